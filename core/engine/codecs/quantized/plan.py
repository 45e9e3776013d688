"""TilePlan: what a codec of quantised tiles has learnt, and the tables that its kernels read."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.attend_tables import attend_tables
from ...kernels.tile_format import (
    LEVEL_ZERO,
    LEVELS,
    MAX_CODE,
    MAX_SYMBOLS,
    ZERO_SYMBOL,
    Granularity,
    TileFormat,
    TileTables,
)
from ..huffman import canonical_codes, lookup_table


@dataclass(frozen=True, eq=False)
class TilePlan:
    """What a codec of tiles has learnt; see `bitslab.engine.kernels.tile_format`.

    Parameters
    ----------
    format : TileFormat
        Sizes and granularity.
    heads, rows_per_head, scale
        As in `TileTables`.
    order : numpy.ndarray
        uint8 ``[H, dim]``: the channel at each position; of each head a permutation.
    steps, centers : numpy.ndarray
        float32 ``[H, dim]`` by position, for `Granularity.CHANNEL`; ``[0, 0]`` else.
    block_class : numpy.ndarray
        uint8 ``[H, blocks]``.
    radius : numpy.ndarray
        uint8 ``[classes]``.
    lengths : numpy.ndarray
        uint8 ``[classes, MAX_SYMBOLS]``: bits of the code of each symbol, 0 for none.
    """

    format: TileFormat
    heads: int
    rows_per_head: int
    scale: float
    order: npt.NDArray[np.uint8]
    block_class: npt.NDArray[np.uint8]
    radius: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.uint8]
    steps: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))
    centers: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))

    def tables(self) -> TileTables:
        """Return the tables of the kernels, on the CPU."""
        fmt, classes = self.format, len(self.radius)
        codes = np.zeros((classes, MAX_SYMBOLS), np.int32)
        lookup = np.zeros((classes, 1 << fmt.code_bits), np.int32)
        for c in range(classes):
            lengths = self.lengths[c].astype(np.int32)
            codes[c] = canonical_codes(lengths).astype(np.int32) | lengths << 16
            symbols, bits = lookup_table(self.lengths[c], fmt.code_bits)
            lookup[c] = np.where(symbols < 0, 0, _values_of(symbols, int(self.radius[c])))
            lookup[c] |= bits.astype(np.int32) << 24
        if fmt.granularity is Granularity.TOKEN_LEVEL:
            level_steps, level_squares = level_tables()
        else:
            level_steps, level_squares = (
                torch.empty(0, dtype=torch.float32),
                torch.empty(0, dtype=torch.float32),
            )
        longest = self.lengths.max(axis=1)
        attend_codes, attend_blocks = attend_tables(
            self.block_class, self.radius, longest, lookup, lossless=fmt.lossless
        )
        return TileTables(
            format=fmt,
            heads=self.heads,
            rows_per_head=self.rows_per_head,
            scale=self.scale,
            order=_int32(self.order),
            steps=torch.from_numpy(self.steps.astype(np.float32)),
            centers=torch.from_numpy(self.centers.astype(np.float32)),
            level_steps=level_steps,
            level_squares=level_squares,
            block_class=_int32(self.block_class),
            radius=_int32(self.radius),
            class_bits=_int32(longest),
            codes=torch.from_numpy(codes),
            lookup=torch.from_numpy(lookup),
            attend_codes=torch.from_numpy(attend_codes),
            attend_blocks=torch.from_numpy(attend_blocks),
            longest_codes=tuple(longest.tolist()),
        )


def level_tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the step of each level, and the squares between levels, float32."""
    eighths = np.arange(LEVELS, dtype=np.float64) - LEVEL_ZERO
    steps = 2.0 ** (eighths / 8)
    # Between two levels lies the mean of their logarithms.
    squares = 2.0 ** ((eighths[1:] - 0.5) / 4)
    return torch.from_numpy(steps.astype(np.float32)), torch.from_numpy(squares.astype(np.float32))


@lru_cache(maxsize=16)
def levels_on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `level_tables` on a device, where they are kept."""
    steps, squares = level_tables()
    return steps.to(device), squares.to(device)


def symbols_of(radius: int) -> int:
    """Return the number of symbols of a class."""
    return ZERO_SYMBOL + MAX_CODE + 1 if radius == 0 else (2 * radius + 1) ** 2


def _values_of(symbols: npt.NDArray[np.int32], radius: int) -> npt.NDArray[np.int32]:
    """Return the bytes of an entry of `lookup` for each symbol: codes + 128, the first lowest."""
    if not radius:
        return symbols
    first, second = np.divmod(symbols, 2 * radius + 1)
    pair = (first - radius + ZERO_SYMBOL) | (second - radius + ZERO_SYMBOL) << 8
    return np.asarray(pair, np.int32)


def _int32(values: npt.NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))
