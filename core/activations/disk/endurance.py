"""How fast SSDs must write, and how long they last, when activations go to them.

SSDTrain, section 5.3.6: activations are written in half a step, and the drives' life is what they
can take over what a step writes. A data sheet's rating assumes random writes that the drive
multiplies by 2.5 (JESD); large sequential ones are not multiplied. Flash that has to keep its
content for a day, not for years, takes 86 times as many.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ...errors import ArgumentError

DAY_S = 86400.0
YEAR_DAYS = 365.0
#: Bytes that a drive writes for each that it is given, in a data sheet's rating.
RATED_AMPLIFICATION = 2.5
#: How many times as many writes flash takes that keeps its content for a day.
RELAXED_RETENTION = 86.0


def _check(name: str, value: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise ArgumentError(f"{name}: {value!r}, expected a number above 0")


@dataclass(frozen=True)
class Drive:
    """SSDs of one kind, as their data sheet rates each of them.

    Parameters
    ----------
    capacity_bytes : float
        Of one.
    writes_per_day : float, optional
        Times its capacity a day (DWPD), over the warranty.
    warranty_years : float
        How long.
    rated_bytes : float, optional
        Bytes that may be written in all (TBW), in place of `writes_per_day`.
    count : int
        How many share the writes.

    Raises
    ------
    ArgumentError
        For a figure that is not positive, or when neither or both ratings are given.
    """

    capacity_bytes: float
    writes_per_day: float | None = None
    warranty_years: float = 5.0
    rated_bytes: float | None = None
    count: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                _check(field.name, value)
        if (self.writes_per_day is None) == (self.rated_bytes is None):
            raise ArgumentError(
                "writes_per_day, rated_bytes: expected one of both, got "
                f"{self.writes_per_day} and {self.rated_bytes}"
            )

    def endurance_bytes(
        self, *, write_amplification: float = 1.0, relaxed_retention: bool = False
    ) -> float:
        """Return the bytes that may be written to all of them together.

        Parameters
        ----------
        write_amplification : float
            Bytes that a drive writes for each that it is given; 1 for large sequential writes.
        relaxed_retention : bool
            Whether content is kept for a day only, where drives can be set so.
        """
        _check("write_amplification", write_amplification)
        if self.rated_bytes is not None:
            rated = self.rated_bytes
        else:
            assert self.writes_per_day is not None
            rated = self.writes_per_day * self.capacity_bytes * YEAR_DAYS * self.warranty_years
        factor = RATED_AMPLIFICATION / write_amplification
        return self.count * rated * factor * (RELAXED_RETENTION if relaxed_retention else 1.0)


#: Drives of the paper, by name.
DRIVES = {
    "d7-p5620": Drive(12.8e12, writes_per_day=3.0, warranty_years=5.0),
    "980-pro": Drive(1e12, rated_bytes=600e12),
}


def required_bytes_per_s(step_bytes: float, step_seconds: float) -> float:
    """Return the rate at which the activations of a step must be written: in half of it."""
    _check("step_bytes", step_bytes)
    _check("step_seconds", step_seconds)
    return step_bytes / (step_seconds / 2)


def lifespan_days(endurance_bytes: float, step_bytes: float, step_seconds: float) -> float:
    """Return how long drives last, when all steps write as much, one after the other.

    Parameters
    ----------
    endurance_bytes : float
        What they can take.
    step_bytes, step_seconds : float
        What a step writes, and how long it takes.

    Examples
    --------
    Four drives of 12.8 TB and three writes a day, at 12.1 GB/s (figure 5.10):

    >>> from bitslab.activations.disk.endurance import DRIVES, lifespan_days
    >>> from dataclasses import replace
    >>> drives = replace(DRIVES["d7-p5620"], count=4)
    >>> round(lifespan_days(drives.endurance_bytes(), 12.1e9 / 2, 1.0) / 365, 1)
    3.7
    """
    _check("endurance_bytes", endurance_bytes)
    _check("step_bytes", step_bytes)
    _check("step_seconds", step_seconds)
    return endurance_bytes / step_bytes * step_seconds / DAY_S
