"""Which of the plans that were followed goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bitslab.activations.followed import NEAR_PEAK, Followed, FollowedPlans
from bitslab.activations.pass_record import PassPlan
from bitslab.engine.advisor.planning import (
    MeasuredStep,
    drawn_profile,
    least_plan,
    make_plan,
)

LIMIT = 130_000_000
PROFILE = drawn_profile(0, 12)
PLAN = make_plan(PROFILE, memory_bytes=LIMIT)


def plans(*measured: tuple[float, float]) -> tuple[FollowedPlans, list[Followed]]:
    """Return plans of a limit whose steps took these seconds and shares of it, in turn."""
    known, added = FollowedPlans(6), []
    for step_s, share in measured:
        steps = [MeasuredStep(step_s, share * LIMIT)] * 2
        made = Followed(
            PLAN, PassPlan({}, {}, {}, {}, {}, frozenset(), {}, True), PROFILE, PLAN.prediction
        )
        added.append(made.measured(steps))
        known.add(added[-1])
    return known, added


@pytest.mark.parametrize(
    ("measured", "best"),
    [
        ([(1.0, 0.9), (2.0, 0.5)], 0),
        ([(2.0, 0.9), (1.0, 1.0)], 1),
        ([(1.0, 1 + NEAR_PEAK / 2), (2.0, 0.9)], 1),
        ([(1.0, 1.2), (3.0, 1.1), (2.0, 1.1 * (1 + NEAR_PEAK / 2))], 2),
    ],
    ids=["fastest", "fastest at the limit", "slower below the limit", "fastest of the nearest"],
)
def test_the_fastest_that_keeps_the_limit_goes_on(
    measured: Sequence[tuple[float, float]], best: int
) -> None:
    known, added = plans(*measured)
    assert known.best(LIMIT) is added[best]


def test_the_plan_that_is_followed_goes_on_where_others_are_as_fast() -> None:
    known, (first, second) = plans((1.0, 0.9), (1.0, 0.8))
    assert known.best(LIMIT) is second
    known.add(first)
    assert known.best(LIMIT) is first


@pytest.mark.parametrize(
    ("share", "serial", "needed"),
    [(1 + NEAR_PEAK / 2, False, False), (1.01, False, True), (1.01, True, False)],
    ids=["near the limit", "above it", "the one of least memory"],
)
def test_where_no_plan_keeps_the_limit_the_one_of_least_memory_is_needed(
    share: float, serial: bool, needed: bool
) -> None:
    known, (only,) = plans((1.0, share))
    if serial:
        known.add(replace(only, plan=least_plan(PROFILE, memory_bytes=LIMIT)))
    assert known.needs_least(LIMIT) == needed
