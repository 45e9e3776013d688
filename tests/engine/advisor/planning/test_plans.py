"""Plans as files and tables, SSDTrain's formula, and predictions beside what was measured."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bitslab import ArgumentError
from bitslab.engine.advisor.planning import (
    CHECKPOINT,
    KEEP,
    Candidate,
    DiskRates,
    MeasuredStep,
    MemoryLimitError,
    OffloadUnit,
    Plan,
    SiteProfile,
    StepPrediction,
    StepProfile,
    Timeline,
    adaptive_offload,
    candidates_of,
    compare,
    drawn_profile,
    make_plan,
    offload_units,
    predicted_again,
)
from tests.engine.advisor.planning.test_module_layouts import layers_profile

PROFILE = drawn_profile(1, 20)
LIMIT = 130_000_000


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(PROFILE, memory_bytes=LIMIT)


def test_a_plan_is_written_and_read(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert plan.fits(PROFILE)
    assert not plan.fits(drawn_profile(2, 20))
    timeline = Timeline(PROFILE)
    again = timeline.predict(timeline.choices(Plan.load(path).choices()), limit_bytes=LIMIT)
    assert again == plan.prediction


def test_nothing_is_left_on_a_host_that_is_no_tier() -> None:
    profile = replace(PROFILE, disk=DiskRates(20e9, 20e9), has_host_tier=False)
    found = [candidates_of(site, profile) for site in profile.sites]
    actions = {candidate.action for own in found for candidate in own}
    assert "disk" in actions and "host" not in actions
    made = make_plan(profile, memory_bytes=LIMIT)
    assert made.prediction.written_bytes == made.prediction.link_bytes > 0
    assert StepProfile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


@pytest.mark.drawn(1)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
def test_other_ways_take_over_where_a_host_is_full(share: float) -> None:
    """Such as packing on the device and recomputation, for the least memory and for a limit."""
    profile = replace(PROFILE, disk=None)
    moved = make_plan(profile, memory_bytes=LIMIT).prediction.link_bytes / 2
    full = replace(profile, host_bytes=int(share * moved))
    nothing = replace(profile, link=None)
    with pytest.raises(MemoryLimitError) as caught:
        make_plan(nothing, memory_bytes=1)
    least = caught.value.least_bytes
    with pytest.raises(MemoryLimitError) as caught:
        make_plan(full, memory_bytes=1)
    assert caught.value.least_bytes <= 1.01 * least
    limit = int(1.05 * least)
    without, made = (make_plan(each, memory_bytes=limit) for each in (nothing, full))
    assert made.prediction.peak_bytes <= limit
    assert made.prediction.step_s <= 1.01 * without.prediction.step_s
    assert sum(s.nbytes for s in made.sites if s.candidate == Candidate("host")) <= share * moved


def test_a_plan_is_predicted_by_another_profile() -> None:
    dear = make_plan(PROFILE.scaled(link=100.0, disk=100.0), memory_bytes=LIMIT)
    again = predicted_again(dear, PROFILE)
    assert again.choices() == dear.choices() and again.modules == dear.modules
    assert (again.reason, again.memory_bytes) == (dear.reason, LIMIT)
    timeline = Timeline(PROFILE)
    choices = timeline.choices(dear.choices())
    assert again.prediction == timeline.predict(choices, limit_bytes=LIMIT)
    assert again.prediction.step_s <= dear.prediction.step_s
    cheap = make_plan(PROFILE, slowdown=0.1)
    assert predicted_again(cheap, PROFILE).slowdown == 0.1


def test_a_plan_writes_no_more_than_its_budget(tmp_path: Path) -> None:
    rates = DiskRates(20e9, 20e9)
    profile = replace(PROFILE, disk=rates, host_bytes=0, sites=[_plain(s) for s in PROFILE.sites])
    profile = replace(profile, modules=())
    free = make_plan(profile, slowdown=0.5)
    assert free.budget_bytes is None
    written = free.prediction.written_bytes
    assert written > 0
    budget = replace(profile, write_bytes_per_s=0.4 * written / profile.step_s)
    made = make_plan(budget, slowdown=0.5)
    assert made.budget_bytes is not None
    assert made.budget_bytes == budget.budget_bytes == pytest.approx(0.4 * written, abs=1)
    assert 0 < made.prediction.written_bytes <= made.budget_bytes
    assert f"of {made.budget_bytes / 1e6:,.1f} that its write budget allows" in made.summary()
    # Of both limits the lower one counts; a slower step may write more.
    assert replace(budget, disk_bytes=1000).most_disk_bytes == 1000
    slower = budget.scaled(compute=2.0).budget_bytes
    assert slower is not None and slower > 1.9 * made.budget_bytes
    none = make_plan(replace(profile, write_bytes_per_s=0.0), slowdown=0.5)
    assert none.declined and none.prediction.written_bytes == 0
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made
    assert StepProfile.from_dict(budget.to_dict()) == replace(
        budget, sites=tuple(budget.sites), modules=()
    )
    with pytest.raises(ArgumentError, match="write_bytes_per_s"):
        replace(profile, write_bytes_per_s=-1.0)


def _plain(site: SiteProfile) -> SiteProfile:
    return replace(site, packings={}, replay_s=None, replay_from=(), module="")


def test_files_that_are_no_plans_are_refused(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for text in ("", "[1]", "{", json.dumps({"version": 1}), "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ArgumentError, match=r"not (a plan|one that was written here)"):
            Plan.load(path)
    path.write_text(json.dumps({**plan.to_dict(), "version": 2}))
    with pytest.raises(ArgumentError, match="version 2, accepted is 1"):
        Plan.load(path)
    damaged = plan.to_dict()
    damaged["sites"][0]["candidate"] = "moved"
    with pytest.raises(ArgumentError, match="action: 'moved'"):
        Plan.from_dict(damaged)
    twice = plan.to_dict()
    twice["sites"] += twice["sites"][:1]
    with pytest.raises(ArgumentError, match="two sites of one name"):
        Plan.from_dict(twice)


def test_a_plan_answers_for_tensors_as_large_as_planned(plan: Plan) -> None:
    first = PROFILE.sites[0]
    assert plan.of(first.site, first.nbytes) == plan.choices()[first.site]
    assert plan.of(first.site, first.nbytes + 1) is None
    assert plan.of("nowhere", 1) is None


def test_a_plan_is_shown(plan: Plan) -> None:
    shown = str(plan)
    for each in plan.sites:
        assert each.site in shown
        assert str(each.candidate) in shown
    assert "130,000,000 bytes" in plan.summary()
    assert {each.candidate.action for each in plan.sites} >= {"host", "replay"}
    fetched = [each for each in plan.sites if each.fetch_after is not None]
    assert {each.candidate.action for each in fetched} <= {"host", "disk"}
    assert len(fetched) == sum(each.candidate.action in ("host", "disk") for each in plan.sites)


# SSDTrain's formula


def brute_last(units: list[OffloadUnit], turn_s: float, rate: float) -> int:
    """Return the largest m that fulfils the formula, as it is written; -1 for none."""
    found = -1
    for m in range(len(units)):
        behind = sum(
            2 * u.forward_s if u.backward_s is None else u.backward_s for u in units[m + 1 :]
        )
        need = sum(u.nbytes for u in units[:m]) + 2 * units[m].nbytes
        if need <= rate * (turn_s + behind - units[0].begin_s):
            found = m
    return found


@pytest.mark.parametrize("seed", range(20))
def test_the_formula_finds_the_last_unit(seed: int) -> None:
    draw = random.Random(seed)
    units, now = [], draw.random()
    for i in range(draw.randint(1, 12)):
        seconds = draw.random()
        known = None if draw.random() < 0.5 else draw.random() * 3
        units.append(OffloadUnit(str(i), draw.randint(0, 1000), now, seconds, known))
        now += seconds
    rate = draw.uniform(50, 2000)
    found = adaptive_offload(units, now, rate)
    last = brute_last(units, now, rate)
    assert found.moved == tuple(u.name for u in units[: last + 1])
    assert found.kept == tuple(u.name for u in units[last + 1 :])
    assert found.required_bytes_per_s <= rate


def test_the_formula_on_a_profile_leaves_the_last_modules() -> None:
    units = offload_units(PROFILE)
    assert [u.name for u in units] == [m.module for m in PROFILE.modules]
    assert sum(u.nbytes for u in units) == sum(s.nbytes for s in PROFILE.sites if s.movable)
    assert PROFILE.disk is not None
    many = adaptive_offload(units, PROFILE.turn_s, 1e15)
    assert many.kept == ()
    none = adaptive_offload(units, PROFILE.turn_s, 1.0)
    assert none.moved == () and none.required_bytes_per_s == 0
    assert none.choices(PROFILE.sites, Candidate("disk")) == {}
    some = adaptive_offload(units, PROFILE.turn_s, 4e9)
    assert some.moved and some.kept
    chosen = some.choices(PROFILE.sites, Candidate("host"))
    timeline = Timeline(PROFILE)
    timeline.choices(chosen)  # all of them are candidates
    inside = {s.site for s in PROFILE.sites if s.module in some.moved and s.movable}
    assert set(chosen) == inside
    alone = replace(PROFILE, modules=(), sites=tuple(replace(s, module="") for s in PROFILE.sites))
    assert len(offload_units(alone)) == sum(s.movable for s in PROFILE.sites)


def test_the_formula_checks_what_it_is_given() -> None:
    unit = OffloadUnit("a", 1, 1.0, 1.0)
    with pytest.raises(ArgumentError, match="bandwidth_bytes_per_s: 0"):
        adaptive_offload([unit], 2.0, 0)
    with pytest.raises(ArgumentError, match="units"):
        adaptive_offload([unit, replace(unit, begin_s=0.5)], 2.0, 1.0)
    with pytest.raises(ArgumentError, match="units"):
        adaptive_offload([unit], 0.5, 1.0)
    assert adaptive_offload([], 0.0, 1.0).moved == ()


# Prediction and reality


def measured(plan: Plan, step: float = 1.0, peak: float = 1.0, **more: float) -> list[MeasuredStep]:
    """Return two steps, the first of them slow, that took so many times what was predicted."""
    p = plan.prediction
    slow = MeasuredStep(p.step_s * step * 1.5, p.peak_bytes * peak)
    return [slow, MeasuredStep(p.step_s * step, p.peak_bytes * peak, **more)]


def test_a_plan_that_does_as_predicted_holds(plan: Plan) -> None:
    assert compare(plan, measured(plan, 1.04)).outcome == "holds"
    assert compare(plan, measured(plan, 0.5)).outcome == "holds"
    with pytest.raises(ArgumentError, match="steps: 1, expected 2"):
        compare(plan, measured(plan)[1:])


def test_what_took_longer_is_corrected(plan: Plan) -> None:
    p = plan.prediction
    found = compare(plan, measured(plan, 1.2, up_s=p.up_s * 2, codec_s=p.codec_s * 3))
    assert found.outcome == "corrected"
    assert [found.link, found.codecs, found.disk] == pytest.approx([2, 3, 1])
    corrected = found.corrected(PROFILE)
    timeline = Timeline(corrected)
    now = timeline.predict(timeline.choices(plan.choices()), limit_bytes=LIMIT)
    assert now.up_s == pytest.approx(2 * p.up_s, rel=0.01)
    assert now.step_s > p.step_s * 1.02
    better = make_plan(corrected, memory_bytes=LIMIT)
    assert better.prediction.step_s <= now.step_s


#: A step whose plan under a limit packs.
PACKED, PACKED_LIMIT = drawn_profile(8, 20), 104_109_053


def test_what_packing_adds_to_compute_is_corrected_apart_from_it() -> None:
    """The device computes 1.1 times as long as profiled; packing beside that takes four times."""
    profile, limit_bytes = drawn_profile(2, 20), 161_176_066
    plan = make_plan(profile, memory_bytes=limit_bytes)
    true = profile.scaled(compute=1.1, encoding=4.0)
    timeline = Timeline(true)

    def step_of(made: Plan) -> StepPrediction:
        return timeline.predict(timeline.choices(made.choices()), limit_bytes=limit_bytes)

    p = step_of(plan)
    step = MeasuredStep(
        p.step_s,
        p.peak_bytes,
        compute_s=p.step_s - p.stall_s - (p.codec_s - p.encode_s),
        forward_compute_s=true.turn_s + p.encode_s,
    )
    found = compare(plan, [step, step], turn_s=profile.turn_s)
    assert found.outcome == "corrected"
    assert [found.compute, found.encoding, found.codecs] == pytest.approx([1.1, 4, 1])
    # Of the whole alone what packing adds is taken for compute, and goes on to be planned.
    whole = compare(plan, [replace(step, forward_compute_s=None)] * 2, turn_s=profile.turn_s)
    assert whole.compute > 1.14 and whole.encoding == 1.0
    best_s, right_s, wrong_s = (
        step_of(make_plan(each, memory_bytes=limit_bytes)).step_s
        for each in (true, found.corrected(profile), whole.corrected(profile))
    )
    assert right_s == pytest.approx(best_s, rel=1e-3)
    assert p.step_s > wrong_s > best_s * 1.02


@pytest.mark.parametrize("encoding", [0.0, 20.0], ids=["nothing", "much"])
def test_one_comparison_changes_packing_by_a_bounded_factor(encoding: float) -> None:
    plan = make_plan(PACKED, memory_bytes=PACKED_LIMIT)
    p = plan.prediction
    compute_s = p.step_s - p.stall_s - p.codec_s
    step = MeasuredStep(
        p.step_s * 1.2,
        p.peak_bytes,
        compute_s=compute_s + encoding * p.encode_s,
        forward_compute_s=PACKED.turn_s + encoding * p.encode_s,
    )
    found = compare(plan, [step, step], turn_s=PACKED.turn_s)
    assert found.compute == pytest.approx(1.0)
    assert found.encoding == (1 / 8 if encoding == 0 else 8)
    # Packing that was faster explains no slow step: the link is what nothing was measured of.
    assert (found.link > 1.05) == (encoding == 0)


def test_packing_that_is_too_short_to_be_seen_is_not_corrected() -> None:
    """What else differs between both passes is the forward pass's own."""
    plan = make_plan(PACKED, memory_bytes=PACKED_LIMIT)
    p = plan.prediction
    encode_s = 0.045 * PACKED.turn_s
    tiny = replace(plan, prediction=replace(p, encode_s=encode_s))
    backward_s = p.step_s - p.stall_s - p.codec_s - PACKED.turn_s
    forward_s = 2 * PACKED.turn_s + encode_s
    step = MeasuredStep(
        p.step_s * 1.2,
        p.peak_bytes,
        compute_s=1.1 * backward_s + forward_s,
        forward_compute_s=forward_s,
    )
    found = compare(tiny, [step, step], turn_s=PACKED.turn_s)
    assert [found.compute, found.encoding] == pytest.approx([1.1, 1.0], rel=0.01)
    assert found.compute * found.forward == pytest.approx(2)


def test_replays_are_corrected_apart_from_other_compute() -> None:
    """The device computes 1.1 times as long as profiled, and replays take 1.5 times as long."""
    profile = layers_profile(16, link_bytes_per_s=20e9, replays=True)
    kept = Timeline(profile).predict(Timeline(profile).keep_all()).peak_bytes
    limit_bytes = int(kept * 0.6)
    plan = make_plan(profile, memory_bytes=limit_bytes)
    true = profile.scaled(compute=1.1, replays=1.5 / 1.1)
    timeline = Timeline(true)
    p = timeline.predict(timeline.choices(plan.choices()), limit_bytes=limit_bytes)
    assert p.replay_s == pytest.approx(1.5 * plan.prediction.replay_s) and p.replay_s > 0
    step = MeasuredStep(
        p.step_s * 1.06,
        p.peak_bytes,
        compute_s=p.step_s - p.stall_s - (p.codec_s - p.encode_s),
        forward_compute_s=true.turn_s + p.encode_s,
        replay_s=p.replay_s,
    )
    found = compare(plan, [step, step], turn_s=profile.turn_s)
    assert [found.compute, found.replays] == pytest.approx([1.1, 1.5 / 1.1], rel=1e-3)
    now = Timeline(found.corrected(profile))
    again = now.predict(now.choices(plan.choices()), limit_bytes=limit_bytes)
    assert again.replay_s == pytest.approx(p.replay_s, rel=1e-3)
    assert again.step_s == pytest.approx(p.step_s, rel=1e-3)
    # Where what replays took was not measured, they are compute as any other.
    whole = compare(plan, [replace(step, replay_s=None)] * 2, turn_s=profile.turn_s)
    assert 1.1 < whole.compute < 1.5 and whole.replays == 1.0


def test_where_nothing_says_why_all_that_was_planned_is_slower(plan: Plan) -> None:
    found = compare(plan, measured(plan, 1.3))
    assert found.outcome == "corrected"
    assert found.link == found.codecs == found.disk > 1.05
    assert compare(plan, measured(plan, 1e6)).link == 8.0


def test_bytes_that_were_not_known_are_added(plan: Plan) -> None:
    found = compare(plan, measured(plan, 1.0, 1.1))
    assert found.outcome == "corrected"
    assert found.more_bytes == round(0.1 * plan.prediction.peak_bytes)
    corrected = found.corrected(PROFILE)
    plain = Timeline(corrected).predict(Timeline(corrected).keep_all())
    assert plain.peak_bytes == plan.plain.peak_bytes + found.more_bytes


def test_a_plan_that_gains_nothing_in_reality_is_withdrawn() -> None:
    cheap = make_plan(PROFILE, slowdown=0.05)
    assert not cheap.declined
    slow = measured(cheap, 1.5)
    assert compare(cheap, slow).outcome == "corrected"
    assert compare(cheap, slow, corrections=2).outcome == "withdrawn"
    high = measured(cheap, 1.0, cheap.plain.peak_bytes / cheap.prediction.peak_bytes)
    assert compare(cheap, high).outcome == "withdrawn"


def test_a_plan_that_memory_needs_is_not_withdrawn(plan: Plan) -> None:
    assert compare(plan, measured(plan, 1.5), corrections=2).outcome == "holds"
    declined = make_plan(PROFILE, memory_bytes=10**12)
    assert set(declined.choices().values()) == {KEEP}
    assert compare(declined, measured(declined, 3.0)).outcome == "holds"


def test_candidates_are_written_as_text() -> None:
    for name in ("keep", "replay", "checkpoint", "device:zvc", "host", "host:zvc+ibp", "disk"):
        assert str(Candidate.named(name)) == name
    assert Candidate.named("checkpoint") == CHECKPOINT
