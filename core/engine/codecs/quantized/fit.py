"""Fit a codec of tiles to a sample: order of channels, classes of blocks, codes.

All values are read where the sample lies; histograms of blocks alone come to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ....errors import ArgumentError
from ...kernels.tile_format import (
    MAX_CLASSES,
    MAX_CODE,
    MAX_CODE_BITS,
    TILE_BLOCK,
    TILE_LANES,
    UNIT_BITS,
    ZERO_SYMBOL,
    Granularity,
    TileFormat,
)
from ...kernels.uploads import in_stream_order, uploaded
from .plan import TilePlan, levels_on
from .quantise import (
    NO_CODE,
    check_sample,
    mean_square,
    spans,
    steps_of_levels,
    steps_of_spans,
)
from .symbols import (
    PAIR_RADIUS,
    PAIR_WIDTH,
    SINGLES,
    Counts,
    SymbolClass,
    choose_classes,
    shorten_codes,
)

#: Names of coders.
CODERS = ("huffman", "fixed")
#: Bits that say where a tile stands: a length, and its part of a base for 32.
_PLACE_BITS = 18
_HEADER_BITS = 32
#: Steps of channels that queries hardly read: no larger than of those with this share of the rms.
_LEAST_WEIGHT = 0.02
#: Of the tokens of a sample one in so many stands for later ones.
_LATER = 8


@dataclass(frozen=True)
class TileFit:
    """A plan, and what the sample takes by it.

    Parameters
    ----------
    plan : TilePlan
        The plan.
    bits_per_value : float
        Expected bits of a value, with headers, parameters, places of tiles, exceptions and the
        padding of streams; without the plan's own tables.
    exceptions : float
        Share of values that are exceptions.
    """

    plan: TilePlan
    bits_per_value: float
    exceptions: float


def fit_tiles(
    sample: torch.Tensor,
    *,
    tile_tokens: int,
    granularity: Granularity,
    token_pairs: bool,
    scale: float,
    weights: torch.Tensor | None = None,
    rows_per_head: int = 1,
    coder: str = "huffman",
    code_bits: int = MAX_CODE_BITS,
) -> TilePlan:
    """Return a plan for tiles like those of a sample.

    Parameters
    ----------
    sample : torch.Tensor
        ``[B, H, T, dim]``, bfloat16, float16 or float32, on any device. Tokens behind the last
        whole tile, or group of 16 if there is none, are left out.
    tile_tokens : int
        Tokens of a tile.
    granularity : Granularity
        Where steps come from; of LOSSLESS tiles there are none, see `fit_lossless`.
    token_pairs : bool
        Whether lanes pair tokens (V) or channels (K).
    scale : float
        CHANNEL: the step of a channel of weight 1. TOKEN_LEVEL: step over the rms of a token.
        Ranges: step over range.
    weights : torch.Tensor, optional
        ``[H, dim]``, for CHANNEL: what an error of 1 in a channel does, as `query_weights` returns;
        the step of a channel is ``scale / weight``. Without them all channels of a head have one
        step, `scale` times the rms of their distances from the mean.
    rows_per_head : int
        Consecutive rows of one head, of the storage.
    coder : str
        ``"huffman"`` or ``"fixed"``: plain fields of the width that takes the fewest bits.
    code_bits : int
        Bits of the longest code.

    Returns
    -------
    TilePlan
        Its tables are made from the sample alone and are the same wherever it lies, but for
        roundings of the order of sums.

    Raises
    ------
    ArgumentError
        For options out of range, and a sample of another shape or too short for a tile.
    """
    return measured_fit(
        sample,
        tile_tokens=tile_tokens,
        granularity=granularity,
        token_pairs=token_pairs,
        scale=scale,
        weights=weights,
        rows_per_head=rows_per_head,
        coder=coder,
        code_bits=code_bits,
    ).plan


def measured_fit(
    sample: torch.Tensor,
    *,
    tile_tokens: int,
    granularity: Granularity,
    token_pairs: bool,
    scale: float,
    weights: torch.Tensor | None = None,
    rows_per_head: int = 1,
    coder: str = "huffman",
    code_bits: int = MAX_CODE_BITS,
) -> TileFit:
    """Return what `fit_tiles` returns, and the bits that it expects."""
    if not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
        raise ArgumentError(f"scale: {scale!r:.60}, accepted are numbers above 0")
    check_coder(coder, rows_per_head)
    fmt = TileFormat(
        tokens=tile_tokens,
        dim=sample.shape[-1],
        dtype=sample.dtype,
        granularity=Granularity(granularity),
        token_pairs=token_pairs,
        code_bits=code_bits,
    )
    with torch.no_grad(), in_stream_order():
        steps = ScaledSteps(whole_tiles(sample, fmt), fmt, weights)
        counted = TileCounts(steps, float(scale))
        return counted.fit(counted.parts.cpu().numpy(), rows_per_head=rows_per_head, coder=coder)


class TileCounts:
    """What a plan is made of: histograms of a sample's codes, on its device.

    Parameters
    ----------
    steps : ScaledSteps
        Of the sample.
    scale : float or torch.Tensor
        Of the steps; float64 ``[1]`` where the sample is, for one that the host does not know.

    Attributes
    ----------
    decoded : torch.Tensor
        float32 ``[B, H, T, dim]``: what the sample is decoded to.
    parts : torch.Tensor
        int32 ``[any]``: all that `fit` reads on the host, so that one copy brings it.
    """

    def __init__(self, steps: ScaledSteps, scale: Scale) -> None:
        self._format = fmt = steps.format
        if not isinstance(scale, torch.Tensor):
            scale = torch.tensor([scale], dtype=torch.float64)
        step, center = (each[0] for each in steps.at(scale))
        found, coded = steps.codes(step)
        self.decoded = steps.decoded(found, coded, step, center)
        # In float32, with NO_CODE where there is none.
        codes = found.masked_fill_(coded.logical_not(), float(NO_CODE))
        self._heads = heads = codes.shape[1]
        tokens, kinds = codes.shape[2], 1
        by_channel = fmt.granularity is Granularity.CHANNEL
        of_channels = (step[0, :, 0], center[0, :, 0]) if by_channel else ()
        del step, center, found, coded  # what follows needs the room
        if by_channel:  # behind them what is likely later, which is counted apart
            codes, kinds = torch.cat((codes, _later(codes)), dim=2), 2
        counted = _count_kinds(codes, tokens, kinds)
        order = _order_by_spread(counted[0])
        parts = [uploaded(scale, order.device).view(torch.int32), order]
        parts += [t.gather(1, order).view(torch.int32) for t in of_channels]
        codes = codes.gather(3, order[None, :, None, :].expand_as(codes))
        by_place = counted.gather(2, order[None, :, :, None].expand_as(counted))
        singles = by_place.view(kinds, heads, fmt.blocks, TILE_BLOCK, SINGLES).sum(dim=3)
        parts += [singles, _count_pairs(codes, tokens, kinds, fmt)]
        self._kinds = kinds
        self._sizes = [part.numel() for part in parts]
        self.parts = torch.cat([part.flatten().int() for part in parts])

    def fit(self, parts: npt.NDArray[np.int32], *, rows_per_head: int, coder: str) -> TileFit:
        """Return the plan, and what the sample takes by it.

        Parameters
        ----------
        parts : numpy.ndarray
            The attribute, on the host.
        rows_per_head, coder
            As in `fit_tiles`.
        """
        fmt, heads = self._format, self._heads
        found = iter(np.split(parts, np.cumsum(self._sizes)[:-1]))
        (scale,) = next(found).view(np.float64).tolist()
        order = next(found).reshape(heads, fmt.dim).astype(np.uint8)
        steps = centers = np.empty((0, 0), np.float32)
        if fmt.granularity is Granularity.CHANNEL:
            steps, centers = (
                next(found).view(np.float32).reshape(heads, fmt.dim).copy() for _ in range(2)
            )
        singles, pairs = (each.reshape(self._kinds, -1) for each in found)
        counts = likely = _counts(singles[0], pairs[0])
        for each in range(1, self._kinds):
            likely = counts + _counts(singles[each], pairs[each])
        classes, labels = choose_classes(
            likely,
            classes=MAX_CLASSES,
            code_bits=fmt.code_bits,
            fixed=coder == "fixed",
            exception_bits=32 * fmt.exception_words,
        )
        if coder != "fixed":
            classes = shorten_codes(
                classes,
                labels,
                likely,
                tile_blocks=fmt.blocks,
                tile_tokens=fmt.tokens,
                exception_bits=32 * fmt.exception_words,
            )
        plan = TilePlan(
            format=fmt,
            heads=heads,
            rows_per_head=rows_per_head,
            scale=scale,
            order=order,
            block_class=labels.reshape(heads, fmt.blocks).astype(np.uint8),
            radius=np.array([c.radius for c in classes], np.uint8),
            lengths=np.stack([c.lengths for c in classes]),
            steps=steps,
            centers=centers,
        )
        bits, exceptions = _expected(plan, classes, labels, counts)
        return TileFit(plan, bits, exceptions)


def check_coder(coder: str, rows_per_head: int) -> None:
    """Raise for options that no plan has."""
    if coder not in CODERS:
        raise ArgumentError(f"coder: {coder!r:.60}, accepted are {', '.join(map(repr, CODERS))}")
    if type(rows_per_head) is not int or rows_per_head < 1:
        raise ArgumentError(f"rows_per_head: {rows_per_head!r:.60}, accepted are integers from 1")


def query_weights(
    queries: torch.Tensor,
    kv_heads: int,
    *,
    scaling: float | None = None,
    counted: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what an error of 1 in each channel of K does to the logits.

    Parameters
    ----------
    queries : torch.Tensor
        ``[B, Hq, n, dim]``.
    kv_heads : int
        Heads of K, H; Hq is a multiple: heads that share one follow each other.
    scaling : float, optional
        What logits are multiplied by; ``dim ** -0.5`` without.
    counted : torch.Tensor, optional
        bool ``[B, n]``, on their device: those that count; all without it.

    Returns
    -------
    torch.Tensor
        float32 ``[H, dim]``: the rms of the queries, times ``scaling * dim ** 0.5``. With steps
        ``scale / weight`` rounding changes logits by about 0.29 times `scale`, in the rms.
    """
    if queries.dim() != 4 or kv_heads < 1 or queries.shape[1] % kv_heads or not queries.shape[2]:
        raise ArgumentError(
            f"queries: {list(queries.shape)}, expected [B, a multiple of {kv_heads}, n, dim]"
        )
    squares = queries.float().square()
    if counted is None:
        squares = squares.mean(dim=(0, 2))
    else:  # chosen, not multiplied: what is left out may be NaN
        squares = squares.masked_fill(~counted[:, None, :, None], 0.0).sum(dim=(0, 2))
        squares /= counted.sum().clamp(min=1)
    dim = queries.shape[3]
    rms = squares.view(kv_heads, -1, dim).mean(dim=1).sqrt()
    return rms if scaling is None else rms * (scaling * dim**0.5)


def whole_tiles(sample: torch.Tensor, fmt: TileFormat) -> torch.Tensor:
    """Return the sample cut to whole tiles, or to whole groups of tokens where that is enough."""
    if sample.dim() != 4 or not sample.shape[0] or not sample.shape[1]:
        raise ArgumentError(f"sample: {list(sample.shape)}, expected [B, H, T, {fmt.dim}]")
    tokens = sample.shape[2] // fmt.tokens * fmt.tokens
    by_tile = (Granularity.BLOCK_RANGE, Granularity.CHANNEL_RANGE, Granularity.TOKEN_RANGE)
    if not tokens and fmt.granularity not in by_tile:
        tokens = sample.shape[2] // TILE_BLOCK * TILE_BLOCK
    if not tokens:
        raise ArgumentError(f"sample: {sample.shape[2]} tokens, accepted are {fmt.tokens} or more")
    sample = sample[:, :, :tokens]
    check_sample("sample", sample, fmt)
    return sample


#: A scale, or one that a device has chosen, float64 ``[1]`` there; several of them, ``[n]``.
Scale = float | torch.Tensor
Scales = Sequence[float] | torch.Tensor


class ScaledSteps:
    """Steps and centers of a sample by any scale; what they need of it is read once.

    Parameters
    ----------
    sample : torch.Tensor
        ``[B, H, T, dim]``, whole tiles.
    fmt : TileFormat
        Of the tiles.
    weights : torch.Tensor, optional
        ``[H, dim]``, as in `fit_tiles`.

    Attributes
    ----------
    sample, format
        As given.
    values : torch.Tensor
        The sample in float32.
    """

    def __init__(self, sample: torch.Tensor, fmt: TileFormat, weights: torch.Tensor | None) -> None:
        if fmt.lossless:
            raise ArgumentError("granularity: LOSSLESS, accepted are those that have steps")
        self.sample = sample
        self.format = fmt
        self.values = sample.float()
        if weights is not None and fmt.granularity is not Granularity.CHANNEL:
            raise ArgumentError("weights: given, accepted are some for Granularity.CHANNEL alone")
        if fmt.granularity is Granularity.CHANNEL:
            self._unit, self._center = _channel_steps(self.values, weights)
            self._far = self.values - self._center[None, :, None]
        elif fmt.granularity is Granularity.TOKEN_LEVEL:
            self._unit = mean_square(self.values)
            self._center = torch.zeros((), dtype=torch.float32, device=sample.device)
            self._far = self.values
        else:
            self._unit, self._center = spans(self.values, fmt)
            _, center = steps_of_spans(self._unit, self._center, 1.0, fmt)
            self._far = self.values - center

    def at(self, scales: Scales) -> tuple[torch.Tensor, torch.Tensor]:
        """Return steps and centers of scales, channels in their order.

        They broadcast to ``[scales, B, H, T, dim]``.
        """
        device, by = self.sample.device, self.format.granularity
        if not isinstance(scales, torch.Tensor):
            scales = torch.tensor(list(scales), dtype=torch.float64)
        if scales.device != device:
            scales = uploaded(scales, device)
        if by is Granularity.TOKEN_LEVEL:
            scaled = self._unit * (scales * scales).float().view(-1, 1, 1, 1)
            step = steps_of_levels(scaled, *levels_on(device))
            return step, self._center.expand_as(step)
        factor = scales.float()
        if by is Granularity.CHANNEL:
            step = self._unit * factor.view(-1, 1, 1)
            step = torch.where((step > 0) & step.isfinite(), step, 1.0)
            return step[:, None, :, None], self._center[None, None, :, None].expand(
                len(scales), -1, -1, -1, -1
            )
        step, center = steps_of_spans(
            self._unit, self._center, factor.view(-1, 1, 1, 1, 1, 1), self.format
        )
        return step, center

    def codes(self, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes by steps of `at`, in float32, and which of them are codes, as `codes_of`."""
        codes = (self._far * (1 / step)).round_()
        return codes, codes.abs() <= MAX_CODE  # false for NaN

    def decoded(
        self, codes: torch.Tensor, coded: torch.Tensor, step: torch.Tensor, center: torch.Tensor
    ) -> torch.Tensor:
        """Return in float32 what `codes` are decoded to; values without one as they are."""
        # As `dequantise`, with less memory.
        decoded = (codes * step).add_(center)
        if decoded.dtype != self.sample.dtype:
            decoded = decoded.to(self.sample.dtype).float()
        return torch.where(coded, decoded, self.values)


def _channel_steps(
    x: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return step at scale 1 and center of each channel, float32 ``[H, dim]``."""
    heads, dim = x.shape[1], x.shape[3]
    finite = x.isfinite()
    known = finite.sum(dim=(0, 2)).clamp(min=1)
    center = torch.where(finite, x, 0.0).sum(dim=(0, 2)) / known
    if weights is None:
        far = torch.where(finite, x - center[:, None], 0.0).square().sum(dim=(0, 2)) / known
        unit = far.mean(dim=1, keepdim=True).sqrt().expand(heads, dim)
    else:
        if tuple(weights.shape) != (heads, dim):
            raise ArgumentError(f"weights: {list(weights.shape)}, expected {[heads, dim]}")
        weights = weights.to(x.device, torch.float32)
        least = _LEAST_WEIGHT * weights.square().mean(dim=1, keepdim=True).sqrt()
        unit = torch.maximum(weights, least).reciprocal()
    return unit, torch.where(center.isfinite(), center, 0.0)


def _order_by_spread(counted: torch.Tensor) -> torch.Tensor:
    """Return the channels of each head, int64 ``[H, dim]``, those of the highest entropy first.

    So the narrowest class comes last: less of a lane's last unit is lost where codes are short.
    """
    # Each channel has as many values: the sum of logarithms decides.
    parts = counted.double()
    together = (parts * parts.clamp(min=1).log2()).sum(dim=2)
    return torch.argsort(together, dim=1, stable=True)


def _later(codes: torch.Tensor) -> torch.Tensor:
    """Return codes that are likely later: the last ones, moved on as their means have moved.

    Slow rotations move the means of some channels on and on. Without this their codes would soon
    be exceptions.
    """
    tokens = codes.shape[2]
    before, behind = codes[:, :, : tokens // 2], codes[:, :, tokens - tokens // 2 :]
    drift = [part.mean(dim=(0, 2), keepdim=True) for part in (before, behind)]
    moved = (2 * (drift[1] - drift[0])).round()
    count = max(tokens // _LATER // TILE_BLOCK, 1) * TILE_BLOCK
    last = codes[:, :, tokens - count :]
    return torch.where(last == NO_CODE, 0.0, last + moved).clamp_(-MAX_CODE, MAX_CODE)


def count_channels(codes: torch.Tensor, coded: torch.Tensor) -> torch.Tensor:
    """Return how often each code occurs in each channel, int32 ``[n, H, dim, SINGLES]``.

    Parameters
    ----------
    codes : torch.Tensor
        float32 ``[n, B, H, T, dim]``: those of n scales; overwritten.
    coded : torch.Tensor
        Which of them are codes; column 0 counts the others.
    """
    n, _, heads, _, dim = codes.shape
    channel = torch.arange(ZERO_SYMBOL, n * heads * dim * SINGLES, SINGLES, device=codes.device)
    at = codes.masked_fill_(coded.logical_not(), float(-ZERO_SYMBOL)).long()
    at += channel.view(n, 1, heads, 1, dim)
    return _bincount(at, n * heads * dim).view(n, heads, dim, SINGLES)


def _count_kinds(codes: torch.Tensor, tokens: int, kinds: int) -> torch.Tensor:
    """Return how often each code occurs in each channel, int32 ``[kinds, H, dim, SINGLES]``.

    Parameters
    ----------
    codes : torch.Tensor
        float32 ``[B, H, T, dim]``, NO_CODE where there is none; column 0 counts those.
    tokens : int
        Tokens of the first kind; those behind are of the second.
    kinds : int
        1 or 2.
    """
    _, heads, _, dim = codes.shape
    channel = torch.arange(0, heads * dim * SINGLES, SINGLES, device=codes.device)
    # NO_CODE, 128, goes to symbol 0.
    at = codes.long().add_(ZERO_SYMBOL).bitwise_and_(SINGLES - 1)
    at += channel.view(heads, 1, dim)
    at[:, :, tokens:] += heads * dim * SINGLES
    return _bincount(at, kinds * heads * dim).view(kinds, heads, dim, SINGLES)


def _count_pairs(placed: torch.Tensor, tokens: int, kinds: int, fmt: TileFormat) -> torch.Tensor:
    """Return histograms of the pairs of lanes, ``[kinds * H * blocks]`` of them; see above.

    The codes, in the order of positions, are overwritten.
    """
    heads, blocks = placed.shape[1], fmt.blocks
    size = PAIR_WIDTH**2
    number = torch.arange(0, heads * blocks * size, size, device=placed.device)
    near = placed.masked_fill_(placed.abs() > PAIR_RADIUS, 0.0).add_(PAIR_RADIUS)
    near = near.view(*placed.shape[:3], blocks, TILE_BLOCK)
    if fmt.token_pairs:
        first, second, tokens = near[:, :, 0::2], near[:, :, 1::2], tokens // 2
    else:
        first, second = near[..., 0::2], near[..., 1::2]
    at = (first * PAIR_WIDTH + second).long()
    at += number.view(heads, 1, blocks, 1)
    at[:, :, tokens:] += heads * blocks * size
    return _bincount(at, kinds * heads * blocks, size)


def _counts(singles: npt.NDArray[np.int32], pairs: npt.NDArray[np.int32]) -> Counts:
    return Counts(
        singles.reshape(-1, SINGLES).astype(np.float64),
        pairs.reshape(-1, PAIR_WIDTH**2).astype(np.float64),
    )


def _bincount(at: torch.Tensor, histograms: int, symbols: int = SINGLES) -> torch.Tensor:
    """Return how often each number occurs, int32 ``[histograms * symbols]``; no wait for a GPU."""
    if at.is_cuda:
        counted = torch.zeros(histograms * symbols, dtype=torch.int32, device=at.device)
        flat = at.flatten()
        one = torch.ones((), dtype=torch.int32, device=at.device)
        return counted.scatter_add_(0, flat, one.expand_as(flat))
    return torch.bincount(at.flatten(), minlength=histograms * symbols).int()


def _expected(
    plan: TilePlan,
    found: list[SymbolClass],
    labels: npt.NDArray[np.int64],
    counts: Counts,
) -> tuple[float, float]:
    """Return bits a value, all in, and the share of exceptions."""
    fmt = plan.format
    values = counts.singles.sum()
    exception_bits = 32 * fmt.exception_words
    with_exceptions = np.stack([c.cost(counts, exception_bits) for c in found], axis=1)
    without = np.stack([c.cost(counts, 0) for c in found], axis=1)
    mine = np.arange(len(labels)), labels
    exceptions = (with_exceptions[mine] - without[mine]).sum() / exception_bits
    # At its end a lane holds, beside what it asked for in vain, half a unit.
    last = labels.reshape(plan.heads, fmt.blocks)[:, -1]
    symbols = np.array([2.0 if c.radius else 1.0 for c in found])
    mean_bits = without / counts.singles.sum(axis=1, keepdims=True) * symbols
    mean_bits = mean_bits.reshape(plan.heads, fmt.blocks, -1)[np.arange(plan.heads), -1, last]
    # Before its last ask it has fewer bits than are needed, behind it those and up to 15 more.
    at_once = np.array([2.0 if c.short else 1.0 for c in found])
    needed = at_once * [c.bits for c in found]
    unused = (needed[last] - at_once[last] * mean_bits).mean() + (UNIT_BITS - 1) / 2
    spare = TILE_LANES * float(unused) + UNIT_BITS / 2
    tile_bits = _HEADER_BITS + 32 * fmt.parameter_words + _PLACE_BITS + spare
    bits = with_exceptions[mine].sum() / values + tile_bits / fmt.values
    return float(bits), float(exceptions / values)
