"""How the tables of kernels get to a GPU: at once, or in the order of a stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
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


class Uploads:
    """Tables of the CPU on a device: each has its memory at once, and its values by few copies.

    Inside ``with uploads:`` they are copied when the outermost block ends; until then nothing may
    read them. Copies are ordered behind what torch's current stream does, and nothing waits for
    them. Threads may share it: others wait for a block to end.

    Parameters
    ----------
    device : torch.device
        Where the tables are wanted; those for the CPU are as they were.
    chunk_bytes : int
        Of memory that tables share; a larger table has its own.
    """

    def __init__(self, device: torch.device, chunk_bytes: int = 4096) -> None:
        self.device, self._chunk_bytes = device, chunk_bytes
        self._lock, self._depth = threading.RLock(), 0
        self._host: torch.Tensor | None = None
        self._there: torch.Tensor | None = None
        self._used = self._copied = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        try:
            self._depth -= 1
            if self._depth == 0:
                self._copy()
        finally:
            self._lock.release()

    def of(self, tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tables of the CPU on the device."""
        if self.device.type == "cpu":
            return list(tables)
        with self:
            return [self._placed(table) for table in tables]

    def _placed(self, table: torch.Tensor) -> torch.Tensor:
        n_bytes = table.numel() * table.itemsize
        begin, host, there = self._used, self._host, self._there
        if host is None or there is None or begin + n_bytes > len(host):
            self._copy()
            size = max(n_bytes, self._chunk_bytes)
            host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            there = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._host, self._there, self._copied, begin = host, there, 0, 0
        host[begin : begin + n_bytes].view(table.dtype).copy_(table.reshape(-1))
        # 16 bytes: as aligned as kernels may read.
        self._used = begin - (-n_bytes // 16) * 16
        # Of `data`, so that what is copied later is no change of this table to autograd.
        return there.data[begin : begin + n_bytes].view(table.dtype).view(table.shape)

    def _copy(self) -> None:
        """Copy what has been placed since the last time."""
        if self._host is None or self._there is None or self._copied >= self._used:
            return
        part = slice(self._copied, self._used)
        # torch keeps page-locked memory from reuse until the copy is through.
        self._there.data[part].copy_(self._host[part], non_blocking=True)
        self._copied = self._used
