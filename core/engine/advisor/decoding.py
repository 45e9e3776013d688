"""How fast a codec decodes on a device: measured at first use, kept on disk.

Each figure is a small JSON file of its own in the cache folder: ``$BITSLAB_CACHE``, else
``$XDG_CACHE_HOME/bitslab``, else ``~/.cache/bitslab``. Processes never write to one file at once
(each renames a new one into place), and a file that is damaged or cannot be written is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ...devices import checked_device
from ...errors import ArgumentError
from ...version import __version__
from ..codecs.base import RowCodec, rows_as_bytes
from ..files.new_file import replacing
from .link import own_stream, stream_seconds

CACHE_VARIABLE = "BITSLAB_CACHE"

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
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        # The folder may be shared by several machines.
        name = f"{platform.node()} {platform.machine()} {torch.get_num_threads()} threads"
    return " | ".join([name, __version__, codec.describe(), f"{codec.row_bytes} B"])


def _measure(codec: RowCodec, device: torch.device, sample: torch.Tensor) -> float:
    if not len(sample) or not codec.row_bytes:
        raise ArgumentError(f"sample: shape {list(sample.shape)}, expected rows with bytes")
    n_rows = max(1, SAMPLE_BYTES[device.type] // codec.row_bytes)
    picked = torch.arange(n_rows) % len(sample)
    as_bytes = rows_as_bytes(sample, codec.row_bytes)[picked.to(sample.device)]
    rows = as_bytes.flatten().view(codec.dtype).view(n_rows, *codec.row_shape).to(device)
    if device.type == "cpu":
        packed, out = codec.encode(rows), torch.empty_like(rows)
        seconds = []
        for _ in range(1 + REPEATS):
            begin = time.perf_counter()
            codec.decode(packed, out=out)
            seconds.append(time.perf_counter() - begin)
    else:
        torch.cuda.current_stream(device).synchronize()  # it is making the rows
        with own_stream(device):
            packed, out = codec.encode(rows), torch.empty_like(rows)
            seconds = [
                stream_seconds(lambda: codec.decode(packed, out=out)) for _ in range(1 + REPEATS)
            ]
    return rows.nbytes / min(seconds[1:])  # the first compiles


# On disk


def cache_folder() -> Path | None:
    """Return the folder of what is kept between processes; None when there is no home."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own)
    for base in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(base):  # XDG: others are to be ignored
            return Path(base) / "bitslab"
    return None


def _file(key: str) -> Path | None:
    folder = cache_folder()
    name = hashlib.sha256(key.encode()).hexdigest()[:24]
    return None if folder is None else folder / f"decode-{name}.json"


def _read(key: str) -> float | None:
    path = _file(key)
    try:
        with open(path or os.devnull, "rb") as file:
            found = json.loads(file.read(4096))
        rate = found["bytes_per_s"] if found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    sound = isinstance(rate, float) and math.isfinite(rate) and rate > 0
    return rate if sound else None


def _write(key: str, rate: float) -> None:
    path = _file(key)
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps({"key": key, "bytes_per_s": rate}))
