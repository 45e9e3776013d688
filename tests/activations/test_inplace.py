"""Changes in place of what was saved: torch's error, or right gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import bitslab
from bitslab import ModifiedInPlaceError
from bitslab.engine.transfer import StreamLane
from tests.activations.test_gradients import LOSSLESS

pytestmark = pytest.mark.usefixtures("one_thread", "quick_measuring", "slow_link", "fits_at_once")

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

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
POLICIES: dict[str, dict[str, Any]] = {
    "keep": {"policy": "keep"},
    "raw": {"policy": "raw"},
    "host": {"policy": "host", "codecs": "zvc"},
    "auto": {"policy": "auto", "profile_every": 1},
    **{codec: {"policy": "static", "codecs": codec} for codec in LOSSLESS},
}
#: Whether copies are complete or under way when the program goes on.
IN_FLIGHT_BYTES = {"copied": 0, "in-flight": 1 << 20}
#: Passes until auto has decided by what it has measured.
PASSES = 4


def leaf(device: str = "cpu") -> torch.Tensor:
    """Half of it zeros, so that auto packs what is made of it."""
    return torch.linspace(-1, 1, 4 * 64).relu().view(4, 64).to(device).requires_grad_()


def run(program: Program, offload: bitslab.ActivationOffload, device: str = "cpu") -> torch.Tensor:
    x = leaf(device)
    with offload:
        y = program(x)
    y.sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()  # so that auto knows what it has measured
    assert x.grad is not None
    return x.grad


def offloaded(policy: str, when: str = "copied") -> bitslab.ActivationOffload:
    return bitslab.ActivationOffload(
        min_bytes=1, in_flight_bytes=IN_FLIGHT_BYTES[when], **POLICIES[policy]
    )


def check_choices(policy: str, offload: bitslab.ActivationOffload) -> None:
    """Check that tensors were moved where they should be, and that auto packed some."""
    assert (offload.stats()["moved_tensors"] > 0) == (policy != "keep")
    choices = {site.choice for site in offload.report().sites}
    assert policy != "auto" or choices - {"raw", "keep"}


@pytest.fixture
def slow_link(link: Callable[[float], None]) -> None:
    link(1e4)  # so slow that auto packs


@on_devices
@pytest.mark.parametrize("when", IN_FLIGHT_BYTES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_what_torch_refuses_is_refused(
    program: Program, policy: str, when: str, device: str
) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        program(leaf(device)).sum().backward()
    offload = offloaded(policy, when)
    for _ in range(PASSES):  # auto decides by passes that are read
        run(before_it_is_saved, offload, device)
    check_choices(policy, offload)
    for _ in range(PASSES):
        message = "modified by an inplace operation.*expected version"
        with pytest.raises(ModifiedInPlaceError, match=message):
            run(program, offload, device)
    offload.detach()


@on_devices
@pytest.mark.parametrize("when", IN_FLIGHT_BYTES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
def test_what_torch_allows_is_right(program: Program, policy: str, when: str, device: str) -> None:
    offload = offloaded(policy, when)
    x = leaf(device)
    program(x).sum().backward()
    assert x.grad is not None
    for _ in range(PASSES):
        assert torch.equal(run(program, offload, device), x.grad)
    check_choices(policy, offload)
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
    offload = offloaded("raw", "in-flight")
    x = leaf()
    with offload:
        h = x * 2
        y = h.sin()
        h.mul_(3)
    go.set()
    with pytest.raises(ModifiedInPlaceError):
        y.sum().backward()
    offload.detach()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["raw", "zvc"])
def test_a_change_while_a_stream_is_to_copy(
    policy: str, held_stream: Callable[..., AbstractContextManager[None]]
) -> None:
    """The stream that copies, or encodes, is held until the change is made and was seen."""
    offload = offloaded(policy, "in-flight")
    for _ in range(2):  # compiles, and takes host memory
        run(before_it_is_saved, offload, "cuda")
    x = leaf("cuda")
    executor = offload._hooks.executor(x.device)
    lane = executor._out if policy == "raw" else executor._encoding
    assert isinstance(lane, StreamLane)
    with held_stream(lane.stream):
        with offload:
            h = x * 2
            y = h.sin()
            h.mul_(3)
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


@on_devices
@pytest.mark.parametrize("again", ["by another node", "retained", "by a graph of it"])
@pytest.mark.parametrize("policy", ["raw", "host", *LOSSLESS])
def test_a_backward_pass_that_changes_what_it_is_given(
    policy: str, again: str, device: str
) -> None:
    """torch refuses the next read; here nobody else gets what was changed."""
    x = leaf(device)
    with offloaded(policy) as offload:
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


@on_devices
@pytest.mark.parametrize("policy", ["raw", "host", *LOSSLESS])
def test_a_change_after_it_was_read(policy: str, device: str) -> None:
    offload = offloaded(policy)
    x = leaf(device)
    with offload:
        h = x * 2
        y = h.sin().sum()
    y.backward(retain_graph=True)
    h.mul_(3)
    with pytest.raises(ModifiedInPlaceError):
        y.backward()
    offload.detach()
