"""The kernels on a GPU: which variant, grid and shared memory each call gets.

What runs a kernel is a `Runner`; the tests put one in its place that runs the same text on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch

from ...errors import ArgumentError
from ..format import (
    BUCKET_ENTRIES,
    PAD_WORDS,
    CacheStorage,
    RowFormat,
    RowLayout,
    RowStorage,
    TableStorage,
    ceil_div,
    read_together,
)
from .launch_copy import copy_rows
from .launch_ids import MAX_IDS, IdScratch, check_ids, map_find, map_insert, order_ids
from .runner import Runner
from .source import BYTE_FIELDS, MIN_SHORT_VECTOR, Variant, widest_vector

_INT_BYTES = {4: np.int32(4), 8: np.int32(8)}

WARPS = 8  # warps of a block, in every kernel
THREADS = 32 * WARPS
MAX_CHOSEN_ROWS = 32  # rows of a tile, when they are chosen by id
SHORT_ROW_BYTES = 1 << 10  # up to which eight lanes take a row
#: Blocks of a decoder for each place on the device: with one, all wait for the slowest.
WAVES = 4
STAGE_BYTES = 33 << 10  # packed words of a tile in shared memory; two tiles are in flight
ENCODE_STAGE_BYTES = 6 << 10  # packed row that a warp puts together in shared memory


class CudaKernels:
    """The functions of `kernels.cpu` on a GPU, with the same arguments and the same bytes."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        # The last one of each table: most gathers of a table are alike.
        self._plans: WeakKeyDictionary[TableStorage, _GatherPlan] = WeakKeyDictionary()

    def count_bits(self, rows: torch.Tensor, chunk_bytes: int) -> torch.Tensor:
        """Count set bits per position; see `kernels.cpu.count_bits`."""
        n, row_bytes = rows.shape
        chunks = row_bytes // chunk_bytes
        counts = torch.zeros((chunks, 8 * chunk_bytes), dtype=torch.int64, device=rows.device)
        if n and chunks:
            rows = _aligned(rows, chunk_bytes)
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
                    _aligned(rows, f.chunk_bytes),
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
                    _aligned(rows, f.chunk_bytes),
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
            -1. Bad ids leave `out` untouched and, like damaged rows, are told in the mailbox.
        """
        if ids is not None:
            table = TableStorage(
                n_rows=storage.lengths.shape[0],
                words=storage.words,
                bases=storage.bases,
                lengths=_aligned(storage.lengths, 16),
                row_clusters=storage.row_clusters if layout.format.clusters > 1 else None,
                max_words=facts["max_row_words"],
            )
            first_bad = torch.full((1,), -1, dtype=torch.int64, device=ids.device)
            self.check_ids(ids, table.n_rows, first_bad)
            return self.gather_rows(
                table, layout, ids, out, first_bad=first_bad, sm_budget=sm_budget
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
        shape = run_shape(f, facts)
        self._launch_tiles(
            _decode_variant("decode", layout, out),
            "decode_rows" if shape.stage_words else "decode_long_rows",
            ceil_div(n, shape.tile_rows) + 1,
            shape,
            (
                _aligned(storage.words, 16),
                np.int64(storage.words.shape[0] - PAD_WORDS),
                storage.bases,
                storage.lengths,
                np.int32(storage.lengths.element_size()),
                np.int64(row_begin),
                np.int64(n),
                storage.row_clusters if f.clusters > 1 else None,
                *_tile_arguments(layout, storage.lengths.shape[0], shape),
                np.int32(facts["max_row_words"]),
                out,
                self._runner.mailbox,
            ),
            sm_budget,
        )
        return -1

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
        order: torch.Tensor | None = None,
        sm_budget: int | None = None,
    ) -> int:
        """Decode rows chosen by id without waiting for the GPU; see `kernels.cpu.gather_rows`.

        Parameters
        ----------
        table, layout, ids, out, cache, counters
            As on the CPU. The table's words and overflow may lie in page-locked host memory, the
            slabs on other GPUs that this one may read.
        first_bad : torch.Tensor, optional
            int64 ``[1]``, what `check_ids` or `order_ids` found; when it found a bad id, `out` is
            left untouched and the mailbox tells. Without it the ids must be known to be good.
        order : torch.Tensor, optional
            int32 ``[n]``, read as unsigned: the sequence in which the rows are fetched.
        sm_budget : int, optional
            Multiprocessors that the kernel may use; all when left out.

        Returns
        -------
        int
            -1. Damaged rows are told in the mailbox.
        """
        n = out.shape[0]
        if n == 0:
            return -1
        if n > MAX_IDS:
            raise ArgumentError(f"ids: {n}, a gather on a GPU takes at most {MAX_IDS}")
        table, layout = read_together(table, layout, cache)
        f = layout.format
        if out.data_ptr() % f.chunk_bytes:
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
                order=order,
                sm_budget=sm_budget,
            )
            out.copy_(aligned)
            return -1
        plan = self._plans.get(table)
        if plan is None or not plan.serves(layout, cache, out):
            plan = _GatherPlan(table, layout, cache, out)
            if plan.words is table.words:
                self._plans[table] = plan
        self._launch_tiles(
            plan.variant,
            plan.kernel,
            ceil_div(n, plan.shape.tile_rows),
            plan.shape,
            (
                *plan.sources,
                ids,
                _INT_BYTES[ids.element_size()],
                order,
                np.int64(n),
                *plan.rows,
                out,
                first_bad,
                counters,
                self._runner.mailbox,
            ),
            sm_budget,
        )
        return -1

    def copy_rows(
        self,
        rows: torch.Tensor,
        row_bytes: int,
        ids: torch.Tensor,
        out: torch.Tensor,
        *,
        first_bad: torch.Tensor | None = None,
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
            order=order,
            sm_budget=sm_budget,
        )

    def check_ids(self, ids: torch.Tensor, n_rows: int, first_bad: torch.Tensor) -> None:
        """Find the first bad id; see `launch_ids.check_ids`."""
        check_ids(self._runner, ids, n_rows, first_bad)

    def order_ids(self, ids: torch.Tensor, n_rows: int, scratch: IdScratch) -> torch.Tensor:
        """Order ids by where their rows lie; see `launch_ids.order_ids`."""
        return order_ids(self._runner, ids, n_rows, scratch)

    def map_insert(
        self, entries: torch.Tensor, ids: torch.Tensor, locations: torch.Tensor
    ) -> torch.Tensor:
        """Insert ids with their locations; see `kernels.cpu.map_insert`."""
        return map_insert(self._runner, entries, ids, locations)

    def map_find(self, entries: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Look up the locations of ids; see `kernels.cpu.map_find`."""
        return map_find(self._runner, entries, ids)

    def _launch_tiles(
        self,
        variant: Variant,
        kernel: str,
        tiles: int,
        shape: TileShape,
        args: Sequence[Any],
        sm_budget: int | None,
    ) -> None:
        """Start a decoder on as many blocks as fit the device, or `sm_budget` of it, at once."""
        runner = self._runner
        shared_bytes = 4 * (2 * shape.stage_words + PAD_WORDS)
        # A block has a few kilobytes of its own beside the stages.
        at_once = runner.shared_bytes_per_multiprocessor // (shared_bytes + 4096)
        at_once = max(1, min(variant.blocks, at_once))
        if sm_budget is None:
            places = runner.multiprocessors * at_once * WAVES
        else:
            places = max(1, min(sm_budget, runner.multiprocessors)) * at_once
        blocks = min(tiles, places)
        runner.launch(variant, kernel, (blocks,), (THREADS,), args, shared_bytes=shared_bytes)

    def _row_blocks(self, n_rows: int, blocks_per_sm: int) -> int:
        return min(ceil_div(n_rows, WARPS), blocks_per_sm * self._runner.multiprocessors)


class _GatherPlan:
    """What gathers from one table have in common, worked out once.

    Parameters
    ----------
    table : TableStorage
        The table.
    layout : RowLayout
        How its rows, or the cached ones, are packed.
    cache : CacheStorage or None
        Cached rows.
    out : torch.Tensor
        uint8 ``[n, row_bytes]``, the first output.

    Attributes
    ----------
    words : torch.Tensor
        The table's words, or an aligned copy, which holds for one gather only.
    """

    def __init__(
        self,
        table: TableStorage,
        layout: RowLayout,
        cache: CacheStorage | None,
        out: torch.Tensor,
    ) -> None:
        self._layout = layout
        # Weakly: nobody wants the slabs of a cache that is gone.
        self._cache = None if cache is None else ref(cache)
        self._start = out.data_ptr() % 16
        f = layout.format
        max_words = max(table.max_words, 0 if cache is None else cache.max_words)
        self.shape = chosen_shape(max_words)
        # Warps that share a row do not wait for each other to fetch more of it.
        typical_words = table.typical_words
        if self.shape.tile_rows < WARPS:
            typical_words = table.max_packed_words or table.max_words
        self.variant = _decode_variant("gather", layout, out)
        self.kernel = _gather_kernel(self.variant, f, self.shape)
        self.words = _aligned(table.words, 16)
        self.sources = (
            self.words,
            np.int64(table.words.shape[0] - PAD_WORDS),
            table.bases,
            table.lengths,
            np.int32(0 if table.lengths is None else table.lengths.element_size()),
            table.flags,
            table.moved,
            table.overflow,
            np.int64(_overflow_rows(table, f)),
            np.int32(typical_words),
            None if cache is None else cache.entries,
            np.uint32(0 if cache is None else cache.entries.shape[0] // BUCKET_ENTRIES - 1),
            None if cache is None else cache.addresses,
        )
        self.rows = (
            table.row_clusters,
            *_tile_arguments(layout, table.n_rows, self.shape),
            np.int32(max_words),
        )

    def serves(self, layout: RowLayout, cache: CacheStorage | None, out: torch.Tensor) -> bool:
        """Tell whether a gather can go by this."""
        kept = None if self._cache is None else self._cache()
        if (kept is None) != (self._cache is None):
            return False
        same = layout is self._layout and cache is kept
        return same and out.data_ptr() % 16 == self._start


class TileShape:
    """How a decode launch cuts its rows.

    Parameters
    ----------
    tile_rows : int
        Rows of a tile, up to 32; with fewer than 8 (a power of two), warps share a row.
    slot_words : int
        Words of a row's place in the stage, when rows are fetched one by one.
    stage_words : int
        Words of a tile's stage; 0: rows are read where they are.
    """

    def __init__(self, tile_rows: int, slot_words: int, stage_words: int) -> None:
        self.tile_rows = tile_rows
        self.slot_words = slot_words
        self.stage_words = stage_words


def run_shape(f: RowFormat, facts: Mapping[str, int]) -> TileShape:
    """Choose the largest tile of rows in order whose packed words fit the stage."""
    row_words = facts["max_row_words"]
    # A tile starts up to 31 words behind the line that its place begins at, and readers look a few
    # words ahead.
    limit_words = STAGE_BYTES // 4
    if _lines(row_words + 36) > limit_words:
        return TileShape(1, 0, 0)
    if facts["max_block_words"] + 36 <= limit_words:
        return TileShape(32, 0, _lines(facts["max_block_words"] + 36))
    rows = 32
    while rows * row_words + 36 > limit_words:
        rows //= 2
    return TileShape(rows, 0, _lines(rows * row_words + 36))


def chosen_shape(max_words: int) -> TileShape:
    """Choose the tile of rows chosen by id, each with a place of its own in the stage."""
    slot_words = _lines(max_words + 36)  # as above
    limit_words = STAGE_BYTES // 4
    if slot_words > limit_words:
        return TileShape(1, 0, 0)
    rows = min(MAX_CHOSEN_ROWS, limit_words // slot_words // WARPS * WARPS)
    if rows == 0:
        rows = 4 if 4 * slot_words <= limit_words else 2 if 2 * slot_words <= limit_words else 1
    return TileShape(rows, slot_words, rows * slot_words)


def _lines(words: int) -> int:
    """Round words up to whole lines of 128 bytes."""
    return ceil_div(words, 32) * 32


def _encode_variant(layout: RowLayout) -> Variant:
    f = layout.format
    byte_field = f.clusters == 1 and _has_byte_field(layout)
    return Variant(
        "encode", f.chunk_bytes, f.code_bits, f.grouped, f.uniform, byte_field=byte_field
    )


def _gather_kernel(variant: Variant, f: RowFormat, shape: TileShape) -> str:
    if not shape.stage_words:
        return "gather_long_rows"
    short = variant.vector >= MIN_SHORT_VECTOR and f.row_bytes <= SHORT_ROW_BYTES
    return "gather_short_rows" if short and shape.tile_rows > WARPS else "gather_rows"


def _tile_arguments(layout: RowLayout, n_rows: int, shape: TileShape) -> tuple[Any, ...]:
    """Return the arguments that both decoders take in the same order."""
    f = layout.format
    return (
        layout.tables,
        layout.starts,
        np.int64(n_rows),
        np.int32(f.chunks),
        np.int32(f.row_words),
        np.int32(f.row_bytes),
        np.int32(f.clusters),
        np.int32(shape.tile_rows),
        np.int32(shape.slot_words),
        np.int32(shape.stage_words),
    )


def _overflow_rows(table: TableStorage, f: RowFormat) -> int:
    return 0 if table.overflow is None else (table.overflow.shape[0] - PAD_WORDS) // f.row_words


def _decode_variant(file: str, layout: RowLayout, out: torch.Tensor) -> Variant:
    f = layout.format
    vector = widest_vector(f.chunk_bytes, f.uniform)
    # Rows with clusters take the decoder of one chunk a lane.
    if f.clusters > 1 or f.row_bytes % 16 or out.data_ptr() % (vector * f.chunk_bytes):
        vector = 1
    byte_field = vector > 1 and _has_byte_field(layout)
    return Variant(file, f.chunk_bytes, f.code_bits, f.grouped, f.uniform, vector, byte_field)


def _has_byte_field(layout: RowLayout) -> bool:
    f = layout.format
    low = BYTE_FIELDS.get(f.chunk_bytes)
    return f.uniform and f.code_bits == 3 and layout.fields[0] == (low, 8)


def _aligned(rows: torch.Tensor, chunk_bytes: int) -> torch.Tensor:
    """Return rows that start at a multiple of the chunk, as the kernels' loads need."""
    return rows if rows.data_ptr() % chunk_bytes == 0 else rows.clone()
