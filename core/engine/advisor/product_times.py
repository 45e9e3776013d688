"""Whether products with packed weights pay: measured for each shape and number of rows, kept."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...version import __version__
from .cache import machine_name, read_cached, write_cached
from .link import own_stream, work_seconds

KIND = "fused"  # of files in the cache folder

#: Bytes that are written between two runs, so that no cache holds the weight.
FLUSHED_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
REPEATS = 5

_lock = threading.Lock()
_known: dict[str, FusedTimes] = {}


@dataclass(frozen=True)
class FusedTimes:
    """Seconds of a product with a packed weight.

    Parameters
    ----------
    fused_s : float
        While the weight is decoded.
    decoded_s : float
        After it was decoded to memory, which is counted.
    """

    fused_s: float
    decoded_s: float


def measured_rows(x_rows: int) -> int:
    """Return the rows of input that are measured for so many: the next power of two."""
    return 1 << max(0, x_rows - 1).bit_length()


def fused_times(
    name: str,
    x_rows: int,
    device: torch.device,
    prepare: Callable[[int], tuple[Callable[[], object], Callable[[], object]]],
) -> FusedTimes:
    """Return how long products with a packed weight take, fused and after decoding.

    Parameters
    ----------
    name : str
        What tells weights with other times: shape and plan.
    x_rows : int
        Rows of input.
    device : torch.device
        Where the weight lies.
    prepare : callable
        Gets the rows of input to measure; returns the fused product and the other one, ready to be
        run. Called only where the times are not known.

    Returns
    -------
    FusedTimes
        Medians. They are kept in the folder that the advisor keeps its figures in, and measured
        once: some milliseconds, and more where kernels have to be compiled.

    Notes
    -----
    Any thread may call it; the second waits for the first.
    """
    rows = measured_rows(x_rows)
    key = " | ".join([machine_name(device), __version__, name, f"{rows} rows"])
    with _lock:
        found = _known.get(key) or _read(key)
        if found is None:
            found = _measure(device, *prepare(rows))
            write_cached(KIND, key, vars(found))
        _known[key] = found
    return found


def _measure(
    device: torch.device, fused: Callable[[], object], decoded: Callable[[], object]
) -> FusedTimes:
    seconds = []
    # Of the caller's stream: what is allocated on another one would be kept for that one.
    flushed = torch.empty(FLUSHED_BYTES[device.type], dtype=torch.uint8, device=device)
    with own_stream(device):
        for work in (fused, decoded):
            work()  # compiles
            runs = []
            for _ in range(REPEATS):
                flushed.zero_()
                runs.append(work_seconds(device, work))
            seconds.append(sorted(runs)[REPEATS // 2])
    return FusedTimes(*seconds)


def _read(key: str) -> FusedTimes | None:
    found = read_cached(KIND, key) or {}
    seconds = [found.get(name) for name in ("fused_s", "decoded_s")]
    if all(isinstance(s, float) and math.isfinite(s) and s > 0 for s in seconds):
        return FusedTimes(*seconds)  # type: ignore[arg-type]
    return None
