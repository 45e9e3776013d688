"""Streams of a GPU: memory that two of them use, and what the host waits for."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..engine.kernels.cuda.stream import current_stream


def keep_on_current(begun_on: torch.cuda.Stream, tensors: Iterable[torch.Tensor]) -> None:
    """Keep memory of a stream, when it is freed, until torch's current stream is through with it.

    Parameters
    ----------
    begun_on : torch.cuda.Stream
        On which the tensors were made.
    tensors : iterable of torch.Tensor
        That are read or written on the current stream of the same GPU.
    """
    stream = current_stream(begun_on.device)
    if stream != begun_on:
        for t in tensors:
            t.record_stream(stream)


def wait_for_stream(device: torch.device) -> None:
    """Wait for what is queued on torch's current stream of a device."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
