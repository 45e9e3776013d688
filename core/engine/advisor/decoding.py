"""How fast a codec decodes on a device: measured at first use, kept in the cache folder."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch

from ...devices import checked_device
from ...errors import ArgumentError
from ...version import __version__
from ..codecs.base import RowCodec, rows_as_bytes
from .cache import machine_name, read_cached, write_cached
from .link import own_stream, work_seconds

KIND = "decode"  # of files in the cache folder

SAMPLE_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}  # enough to keep the device busy
REPEATS = 3

_lock = threading.Lock()
_known: dict[str, float] = {}


#: Rows, or a function that returns them, called only when they are needed.
Sample = torch.Tensor | Callable[[], torch.Tensor]


def decode_bytes_per_s(
    codec: RowCodec, device: torch.device | str, sample: Sample | None = None
) -> float | None:
    """Return the rate at which rows of a codec's plan and row size are decoded on a device.

    Parameters
    ----------
    codec : RowCodec
        What `RowCodec.describe` says of it and the bytes of a row are what the figure is kept by.
    device : torch.device or str
        A GPU or the CPU.
    sample : torch.Tensor or callable, optional
        Rows ``[N, *row_shape]`` such as will be decoded, or a function that returns them, from
        which to measure the rate when it is not known. Packed data is read from the device's own
        memory. Takes some milliseconds, and more where kernels have to be compiled. Waits for its
        own work on the GPU.

    Returns
    -------
    float or None
        Bytes of output per second; None when it is not known and there is no sample.

    Raises
    ------
    ArgumentError
        When the sample has no rows.

    Notes
    -----
    Any thread may call it; the second waits for the first.
    """
    where = checked_device(device)
    key = _key(codec, where)
    with _lock:
        rate = _known.get(key) or _read(key)
        if rate is None and sample is not None:
            rows = sample if isinstance(sample, torch.Tensor) else sample()
            rate = _measure(codec, where, rows)
            _write(key, rate)
        if rate is not None:
            _known[key] = rate
    return rate


def _key(codec: RowCodec, device: torch.device) -> str:
    return " | ".join([machine_name(device), __version__, codec.describe(), f"{codec.row_bytes} B"])


def _measure(codec: RowCodec, device: torch.device, sample: torch.Tensor) -> float:
    if not len(sample) or not codec.row_bytes:
        raise ArgumentError(f"sample: shape {list(sample.shape)}, expected rows with bytes")
    n_rows = max(1, SAMPLE_BYTES[device.type] // codec.row_bytes)
    picked = torch.arange(n_rows) % len(sample)
    as_bytes = rows_as_bytes(sample, codec.row_bytes)[picked.to(sample.device)]
    rows = as_bytes.flatten().view(codec.dtype).view(n_rows, *codec.row_shape).to(device)
    with own_stream(device):
        packed, out = codec.encode(rows), torch.empty_like(rows)
        seconds = [
            work_seconds(device, lambda: codec.decode(packed, out=out)) for _ in range(1 + REPEATS)
        ]
    return rows.nbytes / min(seconds[1:])  # the first compiles


def _read(key: str) -> float | None:
    rate = (read_cached(KIND, key) or {}).get("bytes_per_s")
    sound = isinstance(rate, float) and math.isfinite(rate) and rate > 0
    return rate if sound else None


def _write(key: str, rate: float) -> None:
    write_cached(KIND, key, {"bytes_per_s": rate})
