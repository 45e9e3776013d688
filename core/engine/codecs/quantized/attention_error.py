"""Fit keys and values to an error of attention: the coarsest steps that keep it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ....errors import ArgumentError
from ...kernels.tile_format import MAX_CODE_BITS, Granularity, TileFormat
from ...kernels.uploads import in_stream_order, uploaded
from .fit import (
    Scale,
    ScaledSteps,
    Scales,
    TileCounts,
    check_coder,
    count_channels,
    query_weights,
    whole_tiles,
)
from .plan import TilePlan
from .prompt_attention import PromptAttention
from .scale_search import LEAST_ERROR, Curve, between, cheapest

_T = TypeVar("_T")

#: Scales that are measured, times `_BASE_SCALE`; between them errors and bits are interpolated.
_GRID = (0.0625, 0.35, 1.0, 2.8, 8.0)
_BASE_SCALE = {
    Granularity.CHANNEL: 1.0,
    Granularity.TOKEN_LEVEL: 1.0,
    Granularity.BLOCK_RANGE: 0.1,
    Granularity.CHANNEL_RANGE: 0.2,
    Granularity.TOKEN_RANGE: 0.15,
}
#: Factors on both scales that are measured together, a few rounds where none or all are fine.
_FACTORS = (0.75, 0.9, 1.07, 1.3)
_ROUNDS = 5
#: Share of the error that is aimed at, the one with which the search is content, and how many
#: interpolated factors are measured in a round.
_CLOSE = 0.985
_CLOSE_ENOUGH = 0.96
_TRIALS = 3
#: Bytes of step and center of each value, where those are by range.
_RANGE_BYTES = 12


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


class NothingSeenError(ArgumentError):
    """No query sees a token that is coded, so that no error can be measured."""


class AttentionFit(NamedTuple):
    """Plans of keys and of values, what was measured, and weights of channels, on the CPU."""

    keys: TilePlan
    values: TilePlan
    measured: Measured
    weights: torch.Tensor | None


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
    sink_logits: torch.Tensor | None = None,
    rows_per_head: int = 1,
    coder: str = "huffman",
    code_bits: int = MAX_CODE_BITS,
) -> AttentionFit | None:
    """Return the plans that take the fewest bits while attention keeps an error.

    Errors of keys and of values, each alone, and their bits are measured at five scales; of all
    pairs of scales that should keep `error` the one of the fewest bits is taken, and both are
    multiplied by a factor, which is interpolated between four that are measured with both coded,
    and between more. A GPU does all that by itself and is waited for once; again, up to four times,
    where none or all of the four are fine. Beside what is given it takes up to 256 MiB there, more
    only of more than 8,192 channels or windows of thousands of tokens.

    Parameters
    ----------
    keys, values : torch.Tensor
        ``[B, H, T, dim]``, of one dtype, on one device: a prompt. Of long ones tiles are drawn
        evenly, 2,048 tokens in all, of more than 2,048 channels fewer, down to 512, and of large
        batches some sequences.
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
        ``[B]``: the first token of each sequence that is no padding. Queries of padding count for
        nothing, in errors and in weights; for errors none does that sees no coded token.
    sink_logits : torch.Tensor, optional
        ``[Hq]``: logits that take part in the sum of the softmax, beside those of the tokens.

    Returns
    -------
    AttentionFit or None
        None when the finest steps are not good enough.

    Raises
    ------
    ArgumentError
        For options out of range, shapes that do not fit, and prompts in which no 16 tokens stand
        between `sinks` and `window`.
    NothingSeenError
        An `ArgumentError`: where padding hides all coded tokens from all queries.
    """
    if not isinstance(error, (int, float)) or not 0 < error < math.inf:
        raise ArgumentError(f"error: {error!r:.60}, accepted are numbers above 0")
    check_coder(coder, rows_per_head)
    with torch.no_grad(), in_stream_order():
        prompt = PromptAttention(
            keys,
            values,
            queries,
            tile_tokens=tile_tokens,
            raw_tokens=(sinks, window),
            scaling=scaling,
            softcap=softcap,
            first_valid=first_valid,
            sink_logits=sink_logits,
        )
        weights = None
        if key_granularity is Granularity.CHANNEL:
            counted = None
            if first_valid is not None:
                n, tokens = queries.shape[2], keys.shape[2]
                at = torch.arange(tokens - n, tokens, device=queries.device)
                counted = at >= first_valid.to(queries.device)[:, None]
            weights = query_weights(queries, keys.shape[1], scaling=scaling, counted=counted)
        formats = (
            TileFormat(tile_tokens, keys.shape[3], keys.dtype, granularity, pairs, code_bits)
            for granularity, pairs in ((key_granularity, False), (value_granularity, True))
        )
        k = _Side(prompt.keys, next(formats), key_scale, weights)
        v = _Side(prompt.values, next(formats), value_scale, None)
        prompt.measure_plain(k.steps.values, v.steps.values)
        found = _choose(prompt, k, v, float(error))
        if (found is None or math.isnan(found.error)) and not prompt.measures:
            raise NothingSeenError(
                "queries: none of them sees a token that is coded and no padding"
            )
    if found is None:
        return None
    fits = [
        counted.fit(part, rows_per_head=rows_per_head, coder=coder)
        for counted, part in zip(found.counted, found.parts, strict=True)
    ]
    measured = Measured(
        error=found.error,
        key_scale=fits[0].plan.scale,
        value_scale=fits[1].plan.scale,
        key_bits=fits[0].bits_per_value,
        value_bits=fits[1].bits_per_value,
        key_exceptions=fits[0].exceptions,
        value_exceptions=fits[1].exceptions,
    )
    return AttentionFit(fits[0].plan, fits[1].plan, measured, found.weights)


class _Side:
    """Keys or values of a prompt that are coded, and the scales that may be.

    Parameters
    ----------
    sample : torch.Tensor
        ``[B, H, T, dim]``.
    fmt : TileFormat
        Of their tiles.
    scale : float, optional
        The only one.
    weights : torch.Tensor, optional
        As `fit_tiles` takes them.

    Attributes
    ----------
    step_bytes : int
        Bytes of steps and centers for each value, beside those of its code.
    """

    def __init__(
        self,
        sample: torch.Tensor,
        fmt: TileFormat,
        scale: float | None,
        weights: torch.Tensor | None,
    ) -> None:
        self.weights = weights
        by_value = fmt.granularity not in (Granularity.CHANNEL, Granularity.TOKEN_LEVEL)
        self.step_bytes = _RANGE_BYTES if by_value else 0
        self.steps = ScaledSteps(whole_tiles(sample, fmt), fmt, weights)
        if scale is None:
            self.scales = tuple(_BASE_SCALE[fmt.granularity] * s for s in _GRID)
        elif isinstance(scale, (int, float)) and 0 < scale < math.inf:
            self.scales = (float(scale),)
        else:
            name = "value_scale" if fmt.token_pairs else "key_scale"
            raise ArgumentError(f"{name}: {scale!r:.60}, accepted are numbers above 0")

    def decoded(self, scales: Scales) -> torch.Tensor:
        """Return what codes of scales are decoded to, float32 ``[scales, B, H, T, dim]``."""
        return self._coded(scales)[2]

    def measured(
        self, scales: Scales, errors: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the errors of scales, and the entropy of their codes, each channel by itself.

        Parameters
        ----------
        scales : sequence of float
            What is measured.
        errors : callable
            Takes what `decoded` returns.

        Returns
        -------
        tuple of torch.Tensor
            float64 ``[scales]`` each; the entropy in bits a value.
        """
        codes, coded, decoded = self._coded(scales)
        found = errors(decoded)
        del decoded  # counting needs the room
        counted = count_channels(codes, coded).double()
        each = codes.shape[1] * codes.shape[3]  # values of a channel
        nats = torch.special.xlogy(counted, counted).sum(dim=3).mean(dim=(1, 2)) / each
        return found, (math.log(each) - nats) / math.log(2)

    def _coded(self, scales: Scales) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return codes in float32, which of them are codes, and what they are decoded to."""
        step, center = self.steps.at(scales)
        codes, coded = self.steps.codes(step)
        return codes, coded, self.steps.decoded(codes, coded, step, center)

    def clamped(self, scale: float) -> float:
        """Return a scale, or the nearest that may be."""
        return min(max(self.scales[0], scale), self.scales[-1])

    def clamp(self, scales: torch.Tensor) -> torch.Tensor:
        """Return scales, or the nearest that may be."""
        return scales.clamp(self.scales[0], self.scales[-1])


class _Chosen(NamedTuple):
    """Codes of the chosen scales, counted, and on the host what plans are made of."""

    error: float
    counted: tuple[TileCounts, TileCounts]
    parts: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
    weights: torch.Tensor | None
    beside: list[float]


def _choose(prompt: PromptAttention, k: _Side, v: _Side, error: float) -> _Chosen | None:
    """Return what the coarsest scales give that are good enough; None when there are none."""
    if len(k.scales) == len(v.scales) == 1:
        return _count(prompt, k, v, (k.scales[0], v.scales[0]))
    # What the pair misses is made up for by a factor on both scales.
    factors = _Factors(prompt, k, v, cheapest(*_curves(prompt, k, v), error))
    best: _Chosen | None = None
    middle = 1.0
    for _ in range(_ROUNDS):
        found, further = factors.measure(middle, error)
        if found.error <= error and (best is None or found.error > best.error):
            best = found
        if further is None or (best is not None and best.error >= _CLOSE_ENOUGH * error):
            break
        middle = further
    return best


def _curves(prompt: PromptAttention, k: _Side, v: _Side) -> tuple[Curve, Curve]:
    """Return errors and bits of each side alone, on its device."""
    curves: list[Curve] = []
    of_sides = (k, lambda keys: prompt.errors(keys, None)), (v, lambda x: prompt.errors(None, x))
    for side, of_side in of_sides:
        errors, bits = [], []
        for scales in _parts(side.scales, prompt.at_once(side.step_bytes)):
            found_errors, found_bits = side.measured(scales, of_side)
            errors.append(found_errors)
            bits.append(found_bits)
        curves.append(Curve(side.scales, torch.cat(errors), torch.cat(bits)))
    return curves[0], curves[1]


def _parts(scales: Sequence[_T], most: int) -> Iterator[Sequence[_T]]:
    for begin in range(0, len(scales), most):
        yield scales[begin : begin + most]


class _Factors:
    """Errors of both sides together when the scales of a pair are multiplied by a factor.

    Parameters
    ----------
    prompt, k, v
        What is attended to.
    pair : torch.Tensor
        float64 ``[2]`` on their device: the scales of keys and values.
    """

    def __init__(self, prompt: PromptAttention, k: _Side, v: _Side, pair: torch.Tensor) -> None:
        self._prompt, self._sides, self._pair = prompt, (k, v), pair
        # What was measured: factors and their errors.
        self._known = self._measured = pair.new_empty(0)

    def measure(self, middle: float, error: float) -> tuple[_Chosen, float | None]:
        """Measure factors around one, and some between them as the device finds them; one wait.

        Returns
        -------
        found : _Chosen
            By the factor of the largest error that is not above `error`; by the smallest one of all
            where there is none.
        middle : float or None
            Around which to go on, where no factor or each of the first ones keeps the error; None
            where the error lies between them, or scales cannot be finer or coarser.
        """
        factors = [middle * f for f in _FACTORS]
        begin = self._known.shape[0]
        self._add(torch.tensor(factors, dtype=torch.float64))
        for _ in range(_TRIALS):
            self._add(between(self._known, self._measured, _CLOSE * error))
        fine = self._measured <= error
        largest = self._measured.masked_fill(~fine, -math.inf).argmax()
        at = torch.where(fine.any(), largest, self._known.argmin()).view(1)
        last = begin + len(factors) - 1
        ends = torch.stack([self._measured[begin], self._measured[last]])
        found = _count(
            self._prompt,
            *self._sides,
            self._scales(self._known[at]),
            torch.cat([self._pair, ends]),
        )
        of_keys, of_values, error_first, error_last = found.beside
        k, v = self._sides

        def ends_at(factor: float, end: int) -> bool:
            scales = k.clamped(of_keys * factor), v.clamped(of_values * factor)
            return scales == (k.scales[end], v.scales[end])

        if error_first > error and not ends_at(factors[0], 0):
            return found, factors[0] * min(max(error / error_first, 1 / 16), 0.9)
        if error_last <= error and not ends_at(factors[-1], -1):
            return found, factors[-1] * min(max(error / max(error_last, LEAST_ERROR), 1.1), 16)
        return found, None

    def _add(self, factors: torch.Tensor) -> None:
        """Measure more factors."""
        factors = uploaded(factors, self._pair.device)
        self._measured = torch.cat([self._measured, self._errors(self._scales(factors))])
        self._known = torch.cat([self._known, factors])

    def _scales(self, factors: torch.Tensor) -> list[torch.Tensor]:
        """Return the scales of keys and of values, within those that may be."""
        return [side.clamp(of * factors) for side, of in zip(self._sides, self._pair, strict=True)]

    def _errors(self, scales: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the errors of scales of both sides, float64 ``[n]`` each, on their device."""
        k, v = self._sides
        most = self._prompt.at_once(max(k.step_bytes, v.step_bytes))
        found = [
            self._prompt.errors(k.decoded(of_keys), v.decoded(of_values))
            for of_keys, of_values in zip(
                *(torch.split(each, most) for each in scales), strict=True
            )
        ]
        return torch.cat(found)


def _count(
    prompt: PromptAttention,
    k: _Side,
    v: _Side,
    scales: Sequence[Scale],
    beside: torch.Tensor | None = None,
) -> _Chosen:
    """Count the codes of two scales and measure their error; waits for a GPU once.

    Parameters
    ----------
    scales : sequence of float or torch.Tensor
        Of keys and of values; float64 ``[1]`` of what their device has chosen.
    beside : torch.Tensor, optional
        float64 ``[n]``: what else the host is to know.
    """
    counted = TileCounts(k.steps, scales[0]), TileCounts(v.steps, scales[1])
    error = prompt.errors(*(each.decoded[None] for each in counted))
    numbers = torch.cat([error, *([] if beside is None else [beside])]).view(torch.int32)
    weights = [] if k.weights is None else [k.weights.flatten().view(torch.int32)]
    parts = [numbers, *(each.parts for each in counted), *weights]
    sizes = np.cumsum([part.numel() for part in parts])
    found = np.split(torch.cat(parts).cpu().numpy(), sizes[:-1])
    of_channels = None
    if k.weights is not None:
        of_channels = torch.from_numpy(found[3].view(np.float32).copy()).view(k.weights.shape)
    measured, *others = found[0].view(np.float64).tolist()
    return _Chosen(measured, counted, (found[1], found[2]), of_channels, others)
