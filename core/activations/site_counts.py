"""What was done with the tensors of each site, for reports."""

from __future__ import annotations

from dataclasses import dataclass

from .lossy import ErrorSample
from .policies import KEEP, Choice, Place
from .sites import Site


@dataclass
class SiteCounts:
    """What was done with the tensors of a site so far.

    Parameters
    ----------
    site : Site
        As its last tensor was.
    choice : str
        What is done with them: "keep", "raw", "host", "replay", "checkpoint" or a codec's name.
    reason : str
        Why.
    tier : str, optional
        Where they go; None leaves it open.
    tensors : int
        Number that were moved.
    raw_bytes, packed_bytes : int
        Bytes of those that came back, before packing and as they crossed.
    error : ErrorSample or None
        How far a tensor was off that a lossy codec packed, at its present rate.
    """

    site: Site
    choice: str = KEEP
    reason: str = ""
    tier: Place | None = None
    tensors: int = 0
    raw_bytes: int = 0
    packed_bytes: int = 0
    error: ErrorSample | None = None

    def decided(self, choice: Choice) -> None:
        """Take over what was decided."""
        self.choice, self.reason, self.tier = choice
