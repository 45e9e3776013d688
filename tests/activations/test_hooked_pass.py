"""Where a pass that moves may not begin, and which passes are kept: those that come once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bitslab
from bitslab import ArgumentError
from bitslab.activations import hooked_pass
from tests.activations.cases.training import gradients

pytestmark = pytest.mark.usefixtures("one_thread", "quick_measuring")

OPTIONS: dict[str, dict[str, Any]] = {
    "raw": {"policy": "raw"},
    "static": {"policy": "static", "codecs": "zvc"},
    "auto": {"policy": "auto", "profile_every": 1},
    "planned": {"slowdown": 0.5},
    "limited": {"memory": 20_000},
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(self.up(x).tanh())
        return result


class Layers(nn.Module):
    """Layers of which each may be checkpointed."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.sin()


def made(reentrant: bool | None = None) -> tuple[Layers, torch.Tensor]:
    torch.manual_seed(5)
    return Layers(reentrant), torch.randn(16, 8, requires_grad=True)


def plain_gradients(steps: int = 1) -> list[torch.Tensor]:
    model, x = made()
    for _ in range(steps):
        model(x).square().sum().backward()
    assert x.grad is not None
    return [x.grad, *gradients(model)]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def leaf_gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    assert x.grad is not None
    return [x.grad, *gradients(model)]


# What is computed again


def moved_out(offload: bitslab.ActivationOffload) -> tuple[int, ...]:
    stats = offload.stats()
    names = "moved_out_bytes", "crossed_out_bytes", "moved_tensors"
    return *(stats[name] for name in names), offload.report().passes


@pytest.mark.drawn(10)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the inner ones
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("around", ["model", "layers", "both"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_is_not_moved(
    reentrant: bool, around: str, options: str, link: Callable[[float], None]
) -> None:
    link(1e6)  # so slow that auto packs
    model, x = made(None if around == "model" else reentrant)
    offload = bitslab.offload_activations(
        model, min_bytes=64, in_flight_bytes=0, **OPTIONS[options]
    )
    steps = 4
    for _ in range(steps):
        if around == "layers":
            y = model(x)
        else:  # what is saved behind the model lets it be computed again
            y = checkpoint(lambda x: model(x).exp().log(), x, use_reentrant=reentrant)
        loss = y.square().sum()
        before = moved_out(offload)
        loss.backward()
        assert moved_out(offload) == before
    assert x.grad is not None
    is_again = around != "layers"
    assert offload.report().passes == (0 if is_again and reentrant else steps)
    assert any("within a backward pass" in note for note in offload.report().notes) == is_again
    if is_again and reentrant:
        assert not moved_out(offload)[0] and offload.plan is None
    elif options in ("raw", "static"):
        assert moved_out(offload)[0] > 0
    found = [x.grad, *gradients(model)]
    offload.detach()
    plain, x = made()
    for _ in range(steps):
        y = plain(x)
        (y if around == "layers" else y.exp().log()).square().sum().backward()
    assert x.grad is not None
    assert equal(found, [x.grad, *gradients(plain)])


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_within_the_context_is_not_moved(reentrant: bool) -> None:
    """In which the backward pass runs too, with the hooks on."""
    model, x = made(reentrant)
    offload = bitslab.ActivationOffload("raw", min_bytes=64, in_flight_bytes=0)
    with offload:
        loss = model(x).square().sum()
        before = offload.stats()["crossed_out_bytes"]
        loss.backward()
    assert offload.stats()["crossed_out_bytes"] == before > 0
    assert x.grad is not None and equal([x.grad, *gradients(model)], plain_gradients())
    offload.detach()


def test_a_graph_of_a_backward_pass_within_the_context_is_moved() -> None:
    """Nothing of it is computed again: a second backward pass reads it later."""
    x = torch.randn(64, 8, requires_grad=True)
    expected = torch.autograd.grad(
        torch.autograd.grad(x.exp().sin().sum(), x, create_graph=True)[0].square().sum(), x
    )
    offload = bitslab.ActivationOffload("raw", min_bytes=64, in_flight_bytes=0)
    with offload:
        y = x.exp().sin().sum()
        before = offload.stats()["moved_tensors"]
        (first,) = torch.autograd.grad(y, x, create_graph=True)
    assert offload.stats()["moved_tensors"] > before
    assert equal(list(torch.autograd.grad(first.square().sum(), x)), list(expected))
    offload.detach()


def test_a_hook_that_calls_the_model_in_the_backward_pass() -> None:
    """As implicit layers do; its tensors are read at once."""

    def trained(attach: bool) -> list[torch.Tensor]:
        model, x = made()
        offload = bitslab.ActivationOffload("raw", min_bytes=64, in_flight_bytes=0)
        if attach:
            offload.attach(model)
        found: list[torch.Tensor] = []

        def again(grad: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                z = x.detach().requires_grad_()
                (first,) = torch.autograd.grad(model(z).square().sum(), z, create_graph=True)
                (second,) = torch.autograd.grad(first.square().sum(), z)
            found.append(second)
            return grad + second

        h = x * 2
        h.register_hook(again)
        loss = model(h).square().sum()
        before = offload.stats()["moved_tensors"]
        loss.backward()
        assert offload.stats()["moved_tensors"] == before and (before > 0) == attach
        offload.detach()
        assert x.grad is not None
        return [*found, x.grad, *gradients(model)]

    assert equal(trained(True), trained(False))


def test_a_pass_that_is_computed_again_sees_changes_in_place() -> None:
    model, x = nn.Sequential(nn.Linear(8, 32), nn.Sigmoid()), torch.randn(4, 8, requires_grad=True)
    offload = bitslab.offload_activations(model, policy="raw", min_bytes=64)

    def changed(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(x)
        with torch.no_grad():
            y.mul_(2)
        return y

    with pytest.raises(bitslab.ModifiedInPlaceError, match="inplace operation"):
        checkpoint(changed, x, use_reentrant=True).sum().backward()
    offload.detach()


# Captures of CUDA graphs


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list of the answers to whether a graph is captured, of which the last is given."""
    answers = [True]

    def capturing() -> bool:
        answers.append(answers[-1])
        return answers[-1]

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
    return answers


def test_a_capture_is_refused_before_anything_is_changed(asked: list[bool]) -> None:
    model, x = made()
    offload = bitslab.offload_activations(model, policy="raw", min_bytes=64)
    context = bitslab.ActivationOffload("raw", min_bytes=64)
    for call in (lambda: model(x), context.__enter__):
        with pytest.raises(ArgumentError, match=r"CUDA graph is being captured.*detach\(\)"):
            call()
    for each in (offload, context):
        assert each.report().passes == 0 and not each.stats()["moved_tensors"]
        assert not each._hooks.inside()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    with torch.no_grad():
        model(x)  # moves nothing
    asked.append(False)
    with context:
        asked.append(True)
        offload.detach()
        context.attach(model)
        with pytest.raises(ArgumentError, match="CUDA graph"):
            model(x)
    context.detach()
    assert model(x).requires_grad
    offload.attach(model)
    asked.append(False)
    model(x).square().sum().backward()
    assert x.grad is not None and equal([x.grad, *gradients(model)], plain_gradients())
    assert offload.report().passes == 1 and offload.stats()["moved_tensors"] > 0
    offload.detach()


def test_a_pass_asks_once_whether_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(hooked_pass, "refuse_capture", lambda: calls.append(1))
    model, x = made()
    offload = bitslab.offload_activations(model, policy="raw", min_bytes=64)
    for passes in (1, 2):
        model(x).square().sum().backward()
        assert len(calls) == passes
    offload.detach()


def test_without_cuda_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch without it raises at the question."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", None)
    with bitslab.ActivationOffload("raw"):
        pass


@pytest.fixture
def on_gpu() -> Iterator[tuple[Layers, torch.Tensor, bitslab.ActivationOffload]]:
    torch.manual_seed(5)
    model, x = Layers().cuda(), torch.randn(16, 8, device="cuda")
    offload = bitslab.offload_activations(model, policy="raw", min_bytes=64)
    yield model, x, offload
    offload.detach()


@pytest.mark.gpu
def test_a_real_capture_is_refused_and_training_goes_on(
    on_gpu: tuple[Layers, torch.Tensor, bitslab.ActivationOffload],
) -> None:
    model, x, offload = on_gpu

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [g.clone() for g in gradients(model)]

    expected = step()
    before = moved_out(offload)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with (
        pytest.raises(ArgumentError, match="CUDA graph is being captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
    ):
        x.add_(0)  # torch warns of graphs that hold nothing
        model(x)
    assert moved_out(offload) == before
    for _ in range(2):
        assert equal(step(), expected)
    assert moved_out(offload)[0] > before[0]
    offload.detach()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = model(x)
    graph.replay()
    assert torch.equal(y, model(x))


@pytest.mark.gpu
def test_what_a_gpus_backward_pass_computes_again_is_not_moved(
    on_gpu: tuple[Layers, torch.Tensor, bitslab.ActivationOffload],
) -> None:
    """It runs in a thread of autograd."""
    model, x, offload = on_gpu
    x.requires_grad_()
    model(x).square().sum().backward()
    expected = [g.clone() for g in leaf_gradients(model, x)]
    before = moved_out(offload)
    model.zero_grad()
    x.grad = None
    checkpoint(model, x, use_reentrant=True).square().sum().backward()
    assert moved_out(offload) == before
    assert equal(leaf_gradients(model, x), expected)
