"""Changes in place of what was saved: torch's error, or right gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import bitslab
from bitslab import ModifiedInPlaceError

Program = Callable[[torch.Tensor], torch.Tensor]


def on_an_input(x: torch.Tensor) -> torch.Tensor:
    h = x * 2
    y = h.sin()
    h.mul_(3)
    return y


def on_an_output(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    y.add_(1)
    return y


def on_a_view(x: torch.Tensor) -> torch.Tensor:
    h = x * 2
    y = h.sin()
    h[1:3].zero_()
    return y


def on_the_base_of_a_view(x: torch.Tensor) -> torch.Tensor:
    h = x * 2
    y = h[1:3].sin()
    h.zero_()
    return y


def on_a_detached_one(x: torch.Tensor) -> torch.Tensor:
    h = x * 2
    y = h.sin()
    h.detach().zero_()
    return y


def on_one_of_two_views(x: torch.Tensor) -> torch.Tensor:
    a, b = (x * 2).chunk(2)
    y = a.sin() * b.cos()
    return y + b.square()


def by_data(x: torch.Tensor) -> torch.Tensor:
    """A change that torch does not count: an old value is as good as the new one."""
    h = x * 2
    y = h.sin()
    h.data.add_(0)
    return y


def before_it_is_saved(x: torch.Tensor) -> torch.Tensor:
    h = x * 2
    h.mul_(3)
    return h.sin()


REFUSED: list[Program] = [
    on_an_input,
    on_an_output,
    on_a_view,
    on_the_base_of_a_view,
    on_a_detached_one,
]
RIGHT: list[Program] = [on_one_of_two_views, by_data, before_it_is_saved]
#: What is under way, and what is done, when the program ends.
OPTIONS = {
    "copied": {"policy": "raw", "in_flight_bytes": 0},
    "packed": {"policy": "static", "codecs": "zvc", "in_flight_bytes": 0},
    "in-flight": {"policy": "raw", "in_flight_bytes": 1 << 20},
    "kept": {"policy": "keep"},
}


def leaf() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * 64).view(4, 64).requires_grad_()


def run(program: Program, offload: bitslab.ActivationOffload) -> torch.Tensor:
    x = leaf()
    with offload:
        y = program(x)
    y.sum().backward()
    assert x.grad is not None
    return x.grad


def offloaded(name: str) -> bitslab.ActivationOffload:
    return bitslab.ActivationOffload(min_bytes=1, **OPTIONS[name])  # type: ignore[arg-type]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_what_torch_refuses_is_refused(program: Program, options: str) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        program(leaf()).sum().backward()
    offload = offloaded(options)
    with pytest.raises(ModifiedInPlaceError, match="modified by an inplace operation") as caught:
        run(program, offload)
    assert "expected version" in str(caught.value)
    offload.detach()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
def test_what_torch_allows_is_right(program: Program, options: str) -> None:
    offload = offloaded(options)
    x = leaf()
    program(x).sum().backward()
    assert x.grad is not None and torch.equal(run(program, offload), x.grad)
    offload.detach()


def test_a_change_while_the_copy_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that copies is held until the change is made: nobody gets the changed bytes."""
    import threading

    from bitslab.activations import crossing

    go = threading.Event()
    real = crossing.copy_on_host

    def held(*args: object) -> None:
        go.wait(10)
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(crossing, "copy_on_host", held)
    offload = offloaded("in-flight")
    x = leaf()
    with offload:
        h = x * 2
        y = h.sin()
        h.mul_(3)
    go.set()
    with pytest.raises(ModifiedInPlaceError):
        y.sum().backward()
    offload.detach()


class Clears(torch.autograd.Function):
    """Its backward pass changes what it has saved, and holds it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.held = held
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        made = grad * x.exp()
        with torch.no_grad():
            ctx.held.append(x.zero_())
        return made, None


@pytest.mark.parametrize("again", ["by another node", "retained", "by a graph of it"])
@pytest.mark.parametrize("policy", ["raw", "static", "host"])
def test_a_backward_pass_that_changes_what_it_is_given(policy: str, again: str) -> None:
    """torch refuses the next read; here nobody else gets what was changed."""
    x = leaf()
    with bitslab.ActivationOffload(policy, codecs="zvc", min_bytes=1, in_flight_bytes=0) as offload:
        h = x * 2
        y = h.sin().sum() if again == "by another node" else h.new_zeros(())
        y = y + Clears.apply(h, []).sum()  # of which the backward pass runs first
    del h
    graph = again == "by a graph of it"
    gradients = [
        torch.autograd.grad(y, x, retain_graph=True, create_graph=graph)[0]
        for _ in range(1 if again == "by another node" else 3)
    ]
    expected = 2 * (2 * x).exp()
    if again == "by another node":
        expected = expected + 2 * (2 * x).cos()
    assert all(torch.equal(g, expected) for g in gradients)
    offload.detach()


def test_a_change_after_it_was_read() -> None:
    offload = offloaded("copied")
    x = leaf()
    with offload:
        h = x * 2
        y = h.sin().sum()
    y.backward(retain_graph=True)
    h.mul_(3)
    with pytest.raises(ModifiedInPlaceError):
        y.backward()
    offload.detach()
