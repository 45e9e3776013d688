"""Modules that are computed again: only where that gives the same bits, from the same state."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import bitslab
from bitslab import ModifiedInPlaceError
from bitslab.activations import planned as planned_module
from bitslab.activations.module_state import PlainState, same_bits
from bitslab.activations.pass_record import PassRecord
from bitslab.engine.advisor.planning import (
    Candidate,
    Correction,
    MeasuredStep,
    Plan,
    StepProfile,
)
from tests.activations.test_planned import HIDDEN, ROWS, follow, plan_of

pytestmark = pytest.mark.usefixtures("one_thread", "quick_measuring", "holds")

#: Returns the factor of a layer in one forward pass.
Factor = Callable[["Layer"], float]


class Layer(nn.Module):
    """A product whose factor is not a tensor's."""

    def __init__(self, factor: Factor) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.factor, self.calls, self.scale, self.shape = factor, 0, 1.0, (1, "a")
        self.hidden: list[weakref.ref[torch.UntypedStorage]] = []

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        hidden = (self.first(x) * self.factor(self)).tanh()
        self.hidden.append(weakref.ref(hidden.untyped_storage()))
        made: torch.Tensor = x + self.second(hidden)
        return made if shift is None else made * shift


def layers(factor: Factor, n: int = 4) -> Any:
    torch.manual_seed(3)
    return nn.Sequential(*(Layer(factor) for _ in range(n)))


def counted(layer: Layer) -> float:
    layer.calls += 1
    return 1 / layer.calls


def reshaped(layer: Layer) -> float:
    layer.shape = (layer.shape[0] + 1, "a")
    return 1 / layer.shape[0]


def steps(
    model: nn.Module,
    n: int = 8,
    backward: Callable[[nn.Module, torch.Tensor, int], None] = lambda _, loss, __: loss.backward(),
) -> list[torch.Tensor]:
    """Train; return all losses and gradients."""
    random.seed(5)
    np.random.seed(5)
    found = []
    for i in range(n):
        torch.manual_seed(i)
        x = torch.randn(ROWS, HIDDEN, requires_grad=True)
        loss = model(x * 1.5).square().mean()  # leaves are left alone
        backward(model, loss, i)
        found.append(loss.detach())
        for t in (x, *model.parameters()):
            assert t.grad is not None
            found.append(t.grad.clone())
        model.zero_grad(set_to_none=False)
    return found


def checkpoint_all(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    def choose(profile: StepProfile) -> Plan:
        inside = {s.site: Candidate("checkpoint") for s in profile.sites if s.module}
        return plan_of(profile, inside)

    return follow(monkeypatch, choose)


def planned(model: nn.Module) -> bitslab.ActivationOffload:
    return bitslab.offload_activations(model, min_bytes=1024, slowdown=0.1)


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("factor", "what"),
    [
        (lambda _: 0.5 + random.random(), "Python's random"),
        (lambda _: 0.5 + float(np.random.rand()), "NumPy's random"),
        (counted, "Layer.calls"),
        (reshaped, "Layer.shape"),
    ],
    ids=["python", "numpy", "count", "tuple"],
)
def test_modules_that_change_what_they_read_are_not_computed_again(
    factor: Factor, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint_all(monkeypatch)
    model = layers(factor)
    offload = planned(model)
    assert equal(steps(model), steps(layers(factor)))
    assert offload.plan is not None and offload.plan.modules == ()
    assert f"0: It changes {what}, and would change it twice." in "".join(offload.report().notes)
    offload.detach()


def test_attributes_are_those_of_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(model: Any, loss: torch.Tensor, step: int) -> None:
        for layer in model:
            layer.scale = 2.0 + step  # a schedule that goes on before the backward pass
        loss.backward()
        assert all(layer.scale == 2.0 + step for layer in model)

    made = checkpoint_all(monkeypatch)
    model = layers(lambda layer: layer.scale)
    offload = planned(model)
    assert equal(steps(model, 8, backward), steps(layers(lambda x: x.scale), 8, backward))
    assert made[-1].modules == ("0", "1", "2", "3")
    offload.detach()


def test_draws_that_begin_later_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def factor(layer: Layer) -> float:
        return random.random() if layer.scale > 5 else 1.0

    def backward(model: Any, loss: torch.Tensor, step: int) -> None:
        loss.backward()
        for layer in model:
            layer.scale = 2.0 + step

    made = checkpoint_all(monkeypatch)
    model = layers(factor)
    offload = planned(model)
    assert equal(steps(model, 8, backward), steps(layers(factor), 8, backward))
    assert made[-1].modules == ("0", "1", "2", "3")
    offload.detach()


def test_a_module_that_gives_other_bits_is_dropped_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden_from_us = {"calls": 0}

    def factor(layer: Layer) -> float:
        if layer is not model[1]:
            return 1.0
        hidden_from_us["calls"] += 1
        return 1 / hidden_from_us["calls"]

    def backward(_: Any, loss: torch.Tensor, step: int) -> None:
        calls = hidden_from_us["calls"]
        loss.backward()
        assert hidden_from_us["calls"] == calls  # nothing computes it again
        used.append(calls)

    used: list[int] = []
    made = checkpoint_all(monkeypatch)
    model = layers(factor)
    offload = planned(model)
    with pytest.warns(UserWarning, match="'1' is not computed again .*gives other bits") as warned:
        found = steps(model, 8, backward)
    assert len([w for w in warned if "is not computed again" in str(w.message)]) == 1
    assert made[0].modules == ("0", "1", "2", "3") and made[-1].modules == ("0", "2", "3")
    assert offload.plan is not None and offload.plan.modules == ("0", "2", "3")
    assert "1: Computed again, it gives other bits." in "".join(offload.report().notes)
    offload.detach()

    # In each pass the gradients are those of what that pass has computed.
    calls = iter(used)
    plain = layers(lambda layer: 1 / next(calls) if layer is plain[1] else 1.0)
    assert equal(found, steps(plain))


def test_behind_a_module_that_is_dropped_a_plan_is_corrected_as_often_as_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The corrected plan is the first to compute that module again."""
    corrections: list[int] = []

    def compare(plan: Plan, found: list[MeasuredStep], **options: Any) -> Correction:
        corrections.append(options["corrections"])
        return Correction("holds" if len(corrections) > 1 else "corrected", "Said.")

    def choose(profile: StepProfile) -> Plan:
        among = ("0", "1") if corrections else ("0",)
        chosen = {s.site: Candidate("checkpoint") for s in profile.sites if s.module in among}
        return plan_of(profile, chosen)

    def factor(layer: Layer) -> float:
        hidden_from_us["calls"] += layer is model[1]
        return 1 / hidden_from_us["calls"] if layer is model[1] else 1.0

    hidden_from_us = {"calls": 0}
    made = follow(monkeypatch, choose)
    monkeypatch.setattr(planned_module, "compare", compare)
    model = layers(factor)
    offload = planned(model)
    with pytest.warns(UserWarning, match="'1' is not computed again .*gives other bits"):
        steps(model, 20)
    assert [plan.modules for plan in made] == [("0",), ("0", "1"), ("0",)]
    assert corrections[:2] == [0, 0]
    offload.detach()


def test_a_module_that_cannot_be_tried_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def factor(layer: Layer) -> float:
        if layer is model[1] and fails:
            fails.pop()
            raise ZeroDivisionError
        return 1.0

    fails: list[int] = []
    checkpoint_all(monkeypatch)
    model = layers(factor)
    offload = planned(model)
    found = steps(model, 3)
    fails.append(1)
    with pytest.warns(UserWarning, match="'1' is not .*could not be tried .ZeroDivisionError"):
        found += steps(model, 5)
    assert equal(found, steps(layers(lambda _: 1.0), 3) + steps(layers(lambda _: 1.0), 5))
    offload.detach()


def test_the_first_pass_keeps_no_more_than_a_module_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint_all(monkeypatch)
    model = layers(lambda _: 1.0)
    offload = planned(model)
    alive = []

    def backward(model: Any, loss: torch.Tensor, _: int) -> None:
        alive.append([sum(ref() is not None for ref in layer.hidden) for layer in model])
        loss.backward()

    steps(model, 6, backward)
    assert alive[0] == [1, 1, 1, 1]  # it is saved
    assert alive[3] == alive[5] == [0, 0, 0, 0]
    assert alive[4] == [1, 1, 1, 1]  # what the plan's steps are compared with
    offload.detach()


def test_parameters_that_change_between_backward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(model: Any, loss: torch.Tensor, _: int) -> None:
        loss.backward(retain_graph=True)
        with torch.no_grad():
            model[2].first.bias.add_(1.0)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        raised.append(caught.value)

    raised: list[BaseException] = []
    checkpoint_all(monkeypatch)
    model = layers(lambda _: 1.0)
    offload = planned(model)
    loop = iter(range(8))

    def plain(model: Any, loss: torch.Tensor, step: int) -> None:
        follows = next(loop) in (5, 7)  # between them all is kept once
        (backward if follows else lambda *_: loss.backward())(model, loss, step)

    steps(model, 8, plain)
    assert len(raised) == 2
    assert all(isinstance(error, ModifiedInPlaceError) for error in raised)
    assert "which '2' is computed again from" in str(raised[0])
    offload.detach()


class Shifted(nn.Module):
    """Gives each layer a tensor by name."""

    def __init__(self, shift: torch.Tensor) -> None:
        super().__init__()
        self.layers, self.shift = nn.ModuleList(layers(lambda _: 1.0)), [shift]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, shift=self.shift[0])
        return x


def test_tensors_by_name_that_change_before_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = checkpoint_all(monkeypatch)
    shift = torch.ones(HIDDEN)
    model = Shifted(shift)
    offload = planned(model)
    steps(model, 4)
    assert made[-1].modules == tuple(f"layers.{i}" for i in range(4))
    loss = model(torch.randn(ROWS, HIDDEN, requires_grad=True) * 1.5).square().mean()
    shift.mul_(2.0)
    with pytest.raises(ModifiedInPlaceError):
        loss.backward()
    offload.detach()


def test_a_state_is_set_back_and_restored() -> None:
    layer: Any = Layer(lambda _: 1.0)
    layer.cache = None
    state = PlainState(layer)
    assert state.what_differs() == ""
    t = torch.ones(1)
    layer.calls, layer.cache, layer.added = 3, t, "new"
    random.random()
    np.random.rand()
    drawn = PlainState(layer)
    assert state.what_differs() == "Python's random"
    with state.again():
        assert (layer.calls, layer.cache, hasattr(layer, "added")) == (0, None, False)
        assert state.what_differs() == ""
        layer.calls, layer.cache = 9, torch.zeros(1)
    assert (layer.calls, layer.cache, layer.added) == (3, t, "new")
    assert drawn.what_differs() == ""


def test_results_are_compared_by_bits() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert same_bits([nan, 1, None], [nan.clone(), 1, None])
    assert not same_bits([zero], [-zero])
    assert not same_bits([zero], [zero.double()])
    assert not same_bits([zero, 1], [zero, 2]) and not same_bits([zero], [])
    assert same_bits([object()], [object()])  # nobody can tell
    assert same_bits([torch.tensor([True]), torch.ones(2, dtype=torch.complex64)],
                     [torch.tensor([True]), torch.ones(2, dtype=torch.complex64)])  # fmt: skip


class Attending(nn.Module):
    """Takes another way where what it is given twice is not one tensor, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if query is key and key is value:
            a, b = self.both(query).chunk(2, -1)
        else:
            weights, biases = self.both.weight.chunk(2), self.both.bias.chunk(2)
            a, b = (
                nn.functional.linear(t, w, c)
                for t, w, c in zip((query, key), weights, biases, strict=True)
            )
        made: torch.Tensor = value + self.down(a.tanh() * b)
        return made


class Attentions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Attending() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, x, value=x)
        return x


def test_a_tensor_that_a_layer_is_given_twice_is_one_when_it_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint_all(monkeypatch)
    model = Attentions()
    offload = planned(model)
    found = steps(model)
    assert offload.plan is not None and offload.plan.modules
    assert not any("not computed again" in note for note in offload.report().notes)
    assert equal(found, steps(Attentions()))
    offload.detach()


@pytest.mark.parametrize("transform", ["vmap", "fake"])
def test_layers_are_not_compared_under_transforms(
    transform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tensors have no bits; the layer is tried in the next pass."""
    plans = checkpoint_all(monkeypatch)
    model = Attentions()
    offload = planned(model)
    steps(model, 3)
    policy: Any = offload._policy
    policy.begin(PassRecord(-1, set()))  # plans, of which no pass has followed any
    assert plans and plans[0].modules and not policy._modules._proven
    policy._running.record = None
    x = torch.randn(2, ROWS, HIDDEN)
    if transform == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert model(torch.ones(ROWS, HIDDEN)).shape == (ROWS, HIDDEN)
    else:
        mapped = torch.vmap(model)(x)
        with torch.no_grad():
            assert torch.allclose(mapped[0], model(x[0]), atol=1e-6)
    assert not policy._modules._proven and not policy._modules.refused
    model(x[0]).square().mean().backward()
    assert policy._modules._proven == set(plans[0].modules)
    offload.detach()
