"""The least memory: beside all plans there are, with tiers of little room, and what it leaves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from bitslab.engine.advisor.planning import (
    Candidate,
    Choices,
    MeasuredStep,
    Plan,
    Solver,
    StepProfile,
    Timeline,
    compare,
    drawn_profile,
    least_plan,
    make_plan,
)
from bitslab.engine.advisor.planning.tier_room import with_room
from tests.engine.advisor.planning.test_solver import all_choices


def limited(seed: int, n_sites: int, room: float) -> StepProfile:
    """Return a drawn step whose tiers take a share of its bytes each."""
    profile = drawn_profile(seed, n_sites, modules=seed % 3 != 1, disk=seed % 2 == 0)
    room_bytes = int(room * sum(site.nbytes for site in profile.sites))
    return replace(profile, host_bytes=room_bytes, disk_bytes=room_bytes if profile.disk else None)


def all_moved(timeline: Timeline) -> Choices:
    named = {
        s.site: own for s, own in zip(timeline.profile.sites, timeline.candidates, strict=True)
    }
    host = Candidate("host")
    return timeline.choices({name: host for name, own in named.items() if host in own})


@pytest.mark.drawn(2)
@pytest.mark.parametrize("room", [0.25, 0.5])
@pytest.mark.parametrize("seed", [3, 5, 7, 9, 13, 19])
def test_a_limit_that_full_tiers_can_keep_is_not_refused(seed: int, room: float) -> None:
    """Of the plans of a small step that are valid, the one that takes least says what can be."""
    profile = limited(seed, 4, room)
    timeline = Timeline(profile)
    least = min(float(timeline.floor(choices).max()) for choices in all_choices(timeline))
    plan = make_plan(profile, memory_bytes=math.ceil(1.01 * least))
    assert plan.prediction.peak_bytes <= math.ceil(1.01 * least) + 0.5
    assert Solver(timeline).least().prediction.peak_bytes <= 1.25 * least


@pytest.mark.drawn(1)
@pytest.mark.parametrize("n_sites", [30, 120])
def test_the_least_is_no_more_than_everything_moved(n_sites: int) -> None:
    for seed in range(4):
        timeline = Timeline(drawn_profile(seed, n_sites, disk=False))
        moved = timeline.predict(all_moved(timeline), limit_bytes=0.0).peak_bytes
        assert Solver(timeline).least().prediction.peak_bytes <= moved


def test_what_holds_least_for_its_bytes_in_a_tier_gives_way() -> None:
    profile = drawn_profile(2, 40, modules=False, disk=False)
    total = sum(site.nbytes for site in profile.sites)
    timeline = Timeline(replace(profile, host_bytes=total // 3))
    wanted = all_moved(timeline)
    held = np.full(timeline.staged_out.shape, np.inf)
    for i, own in enumerate(timeline.actions):
        for k, action in enumerate(own):
            held[i, k] = 0.0 if action == "host" else (1 + i % 3) * timeline.nbytes[i]
    assert not timeline.valid(wanted)
    plans = with_room(timeline, wanted), with_room(timeline, wanted, held)
    rows = np.arange(len(timeline.actions))
    kept, given = (float(held[rows, choices.options].sum()) for choices in plans)
    assert given < kept
    for choices in plans:
        assert timeline.valid(choices)
    moved = sum(
        timeline.costs[i][k].moved_bytes
        for i, k in enumerate(plans[1].options.tolist())
        if timeline.actions[i][k] == "host"
    )
    assert moved > 0.9 * (total // 3)  # what was given up too much came back


def test_the_least_plan_has_no_copies_on_their_way() -> None:
    profile = replace(drawn_profile(1, 25), unprofiled_bytes=10**6)
    plan = least_plan(profile, memory_bytes=1)
    timeline = Timeline(profile)
    choices = timeline.choices(plan.choices())
    assert plan.serial and plan.prediction.peak_bytes <= timeline.floor(choices).max() + 0.5
    assert plan.memory_bytes == math.ceil(plan.prediction.peak_bytes)
    assert Plan.from_dict(plan.to_dict()) == plan
    # Others of the same limit have some, and take as much by prediction.
    other = make_plan(profile, memory_bytes=plan.memory_bytes)
    assert not other.serial and other.prediction.step_s < plan.prediction.step_s
    peak = plan.prediction.peak_bytes
    step = MeasuredStep(10 * plan.prediction.step_s, 2 * peak)
    assert compare(plan, [step, step]).outcome == "holds"
    assert compare(other, [step, step]).outcome == "corrected"


def test_bytes_that_were_not_profiled_are_there_at_every_moment() -> None:
    profile = drawn_profile(1, 10)
    more = replace(profile, unprofiled_bytes=12345)
    plain, other = (Timeline(each) for each in (profile, more))
    assert (other.other - plain.other == 12345).all()
    assert StepProfile.from_dict(more.to_dict()) == more
    empty = replace(more, other_bytes=())
    assert (Timeline(empty).other == 12345).all()
