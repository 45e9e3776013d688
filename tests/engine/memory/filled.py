"""Host buffers that tests fill, and how much of their memory is there."""

from __future__ import annotations

import ctypes

import torch

from bitslab.engine.memory.host import HostBuffer


def allocate_filled(nbytes: int, **options) -> HostBuffer:
    buffer = HostBuffer.allocate(nbytes, **options)
    buffer.tensor.copy_(torch.arange(nbytes) % 251)
    return buffer


def resident_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the pages of mapped memory that the system has given."""
    library = ctypes.CDLL(None, use_errno=True)
    found = (ctypes.c_ubyte * -(-tensor.numel() // 4096))()
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert library.mincore(tensor.data_ptr(), tensor.numel(), found) == 0
    return sum(page & 1 for page in found) * 4096
