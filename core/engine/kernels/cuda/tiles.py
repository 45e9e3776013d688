"""How decoders cut rows into tiles: shapes, variants and blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..format import BLOCK_ROWS, PAD_WORDS, RowFormat, RowLayout, ceil_div
from .parameters import Value
from .runner import Runner
from .source import (
    BYTE_FIELDS,
    MAX_TILE_ROWS,
    MIN_SHORT_VECTOR,
    WORD_CHUNKS,
    Variant,
    widest_vector,
)

WARPS = 8  # warps of a block, in every kernel
THREADS = 32 * WARPS
MAX_CHOSEN_ROWS = 32  # rows of a tile, when they are chosen by id
SHORT_ROW_BYTES = 1 << 10  # up to which eight lanes take a row
NARROW_ROW_BYTES = 256  # up to which a warp has lanes to spare for one
#: Blocks of a decoder for each place on the device: with one, all wait for the slowest.
WAVES = 4
WORDS_ALIGN_BYTES = 16  # of packed words: what loads of them need
STAGE_BYTES = 33 << 10  # packed words of a tile in shared memory; two tiles are in flight


class Grid:
    """How many blocks of a decoder run at once.

    Parameters
    ----------
    runner : Runner
        Of the device.
    variant : Variant
        The decoder's.
    shape : TileShape
        How its rows are cut.

    Attributes
    ----------
    shared_bytes : int
        Dynamic shared memory of a block.
    """

    def __init__(self, runner: Runner, variant: Variant, shape: TileShape) -> None:
        self.shared_bytes = 4 * (2 * shape.stage_words + PAD_WORDS)
        # A block has a few kilobytes of its own in addition to the stages.
        at_once = runner.shared_bytes_per_multiprocessor // (self.shared_bytes + 4096)
        self._at_once = max(1, min(variant.blocks, at_once))
        self._multiprocessors = runner.multiprocessors

    def blocks(self, sm_budget: int | None) -> int:
        """Return the most blocks that a launch has use for."""
        if sm_budget is None:
            return self._multiprocessors * self._at_once * WAVES
        return max(1, min(sm_budget, self._multiprocessors)) * self._at_once


class TileShape:
    """How a decode launch cuts its rows.

    Parameters
    ----------
    tile_rows : int
        Rows of a tile, up to 32, or a multiple of it where rows in order are short; with fewer than
        8 (a power of two), warps share a row.
    stride_words : int
        Words from a row to the next in the stage, when rows are fetched one by one.
    stage_words : int
        Words of a tile's stage; 0: rows are read where they are.
    """

    def __init__(self, tile_rows: int, stride_words: int, stage_words: int) -> None:
        self.tile_rows = tile_rows
        self.stride_words = stride_words
        self.stage_words = stage_words


def run_shape(f: RowFormat, facts: Mapping[str, int], rows_of_each: int = 0) -> TileShape:
    """Choose the largest tile of rows in order whose packed words fit the stage.

    It has up to 32 rows, or, of rows that take less than half a warp, as many blocks of 32 as are
    not more than `rows_of_each`, the rows for each block of threads that runs at once.
    """
    row_words = facts["max_row_words"]
    # A tile starts up to 31 words behind the line that it is staged from, and readers look a few
    # words ahead.
    limit_words = STAGE_BYTES // 4
    if lines(row_words + 36) > limit_words:
        return TileShape(1, 0, 0)
    block_words = facts["max_block_words"]
    if block_words + 36 <= limit_words:
        blocks = MAX_TILE_ROWS // BLOCK_ROWS if f.row_bytes <= NARROW_ROW_BYTES else 1
        while blocks > 1 and (
            blocks * BLOCK_ROWS > rows_of_each or blocks * block_words + 36 > limit_words
        ):
            blocks //= 2
        return TileShape(blocks * BLOCK_ROWS, 0, lines(blocks * block_words + 36))
    rows = 32
    while rows * row_words + 36 > limit_words:
        rows //= 2
    return TileShape(rows, 0, lines(rows * row_words + 36))


def chosen_shape(max_words: int) -> TileShape:
    """Choose the tile of rows chosen by id, which are staged one by one."""
    stride_words = lines(max_words + 36)  # as above
    limit_words = STAGE_BYTES // 4
    if stride_words > limit_words:
        return TileShape(1, 0, 0)
    rows = min(MAX_CHOSEN_ROWS, limit_words // stride_words // WARPS * WARPS)
    if rows == 0:
        rows = 4 if 4 * stride_words <= limit_words else 2 if 2 * stride_words <= limit_words else 1
    return TileShape(rows, stride_words, rows * stride_words)


def lines(words: int) -> int:
    """Round words up to whole lines of 128 bytes."""
    return ceil_div(words, 32) * 32


def tile_arguments(layout: RowLayout, n_rows: int, shape: TileShape) -> dict[str, Value]:
    """Return the parameters that both decoders have."""
    f = layout.format
    return {
        "tables": layout.tables,
        "starts": layout.starts,
        "n_rows": n_rows,
        "chunks": f.chunks,
        "row_words": f.row_words,
        "row_bytes": f.row_bytes,
        "clusters": f.clusters,
        "tile_rows": shape.tile_rows,
        "stride_words": shape.stride_words,
        "stage_words": shape.stage_words,
    }


def decode_variant(file: str, layout: RowLayout, address: int) -> Variant:
    """Return the variant of a decoder that stores rows from an address on."""
    f = layout.format
    vector = widest_vector(f.chunk_bytes, f.uniform)
    # Rows with clusters take the decoder of one chunk a lane.
    if f.clusters > 1 or f.row_bytes % 16 or address % (vector * f.chunk_bytes):
        vector = 1
    byte_field = vector > 1 and has_byte_field(layout)
    # Typed products have no registers to spare for it.
    words = file != "typed_gemm" and vector > 1 and not byte_field and word_field(layout)
    return Variant(
        file, f.chunk_bytes, f.code_bits, f.grouped, f.uniform, vector, byte_field, words=words
    )


def takes_eight_lanes(variant: Variant, f: RowFormat, shape: TileShape) -> bool:
    """Return whether eight lanes decode a row in order, so that a warp works on four at once.

    With positional masks the lanes of longer rows would read what is known of positions more often.
    """
    most_bytes = SHORT_ROW_BYTES if f.uniform else NARROW_ROW_BYTES
    whole = shape.stage_words > 0 and shape.tile_rows >= BLOCK_ROWS
    return variant.vector >= MIN_SHORT_VECTOR and whole and f.row_bytes <= most_bytes


def has_byte_field(layout: RowLayout) -> bool:
    """Return whether the mask is the one-byte exponent field that kernels know."""
    f = layout.format
    low = BYTE_FIELDS.get(f.chunk_bytes)
    return f.uniform and f.code_bits == 3 and layout.fields[0] == (low, 8)


def word_field(layout: RowLayout) -> bool:
    """Return whether decoders rebuild whole words of chunks with the mask.

    An exception then has at most eight bits, or is the whole chunk. In both bytes of a chunk the
    mask may be the same field: of at most four bits, so that an exception's fit one byte.
    """
    f = layout.format
    if not f.uniform or f.chunk_bytes not in WORD_CHUNKS:
        return False
    width, width_of_byte = layout.fields[0][1], layout.byte_fields[0][1]
    return 0 < width <= 8 or 0 < width_of_byte <= 4 or width_of_byte == 8


def aligned_to(rows: torch.Tensor, chunk_bytes: int) -> torch.Tensor:
    """Return rows that start at a multiple of the chunk, as the kernels' loads need."""
    return rows if rows.data_ptr() % chunk_bytes == 0 else rows.clone()
