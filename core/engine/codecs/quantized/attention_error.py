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
from ...kernels.uploads import in_stream_order
from .fit import (
    ScaledSteps,
    TileCounts,
    check_coder,
    count_channels,
    query_weights,
    whole_tiles,
)
from .plan import TilePlan
from .prompt_attention import PromptAttention

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
#: Points between two scales of the grid that are compared.
_BETWEEN = 16
#: Factors on both scales that are measured together, a few rounds where none or all are fine.
_FACTORS = (0.75, 0.9, 1.07, 1.3)
_ROUNDS = 5
#: Share of the error that is aimed at, the one with which the search is content, and how many
#: interpolated factors are tried until then.
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
    rows_per_head: int = 1,
    coder: str = "huffman",
    code_bits: int = MAX_CODE_BITS,
) -> AttentionFit | None:
    """Return the plans that take the fewest bits while attention keeps an error.

    Errors of keys and of values, each alone, and their bits are measured at five scales; of all
    pairs of scales that should keep `error` the one of the fewest bits is taken, and both are
    multiplied by a factor, which is interpolated between four that are measured with both coded,
    and measured itself, again where that misses. A GPU is waited for after each step: three times,
    seldom more than five. Beside what is given it takes up to 256 MiB there, more only of more than
    8,192 channels or windows of thousands of tokens.

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
        )
        by_channel = key_granularity is Granularity.CHANNEL
        weights = query_weights(queries, keys.shape[1], scaling=scaling) if by_channel else None
        formats = (
            TileFormat(tile_tokens, keys.shape[3], keys.dtype, granularity, pairs, code_bits)
            for granularity, pairs in ((key_granularity, False), (value_granularity, True))
        )
        k = _Side(prompt.keys, next(formats), key_scale, weights)
        v = _Side(prompt.values, next(formats), value_scale, None)
        prompt.measure_plain(k.steps.values, v.steps.values)
        found = _choose(prompt, k, v, float(error))
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

    def decoded(self, scales: Sequence[float]) -> torch.Tensor:
        """Return what codes of scales are decoded to, float32 ``[scales, B, H, T, dim]``."""
        return self._coded(scales)[2]

    def measured(
        self, scales: Sequence[float], errors: Callable[[torch.Tensor], torch.Tensor]
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

    def _coded(self, scales: Sequence[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return codes in float32, which of them are codes, and what they are decoded to."""
        step, center = self.steps.at(scales)
        codes, coded = self.steps.codes(step)
        return codes, coded, self.steps.decoded(codes, coded, step, center)

    def clamped(self, scale: float) -> float:
        """Return a scale, or the nearest that may be."""
        return min(max(self.scales[0], scale), self.scales[-1])


class _Chosen(NamedTuple):
    """Codes of the chosen scales, counted, and on the host what plans are made of."""

    error: float
    counted: tuple[TileCounts, TileCounts]
    parts: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
    weights: torch.Tensor | None


def _choose(prompt: PromptAttention, k: _Side, v: _Side, error: float) -> _Chosen | None:
    """Return what the coarsest scales give that are good enough; None when there are none."""
    if len(k.scales) == len(v.scales) == 1:
        return _count(prompt, k, v, (k.scales[0], v.scales[0]))
    # Both errors together are about the root of their squares; what that misses is made up for by
    # a factor on both scales.
    pair = _cheapest(*_curves(prompt, k, v), error)
    if pair is None:
        pair = k.scales[0], v.scales[0]
    factors = _Factors(prompt, k, v, pair)
    factors.measure(error)
    best: _Chosen | None = None
    for _ in range(_TRIALS):
        factor = factors.best(_CLOSE * error)
        if factor is None:
            return None
        if factor in factors.counted:
            break
        found = _count(prompt, k, v, factors.scales(factor))
        factors.counted.add(factor)
        factors.errors[factor] = found.error
        if found.error <= error and (best is None or found.error > best.error):
            best = found
        if _CLOSE_ENOUGH * error <= found.error <= error:
            break
    if best is None:
        fine = max((f for f, off in factors.errors.items() if off <= error), default=None)
        best = None if fine is None else _count(prompt, k, v, factors.scales(fine))
    return best


def _curves(prompt: PromptAttention, k: _Side, v: _Side) -> tuple[_Curve, _Curve]:
    """Return errors and bits of each side alone; waits for a GPU once."""
    found: list[torch.Tensor] = []
    of_sides = (k, lambda keys: prompt.errors(keys, None)), (v, lambda x: prompt.errors(None, x))
    for side, of_side in of_sides:
        errors, bits = [], []
        for scales in _parts(side.scales, prompt.at_once(side.step_bytes)):
            found_errors, found_bits = side.measured(scales, of_side)
            errors.append(found_errors)
            bits.append(found_bits)
        found += [*errors, *bits]
    measured = torch.cat(found).cpu().numpy()
    of_keys, of_values = np.split(measured, [2 * len(k.scales)])
    return (
        _Curve(np.array(k.scales), of_keys.reshape(2, -1)),
        _Curve(np.array(v.scales), of_values.reshape(2, -1)),
    )


def _parts(scales: Sequence[_T], most: int) -> Iterator[Sequence[_T]]:
    for begin in range(0, len(scales), most):
        yield scales[begin : begin + most]


class _Factors:
    """Errors of both sides together when the scales of a pair are multiplied by a factor.

    Attributes
    ----------
    errors : dict
        What was measured, by factor.
    counted : set
        Factors of which all was measured that a plan needs.
    """

    def __init__(
        self, prompt: PromptAttention, k: _Side, v: _Side, pair: tuple[float, float]
    ) -> None:
        self._prompt, self._sides, self._pair = prompt, (k, v), pair
        self.errors: dict[float, float] = {}
        self.counted: set[float] = set()

    def scales(self, factor: float) -> tuple[float, float]:
        """Return the scales of a factor, within those that may be."""
        (k, v), (of_keys, of_values) = self._sides, self._pair
        return k.clamped(of_keys * factor), v.clamped(of_values * factor)

    def measure(self, error: float) -> None:
        """Measure until one factor is fine and another is not, or all there are."""
        middle = 1.0
        for _ in range(_ROUNDS):
            factors = [middle * f for f in _FACTORS]
            self._measure(factors)
            first, last = self.errors[factors[0]], self.errors[factors[-1]]
            if first > error and self.scales(factors[0]) != self._end(0):
                middle = factors[0] * min(max(error / first, 1 / 16), 0.9)
            elif last <= error and self.scales(factors[-1]) != self._end(-1):
                middle = factors[-1] * min(max(error / max(last, 1e-30), 1.1), 16)
            else:
                return

    def best(self, goal: float) -> float | None:
        """Return the factor that should have an error, by those around it; None for none."""
        known = sorted(self.errors)
        fine = [f for f in known if self.errors[f] <= goal]
        if not fine:
            # The finest of all may lie between the goal and the error.
            return known[0] if self.errors[known[0]] <= goal / _CLOSE else None
        below = fine[-1]
        above = [f for f in known if f > below]
        if not above:
            return below
        low, high = max(self.errors[below], 1e-30), self.errors[above[0]]
        share = math.log(goal / low) / math.log(high / low)
        return below * math.exp(share * math.log(above[0] / below))

    def _end(self, at: int) -> tuple[float, float]:
        k, v = self._sides
        return k.scales[at], v.scales[at]

    def _measure(self, factors: list[float]) -> None:
        k, v = self._sides
        errors = [
            self._prompt.errors(
                k.decoded([scales[0] for scales in pairs]),
                v.decoded([scales[1] for scales in pairs]),
            )
            for pairs in _parts(
                [self.scales(f) for f in factors],
                self._prompt.at_once(max(k.step_bytes, v.step_bytes)),
            )
        ]
        self.errors.update(zip(factors, torch.cat(errors).tolist(), strict=True))


def _count(prompt: PromptAttention, k: _Side, v: _Side, scales: tuple[float, float]) -> _Chosen:
    """Count the codes of two scales and measure their error; waits for a GPU once."""
    counted = TileCounts(k.steps, scales[0]), TileCounts(v.steps, scales[1])
    error = prompt.errors(*(each.decoded[None] for each in counted)).view(torch.int32)
    weights = [] if k.weights is None else [k.weights.flatten().view(torch.int32)]
    parts = [error, *(each.parts for each in counted), *weights]
    sizes = np.cumsum([part.numel() for part in parts])
    found = np.split(torch.cat(parts).cpu().numpy(), sizes[:-1])
    of_channels = None
    if k.weights is not None:
        of_channels = torch.from_numpy(found[3].view(np.float32).copy()).view(k.weights.shape)
    return _Chosen(float(found[0].view(np.float64)[0]), counted, (found[1], found[2]), of_channels)


class _Curve:
    """Errors and bits over scales, interpolated between the measured ones."""

    def __init__(self, scales: npt.NDArray[np.float64], measured: npt.NDArray[np.float64]) -> None:
        known = np.log(scales)
        points = _BETWEEN * (len(scales) - 1) + 1
        wanted = np.interp(np.linspace(0, len(scales) - 1, points), np.arange(len(scales)), known)
        off = np.log(np.maximum(measured[0], 1e-30))
        self.scales = np.exp(wanted)
        self.errors = np.exp(np.interp(wanted, known, off))
        self.bits = np.interp(wanted, known, measured[1])


def _cheapest(k: _Curve, v: _Curve, target: float) -> tuple[float, float] | None:
    """Return the scales of the fewest bits whose errors together should keep a target."""
    errors = np.hypot(k.errors[:, None], v.errors)
    bits = np.where(errors <= target, k.bits[:, None] + v.bits, np.inf)
    if not np.isfinite(bits).any():
        return None
    at = np.unravel_index(int(bits.argmin()), bits.shape)
    return float(k.scales[at[0]]), float(v.scales[at[1]])
