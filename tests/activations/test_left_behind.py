"""What a step that fails leaves behind: nothing of threads, host memory, events and device memory.

And the step after it is right.
"""

from __future__ import annotations

import gc
import os
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bitslab
from bitslab.activations import crossing, limits, planned, traffic
from bitslab.activations.executor import Executor
from bitslab.engine.advisor.planning import Candidate, Correction, MeasuredStep, Plan, StepProfile
from bitslab.engine.memory import host_arena
from bitslab.engine.memory.page_locking import MappedMemory
from bitslab.engine.transfer import events
from tests.activations.cases.hooks_and_faults import Failing
from tests.activations.test_planned import follow, plan_of

pytestmark = pytest.mark.usefixtures(
    "one_thread", "quick_measuring", "quick_disk", "slow_link", "holds", "all_moved"
)

POLICIES: dict[str, dict[str, Any]] = {
    "raw": {"policy": "raw"},
    "static": {"policy": "static", "codecs": "zvc"},
    "host": {"policy": "host", "codecs": "zvc"},
    "auto": {"policy": "auto", "profile_every": 1},
    "planned": {"memory": "8GiB"},
    "planned-disk": {"memory": "8GiB", "disk": ...},
}
#: Passes until all is measured and decided; those behind them follow a plan.
PASSES = {"planned": 5, "planned-disk": 5}
USUAL_PASSES = 3
#: What a GPU keeps of codecs that auto, or the planner's measured pass, has fitted to a model's
#: tensors: kernels are bound to the tables of the last 1,024, some of which are those of a model
#: that is gone.
TABLES_BYTES = 64 << 10
FITTED = ("auto", "planned", "planned-disk")


@pytest.fixture(autouse=True)
def little_to_collect() -> None:
    """Take what lives before a test from the garbage collector, which `held` asks often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def small_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESERVED_BYTES", 1 << 20)


@pytest.fixture
def slow_link(link: Callable[[float], None]) -> None:
    link(1e4)  # so slow that auto packs


@pytest.fixture
def all_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan to move all tensors, to the disk where there is one."""

    def choose(profile: StepProfile) -> Plan:
        tier = Candidate("host" if profile.disk is None else "disk")
        return plan_of(profile, {each.site: tier for each in profile.sites if each.movable})

    follow(monkeypatch, choose)


def held() -> Counter[str]:
    """Return what this process holds: threads and files by name, and numbers of all else."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    host_arena().trim()
    found = Counter(thread.name for thread in threading.enumerate())
    found.update(host_arena().stats())
    objects = gc.get_objects()
    locked = [each for each in objects if type(each) is MappedMemory and each.is_pinned()]
    found["page-locked bytes"] = sum(memory.nbytes for memory in locked)
    unused = sum(map(len, events._free.values()))
    found["events"] = sum(issubclass(type(each), torch.cuda.Event) for each in objects) - unused
    found["bytes of GPUs"] = torch.cuda.memory_allocated()
    found.update(name for name in map(open_name, os.listdir("/proc/self/fd")) if "/" in name)
    return found


def open_name(number: str) -> str:
    """Return the name of what is open; "" for the listing itself, which is closed by now."""
    try:
        name = os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:
        return ""
    return re.sub(r"/#\d+ ", "/ ", name)  # of a file without a name


class Steps:
    """Steps of a model with one input, and the gradients of plain training."""

    def __init__(self, device: str, folder: Path) -> None:
        torch.manual_seed(2)
        self.folder = folder
        self.model = Failing().to(device)
        self.x = torch.randn(16, 8, device=device)
        self.plain = self.gradients()

    def gradients(self) -> list[torch.Tensor]:
        """Train a step; return its gradients, which the model gives up."""
        try:
            self.model(self.x).square().sum().backward()
            return [p.grad for p in self.model.parameters() if p.grad is not None]
        finally:
            self.model.zero_grad()
            if self.x.is_cuda:
                torch.cuda.synchronize()  # so that auto knows what it has measured

    def check(self, passes: int = 1) -> None:
        for _ in range(passes):
            assert all(map(torch.equal, self.gradients(), self.plain))

    def attach(self, policy: str) -> bitslab.ActivationOffload:
        options = dict(POLICIES[policy])
        if "disk" in options:
            options["disk"] = self.folder
        return bitslab.offload_activations(self.model, min_bytes=64, in_flight_bytes=0, **options)


def fails_once(
    real: Callable[..., Any], error: BaseException, calls: list[int], at: int
) -> Callable[..., Any]:
    """Return a function that raises at a call, counted from 1, and else does what another does."""

    def failing(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise error
        return real(*args, **more)

    return failing


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward", "store", "bytes_of", "fetch"])
def test_a_step_that_fails_leaves_nothing(
    where: str,
    error: type[BaseException],
    policy: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """In the model's own passes, and in what the hooks of saved tensors do."""
    steps, passes = Steps(device, tmp_path), PASSES.get(policy, USUAL_PASSES)
    offload = steps.attach(policy)
    steps.check(passes)  # what is compiled and measured once remains
    offload.detach()
    del offload
    before = held()
    offload = steps.attach(policy)
    steps.check(passes)
    assert (offload.plan is not None) == (policy in PASSES)
    failure = error("on purpose")
    with monkeypatch.context() as patch:
        if where == "forward":
            patch.setattr(steps.model, "error", failure)
        elif where == "backward":
            patch.setattr(steps.model, "backward_error", failure)
        else:
            at = 2 if where == "store" else 1  # when other tensors are on their way
            failing = fails_once(getattr(Executor, where), failure, [], at)
            patch.setattr(Executor, where, failing)
        with pytest.raises(error, match="on purpose"):
            steps.gradients()
    failure.with_traceback(None)  # its frames hold the graph, which holds what raised it
    steps.check()
    stats = offload.stats()
    assert stats["moved_tensors"] > 0
    assert policy != "planned-disk" or stats["disk_written_bytes"] > 0
    offload.detach()
    del offload
    if policy in FITTED:
        before["bytes of GPUs"] += TABLES_BYTES
    assert not held() - before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_thread_that_encodes_leaves_nothing(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its tensor is kept."""
    steps = Steps("cpu", tmp_path)
    before = held()
    offload = steps.attach("static")
    calls: list[int] = []
    failure = error("on purpose")
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="on purpose"):
        failing = fails_once(traffic.encode, failure, calls, 2)
        patch.setattr(crossing, "encode", failing)
        steps.check()
    assert len(calls) >= 2
    failure.with_traceback(None)
    steps.check(2)
    offload.detach()
    del offload
    assert not held() - before


@pytest.mark.parametrize("where", ["error", "backward_error"])
def test_a_step_that_fails_does_not_end_comparisons(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is measured, and never over."""
    compared: list[int] = []

    def compare(plan: Plan, found: list[MeasuredStep], **_: Any) -> Correction:
        compared.append(len(found))
        return Correction("holds", "The plan holds.")

    monkeypatch.setattr(planned, "compare", compare)
    steps = Steps("cpu", tmp_path)
    offload = bitslab.offload_activations(steps.model, min_bytes=64, slowdown=0.5, profile_every=4)
    policy: Any = offload._policy
    steps.check(PASSES["planned"])
    with monkeypatch.context() as patch:
        patch.setattr(steps.model, where, ValueError("on purpose"))
        with pytest.raises(ValueError, match="on purpose"):
            steps.gradients()
    assert not compared
    steps.check(12)
    assert len(compared) >= 2
    with monkeypatch.context() as patch:
        patch.setattr(steps.model, where, ValueError("on purpose"))
        for _ in range(10 * planned.MOST_MEASURED):
            with pytest.raises(ValueError, match="on purpose"):
                steps.gradients()
    assert len(policy._measuring) == planned.MOST_MEASURED
    offload.detach()
