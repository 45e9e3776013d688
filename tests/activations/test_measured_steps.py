"""What a planned step measures: its compute in each pass, apart from what unpacking takes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from bitslab.activations import planned as planned_module
from bitslab.activations.local_copies import PackedCopy
from bitslab.engine.advisor.planning import Candidate, Correction, MeasuredStep, Plan, StepProfile
from tests.activations.test_planned import blocks, check, follow, plan_of

pytestmark = pytest.mark.usefixtures("quick_measuring", "one_thread")

SLOW_S = 0.003


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
        packed = [
            s.site
            for s in profile.sites
            if "zvc+ibp" in s.packings and s.packings["zvc+ibp"].share < 1
        ]
        assert packed
        return plan_of(profile, dict.fromkeys(packed, Candidate("device", "zvc+ibp")))

    def slow(copy: PackedCopy) -> torch.Tensor:
        reads.append(copy)
        time.sleep(SLOW_S)
        return made(copy)

    plans = follow(monkeypatch, choose)
    monkeypatch.setattr(planned_module, "compare", compare)
    monkeypatch.setattr(PackedCopy, "_made", slow)
    offload = check(blocks, n=8, slowdown=0.1, codecs=["zvc+ibp"])
    packed = sum(each.candidate.action == "device" for each in plans[0].sites)
    assert turns == [offload.step_profile.turn_s]
    assert len(measured) == 2 and len(reads) >= 2 * packed > 0
    for step in measured:
        assert step.compute_s is not None and step.forward_compute_s is not None
        assert 0 < step.forward_compute_s < step.compute_s
        assert step.step_s - step.compute_s >= packed * SLOW_S
    offload.detach()
