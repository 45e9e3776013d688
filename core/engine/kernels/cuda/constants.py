"""Small arrays of numbers that depend on sizes alone, on a GPU: copied there once."""

from __future__ import annotations

import functools

import numpy as np
import torch

from .stream import stream_pointer

#: Arrays that are kept on GPUs; those of a plan take some kilobytes each.
MOST_ARRAYS = 128


class Constant:
    """An array that nobody writes to, and its copies on GPUs.

    A copy from pageable memory makes the host wait for all that is queued on the stream. Here it
    waits once for each array, which is known by itself and not by what it holds: to hash that would
    take longer than to launch a kernel.

    Parameters
    ----------
    array : numpy.ndarray
        Of any dtype that torch has.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __len__(self) -> int:
        """Return the length of the first dimension."""
        return len(self.array)

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the array as a tensor on a device.

        Parameters
        ----------
        device : torch.device
            A CPU, where the tensor has the array's memory, or a GPU.
        """
        if device.type != "cuda":
            return torch.from_numpy(self.array)
        # Of each stream an own one: memory that makes room for others is used again on its stream.
        return _copied(self, device, stream_pointer(device))


@functools.lru_cache(MOST_ARRAYS)
def _copied(constant: Constant, device: torch.device, stream: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.from_numpy(constant.array).to(device)
