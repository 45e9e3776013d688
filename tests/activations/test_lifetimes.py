"""What is left behind: nothing, of host memory, threads and graphs."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import bitslab
from bitslab.activations.host_room import HostMemoryError, HostRoom
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
    names = "bitslab-out", "bitslab-in"
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


@pytest.mark.parametrize(
    ("in_flight_bytes", "tensors"), [(0, 1), (8191, 1), (8192, 2), (1 << 20, 3)]
)
def test_tensors_are_fetched_ahead_within_a_number_of_bytes(
    in_flight_bytes: int, tensors: int
) -> None:
    offload = bitslab.ActivationOffload(
        policy="raw", min_bytes=1, in_flight_bytes=in_flight_bytes, depth=3
    )
    y = torch.zeros(1024, requires_grad=True)
    with offload:
        for _ in range(6):
            y = y.exp()
    assert y.grad_fn is not None
    fetched_bytes: list[int] = []
    y.grad_fn.register_hook(lambda *_: fetched_bytes.append(offload.stats()["moved_in_bytes"]))
    total = y.sum()
    del y
    offload.detach()  # waits for the copies, and gives the originals up
    total.backward()
    assert fetched_bytes == [(1 + tensors) * 4096]


class SavesTwice(torch.autograd.Function):
    """Saves its first tensor again after the others, as attention does where keys are values."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors, tensors[0])
        return torch.stack(tensors).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return tuple(grad * t for t in ctx.saved_tensors[:-1])


def test_a_tensor_that_is_read_twice_comes_back_once() -> None:
    offload = bitslab.ActivationOffload(policy="raw", min_bytes=1, in_flight_bytes=0, depth=2)
    moved = []
    for _ in range(3):
        before = offload.stats()
        y = torch.ones(1024, requires_grad=True)
        with offload:
            for _ in range(3):
                y = SavesTwice.apply(y.exp(), y.sin(), y.cos())
        total = y.sum()
        del y
        total.backward()
        after = offload.stats()
        moved.append([after[k] - before[k] for k in ("moved_out_bytes", "moved_in_bytes")])
    assert moved[1][0] == moved[1][1] == moved[2][0] == moved[2][1] > 0
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
    from bitslab.activations import traffic

    monkeypatch.setattr(traffic, "is_done", lambda mark: False)
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


# Host memory of copies whose size is learnt


class Gate(nn.Module):
    """Saves a tensor with a share of zeros that can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.zeros = 0.9

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).where(torch.rand(x.shape) >= self.zeros, 0.0).sin()


def gated(model: Gate, x: torch.Tensor, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    loss: torch.Tensor = model(x).square().sum()
    return loss


@pytest.mark.parametrize("in_flight_bytes", [0, 1 << 30])
def test_copies_take_the_host_memory_that_they_need(in_flight_bytes: int) -> None:
    nbytes = 256 * 1024 * 4
    model, x = Gate(), torch.randn(256, 1024).requires_grad_()
    offload = bitslab.offload_activations(
        model, policy="static", codecs="zvc", min_bytes=nbytes, in_flight_bytes=in_flight_bytes
    )
    held = []
    for seed in range(3):
        before = used_bytes()
        loss = gated(model, x, seed)
        offload.stats()
        held.append(used_bytes() - before)
        loss.backward()
        del loss
        offload.stats()
    # A mask of where it was zero, and what was left, which has 10 % of the elements.
    assert held[0] > nbytes
    assert held[2] < nbytes / 4
    offload.detach()


@pytest.mark.parametrize("memory", ["enough", "used up"])
@pytest.mark.parametrize("in_flight_bytes", [0, 1 << 30])
@pytest.mark.parametrize("when", ["backward", "detached"])
def test_a_copy_that_is_larger_than_those_before(
    in_flight_bytes: int, memory: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost: it is sent again, or remains on the device."""
    model, x = Gate(), torch.randn(256, 1024).requires_grad_()
    model.zeros = 0.1
    gated(model, x, 5).backward()
    assert x.grad is not None
    plain, x.grad = x.grad.clone(), None
    offload = bitslab.ActivationOffload(
        "static", codecs="zvc", min_bytes=4096, in_flight_bytes=in_flight_bytes
    )
    real = HostRoom.cut

    def cut(room: HostRoom, size: int, events: Any) -> torch.Tensor:
        if memory == "used up" and model.zeros < 0.5 and size > 500_000:
            raise HostMemoryError("on purpose")
        return real(room, size, events)

    monkeypatch.setattr(HostRoom, "cut", cut)
    model.zeros = 0.9
    for seed in range(2):
        with offload:
            loss = gated(model, x, seed)
        loss.backward()
    offload.stats()
    model.zeros, x.grad = 0.1, None
    before = offload.stats()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with offload:
            loss = gated(model, x, 5)
        if when == "detached":
            offload.detach()
        loss.backward()
    assert torch.equal(x.grad, plain)  # type: ignore[arg-type]
    offload.stats()
    moved = offload.stats()["moved_out_bytes"] - before["moved_out_bytes"]
    refused = in_flight_bytes == 0 or when == "detached"
    if memory == "enough" and refused:
        assert moved > x.nbytes  # sent twice
        assert not caught
    if memory == "used up" and refused:
        assert "could not be packed (HostMemoryError: on purpose)" in str(caught[0].message)
    offload.detach()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_what_two_sites_save_leaves_the_device_when_one_is_selected(no_collector: None) -> None:
    """The output that a ReLU saves is the input that the convolution behind it saves."""
    torch.manual_seed(2)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Tanh()
    model = nn.Sequential(*layers)
    x = torch.randn(4, 3, 16, 16)
    model(x).sum().backward()
    plain = gradients(model)
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    layers[1].register_forward_hook(
        lambda module, given, out: seen.append(weakref.ref(out.untyped_storage()))
    )
    offload = bitslab.offload_activations(
        model,
        policy="raw",
        select=bitslab.activations.conv_inputs,
        min_bytes=1024,
        in_flight_bytes=0,
        verify=True,
    )
    for _ in range(2):
        model.zero_grad()
        loss = model(x).sum()
        assert seen[-1]() is None
        loss.backward(retain_graph=True)
        assert all(map(torch.equal, gradients(model), plain))
        model.zero_grad()
        loss.backward()
        assert all(map(torch.equal, gradients(model), plain))
    choices = {site.unit.name: site.choice for site in offload.report().sites}
    assert choices == {"0:0": "raw", "1:0": "keep", "2:0": "raw", "3:0": "keep"}
    offload.detach()


def test_a_change_of_what_is_kept_until_it_is_moved() -> None:
    for when in ("before", "after"):
        x = torch.randn(64, 64).requires_grad_()
        offload = bitslab.ActivationOffload(
            "raw", min_bytes=1, in_flight_bytes=0, select=lambda site: site.name == ":1"
        )
        with offload:
            h = (x * 2).relu()
            if when == "before":
                h.mul_(2)
            y = h.sin()
            if when == "after":
                h.mul_(2)
        with pytest.raises(bitslab.ModifiedInPlaceError):
            y.sum().backward()
        offload.detach()


def test_copies_of_graphs_that_are_gone_count_until_they_are_over() -> None:
    """A link that is slower than the steps holds them up; what is under way does not add up."""
    limit, nbytes = 1 << 20, 1 << 18
    offload = bitslab.ActivationOffload("raw", min_bytes=1024, in_flight_bytes=limit)
    x = torch.randn(nbytes // 4, requires_grad=True)

    def steps() -> None:
        for _ in range(40):
            with offload:
                loss = (x * 2).sin().sum()
            torch.autograd.grad(loss, x)

    gate = threading.Event()

    def hold() -> None:
        gate.wait()

    executor = offload._hooks.executor(x.device)
    executor._out.run(hold)
    thread = threading.Thread(target=steps)
    thread.start()
    thread.join(0.5)
    held_up, moved_bytes = thread.is_alive(), executor.traffic.moved_out_bytes
    gate.set()
    thread.join()
    assert held_up and limit <= moved_bytes <= limit + nbytes
    assert offload.stats()["moved_out_bytes"] == 40 * nbytes
    offload.detach()
