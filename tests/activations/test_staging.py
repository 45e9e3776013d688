"""Staged copies of a GPU, by streams whose work is done in any order that they allow."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch

from bitslab.activations import staging
from bitslab.activations.copies import Pass, StoredCopy
from bitslab.activations.executor import Executor
from bitslab.activations.forms import SavedForm
from bitslab.activations.host_room import HostMemoryError
from bitslab.activations.identity import span_of
from tests.activations.delayed_streams import DelayedZvc, Streams, delayed

CPU = torch.device("cpu")
SITES = 10


class Step:
    """Saves tensors of some sites, as a forward pass does."""

    def __init__(
        self, executor: Executor, streams: Streams, codec: DelayedZvc, planned_bytes: int | None
    ) -> None:
        self.executor, self.streams = executor, streams
        self.made = Pass(0, set())
        self.copies: list[tuple[StoredCopy, torch.Tensor]] = []
        zeros = streams.random.choice([0.1, 0.5, 0.9])
        for i in range(SITES):
            t = torch.randn(streams.random.choice([300, 1024, 4096]))
            values = t.where(torch.rand_like(t) >= zeros, 0.0)
            t.fill_(7.0)
            streams.later(functools.partial(t.copy_, values))  # what computes is not there yet
            encoded = streams.random.random() < 0.8
            form = None
            if streams.random.random() < 0.5:  # comes back in its shape
                t, values = t.view(-1, 4), values.view(-1, 4)
                form = SavedForm(t, t.untyped_storage())
            copy = StoredCopy(f"{i}:0", t.detach(), span_of(t), t, 0, self.made, form)
            if planned_bytes is not None:
                executor.bound_in_flight(planned_bytes)
            executor.store(copy, codec if encoded else None)
            self.copies.append((copy, values))
            streams.progress()

    def read(self) -> None:
        """Read all in reverse, some ahead, as a backward pass does."""
        found = []
        for i in reversed(range(SITES)):
            copy, expected = self.copies[i]
            found.append((self.executor.bytes_of(copy, False), expected))
            for ahead, _ in self.copies[max(0, i - 3) : i]:
                self.executor.fetch(ahead)
            self.streams.progress()
        self.streams.drain()
        assert all(torch.equal(t, expected) for t, expected in found)


@pytest.mark.drawn(12)
@pytest.mark.parametrize("planned", [False, True], ids=["", "planned"])
@pytest.mark.parametrize("in_flight_bytes", [0, 1 << 14, 1 << 16, 1 << 30])
@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_every_bit_comes_back_in_any_order_of_streams(
    seed: int, lossy: bool, in_flight_bytes: int, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(seed)
    streams, codec = delayed(monkeypatch, seed, lossy)
    failures: list[Any] = []
    executor = Executor(CPU, in_flight_bytes, lambda *_: None, lambda *each: failures.append(each))
    for _ in range(6):
        step = Step(executor, streams, codec, in_flight_bytes if planned else None)
        if streams.random.random() < 0.2:
            executor.close()
        if streams.random.random() < 0.2:
            continue  # the graph is dropped while copies are under way
        step.read()
        if streams.random.random() < 0.5:
            step.read()  # of a graph that is retained
    executor.close()
    staging = executor._staging
    assert not (staging._encoding or staging._sending or staging._unsure)
    assert staging.unsure_bytes == staging.sending_bytes == staging._encoding_bytes == 0
    assert not failures
    # One event says for all copies when their memory may be read or written.
    assert len(streams.recorded) > SITES and len(set(streams.recorded)) == 1


@pytest.mark.parametrize("over", [1, 2, 3])
def test_a_planned_bound_waits_for_what_was_sent_first(
    over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raw and encoded copies cross in order: a later one is done when all before it are."""
    streams, codec = delayed(monkeypatch, 0)
    executor = Executor(CPU, 1 << 30, lambda *_: None, lambda *_: None)
    n = 1 << 12

    def sent(encoded: bool) -> StoredCopy:
        t = torch.randn(n)
        copy = StoredCopy("0:0", t, span_of(t), t, 0, Pass(0, set()))
        executor.bound_in_flight(1 << 30)
        executor.store(copy, codec if encoded else None)
        return copy

    for _ in range(3):  # learns what is needed
        sent(True)
        streams.drain()
    executor.close()
    with monkeypatch.context() as ahead:
        ahead.setattr(streams, "progress", lambda: None)  # the host is far ahead
        copies = [sent(encoded) for encoded in (False, True, False, True)]
        staged: list[Any] = [copy.staged for copy in copies]
        marks: list[Any] = [b.sent if b else c.stored for b, c in zip(staged, copies, strict=True)]
        before = len(streams.current.queue)  # of what had to be encoded
        # Of encoded ones the memory that they may need counts.
        sizes = [b.data.nbytes if b else c.nbytes for b, c in zip(staged, copies, strict=True)]
        executor.bound_in_flight(sum(sizes[over:]), now=True)
        waited = streams.current.queue[before:]
        assert [any(each is mark.passed for each in waited) for mark in marks] == [
            i < over for i in range(len(copies))
        ]
    streams.drain()
    executor.close()


def test_memory_to_encode_into_is_taken_when_there_is_room_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a planned pass: what was sent first is waited for before."""
    streams, codec = delayed(monkeypatch, 0)
    executor = Executor(CPU, 1 << 30, lambda *_: None, lambda *_: None)
    n, taken = 1 << 12, []
    real = staging.StagedBlob.__init__

    def take(self: staging.StagedBlob, nbytes: int, *args: Any) -> None:
        held = executor._staging.sending_bytes + executor._originals.in_flight_bytes
        taken.append(held + nbytes)
        real(self, nbytes, *args)

    monkeypatch.setattr(staging.StagedBlob, "__init__", take)
    bound = 3 * 4 * n
    with monkeypatch.context() as ahead:
        ahead.setattr(streams, "progress", lambda: None)  # the host is far ahead
        for i in range(12):
            t = torch.randn(n)
            copy = StoredCopy("0:0", t, span_of(t), t, 0, Pass(0, set()))
            executor.bound_in_flight(bound)
            executor.store(copy, codec if i % 4 == 3 else None)
    assert len(taken) == 3 and 2 * 4 * n < max(taken) <= bound
    streams.drain()
    executor.close()


def test_what_comes_back_before_its_size_is_known_takes_what_it_is_likely_to_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a planned pass; where that is too little, it is brought back once more."""
    streams, codec = delayed(monkeypatch, 0)
    executor = Executor(CPU, 1 << 30, lambda *_: None, lambda *_: None)

    def sent(zeros: float) -> tuple[StoredCopy, torch.Tensor]:
        t = torch.randn(1 << 14)
        t = t.where(torch.rand_like(t) >= zeros, 0.0)
        copy = StoredCopy("0:0", t, span_of(t), t, 0, Pass(0, set()))
        executor.bound_in_flight(0)
        executor.store(copy, codec)
        return copy, t.clone()

    for _ in range(3):  # learns what is needed
        copy, _ = sent(0.9)
        streams.drain()
        executor.bytes_of(copy, False)
    brought: list[StoredCopy] = []
    real = executor.fetch
    short: list[Any] = []

    def fetch(copy: StoredCopy, **options: Any) -> None:
        brought.append(copy)
        assert all(ref() is None for ref in short)  # memory is taken once at a time
        real(copy, **options)
        short.append(weakref.ref(copy.fetched))

    monkeypatch.setattr(executor, "fetch", fetch)
    for zeros, fetches in ((0.9, 1), (0.1, 2)):
        with monkeypatch.context() as ahead:
            ahead.setattr(streams, "progress", lambda: None)  # the host is far ahead
            copy, expected = sent(zeros)
            before = executor.traffic.moved_in_bytes
            executor.fetch(copy)
        assert copy.fetched is not None and copy.fetched.nbytes < copy.nbytes // 4
        found = executor.bytes_of(copy, False)
        streams.drain()
        assert torch.equal(found, expected)
        assert len(brought) == fetches
        assert executor.traffic.moved_in_bytes - before == copy.nbytes  # counted once
        brought.clear()
        short.clear()


def test_what_cannot_be_sent_again_remains_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was larger than its host memory, and there is no more: it is read on the device."""
    streams, codec = delayed(monkeypatch, 0)
    failures: list[Any] = []
    executor = Executor(CPU, 1 << 30, lambda *_: None, lambda *each: failures.append(each))

    def saved(zeros: float) -> tuple[StoredCopy, torch.Tensor]:
        t = torch.randn(1 << 14)
        t = t.where(torch.rand_like(t) >= zeros, 0.0)
        copy = StoredCopy("0:0", t, span_of(t), t, 0, Pass(0, set()))
        executor.store(copy, codec)
        return copy, t.clone()

    for _ in range(3):  # learns that little is needed
        copy, _ = saved(0.99)
        streams.drain()
        executor.bytes_of(copy, False)
    copy, expected = saved(0.0)

    def cut(*args: Any) -> torch.Tensor:
        raise HostMemoryError("on purpose")

    monkeypatch.setattr(executor._room, "cut", cut)
    executor.close()
    assert [name for name, _ in failures] == ["0:0"] and copy.original is None
    for _ in range(2):
        found = executor.bytes_of(copy, False)
        streams.drain()
        assert torch.equal(found, expected)
