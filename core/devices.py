"""Checks of device arguments."""

from __future__ import annotations

from typing import TypeAlias

import torch

from .errors import ArgumentError, ArgumentTypeError

#: How a caller names a device: an object, a name such as ``"cuda:0"``, or the number of a GPU.
DeviceLike: TypeAlias = torch.device | str | int


def named_device(device: DeviceLike, argument: str = "device") -> torch.device:
    """Return the CPU or CUDA device of an argument, whether or not the machine has it.

    Parameters
    ----------
    device : torch.device or str or int
        An int is the number of a GPU.
    argument : str
        Name of the argument, for the message.

    Raises
    ------
    ArgumentTypeError
        When it is of another type, or a device of another kind.
    ArgumentError
        When it names no device.
    """
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise ArgumentTypeError(
            f"{argument}: {device!r:.60}, expected a torch.device, a name such as 'cpu', 'cuda' "
            "and 'cuda:0', or the number of a GPU"
        )
    found = device if isinstance(device, torch.device) else _parsed(device)
    if found is None:
        raise ArgumentError(
            f"{argument}: {device!r:.60} names no device, accepted are 'cpu', 'cuda' and 'cuda:N'"
        )
    if found.type not in ("cpu", "cuda"):
        raise ArgumentTypeError(f"{argument}: {found}, accepted are cpu and cuda")
    return found


def _parsed(device: str | int) -> torch.device | None:
    name = f"cuda:{device}" if isinstance(device, int) else device
    try:
        found = torch.device(name)
    except RuntimeError:
        return None
    # torch keeps the low byte of an index: cuda:256 becomes cuda:0.
    return found if str(found) == name else None


def checked_device(device: DeviceLike, argument: str = "device") -> torch.device:
    """Return a device that exists, a GPU with its index, or refuse it; see `named_device`."""
    found = named_device(device, argument)
    if found.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index: int | None = found.index
    if (index or 0) >= count:
        there = f"{count} CUDA GPU{'s' * (count > 1)}" if count else "no CUDA GPU"
        raise ArgumentError(f"{argument}: {found}, but torch sees {there}")
    return torch.device("cuda", torch.cuda.current_device()) if index is None else found


def device_or_default(device: DeviceLike | None, argument: str = "device") -> torch.device:
    """Return a device that exists; for None the current GPU, or the CPU without one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return checked_device(device, argument)
