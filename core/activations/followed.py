"""Plans of one profile that were followed, and what a step of each took."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.advisor.planning import Plan, StepProfile
from .pass_record import PassPlan

#: Share by which a measured peak may be above the limit, or the lowest one: allocators round.
NEAR_PEAK = 0.005


@dataclass(frozen=True)
class Followed:
    """A plan that was followed, and what a step of it took."""

    plan: Plan
    pass_plan: PassPlan
    profile: StepProfile
    step_s: float
    peak_bytes: float


class FollowedPlans:
    """Plans that were compared with the steps that followed them."""

    def __init__(self) -> None:
        self._plans: list[Followed] = []

    def add(self, followed: Followed) -> None:
        """Add a plan, in the place of what its steps took before."""
        others = [each for each in self._plans if each.pass_plan is not followed.pass_plan]
        self._plans = [*others, followed]

    def clear(self) -> None:
        """Forget them: another profile is planned."""
        self._plans.clear()

    def best(self, memory_bytes: int) -> Followed:
        """Return the fastest one of those that keep a limit, or that are nearest to it."""
        nearest = min(each.peak_bytes for each in self._plans)
        most = max(memory_bytes, nearest) * (1 + NEAR_PEAK)
        return min((f for f in self._plans if f.peak_bytes <= most), key=lambda f: f.step_s)

    def needs_least(self, memory_bytes: int) -> bool:
        """Return whether none keeps a limit, and the one of least memory is not among them."""
        most = memory_bytes * (1 + NEAR_PEAK)
        return all(each.peak_bytes > most and not each.plan.serial for each in self._plans)
