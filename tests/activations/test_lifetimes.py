"""What is left behind: nothing, of host memory, threads and graphs."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import bitslab
from bitslab.engine.memory import host_arena

pytestmark = pytest.mark.usefixtures("one_thread")

POLICIES: list[dict[str, Any]] = [{"policy": "raw"}, {"policy": "static", "codecs": "zvc"}]


@pytest.fixture(params=POLICIES, ids=lambda options: options["policy"])
def offload(request: pytest.FixtureRequest) -> Iterator[bitslab.ActivationOffload]:
    made = bitslab.ActivationOffload(min_bytes=1, in_flight_bytes=0, **request.param)
    yield made
    made.detach()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Let reference counts alone free: a cycle is left."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def used_bytes() -> int:
    return host_arena().stats()["used_bytes"]


def threads() -> list[str]:
    names = "bitslab-encode", "bitslab-out", "bitslab-in"
    return [thread.name for thread in threading.enumerate() if thread.name in names]


class Token:
    """Lives as long as the node that has it."""


def node_of(y: torch.Tensor) -> weakref.ref[Token]:
    """Return a reference to the node that made a tensor, which itself has none."""
    node: Any = y.grad_fn
    token = node.metadata["token"] = Token()
    return weakref.ref(token)


def program(x: torch.Tensor) -> torch.Tensor:
    h = (x * 2).exp()
    return (h @ h.t()).sigmoid().tanh().sum()


def failing(x: torch.Tensor) -> torch.Tensor:
    program(x)
    raise KeyboardInterrupt


def backward_twice(y: torch.Tensor) -> None:
    y.backward(retain_graph=True)
    y.backward()


def drop(y: torch.Tensor) -> None:
    """Never run backward."""


ENDS: dict[str, Callable[[torch.Tensor], None]] = {
    "read": torch.Tensor.backward,
    "read-twice": backward_twice,
    "dropped": drop,
}


@pytest.mark.parametrize("end", ENDS)
def test_host_memory_and_graphs_go_with_the_last_reference(
    offload: bitslab.ActivationOffload, end: str, no_collector: None
) -> None:
    before = used_bytes()
    x = torch.randn(64, 64, requires_grad=True)
    with offload:
        y = program(x)
    assert used_bytes() > before
    node = node_of(y)
    ENDS[end](y)
    del y
    offload.detach()  # what threads still copy is done then
    assert node() is None
    assert used_bytes() == before


def test_an_interrupted_pass_leaves_nothing(
    offload: bitslab.ActivationOffload, no_collector: None
) -> None:
    before = used_bytes()
    x = torch.randn(64, 64, requires_grad=True)
    with pytest.raises(KeyboardInterrupt), offload:
        failing(x)
    offload.detach()
    assert used_bytes() == before


def test_detach_ends_threads_and_a_graph_can_still_be_read(
    offload: bitslab.ActivationOffload,
) -> None:
    before = threads()
    x = torch.randn(64, 64, requires_grad=True)
    (plain,) = torch.autograd.grad(program(x), x)
    with offload:
        y = program(x)
    assert len(threads()) > len(before)
    offload.detach()
    offload.detach()
    assert threads() == before
    y.backward()
    assert x.grad is not None and torch.equal(x.grad, plain)


@pytest.mark.parametrize("options", POLICIES, ids=lambda options: options["policy"])
def test_later_steps_take_no_host_memory(options: dict[str, Any]) -> None:
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(128, 128), nn.ReLU())))
    offload = bitslab.offload_activations(model, min_bytes=1, in_flight_bytes=0, **options)
    x = torch.randn(256, 128)
    reserved = set()
    for step in range(5):
        model(x).sum().backward()
        if step:
            reserved.add(host_arena().stats()["reserved_bytes"])
    assert len(reserved) == 1
    offload.detach()


def test_a_model_is_freed_with_its_offload(no_collector: None) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    offload = bitslab.offload_activations(model, policy="raw", min_bytes=1)
    model(torch.randn(64, 64))
    offload.detach()
    gone = weakref.ref(model)
    del model
    assert gone() is None


def test_the_first_graph_is_not_kept(no_collector: None) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    offload = bitslab.offload_activations(model, policy="raw", min_bytes=1, in_flight_bytes=0)
    y = model(torch.randn(64, 64))
    node = node_of(y)
    del y
    assert node() is None
    offload.detach()


def test_bytes_that_crossed_and_left_the_device() -> None:
    offload = bitslab.ActivationOffload("static", codecs="zvc", min_bytes=1, in_flight_bytes=0)
    x = torch.randn(64, 256).requires_grad_()
    nbytes = 64 * 256 * 4
    with offload:
        y = x.relu().sin().sum()  # the output of the ReLU, saved by both
        z = (x * 2).relu().sin().sum()
    offload.detach()
    stats = offload.stats()
    assert stats["moved_out_bytes"] == stats["peak_saved_bytes"] == 2 * nbytes
    # Half of them zeros, a bit for each of them, and headers.
    assert stats["crossed_out_bytes"] == pytest.approx(nbytes * (1 + 1 / 16), rel=0.05)
    assert stats["moved_in_bytes"] == stats["crossed_in_bytes"] == 0
    y.backward()
    z.backward()
    stats = offload.stats()
    assert stats["crossed_in_bytes"] == stats["crossed_out_bytes"]
    assert stats["peak_saved_bytes"] == 2 * nbytes  # at one time
    del y, z
    with offload:
        x.relu().sin()  # dropped at once
    with offload:
        y = x.relu().sin().sum()
    y.backward()
    assert offload.stats()["peak_saved_bytes"] == 2 * nbytes
    offload.detach()


def test_a_size_that_is_known_late_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, when the host is ahead: a copy comes back before its size is known here."""
    from bitslab.activations import executor, traffic

    for module in (executor, traffic):
        monkeypatch.setattr(module, "is_done", lambda mark: False)
    offload = bitslab.ActivationOffload("static", codecs="zvc", min_bytes=1, in_flight_bytes=0)
    x = torch.randn(64, 256).requires_grad_()
    with offload:
        y = x.relu().sin().sum()
    y.backward()
    assert offload.stats()["crossed_out_bytes"] == offload.stats()["crossed_in_bytes"] == 0
    monkeypatch.undo()
    stats = offload.stats()
    assert stats["crossed_out_bytes"] == stats["crossed_in_bytes"] > 0
    offload.detach()
