"""Torch's current stream, as cheaply as a gather of a few rows needs it."""

from __future__ import annotations

import torch


def stream_pointer(device: torch.device) -> int:
    """Return the address of torch's current stream on a GPU, which says which stream it is.

    It is looked up at each call: a kept one would be the wrong one inside ``torch.cuda.stream()``
    and during graph capture. `torch.cuda.current_stream` makes an object of it, which costs as much
    as a launch.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch._C._cuda_getCurrentRawStream(index)
