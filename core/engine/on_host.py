"""Values of a GPU's tensors on the host, without holding up other threads."""

from __future__ import annotations

import torch


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

    Returns
    -------
    torch.Tensor
        `host`, or page-locked memory of its own, on the CPU.
    """
    if t.device.type == "cpu":
        return t
    if host is None:
        host = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True)
    host.copy_(t, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(t.device))
    event.synchronize()
    return host
