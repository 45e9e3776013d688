"""What a search for plans passes on: plans that were followed, and prices."""

from __future__ import annotations

from dataclasses import dataclass

from .candidates import Choices
from .prediction import StepPrediction
from .queues import Trace
from .timeline import Floats

#: What sums of floats may differ by.
MARGIN_BYTES = 0.5


@dataclass(frozen=True)
class Solution:
    """Choices, and what the timeline makes of them under the limit."""

    choices: Choices
    prediction: StepPrediction
    trace: Trace
    fits: bool
    limit_bytes: float

    def better_than(self, other: Solution | None) -> bool:
        """Return whether it fits better, or as well and takes less."""
        return other is None or self.rank() < other.rank()

    def rank(self) -> tuple[float, float, float]:
        """Return what is to be small: bytes too many, seconds, bytes."""
        over = (
            0.0 if self.fits else max(self.prediction.peak_bytes - self.limit_bytes, MARGIN_BYTES)
        )
        return over, self.prediction.step_s, self.prediction.peak_bytes


@dataclass
class Prices:
    """Prices of a second of each queue by site, and of a byte of the tiers behind it.

    `checkpoints` are seconds by module that checkpointing it is taken to cost besides, `bytes`
    factors of the price of memory by site, and `moments` those by moment.
    """

    queues: dict[str, Floats]
    checkpoints: Floats
    bytes: Floats
    moments: Floats
    host: float = 0.0
    disk: float = 0.0


@dataclass
class Priced:
    """Seconds at prices, and bytes alive where memory is short, by site's candidate and module."""

    seconds: Floats
    checkpoint_s: Floats
    alive: Floats
    again: Floats


def repriced_tier(price: float, full: bool) -> float:
    """Return the price of a byte of a tier that is full, or is not."""
    return max(price * 2, 1e-13) if full else price * 0.7
