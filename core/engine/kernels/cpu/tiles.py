"""Coded tiles on the CPU: the twins of quantized.cu; see `bitslab.engine.kernels.tile_format`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from ....errors import ArgumentError
from ..format import PAD_WORDS, RowFormat
from ..tile_format import TILE_LANES, Granularity, TileFormat, TileTables
from .compiling import call
from .constants import UNSIGNED, unsigned
from .loading import tiling
from .threads import run_ranges

Array = np.ndarray[Any, Any]


def measure_tiles(rows: torch.Tensor, tables: TileTables) -> torch.Tensor:
    """Measure coded tiles.

    Parameters
    ----------
    rows : torch.Tensor
        uint8 ``[N, row_bytes]``, contiguous; row i is of head ``(i // rows_per_head) % heads``.
    tables : TileTables
        On the CPU.

    Returns
    -------
    torch.Tensor
        ``[N]`` of the dtype that `RowFormat.length_dtype` says: words of the coded tile, 0 for one
        that is kept raw.
    """
    plain = RowFormat(tables.format.row_bytes, 1, 1, grouped=False, uniform=True)
    lengths = torch.empty(rows.shape[0], dtype=plain.length_dtype)
    wide = np.empty(rows.shape[0], np.uint32)
    _encode(rows, tables, wide, np.empty(0, np.int64), np.empty(0, np.uint32))
    unsigned(lengths)[:] = wide
    return lengths


def encode_tiles(
    rows: torch.Tensor,
    tables: TileTables,
    lengths: torch.Tensor,
    bases: torch.Tensor,
    n_words: int,
) -> torch.Tensor:
    """Code tiles whose offsets are known; those of length 0 are kept raw.

    Parameters
    ----------
    rows, tables
        What `measure_tiles` took.
    lengths : torch.Tensor
        What it returned.
    bases : torch.Tensor
        int64 ``[ceil(N / 32) + 1]``, the first word of each block of 32 tiles.
    n_words : int
        Words of all tiles together, or more.

    Returns
    -------
    torch.Tensor
        int32 ``[n_words + PAD_WORDS]``, the last ones 0.

    Raises
    ------
    ArgumentError
        When a length is not that of its tile.
    """
    words = torch.zeros(n_words + PAD_WORDS, dtype=torch.int32)
    # The kernel knows one dtype of lengths: each further one would be compiled again.
    wide = unsigned(lengths).astype(np.uint32)
    bad = _encode(rows, tables, wide, bases.numpy(), unsigned(words))
    if bad >= 0:
        raise ArgumentError(f"lengths: {int(lengths[bad])} words, tile {bad} has another length")
    return words


def decode_tiles(
    words: torch.Tensor,
    at: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    tables: TileTables,
    out: torch.Tensor,
) -> int:
    """Decode tiles, whatever their words hold.

    Parameters
    ----------
    words : torch.Tensor
        int32, of many tiles; they may be damaged in any way.
    at : torch.Tensor
        int64 ``[n]``: the first word of each tile.
    lengths : torch.Tensor
        int64 ``[n]``: words that belong to it; the tile may be shorter. 0 for a raw one.
    rows : torch.Tensor
        int64 ``[n]``: the number of each row in its storage, from 0, which says its head.
    tables : TileTables
        On the CPU.
    out : torch.Tensor
        uint8 ``[n, row_bytes]``, contiguous.

    Returns
    -------
    int
        -1, or the position of the first damaged tile. Then what `out` holds is undefined; nothing
        else was written.
    """
    fmt = tables.format
    raw = unsigned(words)
    arguments = (
        raw,
        raw.view(np.uint16),
        at.numpy(),
        lengths.numpy(),
        rows.numpy(),
        *_sizes(tables),
        _places(fmt),
        *_steps(tables),
        tables.level_steps.numpy(),
        tables.block_class.numpy(),
        tables.radius.numpy(),
        tables.class_bits.numpy(),
        tables.lookup.numpy(),
        fmt.code_bits,
        fmt.parameter_words,
        fmt.plane_words,
        fmt.row_bytes // 4,
        out.numpy().view(UNSIGNED[fmt.dtype.itemsize]),
    )
    kernel = tiling().decode_tiles
    found = run_ranges(
        lambda begin, end: int(call(kernel, *arguments, begin, end)), out.shape[0], fmt.row_bytes
    )
    return next((bad for bad in found if bad >= 0), -1)


def _encode(
    rows: torch.Tensor, tables: TileTables, lengths: Array, bases: Array, words: Array
) -> int:
    """Write tiles, or their lengths where there are no words; return a tile of another length."""
    fmt = tables.format
    squared = fmt.granularity is Granularity.TOKEN_LEVEL
    scale = np.float32(tables.scale * tables.scale if squared else tables.scale)
    arguments = (
        rows.numpy().view(UNSIGNED[fmt.dtype.itemsize]),
        *_sizes(tables),
        scale,
        np.float32(1 / fmt.dim),
        _places(fmt),
        *_steps(tables),
        tables.level_steps.numpy(),
        tables.level_squares.numpy(),
        tables.block_class.numpy(),
        tables.radius.numpy(),
        tables.class_bits.numpy(),
        tables.codes.numpy(),
        fmt.parameter_words,
        fmt.plane_words,
        fmt.row_bytes // 4,
        lengths,
        bases,
        words,
        words.view(np.uint16),
    )
    kernel = tiling().encode_tiles
    found = run_ranges(
        lambda begin, end: int(call(kernel, *arguments, begin, end)), rows.shape[0], fmt.row_bytes
    )
    return next((bad for bad in found if bad >= 0), -1)


def _sizes(tables: TileTables) -> tuple[int, ...]:
    """Return the first arguments of the functions: the kind of the dtype, and sizes."""
    fmt = tables.format
    kind = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[fmt.dtype]
    return (
        kind,
        int(fmt.granularity),
        fmt.tokens,
        fmt.dim,
        tables.heads,
        tables.rows_per_head,
    )


def _steps(tables: TileTables) -> tuple[Array, ...]:
    """Return the order of channels, and the steps and centers of the codec, with a row at least."""
    if tables.format.granularity is Granularity.CHANNEL:
        return tables.order.numpy(), tables.steps.numpy(), tables.centers.numpy()
    none = np.empty((1, 0), np.float32)
    return tables.order.numpy(), none, none


@cache
def _places(fmt: TileFormat) -> Array:
    """Return where the values of each lane stand among the codes of a group and a block."""
    step, lane = np.divmod(np.arange(4 * TILE_LANES), TILE_LANES)
    row = lane // 4 + 8 * (step % 2)
    column = 2 * (lane % 4) + 8 * (step // 2)
    if fmt.token_pairs:
        first, second = column * fmt.dim + row, (column + 1) * fmt.dim + row
    else:
        first, second = row * fmt.dim + column, row * fmt.dim + column + 1
    return np.stack([first, second], axis=1).astype(np.int32)
