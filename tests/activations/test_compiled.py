"""Compiled models: layers one by one come back one by one; one compiled whole is reported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import bitslab
from bitslab.activations.compiled import compile_line
from bitslab.activations.executor import Executor

pytestmark = pytest.mark.usefixtures("one_thread")


class Model(nn.Module):
    """An embedding, layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(32, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture(autouse=True)
def _forget_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def layers(model: nn.Module) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(backend="aot_eager")
    return model


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def wrapped(model: nn.Module) -> nn.Module:
    made: nn.Module = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    return made


def train(model: nn.Module) -> list[Any]:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    found = []
    for _ in range(3):
        model.zero_grad()
        x.grad = None
        model(x).square().mean().backward()
        found += [x.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]
    return found


OPTIONS: dict[str, Any] = {
    "policy": "raw", "min_bytes": 1024, "in_flight_bytes": 0, "verify": True
}  # fmt: skip


def test_layers_compiled_one_by_one_come_back_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train(layers(Model()))
    model = layers(Model())
    offload = bitslab.offload_activations(model, **OPTIONS)
    reads: list[tuple[str, int]] = []
    real = Executor.bytes_of

    def bytes_of(self: Executor, copy: Any, more: bool) -> torch.Tensor:
        reads.append((copy.name, offload.stats()["moved_in_bytes"]))
        return real(self, copy, more)

    monkeypatch.setattr(Executor, "bytes_of", bytes_of)
    found = train(model)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    stats = offload.stats()
    assert stats["moved_tensors"] >= 9
    assert stats["moved_in_bytes"] == stats["moved_out_bytes"]
    # In a step what is read first comes back long before what is read last.
    per_step = stats["moved_in_bytes"] / 3
    assert max(nbytes for _, nbytes in reads[: len(reads) // 9 + 1]) <= 0.8 * per_step
    notes = " ".join(offload.report().notes)
    assert "Compiled by torch.compile: layers.0, layers.1, layers.2" in notes
    assert "compiled whole" not in notes
    offload.detach()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("compiled", [in_place, wrapped])
def test_a_model_compiled_whole_is_reported(
    when: str, compiled: Callable[[nn.Module], nn.Module]
) -> None:
    plain = train(compiled(Model()))
    model = Model()
    if when == "before":
        model = compiled(model)  # type: ignore[assignment]
        offload = bitslab.offload_activations(model, **OPTIONS)
        running: nn.Module = model
    else:
        offload = bitslab.offload_activations(model, **OPTIONS)
        running = compiled(model)
    found = train(running)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    notes = [n for n in offload.report().notes if n.startswith("The model is compiled whole")]
    assert len(notes) == 1
    assert notes[0].endswith("for layer in model.layers: layer.compile()")
    offload.detach()


def test_the_line_that_compiles_layers() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert compile_line(nn.Linear(2, 2)) == "for layer in model.children(): layer.compile()"
    model = nn.Sequential(block, nn.Sequential(nn.Linear(2, 2)))
    assert compile_line(model) == "for layer in model: layer.compile()"
    two = nn.ModuleDict(
        {"a": nn.ModuleList([_Layer(), _Layer()]), "b": nn.ModuleList([_Layer()] * 1)}
    )
    two["b"].append(_Layer())  # type: ignore[operator]
    assert compile_line(two) == "for layer in [*model.a, *model.b]: layer.compile()"
    nested = nn.Sequential(nn.ModuleDict({"h": nn.ModuleList([_Layer(), _Layer()])}))
    assert compile_line(nested) == "for layer in model[0].h: layer.compile()"


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


def test_hooks_ask_the_compiler_where_something_is_compiled_alone() -> None:
    """Its own wrapper takes longer than keeping a tensor."""
    import torch._dynamo.eval_frame as frames

    offload = bitslab.ActivationOffload("raw", min_bytes=1, in_flight_bytes=0)
    x = torch.randn(64, requires_grad=True)
    entered: list[str] = []

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename == frames.__file__:
            entered.append(frame.f_code.co_name)

    with offload:
        sys.setprofile(count)
        y = x.sin().cos().exp()
        sys.setprofile(None)
    y.sum().backward()
    assert not entered
    assert x.grad is not None
    (plain,) = torch.autograd.grad(x.sin().cos().exp().sum(), x)
    assert torch.equal(x.grad, plain)
    offload.detach()


def test_hooks_are_not_compiled_below_a_compiled_function() -> None:
    """Nor is what they call: it would be traced for each tensor anew."""
    from torch._dynamo.utils import counters

    offload = bitslab.ActivationOffload("raw", min_bytes=1, in_flight_bytes=0)
    x = torch.randn(64, requires_grad=True)

    @torch.compile(backend="aot_eager")
    def f(t: torch.Tensor) -> torch.Tensor:
        return t.sin().cos().exp()

    found = []
    counters.clear()
    for _ in range(3):
        with offload:
            y = f(x)
        found.append(torch.autograd.grad(y.sum(), x)[0])
    (plain,) = torch.autograd.grad(x.sin().cos().exp().sum(), x)
    assert all(torch.equal(each, plain) for each in found)
    assert counters["stats"]["unique_graphs"] <= 1 and counters["frames"]["total"] <= 1
    assert offload.stats()["moved_out_bytes"] > 0
    offload.detach()
