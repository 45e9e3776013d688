"""Plans beside a disk that is there, fails, or is full, and limits that copies under way exceed."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bitslab
from bitslab.activations import measured_link, planned_tiers
from bitslab.activations import planned as planned_module
from bitslab.activations.disk import DiskRates as FolderRates
from bitslab.activations.disk import DiskTier, PosixFile
from bitslab.activations.measured_pass import MeasuredPass
from bitslab.activations.planned_tiers import PlannedTiers
from bitslab.activations.tiers import HostLimit, Tiers
from bitslab.engine.advisor import SwapLink
from bitslab.engine.advisor.planning import (
    Correction,
    DiskRates,
    MeasuredStep,
    Plan,
    StepProfile,
    drawn_profile,
)
from bitslab.engine.advisor.planning import compare as real_compare
from tests.activations.test_planned import LIMIT, blocks, steps

pytestmark = pytest.mark.usefixtures("one_thread", "quick_measuring", "quick_disk")

#: That the disk is needed for, since nothing is computed again or packed.
OPTIONS: dict[str, Any] = {"min_bytes": 1024, "recompute": False, "codecs": []}
PROFILE = drawn_profile(1, 20)


def train(
    folder: Path,
    n: int = 12,
    after: Callable[[int, bitslab.ActivationOffload], None] = lambda *_: None,
    **options: Any,
) -> bitslab.ActivationOffload:
    """Train as planned; `after` is called with the number of each step."""
    expected = list(steps(blocks(), n))
    model = blocks()
    given = {**OPTIONS, "memory": LIMIT, "disk": folder, **options}
    offload = bitslab.offload_activations(model, **given)
    found = list(steps(model, n, between=lambda i: after(i, offload)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return offload


def actions_of(offload: bitslab.ActivationOffload) -> set[str]:
    assert offload.plan is not None
    return {each.candidate.action for each in offload.plan.sites}


def plan_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rates be those by which the disk is planned, and not what computes again."""
    fields = PlannedTiers.fields

    def free(self: PlannedTiers, profile: StepProfile, *, on_gpu: bool) -> dict[str, Any]:
        found = fields(self, profile, on_gpu=on_gpu)
        return {**found, "disk": DiskRates(1e15, 1e15), "link": SwapLink(1e15, 1e15, 0.0)}

    monkeypatch.setattr(PlannedTiers, "fields", free)


def measured_peaks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return where peaks of planned steps are collected; every plan holds."""
    found: list[float] = []

    def compare(plan: Plan, measured: list[MeasuredStep], **_: Any) -> Correction:
        found.extend(step.peak_bytes for step in measured)
        return Correction("holds", "The plan holds.")

    monkeypatch.setattr(planned_module, "compare", compare)
    return found


# A disk that is there


def test_on_a_cpu_with_a_disk_nothing_is_planned_to_the_host(tmp_path: Path, holds: None) -> None:
    for options in ({}, {"recompute": True, "codecs": None}, {"host_bytes": 1 << 20}):
        offload = train(tmp_path, 6, **options)
        plan, profile = offload.plan, offload.step_profile
        assert plan is not None and profile is not None and not profile.has_host_tier
        assert "host" not in actions_of(offload)
        assert plan.prediction.host_bytes == 0
        if not options:
            assert plan.prediction.written_bytes > 0
        offload.close()


def test_with_no_disk_a_cpu_stands_for_a_gpu(tmp_path: Path) -> None:
    with DiskTier(tmp_path) as disk:
        tiers = [Tiers(), Tiers(disk=disk), Tiers(host=False, disk=disk)]
        for on_gpu, has_host in ((False, [True, False, False]), (True, [True, True, False])):
            fields = [PlannedTiers(t).fields(PROFILE, on_gpu=on_gpu) for t in tiers]
            assert [each["has_host_tier"] for each in fields] == has_host
            assert [each.get("disk") is None for each in fields] == [True, False, False]
            assert [each.get("read_ahead_bytes", 0) > 0 for each in fields] == [
                False,
                *[on_gpu] * 2,
            ]
        limited = PlannedTiers(Tiers(disk=disk, limit=HostLimit(1000)))
        assert limited.fields(PROFILE, on_gpu=True)["host_bytes"] == 500


def test_a_planned_step_on_a_cpu_waits_for_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than hold more than the limit allows, as it does for other copies."""
    real = PosixFile.write

    def write(*arguments: Any) -> None:
        time.sleep(0.02)
        real(*arguments)

    monkeypatch.setattr(PosixFile, "write", write)
    peaks = measured_peaks(monkeypatch)
    offload = train(tmp_path, 8)
    assert peaks and max(peaks) <= LIMIT
    assert offload.stats()["disk_written_bytes"] > 0
    offload.close()


# A disk that fails


@pytest.mark.parametrize("counted", [True, False], ids=["much", "little"])
def test_a_disk_that_is_slower_while_training_is_planned_as_slow(
    counted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: None
) -> None:
    moves = {"write": PosixFile.write, "read": PosixFile.read}

    def slow(kind: str) -> Callable[..., None]:
        def move(*arguments: Any) -> None:
            time.sleep(0.002)
            moves[kind](*arguments)

        return move

    for kind in moves:
        monkeypatch.setattr(PosixFile, kind, slow(kind))
    monkeypatch.setattr(planned_tiers, "COUNTED_BYTES", 1 if counted else 1 << 40)
    offload = train(tmp_path)
    assert offload.step_profile is not None and offload.step_profile.disk is not None
    found = offload.step_profile.disk
    most = (64 << 10) * 2 / 0.002  # of two threads with requests of 64 KiB, where the probe has 1e9
    for rate in (found.write_bytes_per_s, found.read_bytes_per_s):
        assert (0 < rate <= most) if counted else rate == 1e9


def fail(number: int) -> Callable[..., int]:
    def write(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    return write


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_disk_that_fails_is_planned_without(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: None
) -> None:
    """So that the limit is kept some other way, for the rest of training."""
    plans: list[Plan] = []

    def after(step: int, offload: bitslab.ActivationOffload) -> None:
        if offload.plan is not None and offload.plan not in plans:
            plans.append(offload.plan)
        if step == 5:
            monkeypatch.setattr("os.pwritev", fail(number))

    plan_the_disk(monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        offload = train(tmp_path, 12, after, recompute=True)
    said = [str(each.message) for each in caught if "does not take what was planned" in str(each)]
    before, plan = plans[0], plans[-1]
    assert before.prediction.written_bytes > 0
    assert plan.prediction.written_bytes == 0 and plan.prediction.peak_bytes <= LIMIT
    assert not {"host", "disk"} & actions_of(offload)
    assert len(said) == 1 and os.strerror(number) in said[0]
    assert any("Planned without the disk" in note for note in offload.report().notes)
    offload.close()


def test_no_plan_that_writes_is_followed_again_once_the_disk_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails while one is followed that does not write, and that is slower."""
    writes: list[float] = []
    gone: dict[str, Any] = dict.fromkeys(("disk", "disk_bytes", "write_bytes_per_s"))
    gone["read_ahead_bytes"] = 0
    make, failures = vars(planned_module)["make_plan"], iter([gone])

    def make_plan(profile: StepProfile, **limits: Any) -> Plan:
        plan: Plan = make(replace(profile, **gone) if writes else profile, **limits)
        writes.append(plan.prediction.written_bytes)
        return plan

    def lost(_: PlannedTiers, written_bytes: float) -> dict[str, Any]:
        return next(failures, {}) if writes and not written_bytes else {}

    def compare(plan: Plan, measured: list[MeasuredStep], **_: Any) -> Correction:
        return Correction("corrected" if plan.prediction.written_bytes else "holds", "Said.")

    def step(_: MeasuredPass) -> MeasuredStep:
        return MeasuredStep(float(len(writes)), LIMIT / 2)

    plan_the_disk(monkeypatch)
    monkeypatch.setattr(planned_module, "make_plan", make_plan)
    monkeypatch.setattr(planned_module, "compare", compare)
    monkeypatch.setattr(PlannedTiers, "lost", lost)
    monkeypatch.setattr(MeasuredPass, "step", step)
    offload = train(tmp_path, recompute=True)
    assert len(writes) == 2 and writes[0] > writes[1] == 0
    assert offload.step_profile is not None and offload.step_profile.disk is None
    assert offload.plan is not None and offload.plan.prediction.written_bytes == 0
    offload.close()


def test_a_limit_that_needed_the_disk_is_said_to_be_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: None
) -> None:
    def after(step: int, _: object) -> None:
        if step == 5:
            monkeypatch.setattr("os.pwritev", fail(errno.EIO))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        offload = train(tmp_path, 9, after)
    said = [str(each.message) for each in caught]
    assert sum("could not be written" in each for each in said) == 1
    assert sum("does not take what was planned" in each for each in said) == 1
    assert sum("the least possible is" in each for each in said) == 1
    assert actions_of(offload) == {"keep"}
    offload.close()


def test_a_disk_that_failed_before_a_plan_is_not_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: None
) -> None:
    monkeypatch.setattr("os.pwritev", fail(errno.EIO))
    with pytest.warns(UserWarning, match="could not be written"):
        offload = train(tmp_path, 6, recompute=True)
    assert offload.step_profile is not None and offload.step_profile.disk is None
    assert any("Planned without the disk" in note for note in offload.report().notes)
    offload.close()


def test_a_disk_that_is_full_is_planned_as_far_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holds: None
) -> None:
    """Room is what the file system spares, which no plan knows before."""
    room = 600_000
    posix_file = "bitslab.activations.disk.posix_file"
    monkeypatch.setattr("bitslab.activations.disk.stripe.GROWTH_BYTES", 64 << 10)
    monkeypatch.setattr(f"{posix_file}.free_bytes", lambda fd: room - os.fstat(fd).st_size)
    written: list[float] = []
    refused: list[int] = []

    def after(_: int, offload: bitslab.ActivationOffload) -> None:
        refused.append(offload.stats()["disk_refused_bytes"])
        if offload.plan is not None:
            written.append(offload.plan.prediction.written_bytes)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        offload = train(tmp_path, 16, after, memory=None, slowdown=1e6)
    assert written[0] > room >= written[-1] > room // 2
    assert 0 < refused[-1] == refused[-4]
    assert sum("The disk is full" in str(each.message) for each in caught) == 1
    assert any("The disk is full" in note for note in offload.report().notes)
    offload.close()


# Limits that copies on their way exceed


def measured(monkeypatch: pytest.MonkeyPatch, more: Callable[[Plan], int]) -> list[Plan]:
    """Let peaks be above what is predicted; return the plans that were followed."""
    followed: list[Plan] = []

    def compare(plan: Plan, found: list[MeasuredStep], **options: Any) -> Correction:
        followed.append(plan)
        return real_compare(plan, found, **options)

    def step(measured: MeasuredPass) -> MeasuredStep:
        plan = now[0].plan
        return MeasuredStep(plan.prediction.step_s, plan.prediction.peak_bytes + more(plan))

    now: list[Any] = []
    real_attach = planned_module.PlannedPolicy.attach

    def attach(self: Any, model: Any) -> None:
        now.append(self)
        real_attach(self, model)

    monkeypatch.setattr(planned_module.PlannedPolicy, "attach", attach)
    monkeypatch.setattr(planned_module, "compare", compare)
    monkeypatch.setattr(MeasuredPass, "step", step)
    return followed


@pytest.mark.parametrize("excess", [450_000, 10])
def test_bytes_of_copies_under_way_are_no_part_of_the_least_memory(
    excess: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan takes more than was predicted, and none when each copy is waited for."""
    followed = measured(monkeypatch, lambda plan: 0 if plan.serial else excess)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = blocks()
        offload = bitslab.offload_activations(model, memory=300_000, **OPTIONS)
        list(steps(model, 30))
    said = [str(each.message) for each in caught]
    assert len([each for each in said if "memory" in each]) == 1
    least = int(said[0].split("least possible is ")[1].split(" ")[0].replace(",", ""))
    plan = offload.plan
    assert plan is not None
    assert [each.serial for each in followed[:2]] == [False, True]
    assert followed[1].prediction.peak_bytes <= least
    # A few bytes are no reason to wait for every copy.
    assert plan is followed[1 if excess > 1000 else 0]
    if plan.serial:
        assert "Left as the plan of least memory" in "".join(offload.report().notes)
    offload.detach()


def test_a_limit_that_is_kept_without_copies_under_way_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Corrections leave no room for any other plan, and nothing says that it cannot be met."""
    followed = measured(monkeypatch, lambda plan: 0 if plan.serial else LIMIT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = blocks()
        offload = bitslab.offload_activations(model, memory=LIMIT, **OPTIONS)
        list(steps(model, 30))
    assert offload.plan is followed[-1] and offload.plan.serial
    assert offload.plan.prediction.peak_bytes <= LIMIT
    assert offload.stats()["moved_tensors"] > 0
    offload.detach()


def test_a_limit_that_no_plan_keeps_names_what_was_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured(monkeypatch, lambda plan: LIMIT if plan.serial else 2 * LIMIT)
    model = blocks()
    offload = bitslab.offload_activations(model, memory=LIMIT, **OPTIONS)
    with pytest.warns(UserWarning, match="memory: 1,000,000 bytes, and .* were the least in a"):
        list(steps(model, 30))
    assert offload.plan is not None and offload.plan.serial
    offload.detach()


def test_a_serial_plan_has_no_copies_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, lambda plan: 0 if plan.serial else LIMIT)
    model = blocks()
    offload = bitslab.offload_activations(model, memory=LIMIT, **OPTIONS)
    list(steps(model, 20))
    assert offload.plan is not None and offload.plan.serial
    assert Plan.from_dict(offload.plan.to_dict()) == offload.plan
    in_flight: list[int] = []

    def look(*_: Any) -> None:
        in_flight.extend(each._originals.in_flight_bytes for each in offload._hooks.executors())

    handles = [module.register_forward_hook(look) for module in model.children()]
    list(steps(model, 1))
    assert in_flight and not any(in_flight)
    for handle in handles:
        handle.remove()
    offload.detach()


@pytest.mark.parametrize("fails", [False, True])
def test_a_profile_has_the_share_of_the_link_while_both_directions_are_used(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def share(device: torch.device) -> float:
        if fails:
            raise RuntimeError("on purpose")
        return 0.75

    monkeypatch.setattr(measured_link, "share_both_ways", share)
    model = blocks()
    offload = bitslab.offload_activations(model, min_bytes=1024, slowdown=0.1)
    with pytest.warns(UserWarning, match="both directions") if fails else nullcontext():
        list(steps(model, 5))
    profile = offload.step_profile
    assert profile is not None and profile.link is not None
    assert profile.link_share_both_ways == (1.0 if fails else 0.75)
    offload.detach()


def test_how_fast_a_disk_is_is_that_of_the_latest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_tiers, "COUNTED_BYTES", 100)
    stats = {"written_bytes": 0, "write_seconds": 0.0, "read_bytes": 0, "read_seconds": 0.0}
    own = FolderRates(1 << 20, 2, 3, 1e6, 1e6, 1e6, 1e6, direct=True)
    disk: Any = SimpleNamespace(
        stats=lambda: stats, rates=[own], write_bytes_per_s=1e6, read_bytes_per_s=1e6
    )
    rates = planned_tiers.RatesWhileTraining(disk)
    assert rates.rates() == DiskRates(1e6, 1e6)
    stats |= {"written_bytes": 100, "write_seconds": 1.0}  # a slow start
    assert rates.rates() == DiskRates(200.0, 1e6)
    stats |= {"written_bytes": 150, "write_seconds": 1.1, "read_bytes": 300, "read_seconds": 1.0}
    assert rates.rates() == DiskRates(200.0, 900.0)  # too few were written since
    stats |= {"written_bytes": 1100, "write_seconds": 2.0}
    assert rates.rates() == DiskRates(2000.0, 900.0)
