"""Codecs whose decoded values are within a bound of the given ones."""

from .codec import TileCodec
from .plan import TilePlan

__all__ = ["TileCodec", "TilePlan"]
