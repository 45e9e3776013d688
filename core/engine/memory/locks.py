"""Many readers or one writer, on the CPU's threads and on GPU streams; and locks after a fork."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from ...errors import BitslabError
from ..kernels.cuda.stream import stream_pointer


class Forked(Protocol):
    """What has to be set up anew in a forked child."""

    def after_fork(self) -> None:
        """Replace locks, which threads that do not exist in the child may hold."""


_forked: weakref.WeakSet[Forked] = weakref.WeakSet()
_process = os.getpid()


def current_process() -> int:
    """Return the number of this process, as `os.getpid`, without a system call."""
    return _process


def call_after_fork(target: Forked) -> None:
    """Call ``target.after_fork()`` in every forked child; `target` is held weakly."""
    _forked.add(target)


def _after_fork() -> None:
    global _process
    _process = os.getpid()
    for target in list(_forked):
        target.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class ReadersAndWriter:
    """Lets many readers in at once, or one writer alone.

    A writer waits for the readers that are inside and for GPU work recorded by `mark_gpu_read`;
    readers that come later wait for the writer. A thread that is inside as a reader may enter as
    one again (the garbage collector may run anybody's code in it); what could never end, a writer
    that waits for its own thread, is an error instead.

    Each thread reads under a lock of its own, which nothing but a writer ever makes it wait for,
    and a writer takes them all. They are entered and left by ``with`` alone, and not by Python
    code: an interrupt leaves none of them taken.
    """

    def __init__(self) -> None:
        self._readers: dict[int, contextlib.AbstractContextManager[bool]] = {}  # by thread
        self._mutex = threading.Lock()  # of the writer, and of who adds a reader
        self._writer: int | None = None  # the thread that is inside, or waits for readers
        self._events: dict[
            tuple[torch.device, int], tuple[torch.cuda.Event, torch.cuda.Stream]
        ] = {}
        self._events_mutex = threading.Lock()

    def reading(self) -> contextlib.AbstractContextManager[bool]:
        """Return what a reader is inside of, for a ``with`` in the calling thread.

        Raises
        ------
        BitslabError
            In a thread that is inside as the writer.
        """
        me = threading.get_ident()
        own = self._readers.get(me)
        if self._writer is not None:
            if self._writer == me:
                raise BitslabError("table: read from inside its own change")
            if own is None or not _is_held(own):
                with self._mutex:  # behind the writer, who else might never come in
                    pass
        if own is None:
            with self._mutex:
                own = self._readers.setdefault(me, threading.RLock())
        return own

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock as the only one inside, with no GPU read in flight."""
        me = threading.get_ident()
        own = self._readers.get(me)
        if self._writer == me or (own is not None and _is_held(own)):
            raise BitslabError("table: changed or closed from inside its own gather or change")
        with self._mutex:
            try:
                self._writer = me
                with _all_of(list(self._readers.values())):
                    for event, _ in list(self._events.values()):
                        event.synchronize()
                    yield
            finally:
                self._writer = None

    def mark_gpu_read(self, device: torch.device) -> None:
        """Record, as a reader, that work on the current stream of a GPU reads what is guarded.

        Reads of a graph under capture, and its replays, are the caller's to guard.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        key = (device, stream_pointer(device))
        with self._events_mutex:
            found = self._events.get(key)
            if found is None:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                found = self._events[key] = (event, torch.cuda.current_stream(device))
            event, stream = found
            event.record(stream)


@contextlib.contextmanager
def _all_of(locks: list[contextlib.AbstractContextManager[bool]]) -> Iterator[None]:
    """Hold all locks."""
    if not locks:
        yield
        return
    with locks[0], _all_of(locks[1:]):
        yield


def _is_held(lock: Any) -> bool:
    """Return whether the calling thread holds an `RLock`."""
    try:
        threading.Condition(lock).notify()  # nobody waits
    except RuntimeError:
        return False
    return True
