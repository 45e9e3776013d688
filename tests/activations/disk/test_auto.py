"""``policy="auto"`` with a disk: its measured rates decide what is packed, and what goes there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import bitslab
from bitslab.activations.disk import DiskRates, DiskTier, tier
from bitslab.activations.disk_share import disk_link, required_note, sites_for_disk, with_place
from bitslab.activations.policies import USUAL_CODECS
from bitslab.engine.advisor import Decision, SiteRecord, SwapLink
from tests.activations.test_auto import train

pytestmark = pytest.mark.usefixtures("quick_measuring", "one_thread")

FAST = 1e13


def rates(monkeypatch: pytest.MonkeyPatch, bytes_per_s: float) -> None:
    rate = bytes_per_s
    each = DiskRates(64 << 10, 2, 2, rate, rate, rate, rate, direct=True)
    monkeypatch.setattr(tier, "disk_rates", lambda folder: each)


@pytest.mark.parametrize("disk_bytes_per_s", [1e6, FAST])
def test_rates_of_the_disk_decide_what_is_packed(
    disk_bytes_per_s: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    link: Callable[[float], None],
) -> None:
    link(FAST)  # so that nothing would be packed for the host
    rates(monkeypatch, disk_bytes_per_s)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
    offload = bitslab.offload_activations(model, min_bytes=1024, profile_every=1, disk=tmp_path)
    train(model, 3)
    report = offload.report()
    sites = {site.unit.name: site for site in report.sites}
    made = sites["1:0"]
    if disk_bytes_per_s == FAST:
        assert made.choice == "raw"
    else:
        assert made.choice in USUAL_CODECS  # of a ReLU: half of it zeros
    gb = f"{disk_bytes_per_s / 1e9:.3g}"
    assert made.reason.endswith(f"To the disk, {gb} and {gb} GB/s there and back.")
    assert made.unit.tier == "disk"  # on a CPU that alone saves memory
    (said,) = (note for note in report.notes if note.startswith("To take all "))
    assert re.search(rf" GB/s; measured were {re.escape(gb)}\.$", said)
    offload.close()


def records(n: int, nbytes: int, hidden_s: float) -> list[SiteRecord]:
    return [
        SiteRecord(
            site=str(i), shape=(nbytes // 4,), dtype=torch.float32, nbytes=nbytes,
            hidden_forward_s=hidden_s, hidden_backward_s=2 * hidden_s, ratio={"zvc": 0.5},
        )
        for i in range(n)
    ]  # fmt: skip


def raw(some: list[SiteRecord], codec: str | None = None) -> list[Decision]:
    action = "raw" if codec is None else "pack"
    return [Decision(r.site, action, codec, 0.0, None, "Why.") for r in some]  # type: ignore[arg-type]


def test_the_disk_gets_what_it_carries_in_the_time_of_a_step() -> None:
    # A second each in the forward pass, two in the backward pass: 10 sites of 1 GB.
    some = records(10, 10**9, 1.0)
    plenty = SwapLink(10e9, 10e9)
    assert sites_for_disk(some, raw(some), plenty) == {str(i) for i in range(10)}
    # m is the last one with m + 2 GB in 10 + 2 (10 - m) seconds, by the slower direction.
    for write, read in ((0.5e9, 9e9), (9e9, 0.5e9)):
        found = sites_for_disk(some, raw(some), SwapLink(write, read))
        last = max(m for m in range(10) if (m + 2) * 1e9 <= 0.5e9 * (10 + 2 * (10 - m)))
        assert found == {str(i) for i in range(last + 1)}
    # Packed to half, more sites fit.
    assert len(sites_for_disk(some, raw(some, "zvc"), SwapLink(0.5e9, 9e9))) > last + 1
    assert sites_for_disk(some, raw(some), SwapLink(1.0, 1.0)) == set()
    assert sites_for_disk([], [], plenty) == set()


def test_the_rate_that_a_whole_step_asks_is_named() -> None:
    """SSDTrain, section 5.3.6: its bytes in half of its time."""
    assert required_note(604e6, 2.0, 3.25e9) == (
        "To take all 604.0 MB of a step's tensors in half of its 2,000 ms a disk would have to "
        "write 0.604 GB/s; measured were 3.25."
    )


def test_the_slower_one_of_link_and_disk_counts(tmp_path: Path) -> None:
    each = DiskRates(64 << 10, 2, 2, 3e9, 6e9, 1e9, 1e9, direct=True)
    disk = DiskTier([tmp_path, tmp_path], rates=each)
    link = SwapLink(5e9, 50e9, 1e-5)
    assert disk_link(link, disk, on_gpu=True) == SwapLink(5e9, 12e9, 1e-5)
    assert disk_link(link, disk, on_gpu=False) == SwapLink(6e9, 12e9)
    (made,) = raw(records(1, 8, 0.0))
    said = {
        (on, whole): with_place(made, disk, on_disk=on, whole=whole).reason
        for on, whole in ((True, True), (True, False), (False, False))
    }
    assert said[True, True] == "Why. To the disk, 6 and 12 GB/s there and back."
    assert said[True, False].endswith("there and back, in the time of the step.")
    assert said[False, False].startswith("Why. To the host: the disk, 6 and 12 GB/s,")
    disk.close()
