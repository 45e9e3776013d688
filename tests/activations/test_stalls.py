"""Waits of passes for copies, counted by the tier that these go to or come from."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bitslab
from bitslab.activations.disk.posix_file import PosixFile
from bitslab.activations.moments import TIMED_EVERY
from bitslab.activations.stalls import Stalls, stall_figures
from bitslab.engine.tasks import ThreadTask
from bitslab.engine.transfer import ThreadLane

CPU = torch.device("cpu")
LATE_S = 0.05


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_thread_that_is_late_counts_for_its_tier(tier: str) -> None:
    lane = ThreadLane("bitslab-late")
    stalls = Stalls(CPU)
    late = lane.run(time.sleep, LATE_S)
    assert isinstance(late, ThreadTask)
    stalls.wait(late, tier)  # type: ignore[arg-type]
    found = stall_figures([stalls, Stalls(CPU)])
    other = {"host": "disk", "disk": "host"}[tier]
    assert late.done() and found[f"{other}_stall_us"] == 0
    assert 0 < found["stall_us"] == found[f"{tier}_stall_us"]
    stalls.wait(late, tier)  # type: ignore[arg-type]
    assert stall_figures([stalls]) == found  # it is done: nothing was waited for
    lane.close()


def test_what_a_slow_disk_is_waited_for_is_the_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, reads = PosixFile.read, []

    def read(*arguments: object) -> None:
        reads.append(threading.current_thread().name)
        time.sleep(LATE_S)
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PosixFile, "read", read)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8))
    options = {"policy": "raw", "min_bytes": 1024, "in_flight_bytes": 0}
    offload = bitslab.offload_activations(model, disk=str(tmp_path), **options)
    model(torch.randn(128, 64)).sum().backward()
    stats = offload.stats()
    assert reads and stats["disk_stall_us"] > 0
    assert stats["stall_us"] == stats["host_stall_us"] + stats["disk_stall_us"]
    assert " ms for the disk." in offload.report().summary()
    offload.detach()


@pytest.mark.gpu
def test_waits_of_a_gpus_stream_are_timed_by_events() -> None:
    device = torch.device("cuda")
    stalls = Stalls(device)
    current, other = torch.cuda.current_stream(), torch.cuda.Stream()
    for _ in range(4 * TIMED_EVERY):
        with torch.cuda.stream(other):
            torch.cuda._sleep(1_000_000)
            mark = torch.cuda.Event()
            mark.record(other)
        stalls.wait(mark, "host", current)
    torch.cuda.synchronize()
    stalls.poll()
    waited = stalls.seconds("host")
    assert waited > 0 and stalls.seconds("disk") == 0
    for _ in range(4 * TIMED_EVERY):
        stalls.wait(mark, "disk", current)  # passed long ago
    torch.cuda.synchronize()
    stalls.poll()
    assert stalls.seconds("host") == waited and stalls.seconds("disk") < waited / 4


class _Passed:
    """Stands for an event of a GPU that has passed."""

    def wait(self, stream: object) -> None:
        pass


def test_waits_that_are_over_are_forgotten_with_no_figures_asked_for() -> None:
    stalls = Stalls(CPU)
    stream: Any = object()
    for _ in range(40 * TIMED_EVERY):
        stalls.wait(_Passed(), "host", stream)  # type: ignore[arg-type]
        assert len(stalls.timed) <= 1
    assert stalls.seconds("host") > 0
