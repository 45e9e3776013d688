"""What a profiled step makes of its copies, and when fetches begin beside checkpointed modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import bitslab
from bitslab.activations.copies import StoredCopy
from bitslab.activations.executor import Executor
from bitslab.activations.hooks import SavedTensorHooks
from bitslab.activations.replay import Replay
from bitslab.activations.step_recorder import StepRecorder
from bitslab.engine.advisor.planning import CHECKPOINT, Candidate, Plan, StepProfile
from tests.activations.test_planned import Block, blocks, check, follow, plan_of, steps

pytestmark = pytest.mark.usefixtures("one_thread", "quick_measuring", "holds")


def test_what_several_read_comes_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the link would look as much faster as tensors have readers."""
    counted: list[tuple[int, int]] = []
    real = StepRecorder._link

    def link(self: StepRecorder, given: Any) -> Any:
        out, back = (sum(n for n, *_ in each) for each in (self._moved, self._brought))
        counted.append((out, back))
        return real(self, given)

    monkeypatch.setattr(StepRecorder, "_link", link)
    check(blocks, memory="1GiB")  # the norm's output is read by two layers
    assert counted and all(0 < back <= out for out, back in counted)


def test_a_replay_is_timed_without_the_copies_that_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is computed twice: the second time all that it reads is there."""
    brought: list[int] = []  # by computation
    real, restore = Replay.tensor, Executor._restore

    def tensor(self: Replay) -> torch.Tensor:
        brought.append(0)
        return real(self)

    def restored(*args: Any) -> Any:
        if brought:
            brought[-1] += 1
        return restore(*args)

    monkeypatch.setattr(Replay, "tensor", tensor)
    with monkeypatch.context() as forward:
        # Copies are read by replays alone in the forward pass.
        forward.setattr(Executor, "_restore", restored)
        model = blocks()
        offload = bitslab.offload_activations(model, min_bytes=1024, memory="1GiB")
        for _ in range(3):
            brought.clear()
            loss = model(torch.ones(256, 32)).square().sum()
            last = list(brought)
            loss.backward()
    offload.detach()
    assert len(last) >= 8 and any(last[::2]) and not any(last[1::2])


class Logged(Block):
    """A block that says when it is computed."""

    def __init__(self, said: list[str], name: str) -> None:
        super().__init__()
        self.said, self.name = said, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.said.append(f"computes {self.name}")
        return super().forward(x)


def test_fetches_begin_with_a_module_that_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it reads is not seen: what is to be fetched meanwhile would come as it is read."""
    said: list[str] = []
    real = SavedTensorHooks._fetch

    def fetch(self: SavedTensorHooks, copy: StoredCopy) -> None:
        said.append(f"fetches {copy.name.partition('.')[0]}")
        real(self, copy)

    monkeypatch.setattr(SavedTensorHooks, "_fetch", fetch)

    def choose(profile: StepProfile) -> Plan:
        chosen = {
            site.site: CHECKPOINT if site.module in ("1", "2") else Candidate("host")
            for site in profile.sites
            if site.module in ("0", "1", "2")
        }
        plan = plan_of(profile, chosen)
        inside = next(site.site for site in profile.sites if site.module == "1")
        moved = [
            replace(each, fetch_after=inside)
            if chosen.get(each.site) == Candidate("host")
            else each
            for each in plan.sites
        ]
        return replace(plan, sites=tuple(moved))

    plans = follow(monkeypatch, choose)

    def made(logged: bool) -> nn.Module:
        torch.manual_seed(3)
        log = said if logged else []
        return nn.Sequential(*(Logged(log, str(i)) for i in range(4)))

    expected = list(steps(made(False)))
    model = made(True)
    offload = bitslab.offload_activations(model, min_bytes=1024, memory="1GiB")
    found = list(steps(model))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert plans and plans[-1].modules == ("1", "2")
    last = said[len(said) - 1 - said[::-1].index("computes 2") :]  # of the last backward pass
    assert "fetches 0" in last[1 : last.index("computes 1")], last
    offload.detach()
