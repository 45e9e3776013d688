"""Limits of device memory as people write them: bytes, "60GiB", or a share of what there is."""

from __future__ import annotations

import math
import os
import re
from typing import Any

import torch

from ..errors import ArgumentError, ArgumentTypeError

_UNITS: dict[str, int] = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**i for i, prefix in enumerate("KMGT", 1)},
}
_WRITTEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_ACCEPTED = (
    "bytes above 0, text as '60GiB' or '500 MB', and shares of the device, above 0 up to 1.0"
)


def checked_memory(memory: Any) -> int | float:
    """Return a limit: bytes as an int, a share as a float.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For anything else than bytes, text with a unit, and a share.
    """
    if isinstance(memory, str):
        return _bytes_of(memory)
    if isinstance(memory, bool) or not isinstance(memory, int | float):
        raise ArgumentTypeError(f"memory: expected {_ACCEPTED}, got {memory!r:.60}")
    if isinstance(memory, int):
        if memory > 0:
            return memory
    elif 0 < memory <= 1:
        return memory
    raise ArgumentError(f"memory: {memory}, accepted are {_ACCEPTED}")


def _bytes_of(text: str) -> int:
    found = _WRITTEN.fullmatch(text)
    units = {name.lower(): factor for name, factor in _UNITS.items()}
    factor = None if found is None else units.get(found[2].lower())
    if found is None or factor is None or not float(found[1]):
        raise ArgumentError(f"memory: {text!r:.60}, accepted are {_ACCEPTED}")
    return math.floor(float(found[1]) * factor)


def limit_bytes(memory: int | float, device: torch.device) -> int:
    """Return the bytes of a limit on a device.

    Parameters
    ----------
    memory : int or float
        As `checked_memory` returns it.
    device : torch.device
        Whose memory a share is of; of a CPU that is the machine's.
    """
    if isinstance(memory, int):
        return memory
    if device.type == "cuda":
        total = int(torch.cuda.get_device_properties(device).total_memory)
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(memory * total)
