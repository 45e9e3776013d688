"""Gathers: rows by id, on the CPU by Numba kernels, on a GPU by kernels that read host memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import torch

from ..engine.advisor import pays_to_sort_rows
from ..engine.codecs.base import check_in_range, rows_as_bytes
from ..engine.kernels.cpu.prepared import PreparedRaw, PreparedTable, SlotMap
from ..engine.kernels.cuda import kernels_on
from ..engine.kernels.format import MAX_SLABS
from ..engine.kernels.row_kernels import PreparedRows
from ..engine.kernels.typed_products import PackedRows
from ..engine.memory.locks import ReadersAndWriter
from ..engine.transfer.gather import gather_copied_rows, gather_packed_rows
from .cache import Cache
from .counters import HOST, Counters
from .device import DeviceCopies
from .gpu_writes import GpuWrites
from .rows import Array, HostRows, raise_damaged

CPU = torch.device("cpu")
#: Tables up to this size: all pages are mapped at the first gather, which takes about a second.
POPULATED_BYTES = 4 << 30


def _words(counted: Iterable[tuple[int, Counters]]) -> int:
    """Return the words that were read from the first memory on; waits for the GPUs."""
    return sum(
        int(counts[1, first:].sum())
        for first, counters in counted
        for counts in counters.read().values()
    )


class Gathers:
    """Gathers from rows in host memory, with their state on each device and their counts.

    Parameters
    ----------
    rows : HostRows
        The rows.
    lock : ReadersAndWriter
        The table's lock. Callers of gathers hold it as readers, callers of `update`, `replace`
        and `close` as the writer.

    Notes
    -----
    Threads may gather at once.
    """

    def __init__(self, rows: HostRows, lock: ReadersAndWriter) -> None:
        self._rows = rows
        self._populated = False
        # Prepared for gathers on the CPU, with the rows and overflow memory that it was made from.
        self._prepared: tuple[HostRows, int, PreparedRows | None] | None = None
        self._inherited: object = None
        self._of_this_process(lock)

    def _of_this_process(self, lock: ReadersAndWriter) -> None:
        self._lock = lock
        self._copies = DeviceCopies()
        self._writes: GpuWrites | None = None
        self._totals_lock = threading.RLock()
        self._totals = {"gathers": 0, "rows": 0, "copied_words": 0}
        #: GPUs that have gathered.
        self.gpus: set[torch.device] = set()
        #: Rows and words that gathers with no cache have read.
        self.counters = Counters()
        self._cache_counters: dict[weakref.ref[Cache], Counters] = {}

    def after_fork(self, lock: ReadersAndWriter) -> None:
        """Reset copies on GPUs and counts in a forked child, and use its own lock."""
        # A child cannot free the parent's GPU memory, so it keeps the references.
        self._inherited = (self._lock, self._copies, self._writes, self.counters, self._inherited)
        self._rows.pull = None
        self._of_this_process(lock)

    # Counts

    def count(self, **more: int) -> None:
        """Add to ``gathers``, ``rows`` and ``copied_words``."""
        with self._totals_lock:
            for name, n in more.items():
                self._totals[name] += n

    def stats(self, row_bytes: int) -> dict[str, int]:
        """Return counts of the gathers of this process so far; waits for the GPUs."""
        moved_bytes = 4 * self.read_words()
        return {
            "gathers": self._totals["gathers"],
            "gathered_rows": self._totals["rows"],
            "gathered_bytes": self._totals["rows"] * row_bytes,
            "moved_bytes": moved_bytes,
        }

    def counters_for(self, cache: Cache | None) -> Counters:
        """Return the counters of gathers through a cache, or of gathers with no cache."""
        if cache is None:
            return self.counters
        counters, ref = cache.counters, weakref.ref(cache)
        if self._cache_counters.get(ref) is not counters:
            self._count_deleted()
            with self._totals_lock:
                self._cache_counters[ref] = counters
        return counters

    def _count_deleted(self) -> None:
        """Count what was read through caches that are deleted, for which it waits for the GPUs."""
        with self._totals_lock:
            gone = [ref for ref in list(self._cache_counters) if ref() is None]
            counters = [self._cache_counters[ref] for ref in gone]
        words = [_words([(HOST, each)]) for each in counters]
        with self._totals_lock:
            for ref, read in zip(gone, words, strict=True):
                if self._cache_counters.pop(ref, None) is not None:  # not by another thread
                    self._totals["copied_words"] += read

    def read_words(self) -> int:
        """Return the words of the table that were read by gathers; waits for the GPUs."""
        with self._totals_lock:
            of_caches = list(self._cache_counters.values())
            words = self._totals["copied_words"]
        return words + _words([(0, self.counters), *((HOST, c) for c in of_caches)])

    # On the CPU

    def _settle(self) -> None:
        """Hear of rows that a GPU has written, as `HostRows.settle`; rarely there are any."""
        if self._rows.pull is not None:
            self._rows.pull()

    def on_cpu(self, ids: torch.Tensor, data: torch.Tensor, cache: Cache | None) -> None:
        """Gather rows on the CPU.

        Parameters
        ----------
        ids : torch.Tensor
            int32 or int64 ``[n]`` on the CPU, contiguous and in range.
        data : torch.Tensor
            uint8 ``[n, row_bytes]`` on the CPU, contiguous, to write to.
        cache : Cache or None
            Holds copies of some rows, which are read from there.

        Raises
        ------
        CorruptedDataError
            When a row is damaged; what `data` holds is undefined then.
        """
        self._settle()
        if not self._populated:
            self._populate()
        prepared = self._prepared_rows() if cache is None else None
        if prepared is not None:
            damaged, words = prepared.gather(ids, data)
            if damaged >= 0:
                raise_damaged(damaged)
            self.count(copied_words=words)
            return
        storage = None if cache is None else cache.storage(CPU)
        counts = torch.zeros(2 * (MAX_SLABS + 1), dtype=torch.int64)
        raise_damaged(self._rows.decode(ids, data, cache=storage, counters=counts))
        self.counters_for(cache).add(counts)

    def look_up_bags(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        slots: SlotMap,
        resident: torch.Tensor,
        out: torch.Tensor,
    ) -> int | None:
        """See `CompressedTable.look_up_bags`."""
        self._settle()
        prepared = self._prepared_rows()
        if not isinstance(prepared, PreparedTable) or not out.numel():
            return None
        if not self._populated:
            self._populate()
        found = prepared.look_up(ids, offsets, slots, resident, out)
        if found is None:
            return None
        damaged, words, missing = found
        raise_damaged(damaged)
        if missing:
            self.count(gathers=1, rows=missing, copied_words=words)
        return missing

    def _populate(self) -> None:
        """Map the pages of the rows."""
        self._populated = True
        buffer = self._rows.parts.buffers.get("words")
        if buffer is not None and buffer.nbytes <= POPULATED_BYTES:
            buffer.populate()

    def _prepared_rows(self) -> PreparedRows | None:
        """Return the rows prepared for CPU gathers; None if the layout has no such form."""
        rows, found = self._rows, self._prepared
        # Updates write in place; only an overflow area that grows moves to new memory.
        if found is None or found[0] is not rows or found[1] != rows.overflow_moves:
            parts = rows.parts
            prepared: PreparedRows | None = (
                PreparedRaw(parts.raw_rows(), parts.row_words)
                if parts.raw
                else rows.kernels.prepare_table(rows.storage())
            )
            found = self._prepared = (rows, rows.overflow_moves, prepared)
        return found[2]

    # On a GPU

    def readable_by_gpu(self) -> bool:
        """Return whether GPUs can read the rows in host memory; page-lock them if they may be."""
        rows = self._rows
        buffer = rows.parts.buffers.get("words") if rows.for_gpus else None
        if not rows.pin or buffer is None or not buffer.ensure_pinned():
            return False
        return rows.overflow is None or rows.overflow.buffer.ensure_pinned()

    def writes(self, device: torch.device) -> GpuWrites | None:
        """Return what packs rows into a packed table by a GPU's kernels, where these can do so."""
        rows, found = self._rows, self._writes
        if found is None or found.rows is not rows or found.device != device:
            rows.settle()
            if not self._copies.get(device, rows)[1].rewrites:
                return None
            found = self._writes = GpuWrites(rows, self._copies, self._lock, device)
            rows.pull = found.finish
        return found

    def some_on_gpu(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Gather some rows on a GPU, on torch's current stream.

        Parameters
        ----------
        ids : torch.Tensor
            int64 ``[n]`` on the GPU, contiguous: in range, which is not checked, or NO_ROW. The
            rows are `readable_by_gpu`.
        out : torch.Tensor
            As for `on_gpu`; rows of NO_ROW are left as they are.
        """
        device, parts = out.device, self._rows.parts
        self.gpus.add(device)
        try:
            if parts.raw:
                raw = self._copies.raw_rows(self._rows)
                kernels_on(device, raise_errors=False).copy_rows(raw, parts.item_bytes, ids, out)
            else:
                storage, kernels = self._copies.get(device, self._rows)
                kernels.gather(storage, ids, out, counters=self.counters.on(device))
        finally:
            self._lock.mark_gpu_read(device)

    def on_gpu(
        self,
        ids: torch.Tensor,
        out: torch.Tensor,
        cache: Cache | None,
        sort: bool | None,
        sm_budget: int | None,
        *,
        from_end: bool = True,
    ) -> None:
        """Gather rows on a GPU, on torch's current stream.

        Parameters
        ----------
        ids : torch.Tensor
            int32 or int64 ``[n]`` on the GPU, contiguous; the kernels check them.
        out : torch.Tensor
            The rows ``[n, *row_shape]`` or their bytes uint8 ``[n, row_bytes]``, contiguous, on
            the GPU, to write to.
        cache : Cache or None
            Holds copies of some rows, which are read from there.
        sort, sm_budget : optional
            As in `CompressedTable.gather`.
        from_end : bool
            Whether negative ids count from the end; they are out of range otherwise.
        """
        device, parts = out.device, self._rows.parts
        if not self.readable_by_gpu():
            # The GPU cannot read the rows: gather on the CPU, then copy.
            on_host = torch.empty(out.shape, dtype=out.dtype)
            wanted = ids.cpu()
            check_in_range(wanted, parts.n_items, from_end=from_end)
            self.on_cpu(wanted, rows_as_bytes(on_host, parts.item_bytes), cache)
            out.copy_(on_host)
            return
        self.gpus.add(device)
        try:
            if parts.raw and cache is None:
                rows = self._copies.raw_rows(self._rows)
                if sort is None:
                    sort = pays_to_sort_rows(device, rows, len(rows), ids.shape[0])
                gather_copied_rows(
                    rows,
                    parts.item_bytes,
                    ids,
                    out,
                    sort=sort,
                    sm_budget=sm_budget,
                    from_end=from_end,
                )
                self.count(copied_words=ids.shape[0] * parts.row_words)
                return
            storage, kernels = self._copies.get(device, self._rows)
            cached = None if cache is None else cache.storage(device)
            if cached is not None and cached.kernels is not None:
                kernels = cached.kernels
            if sort is None:
                # With a cache few ids miss; sorting would only slow the hits down.
                sort = cache is None and pays_to_sort_rows(
                    device, storage.words, storage.n_rows, ids.shape[0]
                )
            gather_packed_rows(
                storage,
                kernels,
                ids,
                out,
                cache=cached,
                counters=self.counters_for(cache).on(device),
                sort=sort,
                sm_budget=sm_budget,
                from_end=from_end,
            )
        finally:
            self._lock.mark_gpu_read(device)

    def for_products(
        self, device: torch.device, cache: Cache | None
    ) -> PackedRows | torch.Tensor | None:
        """Return the rows as typed products read them on a GPU; None where they gather first.

        What is returned holds until the table changes: callers are readers of the table's lock
        until they have started their kernels, and then call its `mark_gpu_read`.
        """
        parts = self._rows.parts
        if len(parts.item_shape) != 1 or not self.readable_by_gpu():
            return None
        self.gpus.add(device)
        if parts.raw and cache is None:
            return self._copies.raw_rows(self._rows).view(parts.dtype)
        storage, kernels = self._copies.get(device, self._rows)
        cached = None if cache is None else cache.storage(device)
        if cached is not None and cached.kernels is not None:
            kernels = cached.kernels
        counters = self.counters_for(cache).on(device)
        return kernels.for_products(storage, parts.dtype, cached, counters)

    # Updates

    def refresh(self, changed: dict[str, Array]) -> None:
        """Copy metadata that an update has changed to the GPUs; see `DeviceCopies.refresh`."""
        self._copies.refresh(self._rows, changed)
        if self._writes is not None:
            self._writes.restart()

    def forget_copies(self) -> None:
        """Free the metadata on GPUs; the next gather copies it again."""
        self._writes = self._rows.pull = None
        self._copies.clear()

    def replace(self, rows: HostRows) -> None:
        """Gather from other rows from now on."""
        if rows.parts.codec is not self._rows.parts.codec:
            self._copies = DeviceCopies()
        self._rows = rows
        self._prepared = self._writes = None
        self._copies.clear()

    def close(self) -> None:
        """Free the state of gathers; the rows belong to the table."""
        self._prepared = self._writes = self._rows.pull = None
        self._copies.clear()
