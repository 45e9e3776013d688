"""Saved tensors of a GPU that go on to a disk and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bitslab
from bitslab.activations.disk import DiskError
from bitslab.engine.memory import host_arena
from tests.activations.cases import CASES, Offloaded
from tests.activations.test_gpu_activations import model
from tests.activations.test_gradients import check_case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

#: With a disk; with a limit of the host its half is filled first, and little is read ahead.
DISKS: dict[str, dict[str, Any]] = {
    "raw": {"policy": "raw"},
    "static": {"policy": "static", "in_flight_bytes": 4096},
    "full": {"policy": "raw", "disk_bytes": 8192, "tiers": "disk"},
    "little-host": {"policy": "static", "host_bytes": 64 << 10},
}


@pytest.mark.parametrize("options", DISKS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_when_tensors_go_to_a_disk(
    name: str, options: str, quick_disk: None, tmp_path: Path
) -> None:
    limited = options in ("full", "little-host")
    training = Offloaded("cuda", disk=tmp_path, **DISKS[options])
    check_case(name, training, None if limited else True)


@pytest.mark.parametrize("policy", ["raw", "static"])
def test_what_was_written_comes_back_and_takes_no_more_host_memory(
    policy: str, quick_disk: None, tmp_path: Path
) -> None:
    net = model()
    x = torch.randn(2048, 512, device="cuda", requires_grad=True)
    (plain,) = torch.autograd.grad(net(x).sum(), x)
    host_arena().trim()
    before = host_arena().stats()["used_bytes"]
    offload = bitslab.offload_activations(net, policy=policy, min_bytes=1024, disk=tmp_path)
    disk = offload._tiers.disk
    assert disk is not None
    reserved = []
    for _ in range(6):
        loss = net(x).sum()
        torch.cuda.synchronize()
        offload.stats()  # which gives on what is encoded by now
        assert disk.drain(60)
        offload.stats()
        (found,) = torch.autograd.grad(loss, x)
        assert torch.equal(found, plain)
        del loss
        torch.cuda.synchronize()
        reserved.append(host_arena().stats()["reserved_bytes"])
    assert reserved[-1] == reserved[2]
    stats = offload.stats()
    assert stats["disk_read_bytes"] > 0
    if policy == "raw":
        assert stats["disk_read_bytes"] == stats["disk_written_bytes"] == stats["moved_out_bytes"]
    assert {site.unit.tier for site in offload.report().sites if site.tensors} == {"disk"}
    offload.close()
    assert host_arena().stats()["used_bytes"] == before


def test_a_read_that_fails_is_of_the_tensor_that_is_wanted(
    quick_disk: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model()
    x = torch.randn(2048, 512, device="cuda", requires_grad=True)
    offload = bitslab.offload_activations(net, policy="raw", min_bytes=1024, disk=tmp_path)
    loss = net(x).sum()
    torch.cuda.synchronize()
    assert offload._tiers.disk is not None and offload._tiers.disk.drain(60)

    def fail(*arguments: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.preadv", fail)
    with pytest.raises(DiskError, match=f"{tmp_path}.*cannot be read") as caught:
        loss.backward()
    assert any("while reading '7" in note for note in caught.value.__notes__)
    assert all(p.grad is None for p in net.parameters())
    monkeypatch.undo()
    offload.close()
