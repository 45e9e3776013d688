"""Plans whose copies take longer than measured: what leaves makes room for what is read."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest

import bitslab
from bitslab.activations import crossing
from bitslab.activations import hooks as hooks_module
from bitslab.activations import planned as planned_module
from bitslab.activations.executor import Executor
from bitslab.activations.pass_record import PassPlan
from bitslab.activations.planned_passes import pass_plan, read_order
from bitslab.engine.advisor.planning import Candidate, Plan, StepProfile
from tests.activations.test_planned import blocks, check, follow, plan_of, steps

pytestmark = pytest.mark.usefixtures("one_thread", "quick_measuring")

#: Bytes that were on their way before a wait until none is, and behind it; or the name of a read.
Seen = list[tuple[int, int] | str]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Collect waits until nothing is on its way out."""
    found: Seen = []

    class Watched(Executor):
        def bound_in_flight(self, nbytes: int | None, *, now: bool = False) -> None:
            before = self._originals.in_flight_bytes
            super().bound_in_flight(nbytes, now=now)
            if now and nbytes == 0:
                found.append((before, self._originals.in_flight_bytes))

    monkeypatch.setattr(hooks_module, "Executor", Watched)
    return found


@pytest.mark.parametrize("kind", ["keep", "host", "replay"])
def test_reads_wait_for_what_leaves_where_a_plan_says_so(
    kind: str, monkeypatch: pytest.MonkeyPatch, holds: None, seen: Seen
) -> None:
    """Copies take long; what is read first leaves no room for them."""
    real, copy_on_host = pass_plan, crossing.copy_on_host
    first: list[str] = []

    def planned(plan: Plan, profile: StepProfile, *rest: Any, **options: Any) -> PassPlan:
        made = real(plan, profile, *rest, **options)
        actions = plan.choices()
        first[:] = [profile.sites[i].site for i in read_order(profile)]
        first[:] = [name for name in first if actions[name].action == kind][:1]
        return replace(
            made,
            in_flight_bytes=dict.fromkeys(made.in_flight_bytes, 1 << 30),
            backward_in_flight_bytes=dict.fromkeys(first, 0),
            named={**made.named, **({first[0]: first[0]} if kind == "keep" else {})},
        )

    def slow(*args: Any) -> None:
        time.sleep(2e-3)
        copy_on_host(*args)

    def choose(profile: StepProfile) -> Plan:
        able = [each for each in profile.sites if each.movable and each.nbytes]
        chosen = {each.site: Candidate("host") for each in able}
        replayed = [each.site for each in able if each.replay_s is not None]
        last = [profile.sites[i].site for i in read_order(profile)]
        if kind == "replay":
            own = next(name for name in last if name in replayed)
            chosen[own] = Candidate("replay")
        elif kind == "keep":
            del chosen[next(name for name in last if name in chosen)]
        return plan_of(profile, chosen)

    monkeypatch.setattr(planned_module, "pass_plan", planned)
    monkeypatch.setattr(crossing, "copy_on_host", slow)
    follow(monkeypatch, choose)
    check(blocks, n=8, slowdown=0.5, codecs=[])
    assert first
    waits = [each for each in seen if isinstance(each, tuple)]
    assert any(before for before, _ in waits)  # copies were on their way
    assert all(after == 0 for _, after in waits)


def test_the_read_of_a_view_is_that_of_what_was_planned(
    monkeypatch: pytest.MonkeyPatch, holds: None, seen: Seen
) -> None:
    """`up` reads what `gate` has saved, and reads it first."""
    real, read_kept = pass_plan, hooks_module.SavedTensorHooks._read_kept
    own, view = "3.gate:0", "3.up:0"

    def planned(*given: Any, **options: Any) -> PassPlan:
        passes = replace(real(*given, **options), backward_in_flight_bytes={own: 0})
        return replace(passes, named={**passes.named, own: own, view: given[3][view]})

    def read(self: Any, packed: Any) -> None:
        seen.append(packed.name)
        read_kept(self, packed)

    def choose(profile: StepProfile) -> Plan:
        able = [each.site for each in profile.sites if each.movable and each.nbytes]
        return plan_of(profile, dict.fromkeys(set(able) - {own}, Candidate("host")))

    monkeypatch.setattr(planned_module, "pass_plan", planned)
    monkeypatch.setattr(hooks_module.SavedTensorHooks, "_read_kept", read)
    follow(monkeypatch, choose)
    check(blocks, n=8, slowdown=0.5, codecs=[])
    behind = [after for before, after in zip(seen, seen[1:], strict=False) if before == view]
    assert any(isinstance(each, tuple) for each in behind)  # others are of passes without a plan


def test_a_limit_that_cannot_be_met_holds_no_tensor_of_a_pass(holds: None) -> None:
    """Nothing of the pass in which it was planned waits for the garbage collector."""
    model = blocks()
    with pytest.warns(UserWarning, match="the plan of least memory is followed"):
        offload = bitslab.offload_activations(model, min_bytes=1024, memory=1000, codecs=[])
        collected = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            outputs: list[weakref.ref[Any]] = []
            model.register_forward_hook(lambda _, __, out: outputs.append(weakref.ref(out)))
            for _ in steps(model, 5):
                pass
            frames = [each for each in gc.get_objects() if type(each).__name__ == "traceback"]
        finally:
            if collected:
                gc.enable()
    assert offload.plan is not None
    assert [ref() is None for ref in outputs[:-1]] == [True] * 4
    assert not [each for each in frames if "planner" in each.tb_frame.f_code.co_filename]
    offload.detach()
