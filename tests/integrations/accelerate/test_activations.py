"""`offload_activations` of models that accelerate has prepared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bitslab.errors import ArgumentError, ArgumentTypeError

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.usefixtures("one_thread")


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64), nn.GELU())


def train(net: nn.Module, backward: Any) -> list[torch.Tensor]:
    x = torch.ones(16, 32)
    for _ in range(6):
        backward(net(x).square().sum())
    return [p.grad for p in net.parameters() if p.grad is not None]


def test_a_prepared_model_trains_alike() -> None:
    from bitslab.integrations.accelerate import offload_activations

    expected = train(model(), lambda loss: loss.backward())
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(model())
    offload = offload_activations(accelerator, prepared, memory=9_000, min_bytes=256)
    found = train(prepared, accelerator.backward)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert offload.plan is not None and not offload.plan.declined
    offload.detach()


@pytest.mark.parametrize(
    ("kind", "named"), [("DEEPSPEED", "DEEPSPEED"), ("FSDP", "FSDP1"), ("MEGATRON_LM", "MEGATRON")]
)
def test_engines_are_refused_by_name(
    kind: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitslab.integrations.accelerate import offload_activations

    accelerator = accelerate.Accelerator(cpu=True)
    shown = SimpleNamespace(distributed_type=accelerate.DistributedType[kind], is_fsdp2=False)
    monkeypatch.setattr(type(accelerator), "distributed_type", shown.distributed_type)
    monkeypatch.setattr(type(accelerator), "is_fsdp2", False)
    with pytest.raises(ArgumentError, match=f"accelerator: prepared for {named}"):
        offload_activations(accelerator, model())


def test_what_is_no_accelerator() -> None:
    from bitslab.integrations.accelerate import offload_activations

    with pytest.raises(ArgumentTypeError, match=r"accelerator: expected an accelerate.Accelerator"):
        offload_activations(None, model())
