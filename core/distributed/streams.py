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


def on_host(t: torch.Tensor, host: torch.Tensor | None = None) -> torch.Tensor:
    """Return values of a tensor on the host; waits for what is queued on torch's current stream.

    By page-locked memory and an event. While a copy to other memory waits for its stream, no other
    thread of the process queues work: behind a collective that other ranks have not begun, all
    threads of this one would wait for their hosts.

    Parameters
    ----------
    t : torch.Tensor
        On any device; returned as it is from the CPU.
    host : torch.Tensor, optional
        Page-locked memory of its shape and dtype; torch's own, which may take memory, if left out.
    """
    if t.device.type == "cpu":
        return t
    if host is None:
        host = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True)
    host.copy_(t, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(current_stream(t.device))
    event.synchronize()
    return host


def wait_for_stream(device: torch.device) -> None:
    """Wait for what is queued on torch's current stream of a device."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
