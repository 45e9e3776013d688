"""Lanes: ordered workers that move bytes, a stream of a GPU or threads of the host.

Both take work in order and return what can be waited for: `submit` returns a task with a result,
`run` a mark that another lane waits for. Streams wait for marks of streams by events, and the host
waits for nothing; where one side is a thread, a thread waits, or the host that queues work on a
stream.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from ..kernels.cuda.driver import current_device, driver, ready, this_thread
from ..kernels.cuda.stream import on_stream
from ..memory.locks import call_after_fork
from ..tasks import CLOSE_SECONDS, ThreadTask, Workers
from .events import StreamEvent

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: What streams and the host wait for.
Event = torch.cuda.Event | StreamEvent
#: When work on a lane is done: an event on a stream, the task of a thread.
Mark = torch.cuda.Event | StreamEvent | ThreadTask[Any]


class Task(Protocol[T_co]):
    """Work that was submitted to a lane."""

    def done(self) -> bool:
        """Return whether it is done; waits for nothing."""

    def wait(self) -> object:
        """Wait until it is done: the host for a thread, torch's current stream for a stream."""

    def exception(self) -> BaseException | None:
        """Return its error, or None; waits as `wait` does."""

    def result(self) -> T_co:
        """Return its result, or raise its error; waits as `wait` does."""


class Lane(Protocol):
    """What streams and threads have in common."""

    def submit(self, work: Callable[..., torch.Tensor], /, *args: Any) -> Task[torch.Tensor]:
        """Run ``work(*args)`` after all work before it."""

    def run(
        self,
        work: Callable[..., Any],
        /,
        *args: Any,
        after: Mark | None = None,
        mark: Mark | None = None,
    ) -> Mark:
        """Run ``work(*args)`` after all work before it and after a mark; return its own mark."""

    def close(self) -> None:
        """Wait for the work under way."""


class StreamLane:
    """A stream of its own on a GPU: the only place where the library makes one.

    Parameters
    ----------
    device : torch.device
        The GPU.
    priority : int
        As torch's streams have it: below 0 for kernels that start before those of other streams.

    Attributes
    ----------
    stream : torch.cuda.Stream
        The stream.

    Notes
    -----
    Threads may share it. A copy or pickle is a lane with a stream of its own. In a forked child,
    which has no GPU, `synchronize` and `close` do nothing.
    """

    def __init__(self, device: torch.device, *, priority: int = 0) -> None:
        self.device = device
        self._priority = priority
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device=device, priority=priority)  # type: ignore[no-untyped-call]
        self._process = os.getpid()

    def on(self) -> on_stream:
        """Return a context that makes the stream torch's current one."""
        return on_stream(self.stream)

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Run what comes next after all that is queued on another stream now."""
        self.stream.wait_stream(stream)

    def precede(self, stream: torch.cuda.Stream) -> None:
        """Make another stream wait for all that is queued here now."""
        stream.wait_stream(self.stream)

    def wait(self, mark: Mark | None) -> None:
        """Run what comes next after a mark; the host waits for a task of a thread."""
        if mark is None:
            return
        if isinstance(mark, ThreadTask):
            wait_on_host(mark)
        else:
            mark.wait(self.stream)  # `stream.wait_event` calls this

    def record(self, mark: Mark | None = None) -> torch.cuda.Event:
        """Return an event behind all that is queued now: `mark`, or a new one where it is none."""
        return record_on(self.stream, mark)

    def idle(self) -> bool:
        """Return whether all that was queued is done; waits for nothing."""
        done: bool = self.stream.query()
        return done

    def keep(self, *tensors: torch.Tensor) -> None:
        """Keep the memory of tensors, when they are freed, until what is queued now is done."""
        for t in tensors:
            t.record_stream(self.stream)

    def run(
        self,
        work: Callable[..., torch.cuda.Event | None],
        /,
        *args: Any,
        after: Mark | None = None,
        mark: Mark | None = None,
    ) -> torch.cuda.Event:
        """Queue ``work(*args)`` behind a mark.

        Parameters
        ----------
        work : callable
            Called at once, with the stream as torch's current one. May return an event that it
            recorded last.
        after : event or task, optional
            What the stream waits for.
        mark : event, optional
            Recorded behind the work, where that returned none; a new event when left out.

        Returns
        -------
        torch.cuda.Event
            The event behind the work.
        """
        stream = self.stream
        if after is not None:
            if isinstance(after, ThreadTask):
                wait_on_host(after)
            else:
                after.wait(stream)
        with on_stream(stream):
            made = work(*args)
        return record_on(stream, mark) if made is None else made

    def event(self) -> StreamEvent:
        """Return an event of its GPU that is not recorded yet."""
        return StreamEvent(self.stream.device_index)

    def queue(
        self, work: Callable[..., object], /, *args: Any, after: Event | None = None
    ) -> StreamEvent:
        """Queue ``work(*args)`` behind an event, as `run`; return the event behind it."""
        stream = self.stream
        if after is not None:
            after.wait(stream)
        with on_stream(stream):
            work(*args)
        return StreamEvent(stream.device_index, stream)

    def queue_on(
        self,
        work: Callable[..., object],
        /,
        *args: Any,
        after: Event | None = None,
    ) -> StreamEvent:
        """Queue ``work(stream, *args)``, which names the stream itself, behind an event.

        The stream is not made torch's current one, which takes as long as a launch.
        """
        stream = self.stream
        if after is not None:
            after.wait(stream)
        work(stream, *args)
        return StreamEvent(stream.device_index, stream)

    def copy(
        self,
        target: int,
        source: int,
        nbytes: int,
        *,
        after: Mark | None = None,
        then_after: Mark | None = None,
    ) -> StreamEvent:
        """Queue a copy of bytes between addresses behind one or two marks.

        A tenth of the host's time that ``copy_`` takes in `run`. Whoever calls it keeps the memory
        of both until the event has passed.

        Parameters
        ----------
        target, source : int
            Addresses in memory of the GPU, or in page-locked memory of the host.
        nbytes : int
            From 0.
        after, then_after : event or task, optional
            What the stream waits for; see `wait`.

        Returns
        -------
        StreamEvent
            The event behind the copy.
        """
        stream = self.stream
        index = stream.device_index
        if current_device() != index or not this_thread.ready:
            with ready(index):
                return self.copy(target, source, nbytes, after=after, then_after=then_after)
        calls, address = driver(), stream.cuda_stream
        status = 0
        for mark in (after, then_after):
            if type(mark) is StreamEvent:
                if not mark.has_passed:
                    status = status or calls.wait(address, mark.address, 0)
            elif mark is not None:
                self.wait(mark)
        if nbytes:
            status = status or calls.copy(target, source, nbytes, address)
        if status:
            calls.check(status)
        return StreamEvent(index, stream)

    def submit(self, work: Callable[..., torch.Tensor], /, *args: Any) -> StreamTask:
        """Queue ``work(*args)``, called at once, which returns a tensor made on the stream.

        Raises
        ------
        Exception
            That of the call.
        """
        with on_stream(self.stream):
            result = work(*args)
            return StreamTask(self.device, result, self.record())

    def synchronize(self) -> None:
        """Wait for the stream; in a forked child, do nothing."""
        if os.getpid() == self._process:
            self.stream.synchronize()

    def close(self) -> None:
        """Wait for the stream: memory that its work reads may be freed then."""
        self.synchronize()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the stream, which belongs to a process."""
        return {"device": self.device, "priority": self._priority}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


#: Lanes whose owners are gone, by device, priority and use.
_pool: dict[tuple[torch.device, int, str], list[StreamLane]] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.clear)  # streams are the parent's


def pooled_lane(owner: object, device: torch.device, use: str, *, priority: int = 0) -> StreamLane:
    """Return a lane that goes to the next owner, of the same use, when this one is gone.

    What torch's allocator has given to work on one stream it keeps for that stream. Owners that
    come one after the other, each with a stream of its own, would leave their memory behind on as
    many streams as torch has.

    Parameters
    ----------
    owner : object
        What holds the lane, alone but for what it holds itself.
    device, priority
        As of `StreamLane`. Lanes of a device that is no GPU are not passed on.
    use : str
        What the lane is for, so that it takes as much memory each time.
    """
    if device.type != "cuda":
        return StreamLane(device, priority=priority)
    unused = _pool.setdefault((device, priority, use), [])
    try:
        lane = unused.pop()
    except IndexError:
        lane = StreamLane(device, priority=priority)
    weakref.finalize(owner, unused.append, lane).atexit = False
    return lane


class StreamTask:
    """A tensor that a stream makes."""

    __slots__ = ("_device", "_event", "_result")

    def __init__(self, device: torch.device, result: torch.Tensor, event: torch.cuda.Event) -> None:
        self._device = device
        self._result = result
        self._event = event

    def done(self) -> bool:
        """Return whether it is done."""
        done: bool = self._event.query()  # type: ignore[no-untyped-call]
        return done

    def wait(self) -> None:
        """Make torch's current stream wait for the tensor."""
        self.result()

    def exception(self) -> None:
        """Return None: the call has raised its errors, and kernels report theirs later."""

    def result(self) -> torch.Tensor:
        """Return the tensor; torch's current stream waits for it, the host does not."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._event)
        # The memory belongs to the other stream, which must not use it again before this one is
        # through with it.
        self._result.record_stream(current)
        return self._result


class ThreadLane:
    """Threads of their own, which take work in order: one thread, or several at a time.

    Parameters
    ----------
    name : str
        The threads' name.
    threads : int
        Number of threads. With one, work is also done in order.

    Notes
    -----
    Threads start with the first work. They are daemons, and know nothing of the lane, so that one
    that nobody uses is collected, which closes it, as does the interpreter's exit. A forked child
    has none of the parent's threads and work, and starts its own. A copy or pickle is a lane with
    threads of its own.

    Examples
    --------
    >>> from bitslab.engine.transfer import ThreadLane
    >>> lane = ThreadLane("example")
    >>> lane.submit(sum, [1, 2]).result()
    3
    >>> lane.close()
    >>> lane.submit(sum, [1, 2]).cancelled()
    True
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self.name = name
        self.threads = threads
        self._open()
        call_after_fork(self)

    def _open(self, closed: bool = False) -> None:
        self._workers = Workers(self.name, self.threads, closed)
        self._finalize = weakref.finalize(self, self._workers.close, CLOSE_SECONDS)

    def after_fork(self) -> None:
        """Drop the parent's threads, which do not exist in a forked child."""
        self._finalize.detach()
        self._open(self._workers.closed)

    def submit(self, work: Callable[..., T], /, *args: Any) -> ThreadTask[T]:
        """Queue ``work(*args)``; on a closed lane the task is cancelled."""
        return self._workers.submit(work, args)

    def run(
        self,
        work: Callable[..., Any],
        /,
        *args: Any,
        after: Mark | None = None,
        mark: Mark | None = None,
    ) -> ThreadTask[Any]:
        """Queue ``work(*args)``, before which the thread waits for a mark; `mark` is not used."""
        if after is None:
            return self._workers.submit(work, args)
        return self._workers.submit(_after, (after, work, args))

    def close(self, seconds: float | None = CLOSE_SECONDS) -> None:
        """Cancel work that has not begun, and end the threads. Again: nothing.

        Parameters
        ----------
        seconds : float or None
            How long to wait for the work under way; without a limit for None.
        """
        self._workers.close(seconds)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the threads, which belong to a process."""
        return {"name": self.name, "threads": self.threads}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _after(mark: Mark, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    wait_on_host(mark)
    return work(*args)


def new_event() -> torch.cuda.Event:
    """Return an event that records no time."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def record_on(stream: torch.cuda.Stream, mark: Mark | None = None) -> torch.cuda.Event:
    """Return an event behind all that is queued on a stream: `mark`, or a new one."""
    if mark is None or isinstance(mark, ThreadTask):
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
    mark.record(stream)
    return mark  # type: ignore[return-value] # of the kind that was given


def copy_on(stream: torch.cuda.Stream, target: int, source: int, nbytes: int) -> None:
    """Queue a copy of bytes between addresses on a stream; see `StreamLane.copy`."""
    index = stream.device_index
    if current_device() != index or not this_thread.ready:
        with ready(index):
            copy_on(stream, target, source, nbytes)
    elif nbytes and (status := driver().copy(target, source, nbytes, stream.cuda_stream)):
        driver().check(status)


def wait_on_host(mark: Mark) -> None:
    """Wait for a mark in the calling thread; an error of a task is not raised."""
    if isinstance(mark, ThreadTask):
        mark.wait()
    else:
        mark.synchronize()
