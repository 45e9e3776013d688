"""Invariant bit packing: profile, layout, planner, plan cache, clusters, codec."""

from .codec import InvariantCodec
from .plan_cache import PlanCache
from .profile import Profile

__all__ = ["InvariantCodec", "PlanCache", "Profile"]
