"""Values to codes and back, in torch: the arithmetic of a coded tile on any device.

It is what `bitslab.engine.kernels.tile_format` says, operation by operation: fits count just the
codes that kernels write.
"""

from __future__ import annotations

import numpy as np
import torch

from ....errors import ArgumentError
from ...kernels.tile_format import MAX_CODE, TILE_LANES, Granularity, TileFormat, TileTables

#: What stands for a code of a value that has none: no class has a symbol for it.
NO_CODE = MAX_CODE + 1


def quantise(values: torch.Tensor, tables: TileTables) -> torch.Tensor:
    """Return the codes of values, before exceptions of their classes are taken out.

    Parameters
    ----------
    values : torch.Tensor
        ``[B, H, T, dim]`` of the format's dtype; T a multiple of its tokens where ranges are those
        of a tile.
    tables : TileTables
        On the device of `values`.

    Returns
    -------
    torch.Tensor
        int16 ``[B, H, T, dim]``, in the order of channels: -127 to 127, or NO_CODE for a value that
        is not finite or whose code would be outside.
    """
    step, center = steps_and_centers(values, tables)
    return codes_of(values, step, center)


def dequantise(
    codes: torch.Tensor, step: torch.Tensor, center: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return what codes are decoded to, of steps and centers as `steps_and_centers` returns."""
    return (center + step * codes.float()).to(dtype)


def codes_of(values: torch.Tensor, step: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
    """Return codes by given steps and centers, as `quantise` does."""
    codes = torch.round((values.float() - center) * (1 / step))
    coded = codes.abs() <= MAX_CODE  # false for NaN
    return torch.where(coded, codes, float(NO_CODE)).to(torch.int16)


def steps_and_centers(
    values: torch.Tensor, tables: TileTables
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the steps and centers of values, float32, of shapes that broadcast to theirs."""
    fmt = tables.format
    if fmt.lossless:
        raise ArgumentError("granularity: LOSSLESS, accepted are those that have steps")
    check_sample("values", values, fmt)
    if values.shape[1] != tables.heads:
        raise ArgumentError(f"values: {values.shape[1]} heads, expected {tables.heads}")
    if fmt.granularity is Granularity.CHANNEL:
        place = tables.order.long().argsort(dim=1)
        return tables.steps.gather(1, place)[:, None], tables.centers.gather(1, place)[:, None]
    if fmt.granularity is Granularity.TOKEN_LEVEL:
        return token_steps(values, tables.scale, tables.level_steps, tables.level_squares)
    return ranges(values, fmt, tables.scale)


def token_steps(
    values: torch.Tensor, scale: float, level_steps: torch.Tensor, level_squares: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return steps of TOKEN_LEVEL, and centers of 0, both float32 ``[B, H, T, 1]``."""
    scaled = mean_square(values) * float(np.float32(scale * scale))
    steps = steps_of_levels(scaled, level_steps, level_squares)
    return steps, torch.zeros_like(steps)


def steps_of_levels(
    scaled: torch.Tensor, level_steps: torch.Tensor, level_squares: torch.Tensor
) -> torch.Tensor:
    """Return the steps of tokens ``[..., T]`` by ``scale * scale * mean square``, ``[..., 1]``."""
    levels = torch.bucketize(scaled, level_squares, right=True)
    return level_steps[levels][..., None]


def mean_square(values: torch.Tensor) -> torch.Tensor:
    """Return the mean square of the finite values of each token, float32 ``[B, H, T]``."""
    x = values.float()
    squares = torch.where(x.isfinite(), x, 0.0).square()
    dim = squares.shape[-1]
    spare = -dim % TILE_LANES
    padded = torch.nn.functional.pad(squares, (0, spare))
    lanes = padded.view(*padded.shape[:-1], -1, TILE_LANES)
    sums = lanes[..., 0, :]
    for k in range(1, lanes.shape[-2]):
        sums = sums + lanes[..., k, :]
    width = TILE_LANES
    while width > 1:  # a butterfly: each addition is commutative, so one half is enough
        width //= 2
        sums = sums[..., :width] + sums[..., width:]
    mean: torch.Tensor = sums[..., 0].contiguous() * float(np.float32(1 / dim))
    return mean


def ranges(
    values: torch.Tensor, fmt: TileFormat, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return steps and centers by range: of each tile, of its channels, or of its tokens."""
    return steps_of_spans(*spans(values, fmt), scale, fmt)


def spans(values: torch.Tensor, fmt: TileFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return range and center of the finite values that share a step.

    Both float32 ``[B, H, tiles, 1 or tokens, 1 or dim]``; not finite without such values.
    """
    batch, heads, tokens, dim = values.shape
    x = values.float().reshape(batch, heads, tokens // fmt.tokens, fmt.tokens, dim)
    finite = x.isfinite()
    over = {
        Granularity.BLOCK_RANGE: (3, 4),
        Granularity.CHANNEL_RANGE: (3,),
        Granularity.TOKEN_RANGE: (4,),
    }[fmt.granularity]
    least = torch.where(finite, x, float("inf")).amin(over, keepdim=True)
    largest = torch.where(finite, x, float("-inf")).amax(over, keepdim=True)
    center = (0.5 * least + 0.5 * largest).bfloat16().float()
    return largest - least, torch.where(center.isfinite(), center, 0.0)


def steps_of_spans(
    span: torch.Tensor, center: torch.Tensor, scale: float | torch.Tensor, fmt: TileFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return steps and centers of values, of a scale or of several, which come first."""
    step = (span * scale).bfloat16().float()
    step = torch.where((step > 0) & step.isfinite(), step, 1.0)
    both = step, center.expand_as(step)
    step, center = (t.expand(*t.shape[:-2], fmt.tokens, t.shape[-1]).flatten(-3, -2) for t in both)
    return step, center


def check_sample(name: str, values: torch.Tensor, fmt: TileFormat) -> None:
    """Raise where values are no ``[B, H, T, dim]`` that the format can code."""
    by_tile = fmt.granularity in (
        Granularity.BLOCK_RANGE,
        Granularity.CHANNEL_RANGE,
        Granularity.TOKEN_RANGE,
    )
    if (
        values.dim() != 4
        or values.dtype != fmt.dtype
        or values.shape[3] != fmt.dim
        or (by_tile and values.shape[2] % fmt.tokens)
    ):
        tokens = f"multiple of {fmt.tokens}" if by_tile else "T"
        raise ArgumentError(
            f"{name}: {values.dtype} {list(values.shape)}, expected {fmt.dtype} "
            f"[B, H, {tokens}, {fmt.dim}]"
        )
