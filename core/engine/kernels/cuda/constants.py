"""Small arrays of numbers that depend on sizes alone, on a GPU: copied there once."""

from __future__ import annotations

import functools

import numpy as np
import torch

from .stream import stream_pointer

#: Arrays that are kept; those of a plan take some kilobytes each.
MOST_ARRAYS = 128


def constant_on(device: torch.device, array: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor on a device; nobody may write to it.

    A copy from pageable memory makes the host wait for all that is queued on the stream. Here it
    waits for the first one of equal arrays.

    Parameters
    ----------
    device : torch.device
        A CPU, where the tensor has the array's memory, or a GPU.
    array : numpy.ndarray
        Of any dtype that torch has.
    """
    if device.type != "cuda":
        return torch.from_numpy(array)
    # Of each stream an own one: memory that makes room for others is used again on its own stream.
    stream = stream_pointer(device)
    return _copied(array.tobytes(), array.dtype.str, array.shape, device, stream)


@functools.lru_cache(MOST_ARRAYS)
def _copied(
    data: bytes, dtype: str, shape: tuple[int, ...], device: torch.device, stream: int
) -> torch.Tensor:
    array = np.frombuffer(data, dtype).reshape(shape).copy()
    with torch.inference_mode(False):
        return torch.from_numpy(array).to(device)
