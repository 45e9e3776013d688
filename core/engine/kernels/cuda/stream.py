"""Torch's current stream, as cheaply as a gather of a few rows needs it."""

from __future__ import annotations

from typing import Any

import torch

#: Streams whose objects are kept.
MOST_STREAMS = 64

_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def stream_pointer(device: torch.device) -> int:
    """Return the address of torch's current stream on a GPU, which says which stream it is.

    It is looked up at each call: a kept one would be the wrong one inside ``torch.cuda.stream()``
    and during graph capture. `torch.cuda.current_stream` makes an object of it, which costs as much
    as a launch.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return torch's current stream on a GPU, as `torch.cuda.current_stream`: the object is kept.

    Streams of one address are one stream, whatever object stands for it.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    key = index, torch._C._cuda_getCurrentRawStream(index)
    found = _streams.get(key)
    if found is None:
        if len(_streams) >= MOST_STREAMS:
            _streams.clear()
        found = _streams[key] = torch.cuda.current_stream(index)
    return found


class on_stream:  # noqa: N801 - a context manager, used as `torch.cuda.stream` is
    """Make a stream torch's current one: ``torch.cuda.stream`` without the objects it makes.

    Parameters
    ----------
    stream : torch.cuda.Stream
        Of any device; of another one than torch's current device it takes as long as torch's own.
    """

    __slots__ = ("_before", "_other", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._other: Any = None

    def __enter__(self) -> None:
        stream = self._stream
        index = stream.device_index
        if torch._C._cuda_getDevice() != index:
            self._other = torch.cuda.stream(stream)
            self._other.__enter__()
            return
        self._before = torch._C._cuda_getCurrentStream(index)
        torch._C._cuda_setStream(
            stream_id=stream.stream_id, device_index=index, device_type=stream.device_type
        )

    def __exit__(self, *error: object) -> None:
        if self._other is not None:
            self._other.__exit__(*error)
            return
        stream_id, device_index, device_type = self._before
        torch._C._cuda_setStream(
            stream_id=stream_id, device_index=device_index, device_type=device_type
        )
