"""Error bounds of messages: how they change over the iterations, and which table gets which.

Sections III-C 1 and III-C 2 of the SC'24 paper on the all-to-all of recommenders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import torch

from ..engine.codecs import BoundedVectorCodec, check_tensor_argument
from ..engine.codecs.base import check_integer
from ..engine.codecs.vectors import finite_range
from ..errors import ArgumentError, ArgumentTypeError
from .faults import ContentError
from .rounding import round_to_codes

#: From an iteration, counted from 0, to what the bound is multiplied by.
Schedule = Callable[[int], float]

_KINDS = ("relative", "absolute")


def constant() -> Schedule:
    """Return the schedule that leaves a bound as it is."""
    return lambda iteration: 1.0


def linear(iterations: int, start: float = 2.0) -> Schedule:
    """Return the schedule that falls from `start` to 1 in a straight line, and remains there."""
    return _decay(iterations, start, lambda share: share)


def logarithmic(iterations: int, start: float = 2.0) -> Schedule:
    """Return the schedule that falls from `start` to 1 fast at first, then slowly."""
    span = math.log1p(iterations) if _checked(iterations, start) else 0.0
    return _decay(iterations, start, lambda share: math.log1p(share * iterations) / span)


def stepwise(iterations: int, start: float = 2.0, steps: int = 10) -> Schedule:
    """Return the schedule that falls from `start` to 1 in so many equal steps."""
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ArgumentError(f"steps: {steps!r:.60}, accepted are integers from 1")
    return _decay(iterations, start, lambda share: math.floor(share * steps) / steps)


def drop(iterations: int, start: float = 2.0) -> Schedule:
    """Return the schedule that falls from `start` to 1 at once, at the end of the first phase."""
    return _decay(iterations, start, lambda share: 0.0)


def _decay(iterations: int, start: float, progress: Callable[[float], float]) -> Schedule:
    _checked(iterations, start)

    def factor(iteration: int) -> float:
        if iteration >= iterations:
            return 1.0
        return start - (start - 1) * progress(iteration / iterations)

    return factor


def _checked(iterations: int, start: float) -> bool:
    if not isinstance(iterations, int) or isinstance(iterations, bool) or iterations < 1:
        raise ArgumentError(f"iterations: {iterations!r:.60}, accepted are integers from 1")
    if not isinstance(start, (int, float)) or not 0 < start < math.inf:
        raise ArgumentError(f"start: {start!r:.60}, accepted are positive finite numbers")
    return True


@dataclass(frozen=True)
class ErrorBound:
    """How far a delivered element may be from the one that was sent.

    Parameters
    ----------
    value : float
        Positive and finite.
    kind : str
        ``"relative"``: a share of the largest less the least finite value of what it is the bound
        of: of a message the rows of a table for a rank; ``"absolute"``: in the units of the
        elements.
    schedule : callable, optional
        From the iteration, counted from 0, to what `value` is multiplied by: `linear`, `stepwise`
        and so on, or one of your own. Left out: 1.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When a value is not as above.
    """

    value: float
    kind: str = "relative"
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        """Refuse values that are no bound."""
        BoundedVectorCodec(self.value)  # the same numbers are accepted, with the same message
        if self.kind not in _KINDS:
            raise ArgumentError(f"kind: {self.kind!r:.60}, accepted are {', '.join(_KINDS)}")
        if self.schedule is not None and not callable(self.schedule):
            raise ArgumentTypeError(f"schedule: expected a callable, got {self.schedule!r:.60}")

    def at(self, iteration: int) -> float:
        """Return the value of an iteration.

        Raises
        ------
        ArgumentError
            When the schedule gives no positive finite number.
        """
        factor = 1.0 if self.schedule is None else float(self.schedule(iteration))
        if not 0 < factor < math.inf:
            raise ContentError(
                f"schedule: {factor} for iteration {iteration}, expected positive finite numbers"
            )
        return float(self.value) * factor

    def absolute(self, t: torch.Tensor, iteration: int = 0) -> float:
        """Return the bound of a tensor in the units of its elements.

        Parameters
        ----------
        t : torch.Tensor
            float32, float16 or bfloat16, on the CPU.
        iteration : int
            For the schedule.

        Returns
        -------
        float
            0 where the finite elements are all equal, or there are none: every bit is kept.
        """
        return float(self.where_rows_are((t,), iteration))

    def where_rows_are(
        self, parts: Sequence[torch.Tensor], iteration: int = 0
    ) -> float | torch.Tensor:
        """Return what `absolute` does, of tensors together on any device, without waiting for it.

        Returns
        -------
        float or torch.Tensor
            A share of a range on a GPU is there, float64 without dimensions.
        """
        value = self.at(iteration)
        if self.kind == "absolute":
            return value
        if parts[0].device.type != "cpu":
            return value * range_on_device(*parts)
        return share_of_range(value, *parts)


def share_of_range(share: float, *parts: torch.Tensor) -> float:
    """Return a share of the range of floats on the CPU; 0 where there are no two finite values."""
    ranges = [finite_range(part) for part in parts]
    least, largest = min(low for low, _ in ranges), max(high for _, high in ranges)
    return share * (largest - least) if largest > least else 0.0


def range_on_device(*parts: torch.Tensor) -> torch.Tensor:
    """Return the largest less the least finite value of floats ``[...]``, float64 where they are.

    0 where there are no two.
    """
    some = [part for part in parts if part.numel()]
    if not some:
        return torch.zeros((), dtype=torch.float64, device=parts[0].device)
    lowest, highest = [], []
    for part in some:
        finite = part.isfinite()
        lowest.append(part.masked_fill(~finite, math.inf).amin())
        highest.append(part.masked_fill(~finite, -math.inf).amax())
    least, largest = lowest[0].to(torch.float64), highest[0].to(torch.float64)
    for low, high in zip(lowest[1:], highest[1:], strict=True):
        least, largest = torch.minimum(least, low), torch.maximum(largest, high)
    return torch.where(largest > least, largest - least, torch.zeros_like(least))


@dataclass(frozen=True)
class AdaptiveBound:
    """A bound for each table by its class, that falls over the first iterations.

    The class follows from the homogenisation index of the first rows of a table that a rank sends
    (section III-C 2 and equation 1): one whose rows merge little gets the large bound, one whose
    rows merge much the small one. The defaults are those of the paper: 0.05, 0.03 and 0.01 of the
    range, twice that at first, in ten steps (its published code: 65,536 iterations).

    Parameters
    ----------
    value : float
        The relative bound of tables of the class ``"medium"``.
    thresholds : tuple of two floats
        Indices up to the first are ``"large"``, those from the second on ``"small"``.
    alpha, beta : float
        From 1: the large bound is ``value * alpha``, the small one ``value / beta``.
    schedule : callable, optional
        As for `ErrorBound`; None: constant.
    sample_rows : int
        Rows of which the index is taken.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When a value is not as above.
    """

    value: float = 0.03
    thresholds: tuple[float, float] = (0.01, 0.3)
    alpha: float = 5 / 3
    beta: float = 3.0
    schedule: Schedule | None = field(default_factory=lambda: stepwise(65536))
    sample_rows: int = 2048

    CLASSES: ClassVar[tuple[str, ...]] = ("large", "medium", "small")

    def __post_init__(self) -> None:
        """Refuse values that are no bound."""
        ErrorBound(self.value, schedule=self.schedule)
        check_integer("sample_rows", self.sample_rows, range(2, 1 << 31))
        _check_classes(self.thresholds, self.alpha, self.beta)

    def classify(self, rows: torch.Tensor) -> tuple[float, str]:
        """Return the homogenisation index of rows ``[N, row]`` on the CPU, and their class.

        Rows without two finite values, which no bound changes, are ``"large"``.
        """
        sample = rows[: self.sample_rows]
        # By torch, since a rank whose rows are on a GPU needs no kernel of the CPU but for this.
        bound = self.value * float(range_on_device(sample))
        index = homogenisation_index(sample, bound) if bound else 0.0
        low, high = self.thresholds
        return index, "large" if index <= low else "small" if index >= high else "medium"

    def of_class(self, name: str) -> ErrorBound:
        """Return the bound of a class."""
        factor = {"large": self.alpha, "medium": 1.0, "small": 1 / self.beta}[name]
        return ErrorBound(self.value * factor, schedule=self.schedule)


def value_of(bound: ErrorBound, iteration: int) -> tuple[float, bool]:
    """Return the value of an iteration, and whether it is a share of a message's range."""
    return bound.at(iteration), bound.kind == "relative"


def checked_bound(error_bound: float | ErrorBound | None) -> ErrorBound | None:
    """Return a bound that was given as a number, a share of the range, as an `ErrorBound`."""
    if error_bound is None or isinstance(error_bound, ErrorBound):
        return error_bound
    return _kept_bound(error_bound) if type(error_bound) is float else ErrorBound(error_bound)


#: Those of one number are one object, which is checked once.
_kept_bound = lru_cache(64)(ErrorBound)


def homogenisation_index(rows: torch.Tensor, bound: float) -> float:
    """Return the share of distinct rows that quantising makes equal to others (equation 1).

    Parameters
    ----------
    rows : torch.Tensor
        ``[N, ...]``, float32, float16 or bfloat16, on the CPU: a sample of a table's lookups.
    bound : float
        In the units of the elements.

    Returns
    -------
    float
        ``(distinct rows - distinct quantised rows) / distinct rows``, from 0; 0 of no rows. (Tables
        III and IV of the paper print 1 less this.)
    """
    check_tensor_argument("rows", rows)
    codec = BoundedVectorCodec(bound)
    if not codec.takes(rows.dtype) or rows.dim() < 2:
        raise ArgumentTypeError(
            f"rows: {list(rows.shape)} {rows.dtype}, expected [N, ...] of float32, float16 or "
            "bfloat16"
        )
    if not rows.numel():
        return 0.0
    flat = rows.detach().flatten(1)
    distinct = len(torch.unique(flat, dim=0))
    quantised = len(torch.unique(round_to_codes(flat, bound), dim=0))
    return max(0.0, (distinct - quantised) / distinct)


def bound_classes(
    indices: Mapping[str, float],
    value: float,
    *,
    thresholds: Sequence[float],
    alpha: float = 5 / 3,
    beta: float = 3.0,
) -> dict[str, ErrorBound]:
    """Return a relative bound for each table by its homogenisation index.

    A table whose rows merge little gets a larger bound, one whose rows merge much a smaller one, as
    the text of section III-C 2 says (algorithm 1 as printed never gives the larger one).

    Parameters
    ----------
    indices : mapping of str to float
        By table, what `homogenisation_index` returned.
    value : float
        The bound of tables between: of others ``value * alpha`` and ``value / beta``. With 0.03 the
        defaults give the paper's 0.05, 0.03 and 0.01.
    thresholds : sequence of two floats
        Indices up to the first get the larger bound, those from the second on the smaller one.
    alpha, beta : float
        From 1.

    Raises
    ------
    ArgumentError
        When thresholds fall, or a factor is below 1.
    """
    _check_classes(thresholds, alpha, beta)
    low, high = thresholds
    return {
        name: ErrorBound(
            value * alpha if index <= low else value / beta if index >= high else value
        )
        for name, index in indices.items()
    }


def _check_classes(thresholds: Sequence[float], alpha: float, beta: float) -> None:
    if len(thresholds) != 2 or not thresholds[0] < thresholds[1]:
        raise ArgumentError(f"thresholds: {thresholds!r:.60}, expected two numbers that rise")
    for name, factor in (("alpha", alpha), ("beta", beta)):
        if not 1 <= factor < math.inf:
            raise ArgumentError(f"{name}: {factor}, accepted are finite numbers from 1")
