"""Models on a GPU parts of which compute on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import bitslab
from tests.activations.test_gpu_activations import POLICIES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@pytest.mark.parametrize("policy", ["raw", "static", "host", "auto"])
def test_tensors_on_the_cpu_of_a_model_on_a_gpu_are_left_alone(
    policy: str, link: Callable[[float], None], quick_measuring: None
) -> None:
    """Their memory is not the GPU's; without a model all devices are moved from."""

    class ThroughTheCpu(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.cpu() * 2).sin().to(x.device)  # which saves a tensor of the CPU

    def step(net: nn.Module) -> list[torch.Tensor]:
        net.zero_grad()
        net(x).sum().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    link(1e6)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(64, 128), ThroughTheCpu(), nn.Linear(128, 8)).cuda()
    x = torch.randn(512, 64, device="cuda")
    plain = step(net)
    options = {"min_bytes": 64, "in_flight_bytes": 0, "verify": True} | POLICIES[policy]
    offload = bitslab.offload_activations(net, **options)
    for _ in range(4):
        assert all(map(torch.equal, step(net), plain))
    assert [each.device.type for each in offload._hooks.executors()] == ["cuda"]
    assert offload.report().device == "cuda:0"
    assert "SinBackward0" not in {site.operation for site in offload.report().sites}
    moved = offload.stats()["moved_out_bytes"]
    offload.detach()
    if policy == "raw":
        assert moved == 4 * (x.nbytes + 512 * 128 * 4)  # inputs of both linear layers, four passes
        offload = bitslab.ActivationOffload(**options)
        with offload:
            y = net(x)
        y.sum().backward()
        assert {each.device.type for each in offload._hooks.executors()} == {"cpu", "cuda"}
        offload.close()
