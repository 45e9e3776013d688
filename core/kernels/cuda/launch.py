"""The kernels on a GPU: which variant, grid and shared memory each call gets.

What runs a kernel is a `Runner`; the tests put one in its place that runs the same text on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ..format import PAD_WORDS, RowFormat, RowLayout, RowStorage, ceil_div
from .source import BYTE_FIELDS, IDS, Variant, widest_vector

WARPS = 8  # warps of a block, in every kernel
THREADS = 32 * WARPS
STAGE_BYTES = 33 << 10  # packed words of a tile in shared memory; two tiles are in flight
ENCODE_STAGE_BYTES = 6 << 10  # packed row that a warp puts together in shared memory
MAILBOX_WORDS = 4

NO_ERROR, INDEX_ERROR, DAMAGED_ERROR = 0, 1, 2


class Runner(Protocol):
    """Runs kernels of one device."""

    #: Multiprocessors of the device.
    multiprocessors: int
    #: Shared memory of each, in bytes.
    shared_bytes_per_multiprocessor: int
    #: int64 ``[MAILBOX_WORDS]`` that kernels write errors to and the host reads at any time.
    mailbox: torch.Tensor

    def launch(
        self,
        variant: Variant,
        kernel: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_bytes: int = 0,
    ) -> None:
        """Start a kernel on torch's current stream; tensors pass their address."""
        ...


class CudaKernels:
    """The functions of `kernels.cpu` on a GPU, with the same arguments and the same bytes."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

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
        n = out.shape[0]
        if n == 0:
            return -1
        f = layout.format
        if out.data_ptr() % f.chunk_bytes:
            # The kernel stores whole chunks. A copy first, since bad ids leave `out` untouched.
            aligned = out.clone()
            self.decode_rows(storage, layout, ids, row_begin, aligned, facts, sm_budget)
            out.copy_(aligned)
            return -1
        runner = self._runner
        first_bad = None
        if ids is not None:
            first_bad = self._first_bad(ids, storage.lengths.shape[0])
        variant = _decode_variant(layout, out)
        shape = tile_shape(f, facts, indexed=ids is not None)
        tiles = ceil_div(n, shape.tile_rows) + (1 if ids is None else 0)
        shared_bytes = 4 * (2 * shape.stage_words + PAD_WORDS)
        # A block has a few kilobytes of its own beside the stages.
        blocks_per_sm = runner.shared_bytes_per_multiprocessor // (shared_bytes + 3072)
        blocks_per_sm = max(1, min(8, blocks_per_sm))
        multiprocessors = runner.multiprocessors
        if sm_budget is not None:
            multiprocessors = max(1, min(sm_budget, multiprocessors))
        words = storage.words
        if words.data_ptr() % 16:
            words = words.clone()
        runner.launch(
            variant,
            "decode_rows" if shape.stage_words else "decode_long_rows",
            (min(tiles, multiprocessors * blocks_per_sm),),
            (THREADS,),
            (
                words,
                np.int64(words.shape[0] - PAD_WORDS),
                storage.bases,
                storage.lengths,
                np.int32(storage.lengths.element_size()),
                storage.row_clusters if f.clusters > 1 else None,
                layout.tables,
                layout.starts,
                ids,
                np.int64(row_begin),
                np.int64(n),
                np.int64(storage.lengths.shape[0]),
                np.int32(f.chunks),
                np.int32(f.row_words),
                np.int32(f.row_bytes),
                np.int32(f.clusters),
                np.int32(shape.tile_rows),
                np.int32(shape.slot_words),
                np.int32(shape.stage_words),
                out,
                first_bad,
                runner.mailbox,
            ),
            shared_bytes=shared_bytes,
        )
        return -1

    def _first_bad(self, ids: torch.Tensor, n_rows: int) -> torch.Tensor:
        """Return int64 ``[1]`` on the ids' device: the first bad position, or -1 (all ones)."""
        first_bad = torch.full((1,), -1, dtype=torch.int64, device=ids.device)
        self._runner.launch(
            IDS,
            "check_ids",
            (min(ceil_div(ids.shape[0], THREADS), 2 * self._runner.multiprocessors),),
            (THREADS,),
            (ids, np.int64(ids.shape[0]), np.int64(n_rows), first_bad),
        )
        return first_bad

    def _row_blocks(self, n_rows: int, blocks_per_sm: int) -> int:
        return min(ceil_div(n_rows, WARPS), blocks_per_sm * self._runner.multiprocessors)


class TileShape:
    """How a decode launch cuts its rows.

    Parameters
    ----------
    tile_rows : int
        Rows of a tile, a power of two up to 32; with fewer than 8, warps share a row.
    slot_words : int
        Words of a row's place in the stage, when rows are fetched one by one.
    stage_words : int
        Words of a tile's stage; 0: rows are read where they are.
    """

    def __init__(self, tile_rows: int, slot_words: int, stage_words: int) -> None:
        self.tile_rows = tile_rows
        self.slot_words = slot_words
        self.stage_words = stage_words


def tile_shape(f: RowFormat, facts: Mapping[str, int], *, indexed: bool) -> TileShape:
    """Choose the largest tile whose packed words fit the stage."""
    row_words = facts["max_row_words"]
    # A tile, or a row of its own, starts up to 31 words behind the line that its place begins at,
    # and readers look a few words ahead.
    slot_words = _lines(row_words + 36)
    limit_words = STAGE_BYTES // 4
    if slot_words > limit_words:
        return TileShape(1, 0, 0)
    rows = 32
    if indexed:
        rows = 8
        while rows * slot_words > limit_words:
            rows //= 2
        return TileShape(rows, slot_words, rows * slot_words)
    if facts["max_block_words"] + 36 <= limit_words:
        return TileShape(rows, slot_words, _lines(facts["max_block_words"] + 36))
    while rows * row_words + 36 > limit_words:
        rows //= 2
    return TileShape(rows, slot_words, _lines(rows * row_words + 36))


def _lines(words: int) -> int:
    """Round words up to whole lines of 128 bytes."""
    return ceil_div(words, 32) * 32


def _encode_variant(layout: RowLayout) -> Variant:
    f = layout.format
    byte_field = f.clusters == 1 and _has_byte_field(layout)
    return Variant(
        "encode", f.chunk_bytes, f.code_bits, f.grouped, f.uniform, byte_field=byte_field
    )


def _decode_variant(layout: RowLayout, out: torch.Tensor) -> Variant:
    f = layout.format
    vector = widest_vector(f.chunk_bytes, f.uniform)
    # Rows with clusters take the decoder of one chunk a lane.
    if f.clusters > 1 or f.row_bytes % 16 or out.data_ptr() % (vector * f.chunk_bytes):
        vector = 1
    byte_field = vector > 1 and _has_byte_field(layout)
    return Variant("decode", f.chunk_bytes, f.code_bits, f.grouped, f.uniform, vector, byte_field)


def _has_byte_field(layout: RowLayout) -> bool:
    f = layout.format
    low = BYTE_FIELDS.get(f.chunk_bytes)
    return f.uniform and f.code_bits == 3 and layout.fields[0] == (low, 8)


def _aligned(rows: torch.Tensor, chunk_bytes: int) -> torch.Tensor:
    """Return rows that start at a multiple of the chunk, as the kernels' loads need."""
    return rows if rows.data_ptr() % chunk_bytes == 0 else rows.clone()
