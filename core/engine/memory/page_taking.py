"""Taking the pages of mapped memory from the system, before they are used, by several threads.

Clearing pages and entering them in the page table is most of what page-locking costs, and several
threads do it several times as fast as one. Page-locking itself is one call for the whole range: a
copy may not reach from one registered range into another (cudaErrorInvalidValue), so that memory
locked range by range would have to be copied range by range as well.

Threads take pieces of the range in turn. A call of the system holds the lock of the process's
address space as long as it takes pages, and whatever changes that space (a mapping, the stack of a
new thread) waits for the lock, with all other takers behind it. By one long call for each thread,
four threads and eight were as slow as one. Pieces are small where nothing else runs Python, and
become larger where a thread waits longer than it takes pages, as for the interpreter's lock.

Huge pages are locked in half the time. The system has none for memory files unless its
administrator says so; but where the first page of each of their places is taken, Linux from 6.1 on
collapses the place to one of them on request (MADV_COLLAPSE). That is given up as soon as it is
refused, or slow, because memory is in small parts.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import threading
import time
from collections.abc import Callable

#: Bytes for each thread: starting one takes as long as the pages of some megabytes.
MIN_SHARED_BYTES = 16 << 20
#: More gain little: they wait for each other in the system.
MAX_THREADS = 8

HUGE_PAGE_BYTES = 2 << 20
#: What a thread takes at a time, cut between huge pages: little, so that others wait shortly for
#: the lock of the address space, and up to so much where it waits for the interpreter's; of several
#: threads each a quarter of that.
PIECE_BYTES, MOST_PIECE_BYTES = HUGE_PAGE_BYTES, 64 << 20
#: The rate below which a thread asks for no more huge pages, in bytes a second of its own time over
#: so many bytes: small pages are taken at 0.5 to 2 GB/s, and locked more slowly.
LEAST_COLLAPSED, JUDGED_BYTES = 0.25e9, 32 << 20

_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25  # Python has no names for them
#: What systems before Linux 5.14 answer.
_UNKNOWN = (errno.EINVAL, errno.ENOSYS)


def threads_for(nbytes: int) -> int:
    """Return the number of threads that take the pages of so many bytes."""
    return max(1, min(MAX_THREADS, available_cores(), nbytes // MIN_SHARED_BYTES))


def available_cores() -> int:
    """Return the number of processor cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def take_pages(
    address: int, nbytes: int, threads: int | None = None, *, collapse: bool = False
) -> bool:
    """Take the pages of mapped memory that this process may write to; its bytes are kept.

    Parameters
    ----------
    address, nbytes : int
        The memory; `address` is that of a page.
    threads : int, optional
        How many take them at a time; as `threads_for` says when left out.
    collapse : bool
        Whether to ask for huge pages where none are given by themselves. Of a memory file, whose
        offsets are aligned to them as addresses are.

    Returns
    -------
    bool
        False where the system has no call for it.

    Raises
    ------
    OSError
        When the system has no pages left.
    """
    threads = threads_for(nbytes) if threads is None else threads
    pieces = _Pieces(address, nbytes)
    failed: list[BaseException] = []

    def take() -> None:
        try:
            _take(pieces, MOST_PIECE_BYTES // (1 if threads == 1 else 4), collapse=collapse)
        except BaseException as error:
            failed.append(error)
        finally:
            if failed:
                pieces.stop()

    others = []
    try:
        for _ in range(1, threads):
            thread = threading.Thread(target=take, daemon=True)
            others.append(thread)  # before an interrupt of its start
            with contextlib.suppress(RuntimeError):  # the system has none left
                thread.start()
        take()
    finally:  # of an interrupt: nobody is to take pages of memory that its owner unmaps
        pieces.stop()
        for thread in others:
            if thread.ident is not None:  # it was started
                thread.join()
    if failed:
        error = failed[0]
        if isinstance(error, OSError) and error.errno in _UNKNOWN:
            return False
        raise error
    return True


class _Pieces:
    """Pieces of memory, cut between huge pages, that threads take in turn."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._begin, self._end = address, address + nbytes
        self._lock = threading.Lock()

    def next(self, nbytes: int) -> tuple[int, int]:
        """Return begin and end of a piece of about so many bytes; none are left where these agree.

        `nbytes` is a multiple of those of a huge page.
        """
        with self._lock:
            begin = self._begin
            aligned = begin // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            self._begin = min(self._end, aligned + nbytes)
            return begin, self._begin

    def stop(self) -> None:
        """Have no more pieces."""
        with self._lock:
            self._begin = self._end


def _take(pieces: _Pieces, most_bytes: int, *, collapse: bool) -> None:
    """Take pieces, of so many bytes at most, until none are left.

    Raises
    ------
    OSError
        When the system gives no pages.
    """
    nbytes, huge_pages = PIECE_BYTES, _HugePages() if collapse else None
    while True:
        begin, end = pieces.next(nbytes)
        if begin == end:
            return
        began, began_own = time.perf_counter(), time.thread_time()
        if huge_pages is not None:
            huge_pages.collapse(begin, end)
        error = _populate(begin, end - begin)
        if error:
            raise OSError(error, os.strerror(error))
        own = time.thread_time() - began_own
        if time.perf_counter() - began > 2 * own and nbytes < most_bytes:
            nbytes *= 2


class _HugePages:
    """Asks for huge pages as long as the system gives them quickly to a thread.

    Attributes
    ----------
    given : bool
        False once they were refused, or slow over JUDGED_BYTES.
    """

    def __init__(self) -> None:
        self.given = True
        self._taken_bytes, self._own_s = 0, 0.0  # since they were judged last

    def collapse(self, begin: int, end: int) -> None:
        """Take huge pages for whole places between two addresses; the rest is left untaken."""
        first = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        nbytes = end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - first
        if not self.given or nbytes <= 0:
            return
        began_own = time.thread_time()  # not what it waits for others
        for page in range(first, first + nbytes, HUGE_PAGE_BYTES):
            if _advise(page, mmap.PAGESIZE, _MADV_POPULATE_WRITE):
                self.given = False
                return
        if _advise(first, nbytes, _MADV_COLLAPSE):
            self.given = False
            return
        self._taken_bytes += nbytes
        self._own_s += time.thread_time() - began_own
        if self._taken_bytes >= JUDGED_BYTES:
            self.given = self._taken_bytes >= LEAST_COLLAPSED * self._own_s
            self._taken_bytes, self._own_s = 0, 0.0


def _populate(address: int, nbytes: int) -> int:
    """Take a range's pages without the interpreter's lock; return the system's error, or 0."""
    return _advise(address, nbytes, _MADV_POPULATE_WRITE)


def _advise(address: int, nbytes: int, advice: int) -> int:
    """Call madvise without the interpreter's lock; return the system's error, or 0."""
    advise = _madvise()
    while advise(address, nbytes, advice):
        error = ctypes.get_errno()
        if error != errno.EINTR:
            return error
    return 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise
