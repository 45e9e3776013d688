"""Coded tiles that reach every path of their kernels: plans made by hand, and rows for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bitslab.engine.codecs.huffman import code_lengths
from bitslab.engine.codecs.quantized.plan import TilePlan
from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.format import (
    PAD_WORDS,
    RowStorage,
    TableStorage,
    bases_of_rows,
    words_of_rows,
)
from bitslab.engine.kernels.tile_format import (
    FIELD_AT,
    FIELD_BIAS,
    MAX_SYMBOLS,
    ZERO_SYMBOL,
    Granularity,
    TileFormat,
    TileTables,
)

#: Radius and spread of the classes, whether each symbol within reach has a code, and the bits of
#: the longest code: singles and pairs of short codes, and of others where the format has them.
CLASSES = ((0, 6.0, False, 10), (3, 1.0, True, 10), (2, 0.4, False, 8), (0, 0.5, False, 7))
#: The same of lossless tiles, whose codes are singles.
LOSSLESS_CLASSES = ((0, 6.0, False, 10), (0, 2.0, True, 9), (0, 3.0, True, 8), (0, 1.0, False, 7))


@dataclass(frozen=True)
class TileCase:
    """Tables and rows, uint8 ``[N, row_bytes]``."""

    tables: TileTables
    rows: torch.Tensor

    @property
    def row_words(self) -> int:
        """Words of a raw tile."""
        return self.rows.shape[1] // 4

    def packed(self) -> RowStorage:
        """Return the tiles as the CPU packs them."""
        lengths = cpu.measure_tiles(self.rows, self.tables)
        bases, words = bases_and_words(lengths, self.row_words)
        data = cpu.encode_tiles(self.rows, self.tables, lengths, bases, words)
        return RowStorage(data, bases, lengths, torch.empty(0, dtype=torch.uint8))


def bases_and_words(lengths: torch.Tensor, row_words: int) -> tuple[torch.Tensor, int]:
    """Return the bases of tiles, and the words of all."""
    bases, _ = bases_of_rows(words_of_rows(lengths, row_words))
    return bases, int(bases[-1])


def make_plan(fmt: TileFormat, *, heads: int, rows_per_head: int, seed: int = 0) -> TilePlan:
    """Return a plan whose blocks have classes of pairs and of singles, in no order."""
    rng = np.random.default_rng([seed, fmt.tokens, fmt.dim, int(fmt.granularity)])
    classes = LOSSLESS_CLASSES if fmt.lossless else CLASSES
    lengths = np.zeros((len(classes), MAX_SYMBOLS), np.uint8)
    for c, (radius, spread, whole, limit) in enumerate(classes):
        if radius:
            codes = np.arange(-radius, radius + 1)
            likely = np.exp(-0.5 * (codes / spread) ** 2)
            counts = np.rint(1e5 * np.outer(likely, likely)).astype(np.int64).flatten()
        else:
            codes = np.arange(256) - ZERO_SYMBOL
            counts = np.rint(1e5 * np.exp(-0.5 * (codes / spread) ** 2)).astype(np.int64)
        counts = counts + 1 if whole else counts
        counts[0] *= bool(radius)  # singles have no code -128
        if fmt.lossless:
            counts[fmt.escape_symbol] = max(1, counts[fmt.escape_symbol])
        lengths[c, : len(counts)] = code_lengths(counts, min(limit, fmt.code_bits))
    shape = heads, fmt.dim
    fixed = fmt.granularity is Granularity.CHANNEL
    none = np.empty((0, 0), np.float32)
    scale = {Granularity.CHANNEL: 1.0, Granularity.TOKEN_LEVEL: 0.7}.get(fmt.granularity, 0.08)
    return TilePlan(
        format=fmt,
        heads=heads,
        rows_per_head=rows_per_head,
        scale=scale,
        order=np.stack([rng.permutation(fmt.dim) for _ in range(heads)]).astype(np.uint8),
        block_class=rng.integers(0, len(classes), (heads, fmt.blocks)).astype(np.uint8),
        radius=np.array([radius for radius, *_ in classes], np.uint8),
        lengths=lengths,
        steps=rng.uniform(0.1, 2, shape).astype(np.float32) if fixed else none,
        centers=rng.normal(0, 3, shape).astype(np.float32) if fixed else none,
    )


def make_tiles(
    fmt: TileFormat, *, n_rows: int, heads: int = 2, rows_per_head: int = 3, seed: int = 0
) -> TileCase:
    """Return tiles that suit a plan, but for single values, and some that do not suit it at all."""
    plan = make_plan(fmt, heads=heads, rows_per_head=rows_per_head, seed=seed)
    rng = np.random.default_rng([seed, n_rows, fmt.dim])
    head = np.arange(n_rows) // rows_per_head % heads
    classes = LOSSLESS_CLASSES if fmt.lossless else CLASSES
    spread = np.array([spread for _, spread, *_ in classes])[plan.block_class].repeat(16, axis=1)
    if plan.steps.size:
        width, center = plan.steps * spread, plan.centers
    else:
        width, center = spread / 3, np.zeros_like(spread)
    by_channel = np.empty((2, *plan.order.shape))
    for h, order in enumerate(plan.order):
        by_channel[:, h, order] = width[h], center[h]
    noise = rng.normal(size=(n_rows, fmt.tokens, fmt.dim))
    values = by_channel[1][head][:, None] + by_channel[0][head][:, None] * noise
    if fmt.granularity is not Granularity.CHANNEL:
        values *= rng.uniform(0.01, 30, (n_rows, fmt.tokens, 1))
    if fmt.lossless:  # codes of the same spread, and any other bits
        fields = np.clip(np.rint(3 * by_channel[0][head][:, None] * noise) + FIELD_BIAS, 0, 247)
        bits = fields.astype(np.int64) << FIELD_AT | rng.integers(0, 1 << FIELD_AT, noise.shape)
        values = (bits | rng.integers(0, 2, noise.shape) << 15).astype(np.uint16).view(np.int16)
        x = torch.from_numpy(values).view(fmt.dtype).flatten(1)
    else:
        x = torch.from_numpy(values).to(fmt.dtype).flatten(1)
    special = [float("nan"), float("inf"), -float("inf"), -0.0, 1e30, 1e-42, -1e-6, 6e4]
    for r in range(0, n_rows, 2):  # in every other row
        at = rng.choice(fmt.values, min(fmt.values // 32, 1 + r), replace=False)
        x[r, at] = torch.tensor(rng.choice(special, len(at))).to(fmt.dtype)
    x[2 % n_rows] = 0
    x[5 % n_rows] = -3.0
    x[6 % n_rows] = float("nan")
    rows = x.contiguous().view(torch.uint8)
    noise_rows = rows[3::7]
    rows[3::7] = torch.from_numpy(rng.integers(0, 256, noise_rows.shape, dtype=np.uint8))
    if n_rows > 8:  # subnormal
        rows[8] = rows[8] & 0x7F if fmt.dtype is torch.float32 else 1
    return TileCase(plan.tables(), rows)


def table_of(packed: RowStorage) -> TableStorage:
    """Return packed tiles as a table."""
    return TableStorage(len(packed.lengths), packed.words, packed.bases, packed.lengths)


def decoded(
    table: RowStorage, case: TileCase, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tiles as the CPU decodes them, one by one, and which of them are damaged."""
    out = torch.zeros(len(ids), case.rows.shape[1], dtype=torch.uint8)
    sizes = words_of_rows(table.lengths, case.row_words)
    first = table.bases[:-1].repeat_interleave(32)[: len(sizes)]
    inside = torch.cat([s.cumsum(0) - s for s in sizes.split(32)])
    found = []
    stored = table.words[: len(table.words) - PAD_WORDS]
    for i, r in enumerate(ids.tolist()):
        length = int(words_of_rows(table.lengths[r : r + 1], 0)[0])
        found.append(
            cpu.decode_tiles(
                stored,
                (first + inside)[r : r + 1].clone(),
                torch.tensor([length]),
                torch.tensor([r]),
                case.tables,
                out[i : i + 1],
            )
        )
    return out, torch.tensor(found) >= 0
