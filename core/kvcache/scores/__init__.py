"""Scores of packed tokens, by which some are chosen to be fetched; one method a file.

`TokenScores` is what a method implements.
"""

from .base import TokenScores, check_share
from .heavy import HeavyScores, probability_sums
from .partial_keys import PartialKeys, skew_of

__all__ = [
    "HeavyScores",
    "PartialKeys",
    "TokenScores",
    "check_share",
    "probability_sums",
    "skew_of",
]
