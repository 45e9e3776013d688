"""Invariant bit packing: profile, layout, planner, clusters, codec."""

from .codec import InvariantCodec
from .profile import Profile

__all__ = ["InvariantCodec", "Profile"]
