"""Context managers in the place of torch's and torchtune's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import bitslab
from bitslab.integrations.autograd import OffloadActivations, save_on_cpu
from tests.helpers import same_bits

#: All of a small model moves, and comes back.
SMALL: dict[str, Any] = {"policy": "raw", "min_bytes": 1, "in_flight_bytes": 0}


def given(**values: Any) -> dict[str, Any]:
    """Return arguments of any type."""
    return values


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))


def gradients(context: Any, steps: int = 2) -> list[torch.Tensor]:
    """Return the gradients of steps within one context manager that is entered again."""
    model, found = model_of(3), []
    for step in range(steps):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        with context:
            loss = model(x).square().sum()
        model.zero_grad()
        loss.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize(
    "ours",
    [
        lambda: save_on_cpu(**SMALL),
        lambda: save_on_cpu(True, "cuda", **SMALL),
        lambda: OffloadActivations(min_offload_size=1, policy="raw", in_flight_bytes=0),
        lambda: OffloadActivations(
            True, True, 2, 1, policy="static", codecs="zvc", in_flight_bytes=0
        ),
    ],
    ids=["save_on_cpu", "save_on_cpu-pinned", "OffloadActivations", "OffloadActivations-packed"],
)
def test_gradients_are_those_of_torch_and_tensors_move(ours: Any) -> None:
    context = ours()
    found = gradients(context)
    for theirs in (torch.autograd.graph.save_on_cpu(), torch.enable_grad()):
        for a, b in zip(found, gradients(theirs), strict=True):
            assert same_bits(a, b)
    stats = context.stats()
    assert stats["moved_in_bytes"] >= stats["moved_out_bytes"] > 0


#: What torch 2.13 and torchtune 0.6.1 take.
SAVE_ON_CPU = [("pin_memory", False), ("device_type", "cuda")]
TORCHTUNE = [
    ("use_pin_memory", True),
    ("use_streams", True),
    ("max_fwd_stash_size", 5),
    ("min_offload_size", 1024),
]


def arguments_of(kind: type) -> list[tuple[str, Any]]:
    """Return the names and defaults of what a class takes, in their order."""
    found = inspect.signature(kind).parameters.values()
    return [(p.name, p.default) for p in found if p.kind is not inspect.Parameter.VAR_KEYWORD]


def test_arguments_are_those_of_torch_in_order_and_with_their_defaults() -> None:
    theirs = torch.autograd.graph.save_on_cpu
    assert arguments_of(save_on_cpu) == arguments_of(theirs) == SAVE_ON_CPU


def test_arguments_are_those_of_torchtune_in_order_and_with_their_defaults() -> None:
    assert arguments_of(OffloadActivations) == TORCHTUNE


def test_calls_by_the_positions_of_torchtune() -> None:
    x = torch.randn(1000, requires_grad=True)
    for streams in (True, False, None):
        with OffloadActivations(True, streams, 5, 4000, policy="raw") as offload:
            y = (x * 1).sin().sum()
        y.backward()
        assert offload.stats()["moved_tensors"] == 1


def test_a_call_by_the_positions_of_trl_is_refused() -> None:
    with pytest.raises(bitslab.ArgumentError, match=r"max_fwd_stash_size: 1024, .*TRL.*name both"):
        OffloadActivations(True, True, 1024, 5)


def test_a_size_that_is_given_decides_what_moves() -> None:
    x = torch.randn(1000, requires_grad=True)  # 4,000 bytes
    sizes: list[tuple[dict[str, Any], int]] = [
        ({"min_offload_size": 4001}, 0),
        ({"min_offload_size": 4000}, 1),
        ({"min_offload_size": None}, 0),
        ({}, 1),
    ]
    for size, moved in sizes:
        with OffloadActivations(**size, policy="raw") as offload:
            y = (x * 1).sin().sum()
        y.backward()
        assert offload.stats()["moved_tensors"] == moved


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: save_on_cpu(device_type="xpu"), "device_type: 'xpu', accepted are cuda and cpu"),
        (
            lambda: save_on_cpu(**given(pin_memory="yes")),
            "pin_memory: expected a bool",
        ),
        (
            lambda: OffloadActivations(**given(use_streams=3)),
            "use_streams: expected a bool",
        ),
        (lambda: OffloadActivations(max_fwd_stash_size=0), "max_fwd_stash_size: 0, accepted are 1"),
        (lambda: OffloadActivations(**given(max_fwd_stash_size=1.5)), "expected an int, got 1.5"),
        (lambda: OffloadActivations(min_bytes=3), "min_bytes: give min_offload_size"),
        (lambda: OffloadActivations(min_offload_size=-3), "min_bytes: -3"),
        (lambda: save_on_cpu(policy="none"), "policy: 'none', accepted are"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_other_arguments_are_refused_by_name(make: Any, text: str) -> None:
    with pytest.raises((bitslab.ArgumentError, bitslab.ArgumentTypeError)) as refused:
        make()
    assert text in str(refused.value)
