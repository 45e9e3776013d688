"""What passes do that follow a plan: the device waits for copies when it must, and no earlier."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bitslab.activations.planned_passes import _allowed_bytes, pass_plan
from bitslab.engine.advisor import SwapLink
from bitslab.engine.advisor.planning import (
    Candidate,
    Packing,
    Plan,
    SiteProfile,
    StepProfile,
    Timeline,
    drawn_profile,
    make_plan,
)
from tests.activations.test_planned import plan_of

MB = 1_000_000


def follow(plan: Plan, profile: StepProfile, slower: float = 1.0) -> tuple[float, float]:
    """Follow a plan as the executor does, by its bounds alone; copies take so much longer.

    Returns
    -------
    float, float
        Most bytes of the device at any moment, and the seconds of waits behind saves.
    """
    timeline = Timeline(profile)
    passes = pass_plan(plan, profile, {}, {}, falls_back_to_keeping=False)
    need, read = timeline.needed(timeline.choices(plan.choices()))
    chosen, link = plan.choices(), profile.link
    assert link is not None
    moved = {each.site: each.nbytes for each in profile.sites if chosen[each.site].action == "host"}
    number = {each.site: i for i, each in enumerate(profile.sites)}
    now = free_s = peak = 0.0
    waits = [0.0, 0.0]  # behind saves, and before reads
    # End, and until when, from when and until when again it counts among what is needed.
    flying: dict[str, tuple[float, int, int, int]] = {}
    fetched: set[str] = set()

    def wait(most: float, *, is_read: bool) -> None:
        nonlocal now
        while flying and sum(moved[name] for name in flying) > most:
            end, *_ = flying.pop(next(iter(flying)))
            waits[is_read] += max(0.0, end - now)
            now = max(now, end)

    def hand_back(name: str) -> None:
        if name in flying and flying[name][2] > at:
            flying[name] = *flying[name][:2], at, int(timeline.freed[number[name]])

    for at in range(len(need)):
        for i in np.flatnonzero(timeline.saved == at).tolist():
            site = profile.sites[i]
            if site.site in moved:
                free_s = max(free_s, now) + slower * link.to_host_seconds(site.nbytes)
                released = max(int(timeline.released[i]), at + 1)
                flying[site.site] = free_s, released, len(need), len(need)
            wait(passes.in_flight_bytes.get(site.site, math.inf), is_read=False)
        begun = list(passes.fetches.get("", ())) if at == timeline.turn else []
        for i in sorted(np.flatnonzero(read == at).tolist(), reverse=True):
            site = profile.sites[i]
            wait(passes.backward_in_flight_bytes.get(site.site, math.inf), is_read=True)
            begun += passes.fetches.get(site.site, ())
            fetched.discard(site.site)  # it is among what is needed
            hand_back(site.site)
        for name in begun:
            hand_back(name)  # where it has not left
            fetched.add(name)
        for name in [name for name, (end, *_) in flying.items() if end <= now]:
            del flying[name]
        alone = sum(
            moved[name]
            for name, (_, released, back, freed) in flying.items()
            if not (at < released or back <= at < freed)
        )
        ahead = sum(moved[name] for name in fetched if read[number[name]] > at)
        peak = max(peak, need[at] + alone + ahead)
        now += timeline.seconds[at]
    return peak, waits[0]


@pytest.mark.drawn(6)
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("seed", range(6))
def test_bounds_keep_the_limit_and_wait_little_longer_than_planned(seed: int, share: float) -> None:
    """Longer by what a save waits early: for the whole of what follows up to the next one."""
    profile = drawn_profile(seed=seed, n_sites=24)
    raw = [
        SiteProfile(
            site=s.site, nbytes=s.nbytes, saved_s=s.saved_s, released_s=s.released_s,
            read_s=s.read_s, freed_s=s.freed_s,
        )
        for s in profile.sites
    ]  # fmt: skip
    profile = StepProfile(
        sites=raw, turn_s=profile.turn_s, end_s=profile.end_s, link=profile.link,
        other_bytes=profile.other_bytes,
    )  # fmt: skip
    kept = Timeline(profile)
    most = kept.predict(kept.keep_all()).peak_bytes
    plan = make_plan(profile, memory_bytes=int(most * share))
    peak, stall_s = follow(plan, profile)
    assert peak <= plan.memory_bytes + 1  # type: ignore[operator]
    for slower in (3, 1000):  # however long copies take
        assert follow(plan, profile, slower)[0] <= plan.memory_bytes + 1  # type: ignore[operator]
    assert stall_s <= plan.prediction.stall_s + 0.036 * profile.step_s


def test_what_is_kept_waits_when_its_own_bytes_need_the_room() -> None:
    """Two tensors leave, and eight are kept behind them: the last of these alone needs the room."""
    sites = [
        SiteProfile(
            site=str(i), nbytes=10 * MB, saved_s=0.01 * (i + 1), read_s=0.2 - 0.005 * i,
            freed_s=0.205 - 0.005 * i,
        )
        for i in range(10)
    ]  # fmt: skip
    # A copy takes 40 ms: both are out at 90 ms, when the ninth tensor is saved.
    link = SwapLink(0.25e9, 0.25e9)
    profile = StepProfile(sites=sites, turn_s=0.11, end_s=0.3, link=link)
    plan = plan_of(profile, {"0": Candidate("host"), "1": Candidate("host")})
    peak, stall_s = follow(plan, profile)
    assert stall_s == 0.0
    assert peak <= plan.prediction.peak_bytes


def peaked(
    sites: list[SiteProfile], other: list[tuple[float, int]], chosen: dict[str, Candidate]
) -> tuple[StepProfile, Plan]:
    """Return a profile whose link is fast, and a plan; the forward pass takes 0.11 s of 0.3."""
    link = SwapLink(25e9, 25e9)
    profile = StepProfile(sites=sites, turn_s=0.11, end_s=0.3, link=link, other_bytes=other)
    return profile, plan_of(profile, chosen)


def at_most(plan: Plan, nbytes: float, **fetch_after: str) -> Plan:
    """Return a plan with another peak, and other begins of fetches."""
    sites = [
        replace(s, fetch_after=fetch_after[s.site]) if s.site in fetch_after else s
        for s in plan.sites
    ]
    return replace(plan, sites=tuple(sites), prediction=replace(plan.prediction, peak_bytes=nbytes))


def tensors(n: int, nbytes: int, **more: Any) -> list[SiteProfile]:
    """Return tensors that are saved 10 ms apart, and read 20 ms apart, the first one at 0.2 s."""
    return [
        SiteProfile(
            site=str(i), nbytes=nbytes, saved_s=0.01 * (i + 1), read_s=0.2 - 0.02 * i,
            freed_s=0.205 - 0.02 * i, **more,
        )
        for i in range(n)
    ]  # fmt: skip


def test_a_peak_of_the_backward_pass_waits_for_what_still_leaves() -> None:
    """Copies are a hundred times slower than measured; one read alone has no room beside them."""
    other = [(0.0, 0), (0.162, 30 * MB), (0.178, 0)]  # while 2 is read, at 0.16 s
    chosen = {"0": Candidate("host"), "1": Candidate("host")}
    profile, plan = peaked(tensors(4, 10 * MB), other, chosen)
    plan = at_most(plan, 40.0 * MB, **{"0": "0", "1": "1"})  # each comes back when it is read
    passes = pass_plan(plan, profile, {}, {"view": "2"}, falls_back_to_keeping=False)
    assert passes.backward_in_flight_bytes == {"2": 0}
    assert passes.named.items() >= {"2": "2", "view": "2"}.items()
    assert follow(plan, profile, 100.0)[0] <= plan.prediction.peak_bytes


def test_a_replayed_read_has_a_bound_of_its_own() -> None:
    """`h` is replayed from `x`, which is read itself behind the peak."""
    h = SiteProfile(
        site="h", nbytes=10 * MB, saved_s=0.03, read_s=0.2, freed_s=0.205, replay_s=1e-3,
        replay_from=("x",),
    )  # fmt: skip
    x = SiteProfile(site="x", nbytes=10 * MB, saved_s=0.02, read_s=0.24, freed_s=0.25)
    out = SiteProfile(site="out", nbytes=10 * MB, saved_s=0.01, read_s=0.28, freed_s=0.29)
    other = [(0.0, 0), (0.215, 20 * MB), (0.235, 0)]
    chosen = {"h": Candidate("replay"), "out": Candidate("host")}
    profile, plan = peaked([out, x, h], other, chosen)
    plan = at_most(plan, 30.0 * MB, out="out")
    passes = pass_plan(plan, profile, {}, {}, falls_back_to_keeping=False)
    assert passes.backward_in_flight_bytes == {"h": 0}


def test_what_comes_back_packed_takes_its_packed_bytes() -> None:
    """Two tensors packed to a quarter may be on their way out while they are fetched first."""
    packings = {"zvc": Packing(0.25, 1e-4, 1e-4, 0.25)}
    chosen = {"0": Candidate("host", "zvc"), "1": Candidate("host", "zvc")}
    profile, plan = peaked(tensors(4, 40 * MB, packings=packings), [], chosen)
    # Two kept, both packed forms back, and both on their way out.
    plan = at_most(plan, 120.0 * MB, **{"0": "", "1": ""})
    passes = pass_plan(plan, profile, {}, {}, falls_back_to_keeping=False)
    assert "3" not in passes.in_flight_bytes  # all that is on its way may remain


def test_what_was_handed_back_takes_memory_until_it_has_left() -> None:
    """A copy takes longer than until the tensor is read and freed; then another read peaks."""
    # 3 is read and freed at 0.14 and 0.145 s; 2 at 0.16, beside other bytes.
    other = [(0.0, 0), (0.158, 30 * MB)]
    profile, plan = peaked(tensors(4, 10 * MB), other, {"3": Candidate("host")})
    plan = at_most(plan, 60.0 * MB, **{"3": ""})
    passes = pass_plan(plan, profile, {}, {}, falls_back_to_keeping=False)
    assert passes.backward_in_flight_bytes == {"3": 0}
    assert follow(plan, profile, 1e4)[0] <= 60 * MB


def test_what_has_no_room_before_it_is_read_is_fetched_then() -> None:
    profile = drawn_profile(seed=3, n_sites=6)
    plan = plan_of(profile, {profile.sites[1].site: Candidate("host")})
    own = profile.sites[1].site
    for after, fetches in ((own, {}), (profile.sites[4].site, {profile.sites[4].site: (own,)})):
        sites = tuple(
            replace(each, fetch_after=after if each.site == own else None) for each in plan.sites
        )
        passes = pass_plan(replace(plan, sites=sites), profile, {}, {}, falls_back_to_keeping=False)
        assert passes.fetches == fetches


@pytest.mark.parametrize(
    ("room", "elsewhere", "allowed"),
    [
        (100.0, [True, False, False], 60.0),  # everything may be under way
        (35.0, [True, False, False], 45.0),  # the last one is needed anyway: 20 beside it, and 15
        (35.0, [False, False, False], 35.0),  # nothing is
        (0.0, [False, False, False], 0.0),
    ],
)
def test_bytes_that_may_be_under_way(room: float, elsewhere: list[bool], allowed: float) -> None:
    leaving = np.array([10.0, 20.0, 30.0])  # the one that was saved last is the first one here
    assert _allowed_bytes(room, leaving, np.array(elsewhere)) == allowed
