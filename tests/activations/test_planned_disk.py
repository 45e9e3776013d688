"""Plans with a disk: what is read ahead of its fetch, and how much is written."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bitslab
from bitslab.activations.copies import StoredCopy
from bitslab.activations.executor import Executor
from bitslab.activations.hooks import SavedTensorHooks
from bitslab.activations.planned_passes import read_ahead_bytes
from bitslab.engine.advisor.planning import (
    Candidate,
    Plan,
    Solution,
    StepProfile,
    Timeline,
    make_plan,
)
from bitslab.engine.advisor.planning.planner import described
from tests.activations.test_planned import HIDDEN, ROWS, blocks, follow, plan_of, steps

pytestmark = pytest.mark.usefixtures("one_thread", "quick_measuring", "quick_disk", "holds")


def as_on_a_gpu(profile: StepProfile) -> Plan:
    """Return the plan of everything on the disk, read to the host ahead of its fetch."""
    timeline = Timeline(replace(profile, read_ahead_bytes=read_ahead_bytes(profile, None)))
    choices = timeline.choices({s.site: Candidate("disk") for s in profile.sites})
    limit = 1.6 * float(timeline.floor(choices).max())  # room for some that are fetched ahead
    prediction, trace = timeline.follow(choices, limit_bytes=limit)
    plain = timeline.predict(timeline.keep_all())
    return described(timeline, Solution(choices, prediction, trace, True, limit), plain, "Chosen.")


def train(folder: Path, **options: Any) -> tuple[bitslab.ActivationOffload, bool]:
    """Train as planned; return what planned it, and whether results are those of plain training."""
    plain = list(steps(blocks()))
    model = blocks()
    offload = bitslab.offload_activations(
        model, min_bytes=1024, slowdown=0.1, disk=folder, codecs=[], **options
    )
    found = list(steps(model))
    return offload, all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_a_modules_tensors_are_read_when_the_backward_pass_enters_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow(monkeypatch, as_on_a_gpu)
    events: list[tuple[str, str]] = []
    real_ahead, real_bytes = SavedTensorHooks._read_ahead, Executor.bytes_of

    def read_ahead(self: SavedTensorHooks, copy: StoredCopy) -> None:
        events.append(("ahead", copy.name))
        real_ahead(self, copy)

    def bytes_of(self: Executor, copy: StoredCopy, more: bool) -> torch.Tensor:
        events.append(("read", copy.name))
        return real_bytes(self, copy, more)

    monkeypatch.setattr(SavedTensorHooks, "_read_ahead", read_ahead)
    monkeypatch.setattr(Executor, "bytes_of", bytes_of)
    offload, same = train(tmp_path)
    assert same
    assert offload.plan is not None and all(s.read_after is not None for s in offload.plan.sites)
    last = max(i for i, event in enumerate(events) if event[0] == "ahead") + 1
    first = last
    while first and len({name for what, name in events[first:last] if what == "ahead"}) < len(
        offload.plan.sites
    ):
        first -= 1
    step = events[first:]  # the last one
    ahead = {name: i for i, (what, name) in enumerate(step) if what == "ahead"}
    entered: dict[int, int] = {}
    for i, (what, name) in enumerate(step):
        if what == "read":
            entered.setdefault(int(name[0]), i)
    assert list(entered) == [3, 2, 1, 0]
    assert {int(name[0]) for name in ahead} == {0, 1, 2, 3}
    for name, at in ahead.items():
        block = int(name[0])
        if block == 0:  # two blocks are there at a time
            assert at > entered[3], name
        if block < 3:
            next_read = min(i for i, (what, _) in enumerate(step) if what == "read" and i > at)
            assert next_read < entered[block], name
    offload.close()


def test_host_memory_bounds_what_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StepProfile] = []

    def choose(profile: StepProfile) -> Plan:
        made.append(profile)
        return make_plan(profile, slowdown=0.0)

    follow(monkeypatch, choose)
    model = blocks()
    offload = bitslab.offload_activations(model, min_bytes=1024, slowdown=0.1, codecs=[])
    list(steps(model, 4))
    offload.detach()
    profile = made[0]
    total = sum(site.nbytes for site in profile.sites)
    whole = read_ahead_bytes(profile, None)
    # Two of four blocks that are alike, and what is saved twice is saved in one of them.
    assert 0.4 * total < whole < 0.6 * total
    assert read_ahead_bytes(profile, 1000) == 1000
    assert profile.read_ahead_bytes == 0  # on a CPU it would be memory of the device itself


def test_a_fetch_that_was_not_read_yet_begins_with_a_later_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow(monkeypatch, as_on_a_gpu)
    tried: dict[int, int] = {}
    waited: list[str] = []
    real = Executor.fetch

    def fetch(self: Executor, copy: StoredCopy, *, now: bool = False) -> None:
        if now and not copy.is_here:
            waited.append(copy.name)
        tried[id(copy)] = tried.get(id(copy), 0) + 1
        if now or tried[id(copy)] > 1:  # its disk has answered by then
            real(self, copy, now=now)

    offload, same = train(tmp_path)
    assert same
    offload.close()
    model = blocks()
    offload = bitslab.offload_activations(
        model, min_bytes=1024, slowdown=0.1, disk=tmp_path, codecs=[], in_flight_bytes=0
    )
    list(steps(model, 5))  # the next one follows the plan
    monkeypatch.setattr(Executor, "fetch", fetch)
    loss = model(torch.randn(256, 32)).square().mean()
    tried.clear()
    loss.backward()
    assert len(tried) > 8
    assert len(waited) <= 3, waited  # what is read first has no read before it
    offload.close()


def test_a_plan_writes_what_its_budget_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles: list[StepProfile] = []

    def choose(profile: StepProfile) -> Plan:
        profiles.append(replace(profile, host_bytes=0))
        return make_plan(profiles[-1], slowdown=10.0)

    follow(monkeypatch, choose)
    offload, same = train(tmp_path, write_budget=20, recompute=False, drive="d7-p5620")
    assert same
    profile, plan = profiles[-1], offload.plan
    assert profile.write_bytes_per_s == pytest.approx(20e12 / 86400)
    assert plan is not None and plan.budget_bytes == int(profile.step_s * 20e12 / 86400)
    assert 0 < plan.prediction.written_bytes <= plan.budget_bytes
    notes = "".join(offload.report().notes)
    assert "that its write budget allows" in notes
    movable_mb = sum(site.nbytes for site in profile.sites if site.movable) / 1e6
    assert f"To take all {movable_mb:,.1f} MB of a step's tensors" in notes
    offload.close()


def test_what_may_not_remain_on_the_host_is_planned_to_the_disk(tmp_path: Path) -> None:
    model = blocks()
    options = {"min_bytes": 1024, "memory": 1_400_000, "disk": tmp_path, "recompute": False}
    offload = bitslab.offload_activations(model, tiers="disk", **options)
    list(steps(model))
    plan, profile = offload.plan, offload.step_profile
    assert plan is not None and profile is not None and not profile.has_host_tier
    actions = {each.candidate.action for each in plan.sites}
    assert "disk" in actions and "host" not in actions
    assert plan.prediction.written_bytes > 0
    assert f"of them {plan.prediction.written_bytes / 1e6:,.1f} to the disk" in "".join(
        offload.report().notes
    )
    offload.close()


def test_the_host_is_planned_as_far_as_a_disk_leaves_it_to_tensors(tmp_path: Path) -> None:
    model = blocks()
    offload = bitslab.offload_activations(
        model, min_bytes=1024, slowdown=0.1, disk=tmp_path, host_bytes=600_000
    )
    list(steps(model, 4))
    assert offload.step_profile is not None
    assert offload.step_profile.host_bytes == 300_000  # the other half is for those on their way
    offload.close()


COUNTED = (
    "moved_out_bytes",
    "crossed_out_bytes",
    "crossed_in_bytes",
    "disk_written_bytes",
    "disk_read_bytes",
    "disk_forwarded_bytes",
)


def written(offload: bitslab.ActivationOffload) -> dict[str, int]:
    """Wait until all that was saved is on the disk; return what was counted."""
    before: dict[str, int] = {}
    until = time.monotonic() + 20
    while time.monotonic() < until:
        now = {name: offload.stats()[name] for name in COUNTED}
        if now == before and now["disk_written_bytes"] == now["crossed_out_bytes"]:
            return now
        before = now
        time.sleep(0.05)
    raise AssertionError(f"not written after 20 s: {before}")


@pytest.mark.parametrize("codec", ["ibp-blob", None])
def test_a_plan_that_packs_for_the_disk_writes_packed_bytes_alone(
    codec: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(profile: StepProfile) -> Plan:
        able = [s.site for s in profile.sites if codec is None or s.packings[codec].share < 1]
        return plan_of(profile, dict.fromkeys(able, Candidate("disk", codec)))

    plans = follow(monkeypatch, choose)

    def train(model: nn.Module, offload: bitslab.ActivationOffload | None) -> list[torch.Tensor]:
        torch.manual_seed(11)
        found = []
        for _ in range(6):
            x = torch.randn(ROWS, HIDDEN, requires_grad=True)
            model.zero_grad()
            loss = model(x).square().mean()
            if offload is not None:
                counted.append(written(offload))
            loss.backward()
            assert x.grad is not None
            found += [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        return found

    counted: list[dict[str, int]] = []
    model = blocks()
    offload = bitslab.offload_activations(
        model,
        min_bytes=1024,
        slowdown=0.1,
        disk=tmp_path,
        tiers="disk",
        codecs=[codec] if codec else None,
        in_flight_bytes=0,
        verify=True,
    )
    found = train(model, offload)
    counted.append(written(offload))
    assert all(torch.equal(a, b) for a, b in zip(found, train(blocks(), None), strict=True))
    chosen = {s.site for s in plans[0].sites if s.candidate == Candidate("disk", codec)}
    rows = {site.unit.name: site for site in offload.report().sites}
    assert chosen and {rows[name].choice for name in chosen} == {codec or "raw"}
    assert {rows[name].unit.tier for name in chosen} == {"disk"}
    begin, last, end = counted[2], counted[-2], counted[-1]  # the fourth step is planned
    raw, crossed, back, to_disk, read, forwarded = (end[n] - begin[n] for n in COUNTED)
    assert forwarded == 0 < to_disk == crossed == back
    assert raw > to_disk if codec else raw == to_disk
    assert read == to_disk and last["disk_written_bytes"] == end["disk_written_bytes"]
    offload.close()
