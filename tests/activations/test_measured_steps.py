"""What a planned step measures: its compute in each pass, apart from what unpacking takes."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from bitslab.activations import measured_pass, plain_passes
from bitslab.activations import planned as planned_module
from bitslab.activations.local_copies import PackedCopy, ReplayedCopy
from bitslab.activations.measured_pass import MeasuredPass
from bitslab.engine.advisor.planning import Candidate, Correction, MeasuredStep, Plan, StepProfile
from tests.activations.test_planned import blocks, check, follow, plan_of

pytestmark = pytest.mark.usefixtures("quick_measuring", "one_thread")

SLOW_S = 0.003


def packable(profile: StepProfile) -> list[str]:
    """Return the sites that a codec makes smaller."""
    return [
        s.site for s in profile.sites if "zvc+ibp" in s.packings and s.packings["zvc+ibp"].share < 1
    ]


def test_unpacking_is_no_compute_and_packing_is_the_forward_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[MeasuredStep] = []
    turns: list[float] = []
    reads: list[PackedCopy] = []
    made = PackedCopy._made

    def compare(plan: Plan, found: list[MeasuredStep], *, turn_s: float, **_: Any) -> Correction:
        measured.extend(found)
        turns.append(turn_s)
        return Correction("holds", "The plan holds.")

    def choose(profile: StepProfile) -> Plan:
        packed = packable(profile)
        assert packed
        return plan_of(profile, dict.fromkeys(packed, Candidate("device", "zvc+ibp")))

    def slow(copy: PackedCopy) -> torch.Tensor:
        reads.append(copy)
        time.sleep(SLOW_S)
        return made(copy)

    plans = follow(monkeypatch, choose)
    monkeypatch.setattr(planned_module, "compare", compare)
    monkeypatch.setattr(PackedCopy, "_made", slow)
    offload = check(blocks, n=10, slowdown=0.1, codecs=["zvc+ibp"])
    packed = sum(each.candidate.action == "device" for each in plans[0].sites)
    assert turns == [offload.step_profile.turn_s]
    assert len(measured) == 2 and len(reads) >= 2 * packed > 0
    for step in measured:
        assert step.compute_s is not None and step.forward_compute_s is not None
        assert 0 < step.forward_compute_s < step.compute_s
        assert step.step_s - step.compute_s >= packed * SLOW_S
    offload.detach()


def test_a_plan_that_is_slower_than_keeping_all_is_withdrawn_where_profiled_steps_were_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As while something else computes: the plan is faster than predicted then."""
    made = PackedCopy._made

    def model() -> nn.Module:
        passes: list[nn.Module] = []

        def begin(module: nn.Module, given: tuple[Any, ...]) -> None:
            passes.append(module)
            if len(passes) in (2, 3):  # those that are profiled
                time.sleep(0.2)

        slow_at_first: Any = blocks()
        slow_at_first[0].register_forward_pre_hook(begin)
        return cast(nn.Module, slow_at_first)

    def choose(profile: StepProfile) -> Plan:
        return plan_of(profile, dict.fromkeys(packable(profile), Candidate("device", "zvc+ibp")))

    def slow(copy: PackedCopy) -> torch.Tensor:
        time.sleep(SLOW_S)
        return made(copy)

    plans = follow(monkeypatch, choose)
    monkeypatch.setattr(PackedCopy, "_made", slow)
    offload = check(model, n=26, slowdown=0.1, codecs=["zvc+ibp"])
    assert plans[0].prediction.step_s > 0.2
    assert any("Withdrawn, everything is kept" in note for note in offload.report().notes)
    offload.detach()


@pytest.mark.parametrize(
    ("free_bytes", "measured"), [(40, False), (80, True)], ids=["no room", "room"]
)
def test_a_gpu_without_room_for_it_runs_no_pass_that_keeps_all_behind_a_plan(
    free_bytes: int, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans have allocated since; where too little is left, the profile says what it would take."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 40)
    monkeypatch.setattr(plain_passes, "MeasuredPass", lambda device: SimpleNamespace(is_over=False))
    passes = plain_passes.PlainPasses(may_keep=True)
    gpu = torch.device("cuda", 0)
    assert passes.in_turn(gpu, 0, 100.0) is None  # the plan's first one fills pools
    assert (passes.in_turn(gpu, 1, 100.0) is not None) == measured
    assert passes.in_turn(gpu, 1, 100.0) is None


class _Clock:
    """Stands for the moments of a GPU."""

    def __init__(self) -> None:
        self.now = 0.0

    def pack(self, measured: MeasuredPass, copy: Any, packed_s: float, waited_s: float) -> None:
        """Have a tensor saved, packed, and waited for."""
        begin = self.now
        self.now += packed_s + waited_s
        measured.saved(copy, SITE, torch.empty(0), begin)


SITE: Any = None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    """Let a pass on a GPU be measured by a clock of the test."""
    made = _Clock()
    monkeypatch.setattr(measured_pass, "now", lambda device: made.now)
    monkeypatch.setattr(measured_pass, "seconds_between", lambda a, b: b - a)
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    return made


def copy_of(nbytes: int, packed: bool = True) -> Any:
    return SimpleNamespace(
        nbytes=nbytes, codec=SimpleNamespace(name="x") if packed else None, root=lambda: None
    )


def test_on_a_gpu_packing_that_is_waited_for_is_compute_and_waits_for_room_are_not(
    clock: _Clock,
) -> None:
    measured = MeasuredPass(torch.device("cuda"))
    for i in range(8):
        clock.now += 1.0  # computes
        nbytes = 100 * (1 + i % 3)
        clock.pack(measured, copy_of(nbytes), 0.001 * nbytes, 2.0 if i in (3, 7) else 0.0)
    clock.pack(measured, copy_of(1000, packed=False), 0.0, 3.0)
    measured.end_forward()
    forward_s = clock.now
    clock.now += 10.0
    measured._finish()
    step = measured.step()
    packed_s = 0.001 * sum(100 * (1 + i % 3) for i in range(8))
    # A wait counts as half as much again as packing took, at most.
    waits_s = 0.5 * 0.001 * (100 + 200)
    assert step.step_s == pytest.approx(forward_s + 10.0)
    assert step.forward_compute_s == pytest.approx(8.0 + packed_s + waits_s)
    assert step.compute_s == pytest.approx(18.0 + packed_s + waits_s)
    assert step.replay_s == 0 and step.peak_bytes == 7


def test_hooks_that_do_not_pack_are_measured_of_the_forward_pass_but_for_their_waits(
    clock: _Clock,
) -> None:
    """On a GPU most of them take no time: those that do are no waits for that."""
    measured = MeasuredPass(torch.device("cuda"))
    hooks_s = [1e-6, 2e-4, 1e-6, 2.0, 3e-5]
    for seconds in hooks_s:
        clock.now += 1.0  # computes
        clock.pack(measured, copy_of(100, packed=False), seconds, 0.0)
        clock.pack(measured, copy_of(100), 0.5, 0.0)
        begin = clock.now
        clock.now += seconds / 2
        measured.kept(SITE, SITE, torch.empty(4), torch.empty(4), begin)
    measured.end_forward()
    clock.pack(measured, copy_of(100, packed=False), 1e-4, 0.0)  # of the backward pass
    clock.now += 10.0
    measured._finish()
    step = measured.step()
    once_s, kept_s = 2e-4 + 2e-6 + 3e-5, (2e-4 + 2e-6 + 3e-5) / 2
    assert step.hooks_s == pytest.approx(once_s + kept_s + 2 * 300e-6)
    assert step.forward_compute_s == pytest.approx(5 * 1.5)
    assert step.compute_s == pytest.approx(5 * 1.5 + 10.0)


def test_a_pass_without_an_end_of_its_forward_pass_has_no_hooks_of_it(clock: _Clock) -> None:
    measured = MeasuredPass(torch.device("cuda"))
    clock.pack(measured, copy_of(100, packed=False), 1e-4, 0.0)
    measured._finish()
    step = measured.step()
    assert step.hooks_s is None and step.forward_compute_s is None


def test_replays_are_measured_and_are_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[MeasuredStep] = []
    made = ReplayedCopy._made

    def compare(plan: Plan, found: list[MeasuredStep], **_: Any) -> Correction:
        measured.extend(found)
        return Correction("holds", "The plan holds.")

    def choose(profile: StepProfile) -> Plan:
        replayed = {s.site: Candidate("replay") for s in profile.sites if s.replay_s is not None}
        return plan_of(profile, replayed)

    def slow(copy: ReplayedCopy) -> torch.Tensor:
        time.sleep(SLOW_S)
        return made(copy)

    plans = follow(monkeypatch, choose)
    monkeypatch.setattr(planned_module, "compare", compare)
    monkeypatch.setattr(ReplayedCopy, "_made", slow)
    offload = check(blocks, n=10, slowdown=0.1, codecs=[])
    replayed = sum(each.candidate.action == "replay" for each in plans[0].sites)
    assert len(measured) == 2 and replayed
    for step in measured:
        assert step.replay_s is not None and step.compute_s is not None
        assert replayed * SLOW_S <= step.replay_s < step.compute_s
    offload.detach()
