"""Rows of a batch, with their optimizer state, that a GPU exchanges with the host by itself.

Raw rows in page-locked memory are read and written over the link by the kernel itself, as is
optimizer state. Rows that are packed, or that others read too, are decoded to the device; those
that leave are written to page-locked memory raw, and the host packs them into the table before the
next batch is looked up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine.kernels.cuda import CudaKernels
from ..engine.kernels.cuda.exchange import ExchangedArray
from ..engine.memory.host import HostBuffer
from .row_state import RowState
from .row_store import RowStore


class _Outbox:
    """Rows in page-locked memory that the host has yet to pack into the table."""

    def __init__(self, n_rows: int, data: torch.Tensor) -> None:
        row_bytes = data.shape[1] * data.element_size()
        self.n_rows = n_rows
        # Each waits for the GPU before it is freed.
        self._memory = HostBuffer.allocate(n_rows * row_bytes), HostBuffer.allocate(8 * n_rows)
        self.rows = self._memory[0].tensor.view(data.dtype).view(n_rows, data.shape[1])
        #: int64, the row of each, NO_ROW for none.
        self.ids = self._memory[1].tensor.view(torch.int64)


class RowExchange:
    """Exchanges rows in slots, and their optimizer state, with the host.

    Parameters
    ----------
    store : RowStore
        All rows.
    kernels : CudaKernels
        Of the device.
    """

    def __init__(self, store: RowStore, kernels: CudaKernels) -> None:
        self._store = store
        self._kernels = kernels
        self._direct = False
        self._n_ids = 0
        self._outbox: _Outbox | None = None
        self._incoming: torch.Tensor | None = None
        self._sent: torch.cuda.Event | None = None
        # How many entries of the outbox are to be packed.
        self._waiting = 0
        self._arrays: list[list[ExchangedArray]] = [[], []]
        self._described: list[tuple[tuple[int, ...], torch.Tensor]] = []

    def begin(
        self, data: torch.Tensor, states: Sequence[tuple[torch.Tensor, RowState]], n_ids: int
    ) -> None:
        """Get ready for a batch.

        Parameters
        ----------
        data : torch.Tensor
            ``[S, D]`` on the device: the rows in slots.
        states : sequence of tuple of torch.Tensor and RowState
            Optimizer state of rows in slots ``[S, ...]``, and of all rows, page-locked.
        n_ids : int
            Ids of the batch.
        """
        self.finish()
        store, self._n_ids = self._store, n_ids
        stored = store.table.rows_for_gpu()
        self._direct = stored is not None
        followed = [ExchangedArray(value, state.as_bytes()) for value, state in states]
        if stored is not None:
            both = [ExchangedArray(data, stored), *followed]
            self._arrays = [both, both]
            store.changes += 1
            store.prefetched = None
            return
        if self._outbox is None or self._outbox.n_rows < n_ids:
            self._outbox = _Outbox(n_ids, data)
        if self._incoming is None or self._incoming.shape[0] < n_ids:
            with torch.inference_mode(False):
                self._incoming = torch.empty(
                    n_ids, data.shape[1], dtype=data.dtype, device=data.device
                )
        out = ExchangedArray(data, self._outbox.rows, by_position=True)
        come = ExchangedArray(data, self._incoming, by_position=True)
        self._arrays = [[out, *followed], [come, *followed]]

    def _launch(
        self, which: int, slots: torch.Tensor, rows: torch.Tensor, claims: torch.Tensor
    ) -> None:
        arrays = self._arrays[which]
        key = tuple(n for array in arrays for n in array.description())
        described = next((t for known, t in self._described if known == key), None)
        if described is None:
            described = self._kernels.exchange.described(arrays, claims.device)
            self._described = [*self._described[-3:], (key, described)]
        most_units = self._n_ids * max(1, max(a.row_bytes for a in arrays) // 16)
        self._kernels.exchange.exchange(
            described, slots, rows, claims, most_units, to_host=which == 0
        )

    def store(self, slots: torch.Tensor, rows: torch.Tensor, claims: torch.Tensor) -> None:
        """Write rows back from their slots; see `DeviceSlots`."""
        self._launch(0, slots, rows, claims)
        if self._direct:
            return
        assert self._outbox is not None
        self._outbox.ids[: len(rows)].copy_(rows, non_blocking=True)
        if claims.is_cuda:
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record()  # type: ignore[no-untyped-call]
        self._waiting = len(rows)

    def load(self, slots: torch.Tensor, rows: torch.Tensor, claims: torch.Tensor) -> None:
        """Fetch rows to their slots."""
        if not self._direct:
            assert self._incoming is not None
            self._store.table.gather_some_on_gpu(rows, self._incoming[: len(rows)])
        self._launch(1, slots, rows, claims)
        if self._direct and claims.is_cuda:
            self._store.table.mark_gpu_use(claims.device)

    def finish(self) -> None:
        """Pack rows that have left into the table; waits until the GPU has sent them."""
        if not self._waiting:
            return
        assert self._outbox is not None
        if self._sent is not None:
            self._sent.synchronize()
        ids = self._outbox.ids[: self._waiting]
        there = (ids >= 0).nonzero()[:, 0]
        if len(there):
            rows = self._outbox.rows[: self._waiting][there]
            # The GPU has counted them.
            self._store.update(ids[there].numpy(), rows, counted=False)
        self._waiting = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return 0 if self._incoming is None else self._incoming.nbytes
