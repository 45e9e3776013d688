"""How the tables of kernels get to a GPU: at once, or in the order of a stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_local = threading.local()


@contextmanager
def in_stream_order() -> Iterator[None]:
    """Copy tables behind what torch's current stream does, where the host would wait for it else.

    Of this thread. Other streams must wait for the current one before they use the tables.
    """
    before = getattr(_local, "in_order", False)
    _local.in_order = True
    try:
        yield
    finally:
        _local.in_order = before


def uploaded(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a table of the CPU on a device; one that is there already as it is."""
    if table.device == device:
        return table
    if device.type == "cuda" and getattr(_local, "in_order", False):
        # torch keeps page-locked memory from reuse until the copy is through.
        return table.pin_memory().to(device, non_blocking=True)
    return table.to(device)
