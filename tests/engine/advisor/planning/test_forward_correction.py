"""Forward passes that take longer than profiled, as where a GPU waits for what hooks do."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from bitslab import ArgumentError
from bitslab.engine.advisor.planning import (
    MeasuredStep,
    Plan,
    Solver,
    StepPrediction,
    StepProfile,
    Timeline,
    as_measured,
    compare,
    drawn_profile,
    make_plan,
    predicted_again,
)

SEEDS = st.integers(0, 100_000)
FACTORS = st.floats(0.1, 8.0)


def across(profile: StepProfile) -> StepProfile:
    """Return a profile that has all on either side of the turn that may be on both."""
    turn_s, last = profile.turn_s, profile.sites[-1]
    held = replace(last, released_s=(turn_s + last.freed_s) / 2)
    moments = [0.0, 0.7 * turn_s, turn_s, (turn_s + profile.end_s) / 2, 1.1 * profile.end_s]
    other = tuple((at, 1000 + i) for i, at in enumerate(moments))
    return replace(profile, sites=(*profile.sites[:-1], held), other_bytes=other)


def moments_of(profile: StepProfile) -> list[float]:
    """Return all moments of a profile, those of a site or module together."""
    found = [profile.turn_s, profile.end_s, *(at for at, _ in profile.other_bytes)]
    for site in profile.sites:
        found += [site.saved_s, site.released_s, site.read_s, site.freed_s]
    for each in profile.modules:
        found += [each.begin_s, each.backward_begin_s, each.backward_end_s]
    return found


@given(SEEDS, st.integers(2, 16), FACTORS, FACTORS)
@example(3, 12, 1.0, 1.0)
def test_the_forward_pass_alone_becomes_longer(
    seed: int, n_sites: int, compute: float, forward: float
) -> None:
    """What is saved, held and read keeps its order, else the profile would not be accepted."""
    profile = across(drawn_profile(seed, n_sites))
    scaled = profile.scaled(compute=compute, forward=forward)
    forward_s = profile.turn_s * compute * forward
    backward_s = (profile.end_s - profile.turn_s) * compute
    timeline = Timeline(scaled)
    kept = timeline.predict(timeline.keep_all())
    assert kept.step_s == pytest.approx(forward_s + backward_s + profile.rest_s * compute)
    assert scaled.turn_s == pytest.approx(forward_s)
    for before, after in zip(moments_of(profile), moments_of(scaled), strict=True):
        here, there = min(before, profile.turn_s), max(0.0, before - profile.turn_s)
        assert after == pytest.approx(here * compute * forward + there * compute)
    # What is computed again is so in the backward pass.
    alone = profile.scaled(compute=compute)
    assert [s.replay_s for s in scaled.sites] == [s.replay_s for s in alone.sites]
    assert [m.checkpoint_s for m in scaled.modules] == [m.checkpoint_s for m in alone.modules]
    back = scaled.scaled(compute=1 / compute, forward=1 / forward)
    assert moments_of(back) == pytest.approx(moments_of(profile))
    assert StepProfile.from_dict(json.loads(json.dumps(scaled.to_dict()))) == scaled
    assert profile.scaled() == profile


def test_a_factor_of_the_forward_pass_is_above_0() -> None:
    with pytest.raises(ArgumentError, match="forward: 0"):
        drawn_profile(1, 4).scaled(forward=0.0)


def ran(prediction: StepPrediction, turn_s: float, hooks_s: float = 0.0) -> MeasuredStep:
    """Return what is measured of a step as predicted, whose hooks take so long of its forward."""
    p = prediction
    return MeasuredStep(
        p.step_s,
        p.peak_bytes,
        compute_s=p.step_s - p.stall_s - (p.codec_s - p.encode_s) - hooks_s,
        forward_compute_s=turn_s + p.encode_s - hooks_s,
        replay_s=p.replay_s,
        hooks_s=hooks_s,
    )


# Each example makes a plan: to look for a smaller one that fails would take minutes.
@settings(max_examples=20, phases=[Phase.explicit, Phase.generate])
@given(SEEDS, st.floats(0.15, 0.9), st.floats(1.3, 4.0), st.floats(0.0, 1.0))
def test_a_machine_with_a_slow_forward_pass_is_predicted_after_one_correction(
    seed: int, share: float, slow: float, in_hooks: float
) -> None:
    """However much of that is seen as hooks. Packing is as fast as profiled, and takes little."""
    profile = drawn_profile(seed, 10)
    packed_s = sum(p.encode_s for site in profile.sites for p in site.packings.values())
    profile = profile.scaled(codecs=0.02 * profile.turn_s / max(packed_s, 1e-9))
    timeline = Timeline(profile)
    most = timeline.predict(timeline.keep_all()).peak_bytes
    least = Solver(timeline).least().prediction.peak_bytes
    plan = make_plan(profile, memory_bytes=int(least + share * (most - least)))
    true = profile.scaled(forward=slow)
    took = predicted_again(plan, true).prediction
    # Hooks that wait by plan are not measured apart from their waits.
    extra_s = true.turn_s - profile.turn_s
    hooks_s = in_hooks * extra_s if plan.prediction.forward_stall_s == 0 else 0.0
    step = ran(took, true.turn_s, hooks_s)
    found = compare(plan, [step, step], turn_s=profile.turn_s)
    if found.outcome == "holds":  # waits of the forward pass hide it
        assert plan.declined or took.step_s <= 1.05 * plan.prediction.step_s
        return
    assert found.outcome == "corrected"
    assert [found.compute, found.forward] == pytest.approx([1, slow])
    assert [found.link, found.codecs, found.disk, found.encoding] == [1, 1, 1, 1]
    again = predicted_again(plan, found.corrected(profile)).prediction
    assert again.step_s == pytest.approx(took.step_s, rel=0.01)


@settings(max_examples=15, phases=[Phase.explicit, Phase.generate])
@given(
    SEEDS,
    st.floats(0.3, 0.8),
    st.sampled_from([0.5, 0.93, 1.0, 1.5]),
    st.sampled_from([0.9, 1.0, 1.02, 1.2]),
)
def test_a_plan_that_goes_on_is_predicted_as_it_was_measured(
    seed: int, share: float, factor: float, higher: float
) -> None:
    """Whatever took another time, or other memory: here nothing says what it was."""
    profile = drawn_profile(seed, 10)
    timeline = Timeline(profile)
    most = timeline.predict(timeline.keep_all()).peak_bytes
    least = Solver(timeline).least().prediction.peak_bytes
    plan = make_plan(profile, memory_bytes=int(least + share * (most - least)))
    p = plan.prediction
    step = MeasuredStep(p.step_s * factor, p.peak_bytes * higher)
    found = compare(plan, [step, step], turn_s=profile.turn_s, corrections=2)
    assert found.outcome == "holds"
    is_far = factor != 1 or higher in (0.9, 1.2)
    assert found.off == (is_far and not plan.declined)
    if not found.off:
        assert found.predicted(plan) is plan
        return
    now = found.predicted(plan).prediction
    assert now.step_s == pytest.approx(step.step_s)
    again = predicted_again(plan, found.corrected(profile)).prediction
    assert (now.step_s, now.stall_s) == pytest.approx((again.step_s, again.stall_s))
    assert now.peak_bytes == (p.peak_bytes if higher == 1.02 else step.peak_bytes)


@pytest.mark.parametrize("limited", [False, True])
def test_a_plan_is_not_corrected_for_steps_that_keep_what_was_promised(limited: bool) -> None:
    """Every second step is faster and takes less, which predictions follow down and up again."""
    profile = drawn_profile(0, 12)
    limit: dict[str, Any] = {"memory_bytes": 130_000_000} if limited else {"slowdown": 0.3}
    plan = make_plan(profile, **limit)
    promised, offs = plan.prediction, []
    for factor in [0.9, 1.0] * 4:
        step = MeasuredStep(promised.step_s * factor, promised.peak_bytes * factor)
        found = compare(plan, [step, step], turn_s=profile.turn_s, promised=promised)
        assert found.outcome == "holds"
        offs.append(found.off)
        if found.off:
            plan, profile = found.predicted(plan), found.corrected(profile)
        assert plan.prediction.step_s == pytest.approx(step.step_s, rel=0.05)
        assert plan.prediction.peak_bytes == pytest.approx(step.peak_bytes, rel=0.03)
    assert all(offs)


@pytest.mark.parametrize("over", [1.01, 1.2], ids=str)
@pytest.mark.parametrize("before", [0.9, 1.05, 1.1], ids=str)
def test_a_profile_is_corrected_by_all_that_it_does_not_know(before: float, over: float) -> None:
    """However the prediction has followed other peaks since, and however little is too much."""
    profile = drawn_profile(0, 12)
    made = make_plan(profile, memory_bytes=130_000_000)
    limit = made.memory_bytes or 0
    step = MeasuredStep(made.prediction.step_s, before * made.prediction.peak_bytes)
    known = as_measured(made, [step])
    plan, profile = known.predicted(made), known.corrected(profile)
    assert plan.prediction.peak_bytes == step.peak_bytes
    high = MeasuredStep(step.step_s, over * limit)
    found = compare(plan, [high, high], promised=made.prediction)
    assert found.outcome == "corrected"
    missing_bytes = round(high.peak_bytes - made.prediction.peak_bytes)
    assert found.corrected(profile).unprofiled_bytes == profile.unprofiled_bytes + missing_bytes


#: Steps on an H200 at hidden 2,048 x 8 layers, batch 8: a prediction, `turn_s`, what was measured.
H200 = {
    "gpt2, nothing packed": (
        StepPrediction(
            step_s=56.23e-3, peak_bytes=5.6e9, recompute_s=6.5e-3, replay_s=0.5e-3, up_s=16.4e-3
        ),
        18.1e-3,
        MeasuredStep(
            59.98e-3, 5.6e9, compute_s=58.9e-3, forward_compute_s=19.9e-3, replay_s=0.6e-3,
            hooks_s=1.03e-3,
        ),
    ),
    "gpt2, 0.2 ms of packing": (
        StepPrediction(
            step_s=59.84e-3, peak_bytes=5.6e9, codec_s=0.4e-3, encode_s=0.2e-3,
            recompute_s=7.4e-3, replay_s=3.2e-3, up_s=18.7e-3,
        ),
        19.0e-3,
        MeasuredStep(
            65.06e-3, 5.6e9, compute_s=61.8e-3, forward_compute_s=22.5e-3, replay_s=3.1e-3,
            hooks_s=2.61e-3,
        ),
    ),
    "bert, 0.3 ms of packing": (
        StepPrediction(
            step_s=45.78e-3, peak_bytes=4e9, codec_s=0.5e-3, encode_s=0.3e-3,
            recompute_s=2.6e-3, replay_s=2.6e-3, up_s=14.4e-3,
        ),
        15.3e-3,
        MeasuredStep(
            55.17e-3, 4e9, compute_s=51.9e-3, forward_compute_s=20.1e-3, replay_s=2.9e-3,
            hooks_s=2.36e-3,
        ),
    ),
}  # fmt: skip


def moving_plan(prediction: StepPrediction) -> Plan:
    """Return a plan that moves tensors and is predicted to take that."""
    profile = drawn_profile(1, 20)
    return replace(make_plan(profile, memory_bytes=130_000_000), prediction=prediction)


@pytest.mark.parametrize("name", list(H200))
def test_what_hooks_add_to_steps_of_an_h200_is_the_forward_passes(name: str) -> None:
    """Not of packing that hardly takes a moment, nor of the link and codecs."""
    p, turn_s, step = H200[name]
    found = compare(moving_plan(p), [step, step], turn_s=turn_s)
    assert found.outcome == "corrected" and found.forward > 1.1
    assert [found.link, found.codecs, found.disk, found.encoding] == [1, 1, 1, 1]
    assert step.forward_compute_s is not None and step.hooks_s is not None
    forward_s = step.forward_compute_s + step.hooks_s - p.encode_s
    assert turn_s * found.compute * found.forward == pytest.approx(forward_s)
    others_s = p.step_s - turn_s - p.codec_s - p.replay_s
    replay_s = p.replay_s * found.compute * found.replays
    again_s = forward_s + p.codec_s + others_s * found.compute + replay_s
    assert again_s == pytest.approx(step.step_s, rel=0.015)


def test_packing_that_takes_much_of_a_forward_pass_is_what_took_longer() -> None:
    p, turn_s, step = H200["bert, 0.3 ms of packing"]
    much = replace(p, step_s=p.step_s + 2e-3, codec_s=p.codec_s + 2e-3, encode_s=2.3e-3)
    found = compare(moving_plan(much), [step, step], turn_s=turn_s)
    assert step.forward_compute_s is not None
    assert found.forward == 1.0
    assert found.encoding == pytest.approx(
        (step.forward_compute_s - turn_s * found.compute) / much.encode_s
    )


def test_predicted_stalls_of_the_forward_pass_are_no_hooks() -> None:
    p, turn_s, step = H200["gpt2, nothing packed"]
    assert step.hooks_s is not None
    forward = []
    for share in (0.0, 0.5, 1.0, 2.0):
        stall_s = share * step.hooks_s
        stalled = replace(p, step_s=p.step_s + stall_s, forward_stall_s=stall_s)
        later = replace(step, step_s=step.step_s + 2 * stall_s)
        found = compare(moving_plan(stalled), [later, later], turn_s=turn_s)
        forward.append(found.forward * turn_s * found.compute)
    known_s = [19.9e-3 + step.hooks_s * left for left in (1.0, 0.5, 0.0, 0.0)]
    assert forward == pytest.approx(known_s)


@pytest.mark.parametrize("explained", [0.4, 0.6])
def test_what_is_measured_says_why_where_it_explains_half_of_a_slow_step(explained: float) -> None:
    """Else the plan's own work took what is missing beyond it."""
    p = StepPrediction(step_s=0.1, peak_bytes=1e9, recompute_s=0.01, up_s=0.03)
    turn_s, missing_s = 0.03, 0.02
    seen_s = explained * missing_s
    step = MeasuredStep(0.12, 1e9, compute_s=0.1 + seen_s, forward_compute_s=turn_s + seen_s)
    found = compare(moving_plan(p), [step, step], turn_s=turn_s)
    assert [found.compute, found.forward] == pytest.approx([1.0, 1 + seen_s / turn_s])
    expected = 1.0 if explained > 0.5 else 1 + (1 - explained) * missing_s / (0.5 * p.up_s)
    assert [found.link, found.codecs, found.disk] == pytest.approx([expected] * 3)
