"""The kernels on a GPU: which variant, grid and shared memory each call gets.

What runs a kernel is a `Runner`; the tests put one in its place that runs the same text on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..format import (
    PAD_WORDS,
    CacheStorage,
    RowLayout,
    RowStorage,
    TableStorage,
    ceil_div,
)
from .launch_bags import Bags
from .launch_copy import CopyPlan, copy_rows
from .launch_decode import DecodeLaunch, prepare_decode
from .launch_gather import GatherPlan, prepare_gather
from .launch_ids import (
    ALL_GOOD,
    CHECKED_BY_ALL,
    IdScratch,
    check_ids,
    check_ids_count,
    map_find,
    map_insert,
    order_ids,
)
from .launch_slots import SlotFinder
from .runner import Runner
from .source import Variant
from .tiles import THREADS, WARPS, aligned_to, has_byte_field

ENCODE_STAGE_BYTES = 6 << 10  # packed row that a warp puts together in shared memory


class CudaKernels:
    """The functions of `kernels.cpu` on a GPU, with the same arguments and the same bytes."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        # The last one of each table: most gathers of a table are alike.
        self._plans: WeakKeyDictionary[TableStorage, GatherPlan] = WeakKeyDictionary()
        self._copies: dict[tuple[object, ...], CopyPlan] = {}
        #: Pools bags of rows.
        self.bags = Bags(runner)

    def count_bits(self, rows: torch.Tensor, chunk_bytes: int) -> torch.Tensor:
        """Count set bits per position; see `kernels.cpu.count_bits`."""
        n, row_bytes = rows.shape
        chunks = row_bytes // chunk_bytes
        counts = torch.zeros((chunks, 8 * chunk_bytes), dtype=torch.int64, device=rows.device)
        if n and chunks:
            rows = aligned_to(rows, chunk_bytes)
            columns = ceil_div(chunks, 32)
            slices = min(ceil_div(n, 64), max(1, 8 * self._runner.multiprocessors // columns))
            self._runner.launch(
                Variant("count", chunk_bytes),
                "count_bits",
                (columns, slices),
                (32, THREADS // 32),
                (rows, np.int64(n), np.int32(chunks), counts),
            )
        return counts

    def packed_words(
        self, rows: torch.Tensor, layout: RowLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Measure packed rows; see `kernels.cpu.packed_words`."""
        f, n = layout.format, rows.shape[0]
        lengths = torch.empty(n, dtype=f.length_dtype, device=rows.device)
        row_clusters = torch.empty(
            n if f.clusters > 1 else 0, dtype=torch.uint8, device=rows.device
        )
        if n:
            self._runner.launch(
                _encode_variant(layout),
                "packed_words",
                (self._row_blocks(n, 8),),
                (THREADS,),
                (
                    aligned_to(rows, f.chunk_bytes),
                    np.int64(n),
                    np.int32(f.chunks),
                    np.int32(f.row_words),
                    np.int32(f.clusters),
                    layout.tables,
                    layout.starts,
                    lengths,
                    np.int32(lengths.element_size()),
                    row_clusters if f.clusters > 1 else None,
                ),
            )
        return lengths, row_clusters

    def encode_rows(
        self,
        rows: torch.Tensor,
        layout: RowLayout,
        lengths: torch.Tensor,
        row_clusters: torch.Tensor,
        bases: torch.Tensor,
        n_words: int,
    ) -> torch.Tensor:
        """Pack rows; see `kernels.cpu.encode_rows`."""
        f, n = layout.format, rows.shape[0]
        words = torch.zeros(n_words + PAD_WORDS, dtype=torch.int32, device=rows.device)
        if n:
            # A packed row is shorter than a raw one, and the last read-modify-write may touch the
            # word behind it.
            stage_words = f.row_words + 1 if 4 * f.row_words < ENCODE_STAGE_BYTES else 0
            self._runner.launch(
                _encode_variant(layout),
                "encode_rows",
                (self._row_blocks(n, 8),),
                (THREADS,),
                (
                    aligned_to(rows, f.chunk_bytes),
                    np.int64(n),
                    np.int32(f.chunks),
                    np.int32(f.row_words),
                    np.int32(f.row_bytes),
                    np.int32(f.clusters),
                    layout.tables,
                    layout.starts,
                    lengths,
                    np.int32(lengths.element_size()),
                    row_clusters if f.clusters > 1 else None,
                    bases,
                    words,
                    np.int32(stage_words),
                ),
                shared_bytes=max(16, 4 * stage_words * WARPS),
            )
        return words

    def decode_rows(
        self,
        storage: RowStorage,
        layout: RowLayout,
        ids: torch.Tensor | None,
        row_begin: int,
        out: torch.Tensor,
        facts: Mapping[str, int],
        sm_budget: int | None = None,
    ) -> int:
        """Decode rows without waiting for the GPU; see `kernels.cpu.decode_rows`.

        Parameters
        ----------
        storage, layout, ids, row_begin, out
            As on the CPU. The words may lie in page-locked host memory: then they are read over
            the link by the kernel.
        facts : mapping of str to int
            ``max_row_words`` and ``max_block_words``: the longest row, and 32 rows, of `storage`.
        sm_budget : int, optional
            Multiprocessors that the kernel may use; all when left out.

        Returns
        -------
        int
            -1. Bad ids leave `out` untouched and, like damaged rows, are reported in the mailbox.
        """
        if ids is not None:
            table = TableStorage(
                n_rows=storage.lengths.shape[0],
                words=storage.words,
                bases=storage.bases,
                lengths=aligned_to(storage.lengths, 16),
                row_clusters=storage.row_clusters if layout.format.clusters > 1 else None,
                max_words=facts["max_row_words"],
            )
            n_rows, first_bad = table.n_rows, None
            if ids.shape[0] > CHECKED_BY_ALL:
                first_bad = torch.empty(1, dtype=torch.int64, device=ids.device)
                self.check_ids(ids, n_rows, first_bad)
            return self.gather_rows(
                table, layout, ids, out, first_bad=first_bad, lowest=-n_rows, sm_budget=sm_budget
            )
        n = out.shape[0]
        if n == 0:
            return -1
        f = layout.format
        if out.data_ptr() % f.chunk_bytes:  # the kernel stores whole chunks
            aligned = torch.empty_like(out)
            self.decode_rows(storage, layout, None, row_begin, aligned, facts, sm_budget)
            out.copy_(aligned)
            return -1
        DecodeLaunch(self._runner, storage, layout, row_begin, out, facts).start(sm_budget)
        return -1

    def prepare_decode(
        self,
        storage: RowStorage,
        layout: RowLayout,
        out: torch.Tensor,
        facts: Mapping[str, int],
        sm_budget: int | None = None,
    ) -> Callable[[], None]:
        """Return what decodes all rows when called; see `launch_decode.prepare_decode`."""
        return prepare_decode(self._runner, storage, layout, out, facts, sm_budget)

    def gather_rows(
        self,
        table: TableStorage,
        layout: RowLayout,
        ids: torch.Tensor,
        out: torch.Tensor,
        *,
        cache: CacheStorage | None = None,
        counters: torch.Tensor | None = None,
        first_bad: torch.Tensor | None = None,
        lowest: int = ALL_GOOD,
        order: torch.Tensor | None = None,
        sm_budget: int | None = None,
    ) -> int:
        """Decode rows chosen by id without waiting for the GPU; see `kernels.cpu.gather_rows`.

        Parameters
        ----------
        table, layout, ids, out, cache, counters
            As on the CPU. The table's words and overflow may lie in page-locked host memory, the
            slabs on other GPUs that this one may read. `out` may be of another dtype, if its rows
            have as many bytes.
        first_bad : torch.Tensor, optional
            int64 ``[1]``, what `check_ids` or `order_ids` found; when it found a bad id, `out` is
            left untouched and the mailbox has the error.
        lowest : int
            Without `first_bad`: the lowest good id, 0 or ``-N``. Every block then looks at all ids,
            which for up to CHECKED_BY_ALL takes less than a launch for that. ALL_GOOD where they
            are known to be good.
        order : torch.Tensor, optional
            int32 ``[n]``, read as unsigned: the sequence in which the rows are fetched.
        sm_budget : int, optional
            Multiprocessors that the kernel may use; all when left out.

        Returns
        -------
        int
            -1. Damaged rows are reported in the mailbox.
        """
        n = out.shape[0]
        if n == 0:
            return -1
        check_ids_count(n)
        plan = self._plans.get(table)
        address = out.data_ptr()
        if plan is None or not plan.serves(layout, cache, address):
            plan = GatherPlan(self._runner, table, layout, cache, address, out.nbytes // n)
            if plan.words is table.words:
                self._plans[table] = plan
        if not plan.aligned:
            # The kernel stores whole chunks. A copy first, since bad ids leave `out` untouched.
            aligned = out.clone()
            self.gather_rows(
                table,
                layout,
                ids,
                aligned,
                cache=cache,
                counters=counters,
                first_bad=first_bad,
                lowest=lowest,
                order=order,
                sm_budget=sm_budget,
            )
            out.copy_(aligned)
            return -1
        plan.launch(
            min(ceil_div(n, plan.tile_rows), plan.grid.blocks(sm_budget)),
            ids.data_ptr(),
            ids.element_size(),
            0 if order is None else order.data_ptr(),
            n,
            address,
            0 if first_bad is None else first_bad.data_ptr(),
            lowest,
            0 if counters is None else counters.data_ptr(),
        )
        return -1

    def prepare_gather(
        self,
        table: TableStorage,
        layout: RowLayout,
        ids: torch.Tensor,
        out: torch.Tensor,
        sm_budget: int | None = None,
    ) -> Callable[[], None]:
        """Return what decodes chosen rows when called; see `launch_gather.prepare_gather`."""
        return prepare_gather(self._runner, table, layout, ids, out, sm_budget)

    def copy_rows(
        self,
        rows: torch.Tensor,
        row_bytes: int,
        ids: torch.Tensor,
        out: torch.Tensor,
        *,
        first_bad: torch.Tensor | None = None,
        lowest: int = ALL_GOOD,
        order: torch.Tensor | None = None,
        sm_budget: int | None = None,
    ) -> None:
        """Copy raw rows chosen by id; see `kernels.cpu.copy_rows` and `launch_copy.copy_rows`."""
        copy_rows(
            self._runner,
            rows,
            row_bytes,
            ids,
            out,
            first_bad=first_bad,
            lowest=lowest,
            order=order,
            sm_budget=sm_budget,
            plans=self._copies,
        )

    def check_ids(
        self,
        ids: torch.Tensor,
        n_rows: int,
        first_bad: torch.Tensor,
        lowest: int | None = None,
    ) -> None:
        """Find the first bad id; see `launch_ids.check_ids`."""
        check_ids(self._runner, ids, n_rows, first_bad, lowest)

    def order_ids(
        self, ids: torch.Tensor, n_rows: int, scratch: IdScratch, lowest: int | None = None
    ) -> torch.Tensor:
        """Order ids by where their rows lie; see `launch_ids.order_ids`."""
        return order_ids(self._runner, ids, n_rows, scratch, lowest)

    def map_insert(
        self, entries: torch.Tensor, ids: torch.Tensor, locations: torch.Tensor
    ) -> torch.Tensor:
        """Insert ids with their locations; see `kernels.cpu.map_insert`."""
        return map_insert(self._runner, entries, ids, locations)

    def map_find(self, entries: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Look up the locations of ids; see `kernels.cpu.map_find`."""
        return map_find(self._runner, entries, ids)

    def slot_finder(
        self,
        n_rows: int,
        seen: torch.Tensor,
        claims: torch.Tensor,
        *,
        slot_of: torch.Tensor | None = None,
        adds: bool = False,
    ) -> SlotFinder:
        """Return what finds the slots of batches; see `launch_slots.SlotFinder`."""
        return SlotFinder(self._runner, n_rows, seen, claims, slot_of=slot_of, adds=adds)

    def _row_blocks(self, n_rows: int, blocks_per_sm: int) -> int:
        return min(ceil_div(n_rows, WARPS), blocks_per_sm * self._runner.multiprocessors)


def _encode_variant(layout: RowLayout) -> Variant:
    f = layout.format
    byte_field = f.clusters == 1 and has_byte_field(layout)
    return Variant(
        "encode", f.chunk_bytes, f.code_bits, f.grouped, f.uniform, byte_field=byte_field
    )
