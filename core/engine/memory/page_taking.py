"""Taking the pages of mapped memory from the system, before they are used, by several threads.

Clearing pages and entering them in the page table is most of what page-locking costs, and several
threads do it several times as fast as one. Page-locking itself is one call for the whole range: a
copy may not reach from one registered range into another (cudaErrorInvalidValue), so that memory
locked range by range would have to be copied range by range as well.

Threads take pieces of the range in turn. A call of the system holds the lock of the process's
address space as long as it takes pages, and whatever changes that space (a mapping, the stack of a
new thread) waits for the lock, with all other takers behind it. By one long call for each thread,
eight threads were as slow as one.

Huge pages are locked in half the time. The system has none for memory files unless its
administrator says so; but where the first page of each of their places is taken, Linux from 6.1 on
collapses the place to one of them on request (MADV_COLLAPSE). That is given up as soon as it is
refused, or slow, because memory is in small parts.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

#: Bytes for each thread: starting one takes as long as the pages of some megabytes.
MIN_SHARED_BYTES = 16 << 20
#: More gain little: they wait for each other in the system.
MAX_THREADS = 8

HUGE_PAGE_BYTES = 2 << 20
#: What a thread takes at a time, cut between huge pages: some tenths of a millisecond's work, which
#: is how long others wait for the lock.
PIECE_BYTES = HUGE_PAGE_BYTES
#: The rate of a thread below which no more huge pages are asked for, in bytes a second over so many
#: pieces: small pages are taken at 0.5 to 2 GB/s, and locked more slowly.
LEAST_COLLAPSED, JUDGED_PIECES = 0.25e9, 16

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
        False where the system has no call for it, and nothing was done.

    Raises
    ------
    OSError
        When the system has no pages left.
    """
    threads = threads_for(nbytes) if threads is None else threads
    pieces, next_piece = _pieces(address, nbytes), threading.Lock()
    huge_pages = _HugePages() if collapse else None
    errors: list[int] = []

    def take() -> None:
        while not errors:
            with next_piece:
                begin, end = next(pieces, (0, 0))
            if begin == end:
                return
            if huge_pages is not None:
                huge_pages.collapse(begin, end)
            error = _populate(begin, end - begin)
            if error:
                errors.append(error)

    others = [threading.Thread(target=take, daemon=True) for _ in range(1, threads)]
    for thread in others:
        thread.start()
    take()
    for thread in others:
        thread.join()
    failed = [error for error in errors if error not in _UNKNOWN]
    if failed:
        raise OSError(failed[0], os.strerror(failed[0]))
    return not errors


def _pieces(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield begins and ends of pieces of memory, cut between huge pages."""
    begin, end = address, address + nbytes
    while begin < end:
        cut = min(end, (begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES + PIECE_BYTES)
        yield begin, cut
        begin = cut


class _HugePages:
    """Asks for huge pages as long as the system gives them quickly; shared by threads.

    Attributes
    ----------
    given : bool
        False once they were refused, or slow over JUDGED_PIECES.
    """

    def __init__(self) -> None:
        self.given = True
        self._last: deque[tuple[int, float]] = deque(maxlen=JUDGED_PIECES)  # bytes and seconds

    def collapse(self, begin: int, end: int) -> None:
        """Take huge pages for whole places between two addresses; the rest is left untaken."""
        first = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        nbytes = end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - first
        if not self.given or nbytes <= 0:
            return
        started = time.perf_counter()
        for page in range(first, first + nbytes, HUGE_PAGE_BYTES):
            if _advise(page, mmap.PAGESIZE, _MADV_POPULATE_WRITE):
                self.given = False
                return
        if _advise(first, nbytes, _MADV_COLLAPSE):
            self.given = False
            return
        self._last.append((nbytes, time.perf_counter() - started))
        last = list(self._last)
        taken_bytes, seconds = sum(n for n, _ in last), sum(s for _, s in last)
        if len(last) == JUDGED_PIECES and taken_bytes < LEAST_COLLAPSED * seconds:
            self.given = False


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
