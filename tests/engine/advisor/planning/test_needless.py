"""Plans move nothing that could be kept for nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from bitslab.engine.advisor.planning import (
    Choices,
    Plan,
    Solver,
    Timeline,
    drawn_profile,
    make_plan,
)
from bitslab.engine.advisor.planning.needless import SPARE
from tests.engine.advisor.planning.test_module_layouts import layers_profile


def kept_instead(timeline: Timeline, plan: Plan) -> Iterator[tuple[str, Choices]]:
    """Yield for each tensor that a plan moves the choices with that one kept."""
    choices = timeline.choices(plan.choices())
    for i, site in enumerate(plan.sites):
        if site.candidate.action in ("host", "disk"):
            options = choices.options.copy()
            options[i] = 0
            yield site.site, Choices(options, choices.checkpointed)


def moved_bytes(plan: Plan) -> int:
    return sum(s.nbytes for s in plan.sites if s.candidate.action in ("host", "disk"))


@pytest.mark.parametrize("less_bytes", [1, 10**6, 10**9], ids=["a byte", "a MB", "a GB"])
def test_a_link_with_time_to_spare_carries_no_more_than_has_to_leave(less_bytes: int) -> None:
    profile = layers_profile(16, link_bytes_per_s=55e9, replays=True)
    timeline = Timeline(profile)
    plain = timeline.predict(timeline.keep_all())
    plan = make_plan(profile, memory_bytes=int(plain.peak_bytes) - less_bytes)
    largest = max(site.nbytes for site in profile.sites)
    assert plan.prediction.step_s == plain.step_s
    # A plan is left some room, since steps may take more than is predicted.
    spare = int(SPARE * plain.peak_bytes)
    assert less_bytes <= moved_bytes(plan) <= max(less_bytes, spare) + largest


@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", [0, 3, 5])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_each_move_gains_memory_or_time(seed: int, share: float) -> None:
    profile = drawn_profile(seed, 16)
    timeline = Timeline(profile)
    least = Solver(timeline).least().prediction.peak_bytes
    most = timeline.predict(timeline.keep_all()).peak_bytes
    limit = int(least + share * (most - least))
    plan = make_plan(profile, memory_bytes=limit)
    most_bytes = max(plan.prediction.peak_bytes, limit * (1 - SPARE)) + 0.5
    for site, choices in kept_instead(timeline, plan):
        found = timeline.predict(choices, limit_bytes=most_bytes)
        fits = np.all(timeline.floor(choices) <= most_bytes) and found.peak_bytes <= most_bytes
        slower = found.step_s > plan.prediction.step_s * (1 + 1e-9)
        assert not fits or slower, site
