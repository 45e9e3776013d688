"""How long ways of a product take: measured for each shape and number of rows, and kept."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ...version import __version__
from .cache import machine_name, read_cached, write_cached
from .link import own_stream, work_seconds

FUSED, WAYS = "fused", "ways"  # kinds of files in the cache folder

#: Bytes that are written between two runs, so that no cache holds the weight.
FLUSHED_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
REPEATS = 5

#: Of each kind and key the lock under which it is measured. One for all would be held by a product
#: that waits for its graph, while what plans that graph waits to measure another product.
_locks: dict[tuple[str, str], threading.Lock] = {}
_known: dict[tuple[str, str], dict[str, float]] = {}
#: Products, rows and devices that there was no memory to measure in.
_without_room: set[tuple[str, int, torch.device]] = set()


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
    Any thread may call it; the second waits for the first that measures the same product.
    """

    def ways(rows: int) -> Mapping[str, Callable[[], object]]:
        fused, decoded = prepare(rows)
        return {"fused_s": fused, "decoded_s": decoded}

    return FusedTimes(**_times(FUSED, ("fused_s", "decoded_s"), name, x_rows, device, ways))


def fastest_way(
    names: tuple[str, ...],
    product: str,
    x_rows: int,
    device: torch.device,
    prepare: Callable[[int], Mapping[str, Callable[[], object]]],
) -> str:
    """Return the name of the way that runs a product in the least time.

    Parameters
    ----------
    names : tuple of str
        The ways; the first of those that take the same time is returned.
    product : str
        Names those that take the same time: kind, shape and dtype.
    x_rows : int
        Rows that are multiplied.
    device : torch.device
        Where they lie.
    prepare : callable
        Gets the rows to measure; returns each way, ready to be run. Called only where the times are
        not known: they are measured and kept as those of `fused_times`.

    Notes
    -----
    Any thread may call it; the second waits for the first that measures the same product. Not while
    a CUDA graph is captured.

    A way that raises an error, but for the first one, is left out by this process, with a warning.
    Without memory to measure in, the first one is returned, by this process always.
    """
    product = f"{product} by {', '.join(names)}"
    unmeasured = product, measured_rows(x_rows), device
    if unmeasured in _without_room:
        return names[0]
    try:
        times = _times(WAYS, names, product, x_rows, device, prepare)
    except torch.OutOfMemoryError:
        _without_room.add(unmeasured)
        return names[0]
    return min(names, key=lambda name: times[name])


def _times(
    kind: str,
    names: tuple[str, ...],
    product: str,
    x_rows: int,
    device: torch.device,
    prepare: Callable[[int], Mapping[str, Callable[[], object]]],
) -> dict[str, float]:
    """Return the seconds of each way, as they are known, kept, or measured now."""
    rows = measured_rows(x_rows)
    # Some ways are torch's code.
    versions = f"{__version__}, torch {torch.__version__}"
    key = " | ".join([machine_name(device), versions, product, f"{rows} rows"])
    with _locks.setdefault((kind, key), threading.Lock()):
        found = _known.get((kind, key)) or _read(kind, key, names)
        if found is None:
            found = _measure(device, prepare(rows))
            if all(map(math.isfinite, found.values())):
                write_cached(kind, key, found)
        _known[kind, key] = found
    return found


def _measure(device: torch.device, ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    # Of the caller's stream: what is allocated on another one would be kept for that one.
    flushed = torch.empty(FLUSHED_BYTES[device.type], dtype=torch.uint8, device=device)
    with own_stream(device):
        for name, work in ways.items():
            try:
                work()  # compiles
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if not seconds:  # without the first one there is none to go on with
                    raise
                seconds[name] = math.inf
                warnings.warn(
                    f"bitslab: a product goes without {name!r}, which cannot run: {error}",
                    UserWarning,
                    stacklevel=2,
                )
                continue
            runs = []
            for _ in range(REPEATS):
                flushed.zero_()
                runs.append(work_seconds(device, work))
            seconds[name] = sorted(runs)[REPEATS // 2]
    return seconds


def _read(kind: str, key: str, names: tuple[str, ...]) -> dict[str, float] | None:
    found = read_cached(kind, key) or {}
    seconds = {name: found.get(name) for name in names}
    if all(isinstance(s, float) and math.isfinite(s) and s > 0 for s in seconds.values()):
        return seconds  # type: ignore[return-value]
    return None
