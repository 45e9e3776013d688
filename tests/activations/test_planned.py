"""The planner in training: what it does by itself, what it says, and that nothing else changes."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bitslab
from bitslab import ArgumentError, ArgumentTypeError
from bitslab.activations import planned as planned_module
from bitslab.engine.advisor.planning import (
    Candidate,
    Correction,
    MeasuredStep,
    MemoryLimitError,
    Plan,
    StepProfile,
    make_plan,
)

pytestmark = pytest.mark.usefixtures("one_thread", "quick_measuring")

HIDDEN, ROWS = 32, 256
#: What a step of `blocks` saves, and a limit below that.
KEPT_BYTES, LIMIT = 2_334_720, 1_000_000


class Block(nn.Module):
    """Norm, SwiGLU, and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate, self.up = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down, self.drop = nn.Linear(4 * HIDDEN, HIDDEN), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        made: torch.Tensor = x + self.drop(self.down(F.silu(self.gate(y)) * self.up(y)))
        return made


def blocks(dropout: float = 0.0, n: int = 4) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(Block(dropout) for _ in range(n)))


def steps(
    model: nn.Module,
    n: int = 6,
    rows: Callable[[int], int] = lambda _: ROWS,
    between: Callable[[int], None] = lambda _: None,
) -> Iterator[torch.Tensor]:
    """Train, and yield all that each step has computed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(11)
    for i in range(n):
        x = torch.randn(rows(i), HIDDEN, generator=generator, requires_grad=True)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        between(i)
        assert x.grad is not None
        yield loss.detach()
        yield x.grad
        yield from (p.detach().clone() for p in model.parameters())


def check(model: Callable[[], nn.Module], *, n: int = 6, **options: Any) -> Any:
    """Train plainly and as planned; return what planned it, still attached."""
    rows = options.pop("rows", lambda _: ROWS)
    expected = list(steps(model(), n, rows))
    planned = model()
    offload = bitslab.offload_activations(planned, min_bytes=1024, **options)
    found = list(steps(planned, n, rows))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return offload


def follow(monkeypatch: pytest.MonkeyPatch, choose: Callable[[StepProfile], Plan]) -> list[Plan]:
    """Let plans be chosen by a function; return those that were."""
    made: list[Plan] = []

    def plan(profile: StepProfile, **limits: Any) -> Plan:
        made.append(choose(profile))
        return made[-1]

    monkeypatch.setattr(planned_module, "make_plan", plan)
    return made


def plan_of(profile: StepProfile, chosen: dict[str, Candidate]) -> Plan:
    from bitslab.engine.advisor.planning import Solution, Timeline
    from bitslab.engine.advisor.planning.planner import described

    timeline = Timeline(profile)
    choices = timeline.choices(chosen)
    prediction, trace = timeline.follow(choices)
    plain = timeline.predict(timeline.keep_all())
    return described(timeline, Solution(choices, prediction, trace, True, 1e18), plain, "Chosen.")


def choices_of(offload: Any) -> set[str]:
    return {site.choice for site in offload.report().sites}


# What is done


@pytest.mark.parametrize("share", [0.25, 0.6])
def test_a_limit_of_memory_is_kept(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[MeasuredStep] = []

    def compare(plan: Plan, found: list[MeasuredStep], **_: Any) -> Correction:
        measured.extend(found)
        return Correction("holds", "The plan holds.")

    monkeypatch.setattr(planned_module, "compare", compare)
    memory = int(share * KEPT_BYTES)
    offload = check(blocks, n=8, memory=memory, codecs=[])
    plan = offload.plan
    assert plan is not None and not plan.declined
    assert plan.prediction.peak_bytes <= memory < plan.plain.peak_bytes == KEPT_BYTES
    # Checkpointed modules compute tensors again that are not counted on a CPU.
    assert measured and all(step.peak_bytes <= 1.03 * memory for step in measured)
    for step in measured:
        assert step.compute_s is not None and step.forward_compute_s is not None
        assert step.step_s > step.compute_s > step.forward_compute_s > 0


def test_nothing_is_moved_where_all_fits(holds: None) -> None:
    offload = check(blocks, memory="1GiB")
    assert offload.plan.declined
    assert "Declined: all fits" in "".join(offload.report().notes)
    assert choices_of(offload) == {"keep"}


def test_as_little_memory_as_costs_no_more_than_that(holds: None) -> None:
    offload = check(blocks, slowdown=0.5)
    plan = offload.plan
    assert plan.memory_bytes is None and plan.slowdown == 0.5
    assert plan.prediction.step_s <= plan.plain.step_s * 1.5
    assert plan.prediction.peak_bytes < plan.plain.peak_bytes


@pytest.mark.parametrize("memory", [None, "2GB"])
def test_replays_of_what_was_found_exact(
    memory: str | None, monkeypatch: pytest.MonkeyPatch, holds: None
) -> None:
    def choose(profile: StepProfile) -> Plan:
        replayed = {s.site: Candidate("replay") for s in profile.sites if s.replay_s is not None}
        return plan_of(profile, replayed)

    plans = follow(monkeypatch, choose)
    offload = check(blocks, memory=memory, slowdown=0.1)
    replayed = [each for each in plans[0].sites if each.candidate.action == "replay"]
    # In each block what both linear layers return, the SiLU, and its product with the other half.
    assert len(replayed) == 16
    rows = {site.unit.name: site for site in offload.report().sites}
    for each in replayed:
        assert rows[each.site].choice == "replay"
        assert rows[each.site].tensors >= 6 - 4  # one warms up, two are profiled, one keeps all
        assert rows[each.site].reason.startswith("Replayed in ")
    saved = sum(each.nbytes for each in replayed)
    assert plans[0].prediction.peak_bytes < plans[0].plain.peak_bytes - saved / 2


def test_blocks_with_swiglu_keep_a_quarter_fewer_bytes_by_replays_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[MeasuredStep] = []

    def choose(profile: StepProfile) -> Plan:
        replayed = {s.site: Candidate("replay") for s in profile.sites if s.replay_s is not None}
        return plan_of(profile, replayed)

    def compare(plan: Plan, found: list[MeasuredStep], **_: Any) -> Correction:
        measured.extend(found)
        return Correction("holds", "The plan holds.")

    follow(monkeypatch, choose)
    monkeypatch.setattr(planned_module, "compare", compare)
    offload = check(blocks, n=10, slowdown=0.1)
    assert choices_of(offload) == {"keep", "replay"}
    assert measured and all(step.peak_bytes <= 0.75 * KEPT_BYTES for step in measured)


def test_sources_of_replays_may_be_moved(monkeypatch: pytest.MonkeyPatch, holds: None) -> None:
    def choose(profile: StepProfile) -> Plan:
        chosen = {s.site: Candidate("host") for s in profile.sites}
        chosen |= {s.site: Candidate("replay") for s in profile.sites if s.replay_s is not None}
        return plan_of(profile, chosen)

    follow(monkeypatch, choose)
    offload = check(blocks, slowdown=0.1, verify=1)
    assert {"replay", "raw"} <= choices_of(offload)


def test_a_replay_that_was_not_exact_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(again: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.ones((), dtype=torch.int64)

    from bitslab.activations import replay_trials

    monkeypatch.setattr(replay_trials, "differing_elements", wrong)
    profiles: list[StepProfile] = []

    def choose(profile: StepProfile) -> Plan:
        profiles.append(profile)
        return plan_of(profile, {})

    follow(monkeypatch, choose)
    check(blocks, slowdown=0.1)
    assert profiles and all(s.replay_s is None for s in profiles[0].sites)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("codec", [None, "ibp-blob"])
@pytest.mark.parametrize("action", ["host", "device"])
def test_moved_and_packed(
    action: str, codec: str | None, monkeypatch: pytest.MonkeyPatch, holds: None
) -> None:
    if action == "device" and codec is None:
        codec = "zvc+ibp"
    wanted = Candidate(action, codec)  # type: ignore[arg-type]

    def choose(profile: StepProfile) -> Plan:
        able = [
            s.site
            for s in profile.sites
            if codec is None or (codec in s.packings and s.packings[codec].share < 1)
        ]
        return plan_of(profile, dict.fromkeys(able, wanted))

    plans = follow(monkeypatch, choose)
    offload = check(blocks, slowdown=0.1, codecs=[codec] if codec else None)
    chosen = {each.site for each in plans[0].sites if each.candidate == wanted}
    rows = {site.unit.name: site for site in offload.report().sites}
    assert chosen and {rows[name].choice for name in chosen} == {codec or "raw"}
    assert {rows[name].unit.tier for name in chosen} == {action}
    assert (offload.stats()["moved_out_bytes"] > 0) == (action == "host")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_modules(dropout: float, monkeypatch: pytest.MonkeyPatch, holds: None) -> None:
    def choose(profile: StepProfile) -> Plan:
        inside = {s.site: Candidate("checkpoint") for s in profile.sites if s.module in ("0", "2")}
        return plan_of(profile, inside)

    follow(monkeypatch, choose)
    model: Any = blocks(dropout)
    runs: list[int] = []
    model[2].norm.register_forward_hook(lambda *_: runs.append(1))
    offload = check(lambda: blocks(dropout), slowdown=0.1)
    assert offload.plan.modules == ("0", "2")
    assert "Checkpointed: 0, 2." in offload.report().notes
    assert "forward" in offload._attachment.model[0].__dict__
    offload.detach()

    offload = bitslab.offload_activations(model, min_bytes=1024, slowdown=0.1)
    list(steps(model))
    # Once more in each planned step (between them one keeps all), and once to see that it may.
    assert len(runs) == 6 + 2 + 1
    offload.detach()
    assert not any("forward" in each.__dict__ for each in model.modules())


def test_copies_of_a_model_with_checkpointed_modules_are_plain(
    monkeypatch: pytest.MonkeyPatch, holds: None
) -> None:
    def choose(profile: StepProfile) -> Plan:
        return plan_of(profile, {s.site: Candidate("checkpoint") for s in profile.sites})

    follow(monkeypatch, choose)
    model: Any = blocks()
    offload = bitslab.offload_activations(model, min_bytes=1024, slowdown=0.1)
    list(steps(model))
    assert "forward" in model[0].__dict__
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any("forward" in each.__dict__ for each in made.modules())
        assert torch.equal(made(torch.ones(2, HIDDEN)), model(torch.ones(2, HIDDEN)))
    offload.detach()


class Norms(nn.Module):
    """Changes its buffers in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(self.norm(x)).sigmoid()
        return made


def test_modules_that_change_buffers_are_not_computed_again(holds: None) -> None:
    def model() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(Norms(), Norms(), Block())

    with pytest.warns(UserWarning, match="the least possible is"):
        offload = check(model, memory=30_000)
    assert not {"0", "1"} & set(offload.plan.modules)
    notes = "".join(offload.report().notes)
    assert "0: It changes buffers or inputs, and would change them twice." in notes


def test_without_recompute_nothing_is_computed_again(holds: None) -> None:
    offload = check(blocks, memory=LIMIT, recompute=False)
    actions = {each.candidate.action for each in offload.plan.sites}
    assert "host" in actions and not {"replay", "checkpoint"} & actions


# Other steps than the one that was planned


def test_other_batch_sizes(holds: None) -> None:
    sizes = [ROWS, ROWS, ROWS, ROWS, 3, ROWS, 2 * ROWS, ROWS, 2 * ROWS, 2 * ROWS, ROWS, 40]
    offload = check(blocks, n=len(sizes), rows=lambda i: sizes[i], memory=2 * LIMIT)
    assert "sites were not as in the profiled step" in "".join(offload.report().notes)


class Branches(nn.Module):
    """Takes another way for few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.last = Block(), Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(self.first(x) if len(x) % 2 == 0 else self.other(x).sin())
        return made


def test_a_branch_that_was_not_planned(holds: None) -> None:
    def model() -> nn.Module:
        torch.manual_seed(3)
        return Branches()

    offload = check(model, n=7, rows=lambda i: ROWS - (i in (4, 6)), memory=int(1.5 * LIMIT))
    moved = [s for s in offload.report().sites if s.unit.name.startswith("other")]
    assert moved and all(s.choice == "raw" for s in moved if s.unit.name != "other:3")
    assert any("not in the profiled step" in s.reason for s in moved)


def test_evaluation_and_inference_in_between(holds: None) -> None:
    model, plain = blocks(0.2), blocks(0.2)
    offload = bitslab.offload_activations(model, min_bytes=1024, memory=LIMIT)
    x = torch.ones(8, HIDDEN)

    def evaluate(of: nn.Module, into: list[torch.Tensor]) -> Callable[[int], None]:
        def run(_: int) -> None:
            of.eval()
            with torch.no_grad():
                into.append(of(x))
            with torch.inference_mode():
                into.append(of(x).clone())
            of.train()

        return run

    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    a = list(steps(model, 7, between=evaluate(model, found)))
    b = list(steps(plain, 7, between=evaluate(plain, expected)))
    assert all(torch.equal(x, y) for x, y in zip(a + found, b + expected, strict=True))
    offload.detach()


@pytest.mark.parametrize("hints", [False, True])
def test_micro_batches_whose_passes_take_turns(hints: bool, holds: None) -> None:
    def train(model: nn.Module, offload: Any) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(7)
        found = []
        for _ in range(5):
            model.zero_grad()
            waiting: list[torch.Tensor] = []
            for i in range(4):  # one forward, one backward, two under way
                if offload is not None and hints:
                    offload.micro_batch(i)
                    offload.stage_begins("forward")
                x = torch.randn(ROWS, HIDDEN, generator=generator)
                waiting.append(model(x).square().mean())
                if len(waiting) == 2:
                    if offload is not None and hints:
                        offload.micro_batch(i - 1)
                        offload.stage_begins("backward")
                    waiting.pop(0).backward()
            waiting.pop().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    expected = train(blocks(), None)
    model = blocks()
    offload = bitslab.offload_activations(model, min_bytes=1024, memory=LIMIT)
    found = train(model, offload)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert offload.plan is not None and not offload.plan.declined
    offload.detach()


def test_the_backward_stage_fetches_what_is_read_first(
    monkeypatch: pytest.MonkeyPatch, holds: None
) -> None:
    def choose(profile: StepProfile) -> Plan:
        return plan_of(profile, {s.site: Candidate("host") for s in profile.sites})

    follow(monkeypatch, choose)
    model = blocks()
    offload = bitslab.offload_activations(model, min_bytes=1024, slowdown=0.1, in_flight_bytes=0)
    list(steps(model, 8))
    before = offload.stats()["moved_in_bytes"]
    loss = model(torch.randn(ROWS, HIDDEN)).sum()
    assert offload.stats()["moved_in_bytes"] == before
    offload.stage_begins("backward")
    assert offload.stats()["moved_in_bytes"] > before
    loss.backward()
    with pytest.raises(ArgumentError, match="stage: 'middle', accepted are"):
        offload.stage_begins("middle")
    with pytest.raises(ArgumentError, match="number: -1"):
        offload.micro_batch(-1)
    offload.detach()


def test_a_context_in_the_place_of_save_on_cpu(holds: None) -> None:
    offload = bitslab.ActivationOffload(memory=LIMIT, min_bytes=1024)
    found: list[Any] = []
    expected: list[Any] = []
    for kept, context in ((found, offload), (expected, torch.enable_grad())):
        model = blocks()
        generator = torch.Generator().manual_seed(7)
        for _ in range(6):
            x = torch.randn(ROWS, HIDDEN, generator=generator, requires_grad=True)
            with context:
                loss = model(x).square().mean()
            loss.backward()
            kept.append(x.grad)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert offload.plan is not None and not offload.plan.declined and not offload.plan.modules


# What is said


def test_a_limit_that_cannot_be_met_names_the_least(holds: None) -> None:
    with pytest.warns(UserWarning, match=r"memory_bytes: 1,000, and the least possible is"):
        offload = check(blocks, memory=1000)
    assert offload.plan.memory_bytes > 1000
    with pytest.raises(MemoryLimitError) as caught:
        make_plan(offload.step_profile, memory_bytes=1000)
    assert caught.value.least_bytes == offload.plan.memory_bytes


def test_the_plan_is_written_read_and_shown(tmp_path: Any, holds: None) -> None:
    offload = bitslab.ActivationOffload(memory=LIMIT)
    assert offload.plan is None
    assert "Nothing is planned yet: no profiled step is over." in offload.report().notes
    offload = check(blocks, memory=LIMIT)
    offload.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == offload.plan
    shown = str(offload.report())
    assert "A step is predicted to wait " in shown
    assert "policy planned" in shown and "Plan: Fits 1,000,000 bytes." in shown


def test_a_graph_that_is_dropped_is_not_planned(holds: None) -> None:
    model = blocks()
    offload = bitslab.offload_activations(model, min_bytes=1024, memory=LIMIT)
    for _ in range(4):
        model(torch.randn(ROWS, HIDDEN))
    assert "Nothing is planned yet: no profiled step is over." in offload.report().notes
    list(steps(model, 5))
    assert offload.plan is not None
    offload.detach()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory": 0}, "memory: 0, accepted are bytes above 0, text as '60GiB'"),
        ({"memory": 1.5}, "memory: 1.5, accepted are"),
        ({"memory": "60 cows"}, "memory: '60 cows', accepted are"),
        ({"memory": "0GiB"}, "memory: '0GiB', accepted are"),
        ({"slowdown": -0.1}, "slowdown: -0.1, accepted are numbers from 0"),
        ({"slowdown": 0.1, "policy": "raw"}, "policy: 'raw' with memory or slowdown"),
        ({"slowdown": 0.1, "lossy": "zfp"}, "lossy: 'zfp' with memory or slowdown"),
    ],
)
def test_arguments_that_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        bitslab.ActivationOffload(**options)


@pytest.mark.parametrize("options", [{"memory": True}, {"memory": b"1"}, {"slowdown": "2%"}])
def test_arguments_of_another_type(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentTypeError, match=f"{next(iter(options))}: expected"):
        bitslab.ActivationOffload(**options)


def test_limits_as_people_write_them() -> None:
    from bitslab.activations.memory_limit import checked_memory, limit_bytes

    cpu = torch.device("cpu")
    written = ["60GiB", "1.5 kb", "7", 12, " 2 MiB "]
    assert [limit_bytes(checked_memory(each), cpu) for each in written] == [
        60 << 30, 1500, 7, 12, 2 << 20,
    ]  # fmt: skip
    half, whole = (limit_bytes(checked_memory(each), cpu) for each in (0.5, 1.0))
    assert 0 < half <= whole // 2 < whole


def test_without_either_nothing_is_planned() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        offload = check(blocks, policy="raw")
    assert offload.plan is None and offload.policy == "raw"
