"""Work for threads of the host, and what is known of it, in which an interrupt blocks nobody.

`KeyboardInterrupt` comes between any two lines of the main thread. Where that has just entered a
lock by Python code, as those of `threading.Condition` and of what `concurrent.futures` builds on
it, the lock is never left, and a thread that needs it waits forever. So the state of a task
changes by single stores and by methods of built-in types, which nothing comes between.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_RUNS, _CANCELLED = "runs", "cancelled"
#: Whoever waits looks again after so long: an interrupt may come before a waker's last line.
LOOK_AGAIN_SECONDS = 1.0
CLOSE_SECONDS = 30.0  # work that takes longer outlives `close` in its (daemon) thread


class ThreadTask(Generic[T]):
    """Work of a thread. Any thread may ask for it; what is done is asked for without a lock.

    Methods do what those of `concurrent.futures.Future` do.
    """

    _went_well = False
    _error: BaseException | None = None
    _value: T
    _claimed_by: str | None = None
    _waiting: deque[Any] | tuple[()] = ()  # locks that are released when it is done
    _callbacks: deque[Callable[[ThreadTask[T]], object]] | tuple[()] = ()

    @classmethod
    def of(cls, value: T) -> ThreadTask[T]:
        """Return one that is done."""
        task = cls()
        task.set_result(value)
        return task

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles: nobody would do their work."""
        raise TypeError("a task of a thread cannot be copied or pickled")

    def claim(self) -> bool:
        """Return whether the thread that calls is to do the work: nobody has cancelled it."""
        # Whoever comes first writes it: a thread that runs it, or who cancels it.
        return self.__dict__.setdefault("_claimed_by", _RUNS) is _RUNS

    def cancel(self) -> bool:
        """Cancel work that no thread has begun; return whether it is cancelled."""
        if self._went_well or self._error is not None:
            return False
        try:
            return self.__dict__.setdefault("_claimed_by", _CANCELLED) is not _RUNS
        finally:
            if self._claimed_by is _CANCELLED:
                self._over()

    def cancelled(self) -> bool:
        """Return whether it was cancelled."""
        return self._claimed_by is _CANCELLED

    def done(self) -> bool:
        """Return whether it is done, has failed or was cancelled."""
        return self._went_well or self._error is not None or self._claimed_by is _CANCELLED

    def set_result(self, result: T) -> None:
        """Record the result, and wake those that wait for it."""
        self._value = result
        self._went_well = True  # before it is looked at who waits
        if self._waiting or self._callbacks:
            self._over()

    def set_exception(self, error: BaseException) -> None:
        """Record an error, which is not None, and wake those that wait."""
        assert error is not None
        self._error = error
        self._over()

    def add_done_callback(self, call: Callable[[ThreadTask[T]], object]) -> None:
        """Have ``call(task)`` called once when it is done, in that thread; here, if it is done.

        What it raises is logged.
        """
        try:
            self.__dict__.setdefault("_callbacks", deque()).append(call)
        finally:
            if self.done():
                self._call()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done, has failed or was cancelled; raise nothing.

        Return False where so many seconds have passed before.
        """
        if self._went_well or self.done():
            return True
        end = None if timeout_s is None else time.monotonic() + timeout_s
        woken = threading.Lock()
        woken.acquire()
        # Before it is looked at again: who is late sees the entry.
        self.__dict__.setdefault("_waiting", deque()).append(woken)
        while not (self._went_well or self.done()):
            left = LOOK_AGAIN_SECONDS if end is None else end - time.monotonic()
            if left <= 0:
                return False
            woken.acquire(timeout=min(left, LOOK_AGAIN_SECONDS))
        return True

    def result(self, timeout_s: float | None = None) -> T:
        """Return its result, or raise its error; wait for it.

        Raises
        ------
        CancelledError, TimeoutError
            Of `concurrent.futures` and Python.
        """
        error = None if self._went_well else self.exception(timeout_s)
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del self, error  # which the frames of its traceback would hold in a cycle

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Return its error, or None; wait for it, and raise as `result` does of other things."""
        if self._went_well:
            return None
        if not self.wait(timeout_s):
            raise TimeoutError(f"a thread's work is not done after {timeout_s} s")
        if self._claimed_by is _CANCELLED:
            raise CancelledError
        return self._error

    def _over(self) -> None:
        while self._waiting:
            try:
                self._waiting.popleft().release()
            except IndexError:  # another thread was faster
                break
        if self._callbacks:
            self._call()

    def _call(self) -> None:
        while self._callbacks:
            try:
                call = self._callbacks.popleft()
            except IndexError:
                return
            try:
                call(self)
            except Exception:
                logging.getLogger(__name__).exception("a callback of a task failed: %r", call)


#: A task with the function and arguments that it calls; None ends a thread.
_Item = tuple[ThreadTask[Any], Callable[..., Any], tuple[Any, ...]] | None


class Workers:
    """Threads of one process, and the queue that they take work from, in order.

    Parameters
    ----------
    name : str
        The threads' name.
    most : int
        Number of threads, which start with the first work. They are daemons.
    closed : bool
        Whether to begin as after `close`.

    Notes
    -----
    In a forked child, which has none of the threads, `close` does nothing; nothing else may be
    called there.
    """

    def __init__(self, name: str, most: int, closed: bool = False) -> None:
        self.closed = closed
        self._name, self._most = name, most
        self._process = os.getpid()
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        # No work may be queued behind the end; entered again by a collection that closes.
        self._lock = threading.RLock()
        self._threads: list[threading.Thread] = []
        # An interrupt may come between a thread's start and its entry above. So threads take the
        # places themselves, and one that finds none ends: never do more of them work than `most`.
        self._places = list(range(most))
        self._serving: list[threading.Thread] = []

    def allow(self, most: int) -> None:
        """Allow so many threads, or as many as before, if these were more."""
        with self._lock:
            before, self._most = self._most, max(self._most, most)
            self._places.extend(range(before, self._most))

    def submit(self, work: Callable[..., T], args: tuple[Any, ...]) -> ThreadTask[T]:
        """Queue ``work(*args)``; a task of closed ones is cancelled."""
        task: ThreadTask[T] = ThreadTask()
        with self._lock:
            if self.closed:
                task.cancel()
                return task
            if len(self._threads) < self._most:
                given = self._items, self._places, self._serving
                thread = threading.Thread(target=_serve, args=given, name=self._name, daemon=True)
                thread.start()
                self._threads.append(thread)
            self._items.put((task, work, args))
        return task

    def close(self, seconds: float | None = CLOSE_SECONDS) -> None:
        """Cancel work that has not begun, and end the threads.

        Due at the interpreter's exit: a thread inside an operation of torch would abort it.

        Parameters
        ----------
        seconds : float or None
            How long to wait for the work under way; without a limit for None.
        """
        if os.getpid() != self._process:
            return  # a forked child has the queue and locks, in any state, but no thread
        with self._lock:
            self.closed = True
            self._cancel_queued()
            # Of each place, also where an interrupt has left some of another close: a thread that
            # has ended takes none.
            for _ in range(self._most):
                self._items.put(None)
        end = None if seconds is None else time.monotonic() + seconds
        for thread in {*self._threads, *self._serving}:
            # The garbage collector may run this in one of them.
            if thread is not threading.current_thread():
                thread.join(None if end is None else max(0.0, end - time.monotonic()))

    def _cancel_queued(self) -> None:
        item: _Item = None
        while True:
            try:
                item = self._items.get_nowait()
                if item is not None:
                    item[0].cancel()
                item = None
            except queue.Empty:
                return
            except BaseException:  # an interrupt: nobody waits forever for what was taken out
                if item is not None:
                    item[0].cancel()
                raise


def _serve(
    items: queue.SimpleQueue[_Item], places: list[int], serving: list[threading.Thread]
) -> None:
    try:
        places.pop()
    except IndexError:  # all are taken
        return
    serving.append(threading.current_thread())
    while (item := items.get()) is not None:
        _do(*item)
        item = None  # an idle thread keeps nothing alive


def _do(task: ThreadTask[Any], work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not task.claim():
        return
    try:
        result = work(*args)
    except BaseException as error:  # whatever it is, it is the caller's
        task.set_exception(error)
        del task  # which the error's traceback would hold in a cycle
    else:
        task.set_result(result)
