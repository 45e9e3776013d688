"""How the tables of kernels get to a GPU: at once, or in the order of a stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ...errors import ArgumentError

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
        self.device, self.chunk_bytes = device, chunk_bytes
        self._lock, self._depth = threading.RLock(), 0
        self._chunk: _Chunk | None = None

    @property
    def in_block(self) -> bool:
        """Whether a block has begun, whose tables may not be copied yet."""
        return self._depth > 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        try:
            if self._depth == 1 and self._chunk is not None:
                self._chunk.copy()
        finally:
            self._depth -= 1
            self._lock.release()

    def of(self, tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tables of the CPU on the device."""
        if self.device.type == "cpu":
            return list(tables)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ArgumentError(
                "tables are uploaded inside the capture of a CUDA graph, which would copy them at "
                "each replay; accepted are calls that have run once before it"
            )
        with self:
            return [self._placed(table) for table in tables]

    def _placed(self, table: torch.Tensor) -> torch.Tensor:
        n_bytes = table.numel() * table.itemsize
        chunk = self._chunk
        if chunk is None or not chunk.takes(n_bytes):
            if chunk is not None:
                chunk.copy()
            chunk = self._chunk = _Chunk(self.device, max(n_bytes, self.chunk_bytes))
        return chunk.placed(table, n_bytes)


class _Chunk:
    """Memory of a device that tables share, and those of them that are not copied yet."""

    def __init__(self, device: torch.device, n_bytes: int) -> None:
        self._there = torch.empty(_aligned(n_bytes), dtype=torch.uint8, device=device)
        #: By dtype. What is copied later is no change of them to autograd.
        self._of_dtype = {torch.uint8: self._there}
        self._n_bytes, self._device, self._stream = len(self._there), device, _stream_of(device)
        self._used = 0
        #: Page-locked, of what follows `_begin`, until it is copied.
        self._host: torch.Tensor | None = None
        self._begin = self._host_at = 0

    def takes(self, n_bytes: int) -> bool:
        """Return whether there is room, on the stream that torch's allocator orders it by."""
        room = self._used + n_bytes <= self._n_bytes
        return room and self._stream == _stream_of(self._device)

    def placed(self, table: torch.Tensor, n_bytes: int) -> torch.Tensor:
        """Return a table's place."""
        if self._host is None:
            self._host = _page_locked(self._n_bytes - self._used)
            self._begin, self._host_at = self._used, self._host.data_ptr()
        begin, dtype = self._used, table.dtype
        flat = table.contiguous()
        ctypes.memmove(self._host_at + begin - self._begin, flat.data_ptr(), n_bytes)
        self._used = begin + _aligned(n_bytes)
        there = self._of_dtype.get(dtype)
        if there is None:
            there = self._of_dtype[dtype] = self._there.view(dtype)
        found = there.narrow(0, begin // table.itemsize, table.numel())
        return found if table.ndim == 1 else found.view(table.shape)

    def copy(self) -> None:
        """Copy what has been placed since the last time."""
        if self._host is None:
            return
        there = self._there.data[self._begin : self._used]
        # torch keeps page-locked memory from reuse until the copy is through.
        there.copy_(self._host[: len(there)], non_blocking=True)
        self._host = None


def _aligned(n_bytes: int) -> int:
    """Return bytes up to the next 16: as aligned as kernels may read."""
    return -(-n_bytes // 16) * 16


def _page_locked(n_bytes: int) -> torch.Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _stream_of(device: torch.device) -> int:
    """Return the address of torch's current stream on a device."""
    if device.type != "cuda":
        return 0
    index = torch._C._cuda_getDevice() if device.index is None else device.index
    # A tenth of the time of torch.cuda.current_stream.
    found: int = torch._C._cuda_getCurrentRawStream(index)
    return found
