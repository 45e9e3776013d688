"""Raw copies of a GPU by address: simulated on the CPU, and on a GPU where memory is short."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

import bitslab
from bitslab import ModifiedInPlaceError
from bitslab.activations.copies import Pass, StoredCopy
from bitslab.activations.executor import Executor
from bitslab.activations.forms import SavedForm
from bitslab.activations.identity import span_of
from bitslab.engine.memory import host_arena
from tests.activations.immediate_streams import immediate

CPU = torch.device("cpu")


def saved(t: torch.Tensor) -> StoredCopy:
    """Return a copy of a tensor that comes back in its shape."""
    form = SavedForm(t, t.untyped_storage())
    assert form.is_whole
    return StoredCopy("0:0", t.detach(), span_of(t), t, 0, Pass(0, set()), form)


def given_up(copy: StoredCopy) -> bool:
    return copy.original is None


def executor_of(in_flight_bytes: int) -> Executor:
    return Executor(CPU, in_flight_bytes, lambda *_: None, lambda *_: None)


def test_an_original_gives_its_memory_up_and_remains_a_witness(monkeypatch):
    immediate(monkeypatch)
    t = torch.randn(20, 30)
    copy = saved(t)
    witness, expected = copy.original, t.clone()
    assert witness is not None
    executor = executor_of(0)
    executor.store(copy, None)
    assert copy.original is None and witness.untyped_storage().nbytes() == 0
    t.add_(1)
    assert witness._version == t._version == 1
    found = executor.bytes_of(copy, False)
    assert torch.equal(found, expected) and found.shape == t.shape
    executor.close()


def test_what_is_read_from_an_original_outlives_it(monkeypatch):
    """The original's memory is given up while autograd computes with what it was given."""
    driver = immediate(monkeypatch)
    t = torch.randn(8, 8)
    copy, expected = saved(t), t.clone()
    executor = executor_of(1 << 20)
    driver.answers = [600] * 2  # not over when it is saved and when it is read
    executor.store(copy, None)
    found = executor.bytes_of(copy, False)
    assert copy.original is not None and found.data_ptr() == t.data_ptr()
    executor.bound_in_flight(0, now=True)
    assert torch.equal(found, expected) and given_up(copy)
    executor.close()


@pytest.mark.parametrize("in_flight_bytes", [None, 0])
def test_gradients_are_those_of_plain_training(monkeypatch, in_flight_bytes):
    """Views of one storage, parts of it, other dtypes and shapes without elements among them."""
    immediate(monkeypatch)
    torch.manual_seed(0)
    x = torch.randn(6, 8)

    def gradient(hooks: Any) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        with hooks:
            y = (leaf * 2).sin()
            q, k, v = y.view(6, 2, 4).unbind(1)[0], y[:, 2:6], y.t()
            z = (q * k).exp().sum() + (v @ y).tanh().pow(2).sum() + y[2].sigmoid().prod()
            z = z + y.double().cos().sum() + (y * y).sum().sin() + y[:0].exp().sum()
        first = torch.autograd.grad(z, leaf, retain_graph=True)[0]
        again = torch.autograd.grad(z, leaf)[0]
        assert torch.equal(first, again)
        return first

    offload = bitslab.ActivationOffload("raw", min_bytes=1, in_flight_bytes=in_flight_bytes)
    plain = gradient(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
    for _ in range(3):
        assert torch.equal(gradient(offload), plain)
    assert offload.stats()["moved_out_bytes"] == offload.stats()["crossed_out_bytes"] > 0
    offload.detach()


def test_a_change_in_place_is_seen_after_the_original_is_gone(monkeypatch):
    immediate(monkeypatch)
    offload = bitslab.ActivationOffload("raw", min_bytes=1, in_flight_bytes=0)
    x = torch.randn(64, requires_grad=True)
    with offload:
        h = x * 2
        y = h.sin()
    h.mul_(3)
    with pytest.raises(ModifiedInPlaceError):
        y.sum().backward()
    offload.detach()


def test_host_memory_goes_back_with_the_copies(monkeypatch):
    immediate(monkeypatch)
    executor = executor_of(0)
    copies = [saved(torch.randn(1000)) for _ in range(20)]
    for copy in copies:
        executor.store(copy, None)
    taken = host_arena().stats()["used_bytes"]
    del copy, copies
    gc.collect()
    executor.close()
    assert host_arena().stats()["used_bytes"] <= taken - 20 * 4000


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("in_flight_bytes", [None, 0, 1 << 20])
@pytest.mark.parametrize("policy", [{"policy": "raw"}, {"policy": "static", "codecs": "zvc"}])
def test_every_bit_under_pressure(policy: dict[str, Any], in_flight_bytes: int | None) -> None:
    """Originals are freed at once, and the allocator gives their memory to what comes next."""
    offload = bitslab.ActivationOffload(
        min_bytes=1024, in_flight_bytes=in_flight_bytes, verify=True, **policy
    )
    x = torch.randn(1 << 18, device="cuda", requires_grad=True)

    def gradient() -> torch.Tensor:
        y = x
        for i in range(60):
            y = (y * 1.01).sin()
            if i % 7 == 0:
                torch.cuda._sleep(500_000)
            torch.full_like(y, float(i))  # takes the memory that was given up
        loss = y.sum()
        return torch.autograd.grad(loss, x)[0]

    plain = gradient()
    for _ in range(4):
        with offload:
            y = x
            for i in range(60):
                y = (y * 1.01).sin()
                if i % 7 == 0:
                    torch.cuda._sleep(500_000)
                torch.full_like(y, float(i))
            loss = y.sum()
        assert torch.equal(torch.autograd.grad(loss, x)[0], plain)
        del loss, y
    offload.detach()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [{"policy": "raw"}, {"policy": "static", "codecs": "zvc"}])
def test_a_graph_that_is_dropped_while_its_copies_are_under_way(policy: dict[str, Any]) -> None:
    offload = bitslab.ActivationOffload(min_bytes=1024, **policy)
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    kept = []
    for i in range(20):
        with offload:
            y = (x * (i + 1)).sin().exp()
        y = y.detach()
        kept.append((i, torch.full_like(x, float(i))))  # maybe where the copies are read from
        with offload:
            z = (x * (i + 1)).cos().exp()
        expected = -(x.detach() * (i + 1)).sin() * (x.detach() * (i + 1)).cos().exp() * (i + 1)
        assert torch.allclose(torch.autograd.grad(z.sum(), x)[0], expected, atol=1e-4)
    assert all(bool((t == i).all()) for i, t in kept)
    offload.detach()


@pytest.mark.gpu
@pytest.mark.parametrize("in_flight_bytes", [None, 0])
def test_a_tensor_that_a_slow_stream_has_made(in_flight_bytes: int | None) -> None:
    """It belongs to another stream, and is dropped by the program as soon as it was used."""
    offload = bitslab.ActivationOffload("raw", min_bytes=1024, in_flight_bytes=in_flight_bytes)
    side, home = torch.cuda.Stream(), torch.cuda.current_stream()
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    expected = None
    for _ in range(10):
        side.wait_stream(home)
        with torch.cuda.stream(side):
            torch.cuda._sleep(5_000_000)
            h = x * 2
        home.wait_stream(side)
        with offload:
            torch.cuda._sleep(2_000_000)
            y = h.sin()
        del h
        with torch.cuda.stream(side):
            junk = [torch.full_like(x, 7.0) for _ in range(4)]  # from its memory, if it is free
        home.wait_stream(side)
        (found,) = torch.autograd.grad(y.sum(), x)
        expected = found if expected is None else expected
        assert torch.equal(found, 2 * (2 * x.detach()).cos()) and torch.equal(found, expected)
        del junk, y
    offload.detach()


@pytest.mark.gpu
def test_memory_that_is_read_back_comes_again_in_order() -> None:
    """What was brought back is freed and taken again while the GPU is behind."""
    offload = bitslab.ActivationOffload("raw", min_bytes=1024, in_flight_bytes=0)
    x = torch.randn(1 << 18, device="cuda", requires_grad=True)

    def loss_of() -> torch.Tensor:
        y = x
        for _ in range(40):
            y = y.sin() * 1.1
        return y.sum()

    (plain,) = torch.autograd.grad(loss_of(), x)
    for _ in range(5):
        with offload:
            loss = loss_of()
        torch.cuda._sleep(20_000_000)
        assert torch.equal(torch.autograd.grad(loss, x)[0], plain)
    offload.detach()


@pytest.mark.gpu
def test_threads_with_streams_of_their_own() -> None:
    offload = bitslab.ActivationOffload("raw", min_bytes=1024, in_flight_bytes=1 << 20)
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                made = torch.Generator("cuda").manual_seed(seed)
                x = torch.randn(1 << 16, device="cuda", generator=made).requires_grad_()
                for _ in range(10):
                    with offload:
                        y = (x * seed).sin().exp().sum()
                    (found,) = torch.autograd.grad(y, x)
                    (plain,) = torch.autograd.grad((x * seed).sin().exp().sum(), x)
                    assert torch.equal(found, plain)
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    offload.detach()
    assert not failed


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("current", [0, 1])
def test_tensors_of_two_gpus(current: int) -> None:
    """Of which one is never the current one while its tensors are saved."""
    offload = bitslab.ActivationOffload("raw", min_bytes=1024, in_flight_bytes=0)
    leaves = [torch.randn(1 << 16, device=f"cuda:{i}", requires_grad=True) for i in range(2)]
    with torch.cuda.device(current):
        for _ in range(5):
            with offload:
                first = leaves[0].sin().exp()
                y = (first.to("cuda:1") * leaves[1]).tanh().sum()
            found = torch.autograd.grad(y, leaves)
            plain = torch.autograd.grad(
                (leaves[0].sin().exp().to("cuda:1") * leaves[1]).tanh().sum(), leaves
            )
            assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    offload.detach()
