"""Tasks of threads: who runs, cancels and waits for them, and interrupts at any line."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from bitslab.engine.tasks import ThreadTask, Workers
from tests.forked import run_forked

ROOT = Path(__file__).parents[2]


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    made = Workers(request.node.name, 2)
    yield made
    made.close(20)


def test_a_task_runs_or_is_cancelled_and_never_both() -> None:
    """Both at the same time, over and over."""
    for _ in range(200):
        task: ThreadTask[int] = ThreadTask()
        together = threading.Barrier(2)
        found: list[bool] = []

        def cancel(task: ThreadTask[int], together: threading.Barrier, found: list[bool]) -> None:
            together.wait(20)
            found.append(task.cancel())

        other = threading.Thread(target=cancel, args=(task, together, found))
        other.start()
        together.wait(20)
        claimed = task.claim()
        other.join(20)
        assert [not claimed] == found and task.cancelled() is not claimed


def test_what_is_claimed_cannot_be_cancelled() -> None:
    task: ThreadTask[int] = ThreadTask()
    assert task.claim() and not task.cancel() and not task.cancelled() and not task.done()
    task.set_result(3)
    assert task.done() and task.result() == 3 and task.exception() is None


def test_a_cancelled_task_is_never_claimed() -> None:
    task: ThreadTask[int] = ThreadTask()
    assert task.cancel() and task.cancel() and not task.claim() and task.done()
    for ask in (task.result, task.exception):
        with pytest.raises(CancelledError):
            ask()


def test_a_wait_ends_after_its_time() -> None:
    task: ThreadTask[int] = ThreadTask()
    begin = time.monotonic()
    assert not task.wait(0.05)
    assert 0.05 <= time.monotonic() - begin < 10
    with pytest.raises(TimeoutError, match="not done after 0 s"):
        task.result(0)


def test_all_that_wait_are_woken(workers: Workers) -> None:
    held = threading.Event()
    task = workers.submit(held.wait, (20,))
    found: list[object] = []
    waiting = [threading.Thread(target=lambda: found.append(task.result())) for _ in range(8)]
    for thread in waiting:
        thread.start()
    held.set()
    for thread in waiting:
        thread.join(20)
    assert found == [True] * 8


def test_callbacks_are_called_once_whenever_they_come(
    workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    entered, held, found = threading.Event(), threading.Event(), []

    def work() -> None:
        entered.set()
        held.wait(20)

    def fail(task: object) -> None:
        raise ZeroDivisionError

    task = workers.submit(work, ())
    assert entered.wait(20)
    task.add_done_callback(fail)
    task.add_done_callback(lambda done: found.append((done, threading.current_thread())))
    assert not found
    held.set()
    workers.close(20)  # which waits until it is through with callbacks
    task.add_done_callback(lambda done: found.append((done, threading.current_thread())))
    assert [done for done, _ in found] == [task, task]
    assert found[0][1] is not found[1][1] is threading.current_thread()
    assert "ZeroDivisionError" in caplog.text


def test_more_threads_are_allowed_later(workers: Workers) -> None:
    workers.allow(1)
    workers.allow(4)
    all_at_once = threading.Barrier(4)
    tasks = [workers.submit(all_at_once.wait, (20,)) for _ in range(4)]
    assert sorted(task.result() for task in tasks) == [0, 1, 2, 3]


@pytest.mark.parametrize("pool", ["lane", "ranges"])
def test_interrupts_at_any_line_leave_threads_that_work(pool: str) -> None:
    code = f"""
import faulthandler, sys, time
import torch
sys.path.insert(0, {str(ROOT)!r})
from bitslab.engine.kernels.cpu.threads import run_ranges
from bitslab.engine.transfer import ThreadLane
from tests.interrupts import interrupt_often
faulthandler.dump_traceback_later(60, exit=True)
torch.set_num_threads(2)
lane = ThreadLane("interrupted")

def lane_work():
    tasks = [lane.submit(time.sleep, 0) for _ in range(4)]
    for task in tasks:
        while not task.done():
            task.wait()
        assert task.exception() is None and task.result() is None

def ranges():
    assert len(run_ranges(lambda begin, end: end - begin, 64, 1 << 20)) == 2

work = {{"lane": lane_work, "ranges": ranges}}["{pool}"]
for _ in range(4):  # starts all threads: how these are interrupted is tested with lanes
    work()
interrupts = interrupt_often(work, 3, 3e-6)
for _ in range(100):
    lane_work()
    ranges()
lane.close()
print(interrupts > 100)
"""
    done = run_forked(["-c", code], timeout_s=90)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_what_is_under_way_ends_before_the_interpreter() -> None:
    """A daemon thread that is inside an operation of torch at the very end aborts the process."""
    code = """
import threading, time, torch
from bitslab.engine.kernels.cpu import threads

begun = threading.Event()

def work():
    begun.set()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        torch.ones(1000).sum()
    print("done")

threads._get_pool(2).submit(work, ())
begun.wait(20)
"""
    done = run_forked(["-c", code], timeout_s=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_pieces_of_pieces_are_done_by_who_waits_for_them() -> None:
    """Where all threads of the pool wait for pieces that none of them has begun."""
    code = """
import faulthandler, threading, torch
from bitslab.engine.kernels.cpu.threads import run_ranges

faulthandler.dump_traceback_later(30, exit=True)
torch.set_num_threads(2)
together = threading.Barrier(4)

def outer(begin, end):
    together.wait(20)
    return sum(run_ranges(lambda a, b: b - a, 64, 1 << 20))

found = []
callers = [
    threading.Thread(target=lambda: found.append(run_ranges(outer, 64, 1 << 20)))
    for _ in range(2)
]
for caller in callers:
    caller.start()
for caller in callers:
    caller.join()
print(found)
"""
    done = run_forked(["-c", code], timeout_s=60)
    assert (done.returncode, done.stdout) == (0, "[[64, 64], [64, 64]]\n"), done.stderr


def test_a_closed_pool_leaves_the_work_to_the_caller() -> None:
    workers = Workers("closed", 1)
    workers.close(20)
    assert workers.submit(int, ("7",)).cancelled()


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_tasks_are_not_copied(make: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="cannot be copied"):
        make(ThreadTask())


def test_a_task_that_is_done_is_not_cancelled() -> None:
    failed: ThreadTask[int] = ThreadTask()
    failed.set_exception(ZeroDivisionError())
    for task in (ThreadTask.of(3), failed):
        assert not task.cancel() and not task.cancelled()
