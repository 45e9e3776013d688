"""Fit keys and values to an error of attention: the coarsest steps that stay under it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ....errors import ArgumentError
from ...kernels.tile_format import MAX_CODE_BITS, TILE_BLOCK, Granularity, TileFormat
from .fit import TileFit, count_channels, measured_fit, query_weights, sample_steps
from .plan import TilePlan
from .quantise import NO_CODE, codes_of, dequantise

#: Scales that are measured, times `_BASE_SCALE`; between them errors and bits are interpolated.
_GRID = (0.0625, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_BASE_SCALE = {
    Granularity.CHANNEL: 1.0,
    Granularity.TOKEN_LEVEL: 1.0,
    Granularity.BLOCK_RANGE: 0.1,
    Granularity.CHANNEL_RANGE: 0.2,
    Granularity.TOKEN_RANGE: 0.15,
}
#: Points between two scales of the grid that are compared.
_BETWEEN = 16
#: Measurements of both together: until one is fine, and at the most where one has been; and the
#: share of the error at which the search is content.
_TRIALS = 12
_REFINED = 3
_CLOSE = 0.97
#: Tokens, queries and values that are looked at, at the most.
_TOKENS = 2048
_QUERIES = 64
_VALUES = 1 << 23


@dataclass(frozen=True)
class Measured:
    """What a fit of keys and values measured on its sample.

    Parameters
    ----------
    error : float
        ``norm(o' - o) / norm(o)`` of the outputs of attention, all heads and queries together.
    key_scale, value_scale : float
        Scales of the plans.
    key_bits, value_bits : float
        Expected bits a value, all in (`TileFit`).
    key_exceptions, value_exceptions : float
        Share of values that are exceptions.
    """

    error: float
    key_scale: float
    value_scale: float
    key_bits: float
    value_bits: float
    key_exceptions: float
    value_exceptions: float


class AttentionFit(NamedTuple):
    """Plans of keys and of values, and what was measured."""

    keys: TilePlan
    values: TilePlan
    measured: Measured


def fit_error(
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
    *,
    error: float,
    key_scale: float | None = None,
    value_scale: float | None = None,
    tile_tokens: int = 64,
    key_granularity: Granularity = Granularity.CHANNEL,
    value_granularity: Granularity = Granularity.TOKEN_LEVEL,
    sinks: int = 4,
    window: int = 128,
    scaling: float | None = None,
    softcap: float | None = None,
    first_valid: torch.Tensor | None = None,
    rows_per_head: int = 1,
    coder: str = "huffman",
    code_bits: int = MAX_CODE_BITS,
) -> AttentionFit | None:
    """Return the plans that take the fewest bits while attention stays within an error.

    Errors of keys and of values, each alone, and their bits are measured at seven scales; of all
    pairs of scales that should stay within `error` the one of the fewest bits is measured with both
    coded, and both are moved until they stay within it.

    Parameters
    ----------
    keys, values : torch.Tensor
        ``[B, H, T, dim]``, of one dtype, on one device: a prompt. Of long ones tiles are drawn
        evenly, 2,048 tokens in all, and of large batches some sequences.
    queries : torch.Tensor
        ``[B, Hq, n, dim]``: those of the last n tokens. All give the weights of channels, the last
        64 the error.
    error : float
        Relative error of the outputs of attention, above 0. It is a target, measured on these
        queries: later ones may be hit harder.
    key_scale, value_scale : float, optional
        Scales that are taken as they are. With both, `error` is measured, not asked.
    tile_tokens, rows_per_head, coder, code_bits
        As in `fit_tiles`.
    key_granularity, value_granularity : Granularity
        Where steps come from.
    sinks, window : int
        First and last tokens that are not coded.
    scaling, softcap : float, optional
        Of the logits; ``dim ** -0.5`` and none by default.
    first_valid : torch.Tensor, optional
        ``[B]``: the first token of each sequence that is no padding.

    Returns
    -------
    AttentionFit or None
        None when the finest steps are not good enough.

    Raises
    ------
    ArgumentError
        For options out of range, shapes that do not fit, and prompts in which no 16 tokens stand
        between `sinks` and `window`.
    """
    if not isinstance(error, (int, float)) or not 0 < error < math.inf:
        raise ArgumentError(f"error: {error!r:.60}, accepted are numbers above 0")
    prompt = _Prompt(
        keys,
        values,
        queries,
        tile_tokens=tile_tokens,
        raw_tokens=(sinks, window),
        scaling=scaling,
        softcap=softcap,
        first_valid=first_valid,
    )
    by_channel = key_granularity is Granularity.CHANNEL
    weights = query_weights(queries, keys.shape[1], scaling=scaling) if by_channel else None
    k = _Side(prompt.coded(keys), tile_tokens, key_granularity, False, key_scale, weights)
    v = _Side(prompt.coded(values), tile_tokens, value_granularity, True, value_scale, None)
    chosen = _choose(prompt, k, v, float(error))
    if chosen is None:
        return None
    found, scales = chosen
    plans = [
        measured_fit(
            side.sample,
            tile_tokens=tile_tokens,
            granularity=side.granularity,
            token_pairs=side.token_pairs,
            scale=scale,
            weights=side.weights,
            rows_per_head=rows_per_head,
            coder=coder,
            code_bits=code_bits,
        )
        for side, scale in zip((k, v), scales, strict=True)
    ]
    return AttentionFit(plans[0].plan, plans[1].plan, _measured(found, scales, *plans))


class _Side:
    """Keys or values of a prompt that are coded, and the scales that may be.

    Parameters
    ----------
    sample : torch.Tensor
        ``[B, H, T, dim]``.
    """

    def __init__(
        self,
        sample: torch.Tensor,
        tile_tokens: int,
        granularity: Granularity,
        token_pairs: bool,
        scale: float | None,
        weights: torch.Tensor | None,
    ) -> None:
        self.sample = sample
        self.granularity = granularity
        self.token_pairs = token_pairs
        self.weights = weights
        self.format = TileFormat(
            tokens=tile_tokens,
            dim=sample.shape[3],
            dtype=sample.dtype,
            granularity=granularity,
            token_pairs=token_pairs,
        )
        if scale is None:
            self.scales = tuple(_BASE_SCALE[granularity] * s for s in _GRID)
        elif isinstance(scale, (int, float)) and 0 < scale < math.inf:
            self.scales = (float(scale),)
        else:
            name = "value_scale" if token_pairs else "key_scale"
            raise ArgumentError(f"{name}: {scale!r:.60}, accepted are numbers above 0")

    def coded(self, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes, and float32 what they are decoded to; values without one as they are."""
        step, center = sample_steps(self.sample, self.format, scale, self.weights)
        codes = codes_of(self.sample, step, center)
        decoded = dequantise(codes, step, center, self.sample.dtype)
        return codes, torch.where(codes == NO_CODE, self.sample, decoded).float()

    def bits(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the entropy of codes, each channel by itself: bits a value, on the device."""
        counted = count_channels(codes).double()
        share = counted / counted.sum(dim=2, keepdim=True)
        return -torch.where(counted > 0, share * share.log2(), 0.0).sum(dim=2).mean()


class _Prompt:
    """Attention of a prompt's last queries to some of its tokens, coded or as they came.

    All first and last tokens that are not coded are kept, and tiles between them are drawn evenly;
    where a tile stands for several, its logits are raised by the logarithm of their number.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        queries: torch.Tensor,
        *,
        tile_tokens: int,
        raw_tokens: tuple[int, int],
        scaling: float | None,
        softcap: float | None,
        first_valid: torch.Tensor | None,
    ) -> None:
        _check_shapes(keys, values, queries)
        batch, heads, tokens, dim = keys.shape
        sinks, window = raw_tokens
        between = tokens - sinks - window
        tiles = between // tile_tokens
        if tiles:
            most = max((_TOKENS - sinks - window) // tile_tokens, 1)
            drawn = np.arange(min(tiles, most)) * tiles // min(tiles, most)
            chosen = (sinks + drawn[:, None] * tile_tokens + np.arange(tile_tokens)).ravel()
            tail = sinks + tiles * tile_tokens
            share = tiles / len(drawn)
        else:
            tail = sinks + max(between, 0) // TILE_BLOCK * TILE_BLOCK
            chosen, share = np.arange(sinks, tail), 1.0
        if not len(chosen):
            raise ArgumentError(
                f"keys: {tokens} tokens, accepted are {sinks} sinks, a window of {window}, and "
                f"{TILE_BLOCK} or more between them"
            )
        lines = min(max(_VALUES // (heads * min(tokens, _TOKENS) * dim), 1), batch)
        device = keys.device
        self._lines = torch.from_numpy(np.arange(lines) * batch // lines).to(device)
        self._chosen = torch.from_numpy(chosen).to(device)
        raw = torch.from_numpy(np.r_[0:sinks, tail:tokens]).to(device)
        self._scaling = dim**-0.5 if scaling is None else scaling
        self._softcap = softcap
        count = min(queries.shape[2], _QUERIES)
        last = queries[self._lines, :, queries.shape[2] - count :].float()
        # Heads that share keys are further rows.
        self._query = last.unflatten(1, (heads, -1)).flatten(2, 3)
        groups = queries.shape[1] // heads
        at = torch.arange(tokens - count, tokens, device=device).repeat(groups)
        self._raw_seen = self._seen(raw, at, first_valid)
        self._seen_of_chosen = self._seen(self._chosen, at, first_valid) + math.log(share)
        self._raw_values = values[self._lines][:, :, raw].float()
        self._values = self.coded(values).float()
        self._raw_logits = self._logits(keys[self._lines][:, :, raw].float()) + self._raw_seen
        self._shares = self._softmax(self.coded(keys).float())
        self._plain = self._output(self._shares, self._values)
        self._norm = self._plain.norm().clamp(min=1e-30)

    def coded(self, kept: torch.Tensor) -> torch.Tensor:
        """Return the keys or values that are coded, ``[B, H, T, dim]``."""
        return kept[self._lines][:, :, self._chosen]

    def error(self, keys: torch.Tensor | None, values: torch.Tensor | None) -> torch.Tensor:
        """Return the relative error when these are attended to, None for those as they came."""
        shares = self._shares if keys is None else self._softmax(keys)
        output = self._output(shares, self._values if values is None else values)
        return (output - self._plain).norm() / self._norm

    def _seen(
        self, tokens: torch.Tensor, at: torch.Tensor, first_valid: torch.Tensor | None
    ) -> torch.Tensor:
        """Return 0 where a query sees a token, else -inf; ``[B or 1, 1, queries, tokens]``."""
        hidden = (tokens > at[:, None])[None, None]
        if first_valid is not None:
            first = first_valid.to(tokens.device)[self._lines]
            hidden = hidden | (tokens < first[:, None])[:, None, None]
        return torch.zeros(hidden.shape, device=tokens.device).masked_fill(hidden, -math.inf)

    def _logits(self, keys: torch.Tensor) -> torch.Tensor:
        logits = self._query @ keys.transpose(2, 3) * self._scaling
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits

    def _softmax(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the shares of the coded tokens, then those of the others."""
        logits = self._logits(keys) + self._seen_of_chosen
        return torch.cat((logits, self._raw_logits), dim=3).softmax(dim=3)

    def _output(self, shares: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        coded = values.shape[2]
        return shares[..., :coded] @ values + shares[..., coded:] @ self._raw_values


def _choose(
    prompt: _Prompt, k: _Side, v: _Side, error: float
) -> tuple[float, tuple[float, float]] | None:
    """Return what was measured and the scales of keys and values; None when none is good enough."""
    if len(k.scales) == len(v.scales) == 1:
        scales = k.scales[0], v.scales[0]
        return float(prompt.error(k.coded(scales[0])[1], v.coded(scales[1])[1])), scales
    found = []
    for side in (k, v):
        for scale in side.scales:
            codes, decoded = side.coded(scale)
            off = prompt.error(decoded, None) if side is k else prompt.error(None, decoded)
            found.append(torch.stack((off.double(), side.bits(codes))))
    measured = torch.stack(found).cpu().numpy()
    curves = (
        _Curve(np.array(k.scales), measured[: len(k.scales)]),
        _Curve(np.array(v.scales), measured[len(k.scales) :]),
    )
    # Both errors together are about the root of their squares; what that misses is made up for by
    # a factor on both scales, between the largest that was fine and the least that was not.
    pair = _cheapest(*curves, error)
    if pair is None:
        pair = k.scales[0], v.scales[0]
    best, factor, fine, coarse = None, 1.0, 0.0, math.inf
    for trial in range(_TRIALS):
        scales = tuple(
            min(max(side.scales[0], scale * factor), side.scales[-1])
            for side, scale in zip((k, v), pair, strict=True)
        )
        both = float(prompt.error(k.coded(scales[0])[1], v.coded(scales[1])[1]))
        if both <= error:
            best, fine = (both, (scales[0], scales[1])), factor
        else:
            coarse = factor
        end = 0 if best is None else -1
        at_end = scales == (k.scales[end], v.scales[end])
        if at_end or _CLOSE * error <= both <= error or (best and trial >= _REFINED):
            break
        factor *= (1 + _CLOSE) / 2 * error / max(both, 1e-30)
        if not fine < factor < coarse:
            factor = math.sqrt(fine * coarse) if fine else 0.9 * coarse
    return best


class _Curve:
    """Errors and bits over scales, interpolated between the measured ones."""

    def __init__(self, scales: npt.NDArray[np.float64], measured: npt.NDArray[np.float64]) -> None:
        known = np.log(scales)
        points = _BETWEEN * (len(scales) - 1) + 1
        wanted = np.interp(np.linspace(0, len(scales) - 1, points), np.arange(len(scales)), known)
        off = np.log(np.maximum(measured[:, 0], 1e-30))
        self.scales = np.exp(wanted)
        self.errors = np.exp(np.interp(wanted, known, off))
        self.bits = np.interp(wanted, known, measured[:, 1])


def _cheapest(k: _Curve, v: _Curve, target: float) -> tuple[float, float] | None:
    """Return the scales of the fewest bits whose errors together should stay within a target."""
    errors = np.hypot(k.errors[:, None], v.errors)
    bits = np.where(errors <= target, k.bits[:, None] + v.bits, np.inf)
    if not np.isfinite(bits).any():
        return None
    at = np.unravel_index(int(bits.argmin()), bits.shape)
    return float(k.scales[at[0]]), float(v.scales[at[1]])


def _measured(error: float, scales: tuple[float, float], k: TileFit, v: TileFit) -> Measured:
    return Measured(
        error=error,
        key_scale=scales[0],
        value_scale=scales[1],
        key_bits=k.bits_per_value,
        value_bits=v.bits_per_value,
        key_exceptions=k.exceptions,
        value_exceptions=v.exceptions,
    )


def _check_shapes(keys: torch.Tensor, values: torch.Tensor, queries: torch.Tensor) -> None:
    """Raise where keys, values and queries are not those of one attention."""
    if keys.dim() != 4 or not keys.numel():
        raise ArgumentError(f"keys: {list(keys.shape)}, expected [B, H, T, dim], none of them 0")
    if values.shape != keys.shape or values.dtype != keys.dtype:
        raise ArgumentError(
            f"values: {values.dtype} {list(values.shape)}, expected {keys.dtype} "
            f"{list(keys.shape)}, as the keys have"
        )
    batch, heads, tokens, dim = keys.shape
    if (
        queries.dim() != 4
        or queries.shape[0] != batch
        or queries.shape[1] % heads
        or not 1 <= queries.shape[2] <= tokens
        or queries.shape[3] != dim
    ):
        raise ArgumentError(
            f"queries: {list(queries.shape)}, expected [{batch}, a multiple of {heads}, 1 to "
            f"{tokens}, {dim}]"
        )
