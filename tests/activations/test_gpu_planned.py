"""Plans on a GPU: gradients, the allocator's peak, packed copies on the device, checkpoints."""

from __future__ import annotations

import gc
import importlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bitslab
from bitslab.activations import planned as planned_module
from bitslab.engine.advisor.planning import (
    CHECKPOINT,
    Candidate,
    Correction,
    MeasuredStep,
    Plan,
    SiteProfile,
    StepProfile,
)
from tests.activations.cases import CASES, Offloaded
from tests.activations.test_gradients import check_case
from tests.activations.test_planned import follow, plan_of
from tests.activations.test_planned_gradients import DrawnPolicy, drawn

__all__ = ["drawn"]

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("quick_measuring")]

HIDDEN, ROWS = 512, 4096


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """Import what the first step of an optimizer would.

    What torch.fx does meanwhile holds the frames of that step, its model included, until the
    garbage collector runs: in the middle of a measured pass, maybe.
    """
    importlib.import_module("torch._dynamo")


class Layer(nn.Module):
    """Norm, SwiGLU, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate, self.up = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down, self.drop = nn.Linear(4 * HIDDEN, HIDDEN), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        h = nn.functional.silu(self.gate(y)) * self.up(y)
        made: torch.Tensor = x + self.drop(self.down(h))
        return made


def layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(Layer() for _ in range(6))).to("cuda", torch.bfloat16)


def train(model: nn.Module, n: int = 8) -> list[torch.Tensor]:
    """Train; return inputs' gradients, losses, and the parameters at last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator("cuda").manual_seed(7)
    torch.manual_seed(11)
    found = []
    for _ in range(n):
        x = torch.randn(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator)
        x.requires_grad_()
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        assert x.grad is not None
        found += [loss.detach(), x.grad.sum()]
        torch.cuda.synchronize()  # so that a profiled pass is over when the next one begins
    return found + [p.detach().clone() for p in model.parameters()]


def check(n: int = 12, **options: Any) -> Any:
    expected = train(layers(), n)
    gc.collect()  # or its model may be given back in a profiled pass, where that would count
    model = layers()
    offload = bitslab.offload_activations(model, min_bytes=1 << 16, **options)
    found = train(model, n)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    offload.detach()
    return offload


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[MeasuredStep]:
    """Let every plan hold, and collect what was measured."""
    gc.collect()  # what tests before have left counts where it is given back in a profiled pass
    found: list[MeasuredStep] = []

    def compare(plan: Plan, steps: list[MeasuredStep], **_: Any) -> Correction:
        found.extend(steps)
        return Correction("holds", "The plan holds.")

    monkeypatch.setattr(planned_module, "compare", compare)
    return found


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_gradients_under_random_plans(name: str, drawn: type[DrawnPolicy], seed: int) -> None:
    drawn.seed, drawn.keeps = seed, random.Random(seed).random() < 0.5
    check_case(name, Offloaded("cuda", slowdown=0.5), None)


@pytest.mark.filterwarnings("ignore:bitslab. memory_bytes:UserWarning")  # of the least possible
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_the_allocators_peak_is_kept(share: float, measured: list[MeasuredStep]) -> None:
    offload = check(memory=1 << 40)
    plain = offload.plan.plain.peak_bytes
    assert offload.plan.declined
    torch.cuda.reset_peak_memory_stats()
    layers()
    weights = torch.cuda.max_memory_allocated()
    memory = int(weights + share * (plain - weights))
    offload = check(memory=memory)
    assert not offload.plan.declined
    assert measured
    # As predicted, whatever the least possible is.
    predicted = offload.plan.prediction.peak_bytes
    assert max(step.peak_bytes for step in measured) <= 1.05 * predicted


def noted(
    profiles: list[StepProfile], choose: Callable[[StepProfile], Plan]
) -> Callable[[StepProfile], Plan]:
    """Return `choose`, which also puts what it plans from into a list."""

    def chosen(profile: StepProfile) -> Plan:
        profiles.append(profile)
        return choose(profile)

    return chosen


def is_packed(site: SiteProfile, codec: str) -> bool:
    return codec in site.packings and site.packings[codec].share < 1


def every(kind: str) -> Callable[[StepProfile], Plan]:
    def choose(profile: StepProfile) -> Plan:
        if kind == "checkpoint":
            return plan_of(profile, {s.site: CHECKPOINT for s in profile.sites if s.module})
        if kind == "replay":
            chosen = {s.site: Candidate("replay") for s in profile.sites if s.replay_s is not None}
            return plan_of(profile, chosen)
        codec = "ibp-blob" if kind == "device" else None
        wanted = Candidate(kind, codec)  # type: ignore[arg-type]
        able = [
            s.site for s in profile.sites
            if s.nbytes and s.movable and (codec is None or is_packed(s, codec))
        ]  # fmt: skip
        return plan_of(profile, dict.fromkeys(able, wanted))

    return choose


@pytest.mark.parametrize("kind", ["host", "device", "replay", "checkpoint"])
def test_one_kind_of_choice(
    kind: str, monkeypatch: pytest.MonkeyPatch, measured: list[MeasuredStep]
) -> None:
    profiles: list[StepProfile] = []
    plans = follow(monkeypatch, noted(profiles, every(kind)))
    check(slowdown=0.1, codecs="ibp-blob")
    actions = {each.candidate.action for each in plans[0].sites}
    assert kind in actions, [(each.site, each.nbytes, each.packings) for each in profiles[0].sites]
    if kind != "host":  # with no limit all copies may be under way at once
        assert plans[0].prediction.peak_bytes < plans[0].plain.peak_bytes
    assert measured and all(step.step_s > 0 for step in measured)


def test_moments_are_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, measured: list[MeasuredStep]
) -> None:
    profiles: list[StepProfile] = []
    follow(monkeypatch, noted(profiles, lambda profile: plan_of(profile, {})))
    check(slowdown=0.1)
    profile = profiles[0]
    assert profile.link is not None and 0 < profile.turn_s < profile.end_s < 1
    assert len(profile.modules) == 6
    # Weights, at least, are there from the beginning.
    weights = sum(p.nbytes for p in layers().parameters())
    assert min(nbytes for _, nbytes in profile.other_bytes) >= weights


def test_replays_that_are_tried_count_for_no_step(
    monkeypatch: pytest.MonkeyPatch, measured: list[MeasuredStep]
) -> None:
    profiles: list[StepProfile] = []
    follow(monkeypatch, noted(profiles, lambda profile: plan_of(profile, {})))
    before = []
    for recompute in (False, True):
        gc.collect()  # what tests before have left, which would be given back in between
        before.append(torch.cuda.memory_allocated())
        check(slowdown=0.1, recompute=recompute)
    plain, tried = (
        max(nbytes for _, nbytes in each.other_bytes) - here
        for each, here in zip(profiles, before, strict=True)
    )
    assert any(site.replay_s is not None for site in profiles[1].sites)
    # A tensor of the widest layers, which each replay makes again, has 16 MiB.
    assert abs(tried - plain) < 4 << 20
