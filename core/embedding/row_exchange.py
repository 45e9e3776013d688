"""Rows of a batch, with their optimizer state, that a GPU exchanges with the host by itself.

Raw rows in page-locked memory are read and written over the link by the kernel itself, as is
optimizer state. Packed rows are decoded to the device, and packed into the table from there, by
kernels of their codec. Where there are none, or others read the rows too, those that leave remain
on the device until the host, before the next batch is looked up, knows which they are and puts them
into the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine.kernels.cuda import CudaKernels
from ..engine.kernels.cuda.exchange import FIELDS, ExchangedArray
from ..engine.kernels.rewriting import LeavingRows
from ..engine.memory.host import HostBuffer
from ..tables.gpu_writes import GpuWrites
from ..tables.table import CompressedTable
from .device_access import DeviceAccess
from .row_state import RowState
from .store import RowStore


class _Outbox:
    """Rows on the device that have left their slots, and that the table does not have yet."""

    def __init__(self, n_rows: int, data: torch.Tensor) -> None:
        self.n_rows = n_rows
        # Waits for the GPU before it is freed.
        self._memory = HostBuffer.allocate(8 * n_rows)
        #: int64, page-locked: the row of each, NO_ROW for none.
        self.ids = self._memory.tensor.view(torch.int64)
        with torch.inference_mode(False):
            self.rows = torch.empty(n_rows, data.shape[1], dtype=data.dtype, device=data.device)


class RowExchange:
    """Exchanges rows in slots, and their optimizer state, with the host.

    Parameters
    ----------
    store : RowStore
        All rows.
    access : DeviceAccess
        How the device reaches them.
    kernels : CudaKernels
        Of the device.
    """

    def __init__(self, store: RowStore, access: DeviceAccess, kernels: CudaKernels) -> None:
        self._store = store
        self._access = access
        self._kernels = kernels
        # The table whose raw rows the kernel reads and overwrites itself, and these rows.
        self._direct: tuple[CompressedTable, torch.Tensor] | None = None
        # What packs rows into the table, where kernels do, and the rows of the batch.
        self._writes: GpuWrites | None = None
        self._data = self._incoming = torch.empty(0)
        self._n_ids = 0
        self._outbox: _Outbox | None = None
        self._sent: torch.cuda.Event | None = None
        # How many entries of the outbox are to be put into the table.
        self._waiting = 0
        # What the arrays were described by, and their description.
        self._described_by: tuple[int, ...] = ()
        self._described = torch.empty(0, FIELDS, dtype=torch.int64)
        self._row_units = 0

    def settle(self) -> bool:
        """Finish the batch before, and return whether the kernel still reaches the table's rows.

        It does where it reads and overwrites rows itself. Putting rows into a packed table may pack
        that again.
        """
        if self._waiting:
            self.finish()
        writes = self._writes
        if writes is not None:
            self._record(writes)
            table = self._store.table
            if self._access.packed_rows(table, writes.device) is writes:
                return True
            self._writes = None
            return False
        known = self._direct
        if known is None:
            return False
        if known[0] is self._store.table and known[0].takes_gpu_writes:
            return True
        self._direct = None
        return False

    def begin(
        self, data: torch.Tensor, states: Sequence[tuple[torch.Tensor, RowState]], n_ids: int
    ) -> None:
        """Get ready for a batch; `settle` comes before it.

        Parameters
        ----------
        data : torch.Tensor
            ``[S, D]`` on the device: the rows in slots.
        states : sequence of tuple of torch.Tensor and RowState
            Optimizer state of rows in slots ``[S, ...]``, and of all rows, page-locked.
        n_ids : int
            Ids of the batch.
        """
        store, self._n_ids = self._store, n_ids
        known = self._direct
        if known is None:
            stored = self._access.raw_rows(store.table)
            if stored is not None:
                known = self._direct = (store.table, stored)
        if known is None:
            if self._writes is None:
                self._writes = self._access.packed_rows(store.table, data.device)
            if self._writes is not None:
                self._writes.reserve(n_ids)
                self._outbox = None
            elif self._outbox is None or self._outbox.n_rows < n_ids:
                self._outbox = _Outbox(n_ids, data)
            if self._incoming.shape[0] < n_ids:
                with torch.inference_mode(False):
                    self._incoming = data.new_empty(n_ids, data.shape[1])
        self._data = data
        if self._outbox is None:
            store.changes += 1
            store.prefetched = None
        described_by = [
            data.data_ptr(),
            id(known),
            id(self._outbox),
            0 if known is not None else self._incoming.data_ptr(),
        ]
        for value, state in states:
            described_by += [value.data_ptr(), state.address]
        key = tuple(described_by)
        if key != self._described_by:
            self._describe(data, states)
            self._described_by = key

    def _describe(
        self, data: torch.Tensor, states: Sequence[tuple[torch.Tensor, RowState]]
    ) -> None:
        arrays = [ExchangedArray(value, state.as_bytes()) for value, state in states]
        if self._direct is not None:
            arrays.append(ExchangedArray(data, self._direct[1]))
        else:
            ends = None if self._outbox is None else self._outbox.rows, self._incoming
            arrays.append(ExchangedArray(data, *ends, by_position=True))
        self._described = self._kernels.exchange.described(arrays, data.device)
        self._row_units = max(1, max(array.row_bytes for array in arrays) // 16)

    def exchange(
        self,
        slots: torch.Tensor,
        leaving: torch.Tensor,
        wanted: torch.Tensor,
        coming: torch.Tensor,
    ) -> None:
        """Write rows back from their slots, and fetch others there; see `DeviceSlots`."""
        units = self._n_ids * self._row_units
        exchange, arrays = self._kernels.exchange.exchange, self._described
        if self._direct is not None:
            exchange(arrays, slots, leaving, wanted, coming, units)
            return
        n, outbox, writes = self._n_ids, self._outbox, self._writes
        self._access.gather_some(self._store.table, wanted[:n], self._incoming[:n])
        if writes is not None:
            writes.write(LeavingRows(self._data, slots, leaving, coming, n))
            exchange(arrays, slots, leaving, wanted, coming, units)
            return
        assert outbox is not None
        outbox.ids[:n].copy_(leaving[:n], non_blocking=True)
        try:
            self._waiting = n
            exchange(arrays, slots, leaving, wanted, coming, units)
            if coming.is_cuda:
                self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._sent.record(torch.cuda.current_stream(coming.device))
        except BaseException:
            if not bool(coming[1]):  # which waits for all of this
                self._waiting = 0
            raise

    def finish(self) -> None:
        """Put rows that have left into the table; waits for the GPU."""
        writes = self._writes
        if writes is not None:
            writes.finish()
            self._record(writes)
        if not self._waiting:
            return
        assert self._outbox is not None
        if self._sent is not None:
            self._sent.synchronize()
        ids = self._outbox.ids[: self._waiting]
        there = (ids >= 0).nonzero()[:, 0]
        if len(there):
            rows = self._outbox.rows
            rows = rows[there.to(rows.device)]  # packed where they are
            # The GPU has counted them.
            self._store.update(ids[there].numpy(), rows, counted=False)
        self._waiting = 0

    def _record(self, writes: GpuWrites) -> None:
        """Record what the GPU has reported so far; the table may be packed again."""
        written = writes.take_count()
        if written:
            self._store.record_rewritten(written, writes.outgrown_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        outbox = 0 if self._outbox is None else self._outbox.rows.nbytes
        return outbox + self._incoming.nbytes
