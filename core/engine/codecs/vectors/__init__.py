"""Whole tensors of rows of which equal ones are kept once: of every bit, or within a bound."""

from .codec import BoundedVectorCodec, VectorLzCodec
from .encoding import finite_range

__all__ = ["BoundedVectorCodec", "VectorLzCodec", "finite_range"]
