"""Fit a codec of lossless tiles to a sample: order of channels, classes of blocks, codes."""

from __future__ import annotations

import numpy as np
import torch

from ...kernels.tile_format import (
    FIELD_AT,
    FIELD_BIAS,
    MAX_CLASSES,
    SHORT_BITS,
    TILE_BLOCK,
    ZERO_SYMBOL,
    Granularity,
    TileFormat,
)
from ...kernels.uploads import in_stream_order
from .fit import check_coder, count_channels, whole_tiles
from .plan import TilePlan
from .symbols import PAIR_WIDTH, SINGLES, Counts, choose_classes, shorten_codes


def fit_lossless(
    sample: torch.Tensor,
    *,
    tile_tokens: int,
    token_pairs: bool,
    rows_per_head: int = 1,
    code_bits: int = SHORT_BITS,
) -> TilePlan:
    """Return a plan for lossless tiles like those of a sample.

    Parameters
    ----------
    sample : torch.Tensor
        ``[B, H, T, dim]``, bfloat16 or float16, on any device. Tokens behind the last whole tile,
        or group of 16 if there is none, are left out.
    tile_tokens : int
        Tokens of a tile.
    token_pairs : bool
        Whether lanes pair tokens (V) or channels (K).
    rows_per_head : int
        Consecutive rows of one head, of the storage.
    code_bits : int
        Bits of the longest code. Short ones, as by default, take attention two thirds of the
        instructions of others, and bfloat16 no more bits: few exponents occur.

    Returns
    -------
    TilePlan
        The same wherever the sample lies.

    Raises
    ------
    ArgumentError
        For options out of range, and a sample of another dtype or shape, or too short for a tile.
    """
    check_coder("huffman", rows_per_head)
    fmt = TileFormat(
        tokens=tile_tokens,
        dim=sample.shape[-1],
        dtype=sample.dtype,
        granularity=Granularity.LOSSLESS,
        token_pairs=token_pairs,
        code_bits=code_bits,
    )
    with torch.no_grad(), in_stream_order():
        counted = _count(whole_tiles(sample, fmt))
        # Channels of like size stand together: blocks then differ, and classes suit them.
        codes = torch.arange(SINGLES, device=counted.device) - ZERO_SYMBOL
        order = torch.argsort((counted * codes).sum(dim=2), dim=1, stable=True)
        singles = counted.gather(1, order[:, :, None].expand_as(counted))
        singles = singles.view(-1, fmt.blocks, TILE_BLOCK, SINGLES).sum(dim=2)
        found = torch.cat([order.flatten(), singles.flatten()]).cpu().numpy()
    heads = sample.shape[1]
    by_block = found[order.numel() :].reshape(heads * fmt.blocks, SINGLES).astype(np.float64)
    counts = Counts(by_block, np.zeros((len(by_block), PAIR_WIDTH**2)), fmt.escape_symbol)
    exception_bits = 32 * fmt.exception_words
    classes, labels = choose_classes(
        counts,
        classes=MAX_CLASSES,
        code_bits=code_bits,
        fixed=False,
        exception_bits=exception_bits,
        paired=False,
    )
    classes = shorten_codes(
        classes,
        labels,
        counts,
        tile_blocks=fmt.blocks,
        tile_tokens=fmt.tokens,
        exception_bits=exception_bits,
    )
    return TilePlan(
        format=fmt,
        heads=heads,
        rows_per_head=rows_per_head,
        scale=1.0,
        order=found[: order.numel()].reshape(heads, fmt.dim).astype(np.uint8),
        block_class=labels.reshape(heads, fmt.blocks).astype(np.uint8),
        radius=np.array([c.radius for c in classes], np.uint8),
        lengths=np.stack([c.lengths for c in classes]),
    )


def _count(sample: torch.Tensor) -> torch.Tensor:
    """Return how often each code occurs in each channel, int64 ``[H, dim, SINGLES]``.

    Values that are not finite stand at symbol 0, which has no code.
    """
    field = sample.contiguous().view(torch.int16).int().bitwise_right_shift(FIELD_AT)
    codes = field.bitwise_and(255).sub(FIELD_BIAS).float()
    return count_channels(codes[None], sample.isfinite()[None])[0].long()
