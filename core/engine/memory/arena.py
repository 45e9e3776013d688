"""The arena: host memory of this process that GPUs read, taken in pieces and given back."""

from __future__ import annotations

import operator
import os
import threading
import weakref
from collections import deque

import torch

from ...errors import ArgumentError, BitslabError
from ..tasks import ThreadTask, Workers
from . import host, page_locking
from .free_ranges import FreeRanges
from .host import HostBuffer, Pin
from .pieces import Event, Kind, LeftRange, Pending, Reservation, Slab, Taken, aligned

THREAD_NAME = "bitslab-arena"
#: With two, pages of one reservation ahead would be taken while those of another are page-locked,
#: which takes longer then; and the driver keeps everyone waiting who launches kernels meanwhile.
THREADS = 1
#: Buffers of a kind take so many times what was in use at one time, at most, where some are wholly
#: free.
MOST_RESERVED = 2


class Arena:
    """Host memory of one process, shared by everything that takes pieces of it.

    Pieces are cut from large buffers, because page-locking costs by the call, and each buffer of
    shared memory takes a file descriptor. A piece never moves. A taker reserves as much as it wants
    to cut pieces from; a new buffer is exactly as large as what was asked for.

    Memory is reused for the next taker. Buffers that are wholly free are returned to the system by
    `trim`, when memory for a new buffer is lacking, and when with a new one all would take more
    than `MOST_RESERVED` times what was ever in use at a time, as where each taker wants more in one
    piece than the last. Unlocking pages waits for all GPUs, so that nothing is returned before.

    What does not come from here: tables and unified tensors own each a `HostBuffer`, that processes
    share by its file or map from one, and such memory goes back to the system with its owner; and
    the small page-locked tensors that torch's own allocator serves.

    Notes
    -----
    Threads may share it. A forked child has an arena of its own; the parent's memory is neither
    reused nor released there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slabs: list[Slab] = []
        self._returned: deque[Taken] = deque()
        self._deferred: deque[tuple[list[Event], Taken]] = deque()
        self._dedicated: weakref.WeakSet[HostBuffer] = weakref.WeakSet()
        self._threads: Workers | None = None
        #: Of each kind the most bytes that were taken at a time.
        self._most_taken_bytes: dict[Kind, int] = {}

    def reserve(
        self, least: int, wanted: int | None = None, *, pin: Pin = True, private: bool = True
    ) -> Reservation:
        """Return free memory, or that of a new buffer.

        Waits for no GPU, but where memory is lacking, or free buffers go (`MOST_RESERVED`).

        Parameters
        ----------
        least, wanted : int
            Bytes that are needed, and that would be good to have; as many when left out. Between
            both when free memory has as much, else `wanted`, or `least` where that cannot be had.
        pin, private
            As for `HostBuffer.allocate`.

        Raises
        ------
        BitslabError
            When the memory cannot be had; nothing has changed then, but that free buffers have been
            returned to the system.
        """
        wanted = least if wanted is None else wanted
        if not 0 < least <= wanted:
            raise ArgumentError(f"least: {least}, accepted are 1 to {wanted} bytes")
        kind = Kind(pin, private)
        found = self._reserve_free(least, wanted, kind)
        if found is not None:
            return found
        self._return_surplus(wanted, kind)
        try:
            return self._reserve_new(wanted, kind)
        except BitslabError:
            if wanted == least:
                raise
        return self._reserve_new(least, kind)

    def reserve_soon(
        self, nbytes: int, *, pin: Pin = True, private: bool = True
    ) -> ThreadTask[Reservation]:
        """Return so many bytes of a new buffer, from a thread; free memory is `reserve`'s.

        The error of a buffer that cannot be had is that of the task.
        """
        kind = Kind(pin, private)
        self._return_surplus(nbytes, kind)
        on_gpu = pin is True and page_locking.registrar.available()
        device = torch.cuda.current_device() if on_gpu else None
        with self._lock:
            if self._threads is None:
                self._threads = Workers(THREAD_NAME, THREADS)
                weakref.finalize(self, self._threads.close)
        return self._threads.submit(self._reserve_new_on, (nbytes, kind, device))

    def free_bytes(self, *, pin: Pin = True, private: bool = True) -> int:
        """Return the bytes that `reserve` has free for these arguments, in ranges of any size."""
        kind = Kind(pin, private)
        with self._lock:
            self._collect()
            return sum(slab.free.free_bytes for slab in self._slabs if slab.kind == kind)

    def collect(self, most: int) -> None:
        """Free pieces that went back, up to the first that a GPU may still use; waits for nothing.

        `reserve` frees all it can. This is for takers that reserve much and cut little: until a
        piece is free it holds the events of `cut`, which whoever made them may use again.
        While the current stream is captured in a graph nothing with events is freed.

        Parameters
        ----------
        most : int
            No more pieces are looked at, at a microsecond or two for each.
        """
        with self._lock:
            self._collect(most)

    def buffer(self, nbytes: int) -> HostBuffer:
        """Return a page-locked buffer of exactly this size that is in no slab.

        For what is kept long, seen by forked children, or has views that outlive it. Closing it
        returns it to the system.

        Raises
        ------
        BitslabError
            When the memory cannot be had.
        """
        made = self._allocate(nbytes, Kind(pin=True, private=False))
        with self._lock:
            self._dedicated.add(made)
        return made

    def trim(self) -> int:
        """Return buffers that are wholly free to the system; the bytes of these.

        Waits for the GPUs in use where pieces that went back or such buffers may still be read.
        While the current stream is captured in a graph nothing is returned.
        """
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            if page_locking.registrar.capturing():
                return 0
            if self._returned or self._deferred:
                page_locking.registrar.synchronize()
        with self._lock:
            self._collect()
            idle = {slab for slab in self._slabs if slab.free.wholly_free}
            self._slabs = [slab for slab in self._slabs if slab not in idle]
        for slab in idle:
            slab.buffer.close()
        return sum(slab.nbytes for slab in idle)

    def stats(self) -> dict[str, int]:
        """Return what the arena holds.

        Returns
        -------
        dict
            ``reserved_bytes`` of all buffers, ``used_bytes`` of pieces and buffers that are taken
            or that GPUs may still use, and ``buffers``, their number.
        """
        with self._lock:
            self._collect()
            dedicated = [buffer for buffer in self._dedicated if not buffer.closed]
            free = sum(slab.free.free_bytes for slab in self._slabs)
            reserved = sum(slab.nbytes for slab in self._slabs)
            reserved += sum(buffer.nbytes for buffer in dedicated)
            return {
                "reserved_bytes": reserved,
                "used_bytes": reserved - free,
                "buffers": len(self._slabs) + len(dedicated),
            }

    def _reserve_free(self, least: int, wanted: int, kind: Kind) -> Reservation | None:
        """Return the smallest free range for all that is wanted, else the largest one."""
        with self._lock:
            self._collect()
            ranges = [
                (end - begin, slab, begin)
                for slab in self._slabs
                if slab.kind == kind
                for begin, end in slab.free
                if end - begin >= least
            ]
            if not ranges:
                return None
            enough = [found for found in ranges if found[0] >= wanted]
            by_size = operator.itemgetter(0)
            size, slab, begin = min(enough, key=by_size) if enough else max(ranges, key=by_size)
            nbytes = min(size, wanted)
            end = begin + min(size, aligned(nbytes))
            self._take(slab, begin, end)
        return Reservation(LeftRange(slab, begin, end), nbytes, self._returned)

    def _reserve_new(self, nbytes: int, kind: Kind) -> Reservation:
        slab = Slab(self._allocate(nbytes, kind), kind, FreeRanges(nbytes))
        with self._lock:
            self._slabs.append(slab)
            self._take(slab, 0, nbytes)
        return Reservation(LeftRange(slab, 0, nbytes), nbytes, self._returned)

    def _return_surplus(self, nbytes: int, kind: Kind) -> None:
        """Return the oldest free buffers to the system where a new one would make too many.

        In the thread of the taker: whether a stream is captured in a graph is known there.
        """
        if torch.cuda.is_initialized() and page_locking.registrar.capturing():  # type: ignore[no-untyped-call]
            return
        with self._lock:
            slabs = [slab for slab in self._slabs if slab.kind == kind]
            most = max(self._most_taken_bytes.get(kind, 0), self._taken_bytes(kind) + nbytes)
            surplus = sum(slab.nbytes for slab in slabs) + nbytes - most
            if surplus <= (MOST_RESERVED - 1) * most:
                return
            idle = set()  # many at once, since the GPUs are waited for
            for slab in slabs:
                if slab.free.wholly_free and slab.nbytes <= surplus:
                    idle.add(slab)
                    surplus -= slab.nbytes
            self._slabs = [slab for slab in self._slabs if slab not in idle]
        for slab in idle:
            slab.buffer.close()

    def _take(self, slab: Slab, begin: int, end: int) -> None:
        slab.free.take(begin, end)
        most, kind = self._most_taken_bytes, slab.kind
        most[kind] = max(most.get(kind, 0), self._taken_bytes(kind))

    def _taken_bytes(self, kind: Kind) -> int:
        return sum(s.nbytes - s.free.free_bytes for s in self._slabs if s.kind == kind)

    def _reserve_new_on(self, nbytes: int, kind: Kind, device: int | None) -> Reservation:
        """Return the memory of a new buffer, from a thread.

        The current GPU of a new thread is the first one, and page-locking makes a context on the
        current one.
        """
        if device is None:
            return self._reserve_new(nbytes, kind)
        with torch.cuda.device(device):
            return self._reserve_new(nbytes, kind)

    def _allocate(self, nbytes: int, kind: Kind) -> HostBuffer:
        with torch.inference_mode(False):
            try:
                return HostBuffer.allocate(nbytes, pin=kind.pin, private=kind.private)
            except BitslabError:
                if not self.trim():
                    raise
                return HostBuffer.allocate(nbytes, pin=kind.pin, private=kind.private)

    def _collect(self, most: int | None = None) -> None:
        """Free what was returned and no GPU uses any more; with the lock held.

        With `most` up to the first that one may use, and so many pieces at most: where the host is
        far ahead of a GPU, the events behind it are not asked for again and again.
        """
        # Asking for events would end a graph capture.
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        wait = in_use and page_locking.registrar.capturing()
        returned, deferred = self._returned, self._deferred
        for _ in range(len(returned) if most is None else min(most, len(returned))):
            gone = returned.popleft()
            if gone.begin == gone.end:
                continue  # a reservation that was used up
            if gone.pending is None:
                gone.slab.free.give_back(gone.begin, gone.end)
            elif wait:
                returned.append(gone)
            else:
                events = _events(gone.pending)
                if events is None:
                    returned.append(gone)
                else:
                    deferred.append((events, gone))
        if wait:
            return
        for _ in range(len(deferred) if most is None else min(most, len(deferred))):
            events, gone = deferred[0]
            if all(map(_passed, events)):
                deferred.popleft()
                gone.slab.free.give_back(gone.begin, gone.end)
            elif most is not None:
                return
            else:
                deferred.rotate(-1)  # behind the others, whose order remains


def _events(pending: Pending) -> list[Event] | None:
    """Return the events; None where another thread's graph capture allows none to be asked for."""
    try:
        return list(pending())
    except RuntimeError as error:
        # A GPU that has failed uses nothing more.
        return None if _of_capture(error) else []


def _passed(event: Event) -> bool:
    try:
        return event.query()
    except RuntimeError as error:
        return not _of_capture(error)


def _of_capture(error: RuntimeError) -> bool:
    return "captur" in str(error)


_arena: Arena | None = None
_arena_lock = threading.Lock()
#: Of the parents of this process: their memory may not be mapped here, and what has its address
#: must not be unmapped with them.
_inherited: list[Arena] = []


def host_arena() -> Arena:
    """Return the arena of this process, made at the first call."""
    global _arena
    with _arena_lock:
        if _arena is None:
            _arena = Arena()
        return _arena


def _after_fork() -> None:
    """Begin with no arena in a forked child: the memory is the parent's."""
    global _arena, _arena_lock
    _arena_lock = threading.Lock()
    if _arena is not None:
        _inherited.append(_arena)
        _arena = None


def _return_idle() -> None:
    """Return idle buffers to the system, for what else needs host memory."""
    if _arena is not None:
        _arena.trim()


host.reclaimers.append(_return_idle)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
