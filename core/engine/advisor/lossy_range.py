"""Which rates of a lossy codec pay, and which of them an epoch takes (CSWAP+, section 5.2.2).

P is the codec's bits for a block of four values, MAX those of the values as they are, so that P/MAX
of the bytes cross. A P above Top brings no benefit, and below Bottom the swaps are hidden anyway.
Early epochs are more sensitive to errors than late ones: the schedule slides from Top to Bottom.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ...errors import ArgumentError
from .swapping import Cost, SiteRecord, SwapLink, Times, swap_cost

#: Values of a block, the unit of P.
BLOCK_VALUES = 4
MAX_P = 32 * BLOCK_VALUES  # float32

ScheduleKind = Literal["sliding", "inverse", "fixed"]
SCHEDULES: tuple[ScheduleKind, ...] = ("sliding", "inverse", "fixed")


@dataclass(frozen=True)
class LossyRange:
    """Rates that pay.

    Parameters
    ----------
    top : int
        The largest P of any tensor at which packing it brings more than it costs.
    bottom : int
        The smallest, over all tensors, of the largest P at which compute hides a swap.
    pays : bool
        Whether there is such a range: Top > Bottom. Without it a lossy codec is not to be used.
    """

    top: int
    bottom: int
    pays: bool


def lossy_range(
    records: Iterable[SiteRecord],
    model: Times,
    link: SwapLink,
    codec_name: str,
    *,
    max_p: int = MAX_P,
) -> LossyRange:
    """Return the range of P for dense tensors: algorithm 1.

    Parameters
    ----------
    records : iterable of SiteRecord
        Tensors that the codec may pack. Each is charged alone, as published.
    model : TimeModel
        Predicts the codec's times.
    link : SwapLink
        What the tensors cross.
    codec_name : str
        Name of the codec.
    max_p : int
        MAX, and the largest P, of values of 32 bits. Tensors of narrower values, which are widened
        to 32 bits first, reach the size that they have raw at a smaller P.

    Returns
    -------
    LossyRange
        ``pays`` is False where there are no tensors.

    Raises
    ------
    ArgumentError
        When `max_p` is below 1.
    KeyError
        When the model does not know the codec.
    """
    if not isinstance(max_p, int) or max_p < 1:
        raise ArgumentError(f"max_p: {max_p!r:.60}, accepted are integers from 1")
    top, bottom = 0, max_p
    for record in records:
        tensor = _Tensor(record, model, link, codec_name, max_p)
        top = max(top, _largest(tensor.pays, max_p))
        bottom = min(bottom, _largest(tensor.hidden, max_p))
    return LossyRange(top, bottom, top > bottom)


class _Tensor:
    """What packing one tensor brings at each P.

    Parameters
    ----------
    record, model, link, codec_name, max_p
        As for `lossy_range`.
    """

    def __init__(
        self, record: SiteRecord, model: Times, link: SwapLink, codec_name: str, max_p: int
    ) -> None:
        self._record, self._model, self._link = record, model, link
        self._codec_name = codec_name
        self._element_bytes = record.dtype.itemsize
        self._share_per_p = 4 / (max_p * self._element_bytes)
        self._raw_s = swap_cost(record, link, record.nbytes, 0.0, 0.0).total_s

    def _exposed(self, p: int) -> Cost:
        n_bytes = self._record.nbytes * p * self._share_per_p
        return swap_cost(self._record, self._link, n_bytes, 0.0, 0.0)

    def pays(self, p: int) -> bool:
        """Return whether the seconds that it saves are no fewer than those of the codec."""
        given = (self._record.nbytes, p * self._share_per_p, self._element_bytes)
        return self._raw_s - self._exposed(p).total_s >= sum(
            self._model.predict(self._codec_name, *given)
        )

    def hidden(self, p: int) -> bool:
        """Return whether compute hides both copies."""
        return self._exposed(p).hidden


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` for which it holds, by bisection; 1 when for none."""
    left, right = 1, most
    while left < right:
        middle = (left + right + 1) // 2
        if holds(middle):
            left = middle
        else:
            right = middle - 1
    return left


@dataclass(frozen=True)
class LossySchedule:
    """Which P each epoch takes: equations 1 and 2, and what the paper compares them with.

    Parameters
    ----------
    top, bottom : int
        The range of P.
    epochs : int
        Epochs of the training.
    kind : {"sliding", "inverse", "fixed"}
        From Top down to Bottom; from Bottom up to Top; always Bottom.

    Raises
    ------
    ArgumentError
        For a kind that is not known, a range that is empty, or no epochs.

    Examples
    --------
    >>> from bitslab.engine.advisor import LossySchedule
    >>> schedule = LossySchedule(100, 20, 90)
    >>> [schedule.value(epoch) for epoch in (0, 1, 79, 80, 89)]
    [100, 99, 21, 20, 20]
    """

    top: int
    bottom: int
    epochs: int
    kind: ScheduleKind = "sliding"

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ArgumentError(f"kind: {self.kind!r:.60}, accepted are {', '.join(SCHEDULES)}")
        if not 1 <= self.bottom <= self.top:
            raise ArgumentError(
                f"top, bottom: {self.top}, {self.bottom}, expected 1 <= bottom <= top"
            )
        if self.epochs < 1:
            raise ArgumentError(f"epochs: {self.epochs}, accepted are integers from 1")

    @property
    def step(self) -> int:
        """By how much P changes from one epoch to the next: equation 2."""
        return math.floor((self.top - self.bottom) / self.epochs + 0.5)

    def value(self, epoch: int) -> int:
        """Return P of an epoch, from 0; those beyond the last take what it took."""
        if epoch < 0:
            raise ArgumentError(f"epoch: {epoch}, accepted are integers from 0")
        if self.kind == "fixed":
            return self.bottom
        if self.kind == "inverse":
            return min(self.bottom + epoch * self.step, self.top)
        return max(self.top - epoch * self.step, self.bottom)
