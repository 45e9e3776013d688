"""The rows that typed products read: plain, or packed in a table, out of which they are rebuilt."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..format import PAD_WORDS, read_together
from ..typed_products import SCHEDULES, PackedRows, shared_row_bytes, slice_bytes
from . import chosen_rows
from .chosen_rows import ChosenRows
from .parameters import Address, Int32, Int64, Value, kinds_of
from .source import AnyVariant, typed_gemm_variant
from .tiles import (
    STAGE_BYTES,
    WARPS,
    WORDS_ALIGN_BYTES,
    TileShape,
    aligned_to,
    decode_variant,
    lines,
)


@dataclass(init=False)
class SourceParameters(ChosenRows):
    """What both kernels of typed_gemm.cu take of the rows.

    Those of `ChosenRows` and the tensors of a `RowLayout`, as for `gather_rows`, or of plain rows
    their address as `words` and `stride_bytes`; the others are 0 then. int64 `index` ``[rows]``, or
    None; int64 tiles ``[n, 3]``: type, first row and end of the type's rows.
    """

    tables: Address
    starts: Address
    n_rows: Int64
    chunks: Int32
    row_words: Int32
    row_bytes: Int32
    part_rows: Int32
    stride_words: Int32
    stage_words: Int32
    longest_words: Int32
    counters: Address
    mailbox: Address
    stride_bytes: Int64
    index: Address
    tiles: Address
    row_stride: Int32
    rows_at: Int32
    slices_at: Int32
    depth: Int32
    width: Int32
    bfloat: Int32


def staged(x: PackedRows, schedule: int = 0) -> TileShape | None:
    """Return how many rows of a tile are staged at once: 32, 16 or 8, at most what a schedule says.

    None for rows that no typed product rebuilds: with clusters, with chunks that are not one
    element, several in a packed row, or too long for eight of them to be staged.
    """
    chunk_bytes = x.layout.format.chunk_bytes
    narrow = decode_variant("typed_gemm", x.layout, 0).vector == 1
    if chunk_bytes != x.dtype.itemsize or narrow or x.table.items_per_row > 1:
        return None
    stride_words = lines(x.max_words + 36)  # see run_shape
    rows = SCHEDULES[schedule].staged_rows
    while rows * stride_words > STAGE_BYTES // 4:
        rows //= 2
    return TileShape(rows, stride_words, rows * stride_words) if rows >= WARPS else None


class SharedMemory:
    """How a block's shared memory is divided: packed words, rows of a tile, slices of a weight."""

    def __init__(self, depth: int, size: int, stage_words: int, schedule: int = 0) -> None:
        tile_bytes = SCHEDULES[schedule].tile_rows * shared_row_bytes(depth, size)
        self.row_stride = shared_row_bytes(depth, size)
        self.rows_at = 4 * lines(2 * stage_words + PAD_WORDS) if stage_words else 0
        self.slices_at = 4 * lines((self.rows_at + tile_bytes) // 4)
        self.shared_bytes = self.slices_at + slice_bytes(size)


class RowSource:
    """The rows of a product: a compilation, shared memory, and the kernel's parameters."""

    variant: AnyVariant

    def __init__(
        self,
        x: torch.Tensor | PackedRows,
        depth: int,
        index: torch.Tensor | None,
        schedule: int = 0,
    ) -> None:
        size = x.dtype.itemsize
        self.values: dict[str, Value] = dict.fromkeys(kinds_of(SourceParameters), 0)
        stage_words = 0
        if isinstance(x, torch.Tensor):
            self.variant = typed_gemm_variant(size, schedule)
            self.values |= {"words": x, "stride_bytes": x.stride(0) * size}
            self.values["row_bytes"] = depth * size
        else:
            shape = staged(x, schedule)
            assert shape is not None
            stage_words = shape.stage_words
            decoder = decode_variant("typed_gemm", x.layout, 0)
            self.variant = replace(decoder, schedule=schedule)
            self.values |= _table_values(x, shape)
        self.memory = SharedMemory(depth, size, stage_words, schedule)
        self.values |= {
            "index": index,
            "row_stride": self.memory.row_stride,
            "rows_at": self.memory.rows_at,
            "slices_at": self.memory.slices_at,
            "depth": depth,
            "bfloat": x.dtype is torch.bfloat16,
        }


def _table_values(x: PackedRows, shape: TileShape) -> dict[str, Value]:
    """Return the parameters of a table, as `GatherPlan` gives them."""
    table, cache, f = read_together(x.table, x.cache), x.cache, x.layout.format
    words = aligned_to(table.words, WORDS_ALIGN_BYTES)
    return {
        **chosen_rows.values_of(table, cache, f, words, table.typical_words),
        "tables": x.layout.tables,
        "starts": x.layout.starts,
        "n_rows": table.n_rows,
        "chunks": f.chunks,
        "row_words": f.row_words,
        "row_bytes": f.row_bytes,
        "part_rows": shape.tile_rows,
        "stride_words": shape.stride_words,
        "stage_words": shape.stage_words,
        "longest_words": x.max_words,
        "counters": x.counters,
    }
