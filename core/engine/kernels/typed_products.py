"""Sizes of typed products, which their kernels and launchers share: see cuda/typed_gemm.cu."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .format import CacheStorage, RowLayout, TableStorage

TILE_ROWS = 32  # of one type, that a block multiplies at once, or a multiple
TILE_COLUMNS = 64  # of a weight
GRADIENT_DEPTH = 256  # rows of a weight whose gradient a block sums
#: Tiles whose gradients a block sums, one after another.
CHUNK_TILES = 32
#: Dtypes of rows and weights.
PRODUCT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

#: Of the host: numpy's operators take a third of the time of torch's for so few elements.
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ProductSchedule:
    """How blocks of threads share a product's work; the result has the same bits by any of them.

    Packed rows are rebuilt, and rows multiplied, between barriers of a block: the one goes on while
    the other does only in another block of the same multiprocessor. Blocks are kept from being
    there together by registers and by shared memory, which holds a tile's rows and, twice, the
    packed words of those that are rebuilt at once.

    Attributes
    ----------
    coarsening : int
        A thread's rows, in units of those of a tile of TILE_ROWS: a weight's values that are read
        from shared memory serve as many.
    blocks : int
        Of a multiprocessor, for which registers are left.
    staged_rows : int
        Most rows whose packed words are staged at once.
    """

    coarsening: int
    blocks: int
    staged_rows: int

    @property
    def tile_rows(self) -> int:
        """Rows of a tile."""
        return TILE_ROWS * self.coarsening

    @property
    def name(self) -> str:
        """Name by which measured times are kept."""
        return f"{self.tile_rows} rows, {self.blocks} blocks, {self.staged_rows} staged"


#: The usual schedule, and those that are measured beside it.
SCHEDULES = (
    ProductSchedule(coarsening=1, blocks=2, staged_rows=32),
    ProductSchedule(coarsening=1, blocks=4, staged_rows=8),
    ProductSchedule(coarsening=2, blocks=2, staged_rows=8),
)
#: By bytes of a value what a block takes of a weight at once. The strides of 16-bit values keep the
#: lanes of a warp in banks of their own.
PRODUCT_DEFINES = {
    size: {
        "TILE_COLUMNS": TILE_COLUMNS,
        "SLICE_DEPTH": 128 // size,
        "SLICE_STRIDE": TILE_COLUMNS if size == 4 else TILE_COLUMNS + 8,
        "GRADIENT_DEPTH": GRADIENT_DEPTH,
    }
    for size in (2, 4)
}


def schedules_of(value_bytes: int, packed: bool) -> range:
    """Return the numbers of the SCHEDULES of rows, plain or packed, of values of so many bytes.

    Rebuilding a row takes registers: by a tile of several rows a thread it was never the fastest,
    and packed values of 4 bytes leave too few for more blocks than usual (216 bytes are spilled).
    """
    if not packed:
        return range(len(SCHEDULES))
    return range(2 if value_bytes == 2 else 1)


def product_settings(value_bytes: int, schedule: int) -> dict[str, int]:
    """Return the definitions of the kernels of raw rows, of values of so many bytes.

    `schedule` is the number of one of SCHEDULES.
    """
    return {
        "CHUNK_BYTES": value_bytes,
        "TILE_ROWS": SCHEDULES[schedule].tile_rows,
        "PRODUCT_BLOCKS": SCHEDULES[schedule].blocks,
        "PACKED": 0,
        "GRADIENT_BLOCKS": 2,
    } | PRODUCT_DEFINES[value_bytes]


def shared_row_bytes(depth: int, value_bytes: int) -> int:
    """Return the bytes from a row to the next in shared memory: whole steps of 16, and 16 bytes."""
    return -(-depth // 16) * 16 * value_bytes + 16


def slice_bytes(value_bytes: int) -> int:
    """Return the bytes of the two slices of a weight."""
    sizes = PRODUCT_DEFINES[value_bytes]
    return 2 * sizes["SLICE_DEPTH"] * sizes["SLICE_STRIDE"] * value_bytes


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of a table as a typed product reads them, on one GPU.

    Parameters
    ----------
    table : TableStorage
        Packed rows, one item each; the words may lie in page-locked host memory.
    layout : RowLayout
        How they are packed, or those of the cache where the table is raw.
    dtype : torch.dtype
        Of their elements.
    cache : CacheStorage or None
        Rows that its map holds are taken from its slabs.
    counters : torch.Tensor or None
        As for `RowKernels.gather`.
    """

    table: TableStorage
    layout: RowLayout
    dtype: torch.dtype
    cache: CacheStorage | None = None
    counters: torch.Tensor | None = None

    @property
    def max_words(self) -> int:
        """Words that a row's place in shared memory holds."""
        return max(self.table.max_words, 0 if self.cache is None else self.cache.max_words)


def pieces_of_types(ends: Ints, size: int, least: int) -> tuple[Ints, Ints, Ints]:
    """Cut the rows of each type into pieces.

    Parameters
    ----------
    ends : numpy.ndarray
        int64 ``[types + 1]``: the first row of each type, and the end.
    size : int
        Rows of a piece, at most.
    least : int
        Pieces of a type, at the least.

    Returns
    -------
    types, begins : numpy.ndarray
        int64 ``[pieces]``: of each its type and first row.
    starts : numpy.ndarray
        int64 ``[types + 1]``: the first piece of each type, and the end.
    """
    counts = np.maximum(-((ends[:-1] - ends[1:]) // size), least)
    starts = np.zeros(len(ends), np.int64)
    counts.cumsum(out=starts[1:])
    types = np.arange(len(counts)).repeat(counts)
    begins = ends[types] + size * (np.arange(len(types)) - starts[types])
    return types, begins, starts
