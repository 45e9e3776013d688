"""Many readers or one writer, on the CPU's threads and on GPU streams; and locks after a fork."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol

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
    """

    def __init__(self) -> None:
        # Entered by itself, since the condition does so through more calls.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._depths: dict[int, int] = {}  # of the threads that read
        self._writers_waiting = 0
        self._writing_thread: int | None = None
        self._events: dict[
            tuple[torch.device, int], tuple[torch.cuda.Event, torch.cuda.Stream]
        ] = {}

    def reading(self) -> ReadersAndWriter:
        """Return the lock as a context manager of a reader."""
        return self

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._mutex:
            if self._writing_thread == me:
                raise BitslabError("table: read from inside its own change")
            if me not in self._depths:
                while self._writing_thread is not None or self._writers_waiting:
                    self._changed.wait()
            self._depths[me] = self._depths.get(me, 0) + 1

    def __exit__(self, *error: object) -> None:
        me = threading.get_ident()
        with self._mutex:
            self._depths[me] -= 1
            if not self._depths[me]:
                del self._depths[me]
                if self._writers_waiting:  # nobody else waits for readers
                    self._changed.notify_all()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock as the only one inside, with no GPU read in flight."""
        me = threading.get_ident()
        with self._changed:
            if self._writing_thread == me or me in self._depths:
                raise BitslabError("table: changed or closed from inside its own gather or change")
            self._writers_waiting += 1
            try:
                while self._writing_thread is not None or self._depths:
                    self._changed.wait()
                self._writing_thread = me
            finally:
                self._writers_waiting -= 1
                self._changed.notify_all()  # readers, when this wait was interrupted
        try:
            for event, _ in self._events.values():
                event.synchronize()
            yield
        finally:
            with self._changed:
                self._writing_thread = None
                self._changed.notify_all()

    def mark_gpu_read(self, device: torch.device) -> None:
        """Record, as a reader, that work on the current stream of a GPU reads what is guarded.

        Reads of a graph under capture, and its replays, are the caller's to guard.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        key = (device, stream_pointer(device))
        with self._changed:
            found = self._events.get(key)
            if found is None:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                found = self._events[key] = (event, torch.cuda.current_stream(device))
            event, stream = found
            event.record(stream)
