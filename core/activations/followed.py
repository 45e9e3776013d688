"""Plans of one profile that were followed, and what steps of each took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..engine.advisor.planning import (
    MeasuredStep,
    Plan,
    StepPrediction,
    StepProfile,
    as_measured,
)
from .pass_record import PassPlan

#: Share by which peaks that are above the limit may differ from it, or from the lowest one, before
#: the plan of least memory is tried, or the lowest one followed: allocators round.
NEAR_PEAK = 0.005
#: Last steps of a plan under a limit of memory that are compared; without, it is as many as are
#: measured of those that keep everything. The fastest of two may take a sixth longer than that of
#: the next two, where a step takes less than 0.1 s and its host is busy.
MOST_STEPS = 6
#: Share by which steps of one plan may differ that are of one kind, in seconds and in their peak:
#: others are of another batch, or of a machine with other work since.
MOST_SECONDS_OFF, MOST_PEAK_OFF = 0.25, 0.03


@dataclass(frozen=True)
class Followed:
    """A plan that is followed, and what its last steps took.

    Parameters
    ----------
    plan : Plan
        The plan, predicted as its steps were measured.
    pass_plan : PassPlan
        What passes do that follow it.
    profile : StepProfile
        What it was made from, with the seconds that its steps took.
    promised : StepPrediction
        What its profile predicted when it was made: what steps take beyond its bytes the profile
        does not know.
    steps : sequence of MeasuredStep
        Empty before it was compared.
    """

    plan: Plan
    pass_plan: PassPlan
    profile: StepProfile
    promised: StepPrediction
    steps: Sequence[MeasuredStep] = ()

    @property
    def step_s(self) -> float:
        """Seconds of the fastest step."""
        return min(step.step_s for step in self.steps)

    @property
    def peak_bytes(self) -> float:
        """Most bytes of the device in any step."""
        return max(step.peak_bytes for step in self.steps)

    def measured(self, steps: Sequence[MeasuredStep]) -> Followed:
        """Return it as these steps of it were measured, in the place of those before."""
        known = as_measured(self.plan, steps)
        plan, profile = known.predicted(self.plan), known.corrected(self.profile)
        return replace(self, plan=plan, profile=profile, steps=steps)


class FollowedPlans:
    """Plans that were compared with the steps that followed them.

    Parameters
    ----------
    most_steps : int
        Of a plan that are compared, at most.
    """

    def __init__(self, most_steps: int) -> None:
        self._plans: list[Followed] = []
        self._most_steps = most_steps

    def last_steps(self, following: Followed, steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
        """Return the last steps of a plan of one kind, of which these are the newest.

        Of one that is followed again behind another plan these alone: what it took before says
        whether to try it once more, and no longer what it takes.
        """
        for known in self._plans[-1:]:
            if known.pass_plan is following.pass_plan and _alike(known.steps, steps):
                return [*known.steps, *steps][-self._most_steps :]
        return list(steps)

    def add(self, followed: Followed) -> None:
        """Add a plan, in the place of what its steps took before."""
        others = [each for each in self._plans if each.pass_plan is not followed.pass_plan]
        self._plans = [*others, followed]

    def clear(self) -> None:
        """Forget them: another profile is planned."""
        self._plans.clear()

    def best(self, memory_bytes: int) -> Followed:
        """Return the fastest one of those that keep a limit, or that are nearest to it.

        Of several that are as fast it is the last one that was added.
        """
        nearest = min(each.peak_bytes for each in self._plans)
        most = memory_bytes if nearest <= memory_bytes else nearest * (1 + NEAR_PEAK)
        keeping = [each for each in reversed(self._plans) if each.peak_bytes <= most]
        return min(keeping, key=lambda each: each.step_s)

    def needs_least(self, memory_bytes: int) -> bool:
        """Return whether none keeps a limit, and the one of least memory is not among them."""
        most = memory_bytes * (1 + NEAR_PEAK)
        return all(each.peak_bytes > most and not each.plan.serial for each in self._plans)


def _alike(these: Sequence[MeasuredStep], those: Sequence[MeasuredStep]) -> bool:
    seconds = [min(step.step_s for step in steps) for steps in (these, those)]
    peaks = [max(step.peak_bytes for step in steps) for steps in (these, those)]
    return max(seconds) <= min(seconds) * (1 + MOST_SECONDS_OFF) and max(peaks) <= min(peaks) * (
        1 + MOST_PEAK_OFF
    )
