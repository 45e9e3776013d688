"""Plans that are compared with steps that followed them: corrected, withdrawn, predicted anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bitslab.activations import planned as planned_module
from bitslab.activations.measured_pass import MeasuredPass
from bitslab.engine.advisor.planning import Correction, MeasuredStep, Plan, as_measured
from tests.activations.test_planned import LIMIT, blocks, check, choices_of

pytestmark = pytest.mark.usefixtures("one_thread", "quick_measuring")


def followed_profiles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return where two profiles are collected a plan: the one before, and its own."""
    found: list[Any] = []
    plain = planned_module.PlannedPolicy._follow

    def follow(policy: Any, followed: Any) -> None:
        found.append((policy.profile, followed.profile))
        plain(policy, followed)

    monkeypatch.setattr(planned_module.PlannedPolicy, "_follow", follow)
    return found


def test_a_slower_step_is_corrected_and_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter(["corrected", "withdrawn"])
    compared: list[int] = []

    def compare(plan: Plan, found: list[MeasuredStep], **options: Any) -> Correction:
        assert len(found) == 2 and options["plain_step_s"] > 0
        compared.append(options["corrections"])
        outcome = next(outcomes)
        return Correction(outcome, f"Said: {outcome}.", compute=1.1)  # type: ignore[arg-type]

    monkeypatch.setattr(planned_module, "compare", compare)
    offload = check(blocks, n=14, slowdown=0.5)
    assert compared == [0, 1]
    assert "Said: withdrawn." in offload.report().notes
    assert choices_of(offload) == {"keep"}
    assert {s.reason for s in offload.report().sites} == {"Kept: the plan was withdrawn."}


@pytest.mark.parametrize("second_peak", [1.0, 2.0], ids=["both fit", "the first one fits"])
def test_the_best_plan_that_was_followed_goes_on(
    monkeypatch: pytest.MonkeyPatch, second_peak: float
) -> None:
    """The first one takes 2 s a step and the second one 3, whether that keeps the limit or not."""
    followed: list[Plan] = []
    counts: list[int] = []
    promises: list[object] = []
    took = iter([2.0, 2.0, 3.0, 3.0] + [2.0] * 30)
    peaks = iter([LIMIT, LIMIT, LIMIT * second_peak, LIMIT * second_peak] + [LIMIT] * 30)

    def compare(plan: Plan, found: list[MeasuredStep], promised: object, **_: Any) -> Correction:
        followed.append(plan)
        counts.append(len(found))
        promises.append(promised)
        outcome = "corrected" if len(followed) == 1 else "holds"
        return Correction(outcome, f"Said: {outcome}.", link=2.0)  # type: ignore[arg-type]

    monkeypatch.setattr(planned_module, "compare", compare)
    monkeypatch.setattr(MeasuredPass, "step", lambda _: MeasuredStep(next(took), next(peaks)))
    # One that recomputes would take as long as the first one: the next test is of that.
    monkeypatch.setattr(planned_module.PlannedPolicy, "_try_without_moves", lambda *_: False)
    offload = check(blocks, n=20, memory=LIMIT, profile_every=4)
    assert followed[0] is not followed[1]
    assert offload.plan.choices() == followed[0].choices()
    # It was left for the second one; what is said of it is what its own steps took.
    assert offload.plan.prediction.step_s == pytest.approx(2.0)
    assert offload.plan.prediction.peak_bytes == pytest.approx(LIMIT, rel=0.03)
    assert followed[2] is offload.plan
    # What it was made to keep makes it neither slow nor high.
    assert promises[:3] == [each.prediction for each in (*followed[:2], followed[0])]
    # What it took before it was left does not count with what it takes now.
    assert counts[:5] == [2, 2, 2, 4, 6]


def test_a_plan_that_is_faster_than_predicted_goes_on_and_is_predicted_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps take far less than the first comparison expects, and so do all that follow."""
    plain: Any = vars(planned_module)["compare"]
    compared: list[tuple[Plan, Correction]] = []
    promises: list[object] = []

    def compare(plan: Plan, found: list[MeasuredStep], **options: Any) -> Correction:
        compared.append((plan, plain(plan, found, **options)))
        promises.append(options["promised"])
        return compared[-1][1]

    monkeypatch.setattr(planned_module, "compare", compare)
    monkeypatch.setattr(MeasuredPass, "step", lambda _: MeasuredStep(1e-5, LIMIT / 2))
    offload = check(blocks, n=20, memory=LIMIT, profile_every=4)
    (first, said), (second, later), *_ = compared
    assert [said.outcome, said.off, later.off] == ["holds", True, False]
    assert second.choices() == first.choices() and second.plain == first.plain
    assert second.prediction.step_s == pytest.approx(1e-5)
    assert second.prediction.peak_bytes == LIMIT / 2
    assert promises == [first.prediction] * len(compared)  # what it was made to keep
    assert offload.plan.choices() == first.choices()


def test_a_profile_is_corrected_once_by_steps_that_are_slow_after_fast_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fast ones have changed the profile; what the slow ones say is of that one."""
    plain: Any = vars(planned_module)["compare"]
    compared: list[Correction] = []
    profiles = followed_profiles(monkeypatch)

    def compare(plan: Plan, found: list[MeasuredStep], **options: Any) -> Correction:
        compared.append(plain(plan, found, **options))
        return compared[-1]

    took = iter([1e-5] * 2 + [1.0] * 2)
    monkeypatch.setattr(planned_module, "compare", compare)
    monkeypatch.setattr(MeasuredPass, "step", lambda _: MeasuredStep(next(took, 1e-5), LIMIT / 2))
    check(blocks, n=14, memory=LIMIT, profile_every=4)
    assert [(said.outcome, said.off) for said in compared[:2]] == [
        ("holds", True), ("corrected", False),
    ]  # fmt: skip
    (_, made), (fast, corrected), *_ = profiles
    assert fast.step_s < made.step_s and fast == compared[0].corrected(made)
    assert corrected == compared[1].corrected(fast)


def test_two_slow_steps_between_fast_ones_change_neither_plan_nor_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps take what was predicted but for the third and fourth that are compared: 1.2 times."""
    offload, compared, measured = _compared(monkeypatch, 1.2, memory=LIMIT)
    assert [len(found) for _, found, _ in compared[:4]] == [2, 4, 6, 6]
    assert all(
        found[-2:] == measured[2 * i : 2 * i + 2] for i, (_, found, _) in enumerate(compared)
    )
    assert {said.outcome for _, _, said in compared} == {"holds"}
    assert not any(said.off for _, _, said in compared)
    assert offload.plan is compared[0][0]


@pytest.mark.parametrize(
    ("times", "peak"), [(1.3, 1.0), (5.0, 1.0), (1.0, 1.04), (0.6, 1.0), (1.0, 0.5)], ids=str
)
def test_steps_of_another_kind_are_compared_alone(
    monkeypatch: pytest.MonkeyPatch, times: float, peak: float
) -> None:
    """Of another batch, or of a machine that has other work since."""
    _, compared, measured = _compared(monkeypatch, times, peak, memory=LIMIT)
    assert [found for _, found, _ in compared[:2]] == [measured[:2], measured[2:4]]


def test_without_a_limit_as_many_steps_are_compared_as_keep_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, compared, _ = _compared(monkeypatch, 1.0, slowdown=0.5)
    assert len(compared) > 2 and {len(found) for _, found, _ in compared} == {2}


def _compared(
    monkeypatch: pytest.MonkeyPatch, times: float, peak: float = 1.0, **options: Any
) -> tuple[Any, list[tuple[Plan, list[MeasuredStep], Correction]], list[MeasuredStep]]:
    """Return what is compared of steps as predicted, of which the second two are not."""
    plain: Any = vars(planned_module)["compare"]
    compared: list[tuple[Plan, list[MeasuredStep], Correction]] = []
    measured: list[MeasuredStep] = []

    step_s, peak_bytes = 2.0, LIMIT / 2

    def compare(plan: Plan, found: list[MeasuredStep], **options: Any) -> Correction:
        expected = replace(plan.prediction, step_s=step_s, peak_bytes=peak_bytes)
        said = plain(replace(plan, prediction=expected), found, **options)
        compared.append((plan, list(found), said))
        return compared[-1][2]

    def step(_: Any) -> MeasuredStep:
        slow, high = (times, peak) if len(measured) in (2, 3) else (1.0, 1.0)
        measured.append(MeasuredStep(step_s * slow, peak_bytes * high))
        return measured[-1]

    monkeypatch.setattr(planned_module, "compare", compare)
    monkeypatch.setattr(MeasuredPass, "step", step)
    return check(blocks, n=24, profile_every=4, **options), compared, measured


@pytest.mark.parametrize("fastest", ["moves", "moves less"])
def test_behind_corrections_a_plan_that_moves_little_is_tried(
    monkeypatch: pytest.MonkeyPatch, fastest: str
) -> None:
    followed: list[Plan] = []

    def compare(plan: Plan, found: list[MeasuredStep], **options: Any) -> Correction:
        followed.append(plan)
        outcome = "holds" if options["corrections"] else "corrected"
        return Correction(outcome, f"Said: {outcome}.", link=1.01)  # type: ignore[arg-type]

    def step(_: Any) -> MeasuredStep:
        tried = len(followed) == 2
        return MeasuredStep(2.0 if tried == (fastest == "moves less") else 3.0, LIMIT)

    monkeypatch.setattr(planned_module, "compare", compare)
    monkeypatch.setattr(MeasuredPass, "step", step)
    # So dear that recomputing is not, however busy the machine was in the profiled step.
    monkeypatch.setattr(planned_module, "MOST_FACTOR", 1e6)
    offload = check(blocks, n=20, memory=LIMIT)
    first, second, tried, *again = followed
    moved = [plan.prediction.link_bytes for plan in (first, second, tried)]
    assert moved[2] <= min(moved[:2])
    assert tried.prediction.step_s < 100 * tried.plain.step_s  # by what moves really take
    best = [tried.choices()] if fastest == "moves less" else [first.choices(), second.choices()]
    assert offload.plan.choices() in best
    assert all(plan.choices() in best for plan in again)  # it is compared again


def test_a_plan_that_moves_little_is_made_of_what_steps_were_measured_to_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profiles = followed_profiles(monkeypatch)
    compared: list[Correction] = []

    def compare(plan: Plan, found: list[MeasuredStep], **options: Any) -> Correction:
        measured = as_measured(plan, found)
        compared.append(measured if compared else Correction("corrected", "Said.", link=1.01))
        return compared[-1]

    monkeypatch.setattr(planned_module, "compare", compare)
    monkeypatch.setattr(MeasuredPass, "step", lambda _: MeasuredStep(2.0, LIMIT))
    monkeypatch.setattr(planned_module, "MOST_FACTOR", 1e6)
    check(blocks, n=14, memory=LIMIT)
    assert compared[1].off
    (_, _), (_, corrected), (_, tried), *_ = profiles
    assert tried == compared[1].corrected(corrected) and tried.step_s > corrected.step_s
