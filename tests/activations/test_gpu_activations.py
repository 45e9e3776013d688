"""Saved tensors of a GPU, moved: the same cases, and what only a GPU shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bitslab
from bitslab.activations.policies import blob_codec_names
from bitslab.engine.codecs.registry import get_codec
from bitslab.engine.memory import host_arena
from tests.activations.cases import CASES, Offloaded
from tests.activations.test_gradients import VARIED, check_case

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

POLICIES: dict[str, dict[str, Any]] = {
    "raw": {"policy": "raw"},
    "raw-in-flight": {"policy": "raw", "in_flight_bytes": 1 << 20},
    "static": {"policy": "static"},
    "static-in-flight": {"policy": "static", "in_flight_bytes": 4096, "sm_budget": 8},
    "host": {"policy": "host", "codecs": "zvc"},
    "auto": {"policy": "auto", "profile_every": 1},
}
LOSSLESS = [
    name
    for name in blob_codec_names()
    if get_codec(name).error_bound is None and "cuda" in get_codec(name).device_types
]


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run torch's operators so that two runs give the same bits, as far as they can."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_plain_training(
    name: str, policy: str, link: Callable[[float], None], quick_measuring: None
) -> None:
    link(1e6)
    check_case(name, Offloaded("cuda", **POLICIES[policy]))


@pytest.mark.parametrize("codec", LOSSLESS)
@pytest.mark.parametrize("name", VARIED)
def test_every_codec_returns_every_bit(name: str, codec: str) -> None:
    check_case(name, Offloaded("cuda", policy="static", codecs=codec))


def model() -> nn.Module:
    torch.manual_seed(3)
    layers = [m for _ in range(4) for m in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers).cuda()


@pytest.mark.parametrize("policy", ["raw", "static"])
def test_passes_wait_for_no_gpu_and_take_no_host_memory(policy: str, no_waiting: Any) -> None:
    net = model()
    offload = bitslab.offload_activations(net, policy=policy, min_bytes=1024, in_flight_bytes=0)
    x = torch.randn(256, 512, device="cuda")
    for _ in range(3):  # compiles, fits, takes host memory
        net(x).sum().backward()
    before = host_arena().stats()["reserved_bytes"]
    with no_waiting():
        for _ in range(3):
            net(x).sum().backward()
    assert host_arena().stats()["reserved_bytes"] == before
    offload.detach()


def test_originals_leave_the_device() -> None:
    net = model()
    x = torch.randn(1 << 14, 512, device="cuda")
    net(x).sum().backward()

    def peak() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        net(x).sum().backward()
        return torch.cuda.max_memory_allocated()

    plain = peak()
    offload = bitslab.offload_activations(net, policy="raw", in_flight_bytes=0)
    peak()
    # The outputs of four ReLUs, 32 MiB each, of which two or three are there at once.
    assert peak() < plain - (32 << 20)
    offload.detach()


def test_auto_measures_and_decides_on_the_device(link: Any, quick_measuring: None) -> None:
    net = model()
    x = torch.randn(1 << 12, 512, device="cuda")
    choices = []
    link(1e7)
    offload = bitslab.offload_activations(net, min_bytes=1024, profile_every=1)
    for rate in (1e7, 1e14):
        link(rate)
        for _ in range(4):
            net(x).sum().backward()
            torch.cuda.synchronize()
        choices.append({site.unit.name: site.choice for site in offload.report().sites})
    assert choices[0]["1:0"] not in ("raw", "keep")
    assert choices[1]["1:0"] == "raw"
    offload.detach()
