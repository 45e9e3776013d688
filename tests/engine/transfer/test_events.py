"""Events that are used again, and copies by address: which calls they make, and on a GPU what."""

from __future__ import annotations

import ctypes
import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bitslab.engine.kernels.cuda import driver as driver_module
from bitslab.engine.kernels.cuda.driver import NOT_READY, Driver, zero_words
from bitslab.engine.memory import host_arena
from bitslab.engine.transfer import StreamEvent, StreamLane, copy_on
from tests.driver import FakeStream, simulated

CPU = torch.device("cpu", 0)


def test_an_event_is_used_again_when_it_was_dropped(monkeypatch):
    driver, _ = simulated(monkeypatch)
    stream: Any = FakeStream()
    first = StreamEvent(0)
    first.record(stream)  # by torch, which makes it
    assert not driver.take()
    second = StreamEvent(0)
    second.record(stream)
    addresses = first.address, second.address
    assert 0 not in addresses and len(set(addresses)) == 2
    del first
    third = StreamEvent(0)
    other = StreamEvent(1)  # of another device
    assert third.address == addresses[0] and not other.address
    third.record(stream)
    assert driver.take() == [("record", stream.cuda_stream, addresses[0])]


def test_what_has_passed_is_asked_for_and_waited_for_no_more(monkeypatch):
    driver, _ = simulated(monkeypatch)
    stream: Any = FakeStream()
    event = StreamEvent(0)
    assert event.query()  # never recorded, whoever had it before
    event.wait(stream)
    event.synchronize()
    event.record(stream)
    assert not driver.take()
    driver.answers = [NOT_READY, 0]
    assert not event.query()
    event.wait(stream)
    assert event.query()
    asked = driver.take()
    assert [call[0] for call in asked] == ["query", "wait", "query"]
    event.wait(stream)
    event.synchronize()
    assert event.query() and not driver.take()
    event.record(stream)
    event.wait(stream)
    assert [call[0] for call in driver.take()] == ["record", "wait"]
    driver.answers = [700]
    with pytest.raises(RuntimeError, match="700"):
        event.query()
    assert not event.has_passed


def test_a_new_event_has_passed_whatever_its_last_owner_recorded(monkeypatch):
    driver, _ = simulated(monkeypatch)
    event = StreamEvent(0)
    event.record(FakeStream())  # type: ignore[arg-type]
    driver.answers = [NOT_READY]
    assert not event.query()
    del event
    assert StreamEvent(0).query()


def test_a_copy_is_one_wait_for_each_mark_and_one_event(monkeypatch):
    driver, devices = simulated(monkeypatch)
    lane, other = StreamLane(CPU), StreamLane(CPU)
    source, target = torch.arange(100), torch.zeros(100, dtype=torch.int64)
    before = other.event()
    before.record(other.stream)
    done = lane.copy(target.data_ptr(), source.data_ptr(), 800, after=before)
    own = lane.stream.cuda_stream
    assert torch.equal(source, target)
    assert driver.take() == [("wait", own, before.address), ("copy", own, 800)]
    assert done.query() and before.query()
    driver.take()
    again = lane.copy(target.data_ptr(), 0, 0, after=done, then_after=before)
    assert not driver.take()  # both have passed, and there are no bytes
    assert not again.has_passed and not devices  # torch makes events wherever


def test_another_device_is_made_the_current_one(monkeypatch):
    driver, devices = simulated(monkeypatch, ready=False)
    lane = StreamLane(torch.device("cpu", 1))
    source, target = torch.ones(4), torch.zeros(4)
    event = lane.event()
    event.record(lane.stream)
    event.record(lane.stream)
    event.wait(lane.stream)
    done = lane.copy(target.data_ptr(), source.data_ptr(), 16, after=event)
    copy_on(lane.stream, target.data_ptr(), source.data_ptr(), 0)
    driver.answers = [NOT_READY]
    assert not done.query()
    assert devices and set(devices) == {1}


class FakeLibrary:
    """The driver's library, as far as a thread's context goes."""

    def __init__(self) -> None:
        self.current, self.retained = 0, 0

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(name=name)

    def cuCtxGetCurrent(self, found: Any) -> int:  # noqa: N802
        found._obj.value = self.current
        return 0

    def cuDeviceGet(self, device: Any, index: Any) -> int:  # noqa: N802
        device._obj.value = index.value
        return 0

    def cuDevicePrimaryCtxRetain(self, found: Any, device: Any) -> int:  # noqa: N802
        self.retained += 1
        found._obj.value = 1000 + device.value
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self.current = context.value
        return 0

    def cuGetErrorString(self, status: Any, text: Any) -> int:  # noqa: N802
        text._obj.value = b"operation not permitted when stream is capturing"
        return 0


def test_a_thread_without_a_context_gets_that_of_the_device(monkeypatch):
    monkeypatch.setattr(driver_module, "_contexts", {})
    monkeypatch.setattr(driver_module, "this_thread", SimpleNamespace(ready=False))
    library = FakeLibrary()
    driver = Driver(library)
    for _ in range(2):
        library.current = 0
        driver.bind_thread(3)
        assert library.current == 1003 and library.retained == 1
    library.current = 7  # torch's runtime has given it one
    driver.bind_thread(3)
    assert library.current == 7 and driver_module.this_thread.ready


def test_errors_say_what_the_driver_says():
    driver = Driver(FakeLibrary())
    driver.check(0)
    with pytest.raises(RuntimeError, match=r"capturing \(the driver's number 900\)"):
        driver.check(900)


def test_readiness_is_that_of_a_thread():
    found: list[bool] = []
    worker = threading.Thread(target=lambda: found.append(driver_module.this_thread.ready))
    worker.start()
    worker.join()
    assert found == [False]


def test_zeros_of_the_cpu():
    assert torch.equal(zero_words(5, torch.device("cpu")), torch.zeros(5, dtype=torch.int64))


@pytest.mark.gpu
def test_copies_by_address_and_their_events_on_a_gpu(held_stream):
    device = torch.device("cuda", 0)
    lane = StreamLane(device)
    home = torch.cuda.current_stream()
    piece = host_arena().reserve(1 << 20).cut_piece(1 << 20)
    source = torch.randint(256, (1 << 20,), dtype=torch.uint8, device=device)
    back = torch.zeros_like(source)
    expected = source.cpu()
    begin = lane.event()
    begin.record(home)  # the first time by torch
    torch.cuda.synchronize()
    with held_stream():
        begin.record(home)
        out = lane.copy(piece.data_ptr(), source.data_ptr(), piece.nbytes, after=begin)
        into = lane.copy(back.data_ptr(), piece.data_ptr(), piece.nbytes, after=out)
        assert not (begin.query() or out.query() or into.query())
    into.synchronize()
    assert into.query() and out.query() and begin.query()
    assert torch.equal(piece.tensor(), expected) and torch.equal(back, source)


@pytest.mark.gpu
def test_a_stream_waits_for_what_was_recorded_by_the_call(held_stream):
    """Also when the event has another owner by then, who records it elsewhere."""
    device = torch.device("cuda", 0)
    lane, other = StreamLane(device), StreamLane(device)
    home = torch.cuda.current_stream()
    piece = host_arena().reserve(1 << 12).cut_piece(1 << 12)
    x = torch.zeros(1 << 12, dtype=torch.uint8, device=device)
    warm = lane.event()
    warm.record(home)
    del warm
    torch.cuda.synchronize()
    with held_stream():
        x.fill_(9)  # behind what holds the stream
        event = lane.event()
        address = event.address
        event.record(home)
        done = lane.copy(piece.data_ptr(), x.data_ptr(), x.nbytes, after=event)
        del event
        gc.collect()
        event = lane.event()
        assert event.address == address
        event.record(other.stream)  # which has nothing to do
        other.stream.synchronize()
        assert not done.query()
    done.synchronize()
    assert bool((piece.tensor() == 9).all())


@pytest.mark.gpu
def test_a_thread_of_its_own_copies_on_a_gpu():
    device = torch.device("cuda", 0)
    lane = StreamLane(device)
    x = torch.arange(1000, device=device)
    piece = host_arena().reserve(8000).cut_piece(8000)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            lane.copy(piece.data_ptr(), x.data_ptr(), 8000).synchronize()
        except BaseException as error:
            failed.append(error)

    torch.cuda.synchronize()
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert not failed
    found = (ctypes.c_int64 * 1000).from_address(piece.data_ptr())
    assert list(found) == list(range(1000))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 7, 100_000])
def test_zeros_of_a_gpu(count):
    for _ in range(3):
        made = zero_words(count, torch.device("cuda", 0))
        assert made.dtype == torch.int64 and not made.any()
        made.fill_(-1)  # its memory comes again
        del made


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_lanes_of_two_gpus():
    lanes = [StreamLane(torch.device("cuda", i)) for i in range(2)]
    events = []
    for _ in range(3):
        for i, lane in enumerate(lanes):
            x = torch.full((1 << 16,), i + 1, dtype=torch.uint8, device=lane.device)
            piece = host_arena().reserve(1 << 16).cut_piece(1 << 16)
            with torch.cuda.device(1 - i):  # the other one is the current one
                begin = lane.event()
                begin.record(torch.cuda.current_stream(lane.device))
                done = lane.copy(piece.data_ptr(), x.data_ptr(), x.nbytes, after=begin)
                lanes[1 - i].wait(done)
                assert torch.cuda.current_device() == 1 - i
            events.append((done, piece, i + 1, x))
    for done, piece, value, _ in events:
        done.synchronize()
        assert bool((piece.tensor() == value).all())
