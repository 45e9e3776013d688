"""Many readers or one writer."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from bitslab import BitslabError
from bitslab.engine.memory.locks import ReadersAndWriter, call_after_fork
from tests.interrupts import interrupt_often


def start(target, *arguments) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def wait_for(condition) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_readers_are_inside_together():
    lock, all_inside = ReadersAndWriter(), threading.Barrier(4)

    def read() -> None:
        with lock.reading():
            all_inside.wait(20)

    threads = [start(read) for _ in range(3)]
    with lock.reading():
        all_inside.wait(20)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_writer_is_inside_alone_whatever_comes():
    lock, inside, failures = ReadersAndWriter(), [0, 0], []

    def read() -> None:
        for _ in range(200):
            with lock.reading():
                inside[0] += 1
                if inside[1]:
                    failures.append("reader beside writer")
                inside[0] -= 1

    def write() -> None:
        for _ in range(100):
            with lock.writing():
                inside[1] += 1
                time.sleep(0)
                if inside[1] != 1:
                    failures.append("two writers")
                inside[1] -= 1

    threads = [start(read) for _ in range(4)] + [start(write) for _ in range(3)]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures


def test_a_writer_comes_in_though_readers_never_stop():
    lock, stop = ReadersAndWriter(), threading.Event()

    def read() -> None:
        while not stop.is_set():
            with lock.reading():
                time.sleep(0.002)

    def write() -> None:
        with lock.writing():
            pass

    threads = [start(read) for _ in range(4)]
    for _ in range(5):
        writer = start(write)
        writer.join(20)
        assert not writer.is_alive()
    stop.set()
    for thread in threads:
        thread.join(20)


def test_a_reader_may_enter_again_while_a_writer_waits():
    lock, order = ReadersAndWriter(), []

    def write() -> None:
        with lock.writing():
            order.append("writer")

    with lock.reading():
        writer = start(write)
        wait_for(lambda: lock._writer is not None)
        with lock.reading():
            order.append("reader")
        order.append("still inside")
    writer.join(20)
    assert order == ["reader", "still inside", "writer"]


def test_what_could_never_end_is_an_error():
    lock = ReadersAndWriter()
    with lock.reading(), pytest.raises(BitslabError, match="from inside its own"), lock.writing():
        raise AssertionError
    with lock.writing():
        with pytest.raises(BitslabError, match="from inside its own"), lock.reading():
            raise AssertionError
        with pytest.raises(BitslabError, match="from inside its own"), lock.writing():
            raise AssertionError
    with lock.writing():  # nobody was left inside
        pass


def test_a_body_that_raises_leaves():
    lock = ReadersAndWriter()
    for enter in (lock.reading, lock.writing):
        with pytest.raises(ZeroDivisionError), enter():
            raise ZeroDivisionError
    with lock.writing():
        pass


@pytest.fixture
def alarm_interrupts():
    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_readers_go_on_when_a_waiting_writer_is_interrupted(alarm_interrupts):
    lock = ReadersAndWriter()
    inside, leave = threading.Event(), threading.Event()

    def read() -> None:
        with lock.reading():
            inside.set()
            assert leave.wait(20)

    def read_after() -> None:
        with lock.reading():
            pass

    reader = start(read)
    assert inside.wait(20)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt), lock.writing():
        raise AssertionError
    later = start(read_after)
    later.join(20)
    assert not later.is_alive()
    leave.set()
    reader.join(20)
    with lock.writing():
        pass


@pytest.mark.parametrize("kind", ["reading", "writing"])
def test_interrupts_at_any_line_leave_nobody_inside(kind):
    lock = ReadersAndWriter()

    def enter() -> None:
        for _ in range(2):
            with getattr(lock, kind)():
                pass

    interrupts = interrupt_often(enter, 1.5, 1e-6)

    def write() -> None:
        with lock.writing():
            pass

    writer = start(write)
    writer.join(20)
    assert not writer.is_alive() and interrupts > 100
    with lock.writing():
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_living_objects_are_notified_of_a_fork():
    class Notified:
        forks = 0

        def after_fork(self) -> None:
            self.forks += 1

    living, gone = Notified(), Notified()
    call_after_fork(living)
    call_after_fork(gone)
    del gone
    pid = os.fork()
    if pid == 0:
        os._exit(living.forks)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert living.forks == 0
