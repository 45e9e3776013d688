"""Lanes: work in order, what waits for it, and how threads and streams end, fork and pickle."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
import weakref
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch

from bitslab.engine.transfer import StreamLane, Task, ThreadLane, lanes
from bitslab.engine.transfer.lanes import pooled_lane, wait_on_host
from tests.forked import run_forked
from tests.streams import recorded

CPU = torch.device("cpu")


def threads_of(lane):
    return [thread for thread in threading.enumerate() if thread.name == lane.name]


def held_up(entered, held):
    entered.set()
    return held.wait(20)


@pytest.fixture
def lane(request):
    made = ThreadLane(request.node.name)
    yield made
    made.close()
    assert not threads_of(made)


def test_a_thread_works_in_order_and_starts_with_the_first_work(lane):
    assert not threads_of(lane)
    done: list[int] = []
    tasks = [lane.submit(done.append, n) for n in range(100)]
    tasks[-1].wait()
    assert done == list(range(100)) and all(task.done() for task in tasks)
    assert len(threads_of(lane)) == 1


def test_an_interrupted_start_leaves_one_thread_that_works(lane, monkeypatch):
    real = threading.Thread.start
    interrupts = [True]

    def start(thread):
        real(thread)
        if thread.name == lane.name and interrupts:
            interrupts.pop()
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        lane.submit(int)
    entered, held = threading.Event(), threading.Event()
    first = lane.submit(held_up, entered, held)
    assert entered.wait(20)
    second = lane.submit(int, "7")
    time.sleep(0.05)
    assert not second.done()  # nobody else takes it while the first is under way
    held.set()
    assert first.result() and second.result() == 7
    assert len(threads_of(lane)) == 1
    began = time.monotonic()
    lane.close()
    assert time.monotonic() - began < 10 and not threads_of(lane)


def test_a_start_that_fails_is_tried_again(lane, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            lane.submit(int)
    assert lane.submit(int, "7").result() == 7


def test_errors_belong_to_their_task(lane):
    def fail():
        raise SystemExit(3)

    failed, after = lane.submit(fail), lane.submit(int, "7")
    failed.wait()
    assert isinstance(failed.exception(), SystemExit)
    with pytest.raises(SystemExit):
        failed.result()
    assert after.result() == 7


def test_a_thread_waits_for_a_mark_whatever_its_error(lane):
    held = threading.Event()
    other = ThreadLane("other")

    def fail():
        held.wait(20)
        raise ZeroDivisionError

    mark = other.run(fail)
    second = lane.run(lambda: mark.done(), after=mark)
    held.set()
    assert second.result() is True
    wait_on_host(mark)
    other.close()


def test_several_threads_work_at_a_time():
    lane = ThreadLane("pair", threads=2)
    both = threading.Barrier(2)
    tasks = [lane.submit(both.wait, 20) for _ in range(2)]
    assert sorted(task.result() for task in tasks) == [0, 1]
    lane.close()
    assert not threads_of(lane)


def test_close_waits_for_what_is_under_way_and_cancels_the_rest():
    lane = ThreadLane("closing")
    entered, done = threading.Event(), []

    def slow():
        entered.set()
        time.sleep(0.5)
        done.append(1)

    first, second = lane.submit(slow), lane.submit(slow)
    assert entered.wait(20)
    lane.close()
    lane.close()
    assert done == [1] and first.done() and not threads_of(lane)
    for task in (second, lane.submit(slow)):
        task.wait()
        assert task.cancelled()
        with pytest.raises(CancelledError):
            task.result()


def test_close_gives_up_after_its_time():
    lane, held = ThreadLane("slow"), threading.Event()
    entered = threading.Event()
    task = lane.submit(held_up, entered, held)
    assert entered.wait(20)
    begin = time.monotonic()
    lane.close(0.05)
    assert time.monotonic() - begin < 10 and not task.done()
    held.set()
    assert task.result() is True


def test_a_lane_that_nobody_uses_ends_its_thread():
    lane = ThreadLane("forgotten")
    lane.submit(int).wait()
    threads = threads_of(lane)
    del lane
    gc.collect()
    threads[0].join(20)
    assert not threads[0].is_alive()


def test_an_idle_thread_keeps_nothing_alive(lane):
    class Thing:
        pass

    def use(thing):
        return Thing()

    def fail(thing):
        raise ValueError

    for work in (use, fail):
        thing = Thing()
        gone = weakref.ref(thing)
        lane.submit(work, thing).wait()
        lane.submit(int).wait()
        del thing
        assert gone() is None, work


@pytest.mark.parametrize(
    "make", [copy.copy, copy.deepcopy, lambda lane: pickle.loads(pickle.dumps(lane))]
)
def test_copies_have_threads_of_their_own(lane, make):
    lane.submit(int).wait()
    other = make(lane)
    assert other.submit(threading.get_ident).result() != lane.submit(threading.get_ident).result()
    other.close()
    assert lane.submit(int).result() == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_has_threads_of_its_own():
    code = """
import os, threading
from bitslab.engine.transfer import ThreadLane
lane, closed, held = ThreadLane("lane"), ThreadLane("closed"), threading.Event()
closed.submit(int).wait()
closed.close()
lane.submit(held.wait)
lane.submit(print, "of the parent")
child = os.fork()
if child == 0:
    assert threading.active_count() == 1
    assert lane.submit(os.getpid).result() == os.getpid() and closed.submit(int).cancelled()
    lane.close()
else:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    held.set()
    assert lane.submit(os.getpid).result() == os.getpid()
"""
    done = run_forked(["-c", code], timeout_s=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "of the parent\n", "")


@pytest.mark.parametrize("state", ["idle", "at-work", "never-used"])
def test_the_interpreter_exits_with_an_open_lane(state):
    code = f"""
import time, torch
from bitslab.engine.transfer import ThreadLane
lane = ThreadLane("open", threads=2)
{"lane.submit(int).wait()" if state == "idle" else ""}
for _ in range({5 if state == "at-work" else 0}):
    lane.submit(time.sleep, 0.2)
print("end")
"""
    done = run_forked(["-c", code], timeout_s=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


# Streams


def test_lanes_alone_make_streams():
    root = Path(__file__).resolve().parents[3]
    made = [
        path.relative_to(root).as_posix()
        for folder in ("core", "integrations")
        for path in (root / folder).rglob("*.py")
        if "cuda.Stream(" in path.read_text()
    ]
    assert made == ["core/engine/transfer/lanes.py"]


class Owner:
    pass


def test_owners_that_come_one_after_the_other_have_one_stream(monkeypatch):
    monkeypatch.setattr(lanes, "_pool", {})
    gpu = torch.device("cuda", 0)
    with recorded(monkeypatch):
        found = []
        for _ in range(40):
            owner = Owner()
            found.append([pooled_lane(owner, gpu, use) for use in ("copies", "decodes")])
            found[-1].append(pooled_lane(owner, gpu, "copies", priority=-1))
        del owner
        for same in zip(*found, strict=True):
            assert len(set(map(id, same))) == 1
        assert len({id(lane.stream) for lane in found[0]}) == 3
        first, second = Owner(), Owner()
        one, other = (pooled_lane(owner, gpu, "copies") for owner in (first, second))
        assert one is found[0][0] and other is not one  # both live
        assert pooled_lane(Owner(), CPU, "copies") is not pooled_lane(Owner(), CPU, "copies")


def test_a_stream_waits_by_events_and_the_host_for_threads_alone(monkeypatch, lane):
    with recorded(monkeypatch) as record:
        first, second = StreamLane(CPU), StreamLane(CPU)
        current: Any = record.current
        record.work("makes ids")
        first.follow(current)
        mark = first.run(record.work, "one")
        again = second.run(record.work, "two", after=mark)
        assert first.run(record.work, "three", after=lane.run(int), mark=mark) is mark
        second.wait(None)
        second.wait(mark)
        second.run(record.work, "four", mark=again)
        second.precede(current)
        assert record.take() == [
            ("current", "makes ids"),
            ("stream0", "after current:1"),
            ("stream0", "one"),
            ("stream1", "after stream0:1"),
            ("stream1", "two"),
            ("stream0", "three"),
            ("stream1", "after stream0:2"),
            ("stream1", "four"),
            ("current", "after stream1:2"),
        ]
        lane.run(int, after=again).result()
        assert record.take() == [("host", "after stream1:2")]


def test_work_that_records_an_event_gives_that(monkeypatch):
    with recorded(monkeypatch):
        lane = StreamLane(CPU)
        own = torch.cuda.Event()
        assert lane.run(lambda: own, mark=torch.cuda.Event()) is own


def test_a_result_of_a_stream_is_waited_for_by_the_current_one(monkeypatch):
    with recorded(monkeypatch) as record:
        lane = StreamLane(CPU)

        def make():
            record.work("makes")
            return torch.ones(2)

        def fail():
            raise ZeroDivisionError

        task: Task[torch.Tensor] = lane.submit(make)
        assert task.done() and task.exception() is None
        assert record.take() == [("stream0", "makes")]
        assert task.result().tolist() == [1, 1]
        assert record.take() == [("current", "after stream0:1"), ("current", "keeps 8")]
        with pytest.raises(ZeroDivisionError):
            lane.submit(fail)
        assert record.current.name == "current"


def test_a_forked_child_leaves_the_parents_stream_alone(monkeypatch):
    with recorded(monkeypatch) as record:
        lane = StreamLane(CPU)
        lane.run(record.work, "one")
        lane.synchronize()
        monkeypatch.setattr(os, "getpid", lambda: -1)
        lane.synchronize()
        lane.close()
        assert record.take() == [("stream0", "one"), ("host", "after stream0:1")]


def test_copies_have_streams_of_their_own(monkeypatch):
    with recorded(monkeypatch):
        lane = StreamLane(CPU)
        for other in (copy.deepcopy(lane), pickle.loads(pickle.dumps(lane))):
            assert other.device == CPU and other.stream is not lane.stream


@pytest.mark.gpu
def test_streams_of_a_gpu_run_beside_the_current_one(held_stream):
    lane, second = StreamLane(torch.device("cuda", 0)), StreamLane(torch.device("cuda", 0))
    x = torch.ones(1000, device="cuda")
    lane.follow(torch.cuda.current_stream())
    # Loads the kernels, and gives the streams memory: asking for more would wait for the GPU.
    lane.submit(lambda: x + 1).result().sum().item()
    gc.collect()
    torch.cuda.synchronize()
    with held_stream():
        task = lane.submit(lambda: x + 1)
        lane.synchronize()  # what is held is the current stream
        assert task.done()
    with held_stream(lane.stream):
        task = lane.submit(lambda: x + 2)
        mark = lane.record()
        after = second.run(lambda: None, after=mark)
        assert not task.done() and not after.query()
        assert torch.cuda.current_stream() not in (lane.stream, second.stream)
        rows = task.result()
        total = rows.sum()
    assert total.item() == 3000 and after.query()
