"""Taking the pages of mapped memory from the system, before they are used, by several threads.

Clearing pages and entering them in the page table is most of what page-locking costs, and several
threads do it several times as fast as one. Page-locking itself is one call for the whole range: a
copy may not reach from one registered range into another (cudaErrorInvalidValue), so that memory
locked range by range would have to be copied range by range as well.

Huge pages are locked in half the time. The system has none for memory files unless its
administrator says so; but where the first page of each of their places is taken, Linux from 6.1 on
collapses the place to one of them on request (MADV_COLLAPSE). That is given up as soon as it is
refused, or slow, because memory is in small parts.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time

#: Smaller ranges are taken by one thread: starting others costs as much.
MIN_SHARED_BYTES = 32 << 20
#: More gain little: they wait for each other in the system.
MAX_THREADS = 8
#: Fewer threads take small pages of a memory file no faster than the system's own call for it.
MIN_FILE_THREADS = 4

HUGE_PAGE_BYTES = 2 << 20
#: Huge pages that one call of the system makes, and the rate of a thread below which no more of
#: them are made, in bytes a second: small pages are taken at 0.5 to 2 GB/s, and locked more slowly.
COLLAPSED_PAGES, LEAST_COLLAPSED = 16, 0.25e9

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
    ends = _cuts(address, nbytes, threads)
    errors: list[int] = []

    def take(begin: int, end: int) -> None:
        if collapse:
            _collapse(begin, end)
        error = _populate(begin, end - begin)
        if error:
            errors.append(error)

    ranges = list(zip([address, *ends[:-1]], ends, strict=True))
    others = [threading.Thread(target=take, args=part, daemon=True) for part in ranges[1:]]
    for thread in others:
        thread.start()
    take(*ranges[0])
    for thread in others:
        thread.join()
    failed = [error for error in errors if error not in _UNKNOWN]
    if failed:
        raise OSError(failed[0], os.strerror(failed[0]))
    return not errors


def _cuts(address: int, nbytes: int, parts: int) -> list[int]:
    """Return the ends of equal parts of memory, cut between huge pages."""
    end = address + nbytes
    step = -(-nbytes // (parts * HUGE_PAGE_BYTES)) * HUGE_PAGE_BYTES
    first = -(-(address + step) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return [*range(first, end, step), end] if nbytes else [end]


def _collapse(begin: int, end: int) -> int:
    """Take huge pages for the whole ones between two addresses, as long as that is fast.

    Returns their number. What fails is left to who takes small pages.
    """
    first = -(-begin // HUGE_PAGE_BYTES)
    last = end // HUGE_PAGE_BYTES
    for at in range(first, last, COLLAPSED_PAGES):
        count = min(COLLAPSED_PAGES, last - at)
        started = time.perf_counter()
        for page in range(at, at + count):
            if _advise(page * HUGE_PAGE_BYTES, mmap.PAGESIZE, _MADV_POPULATE_WRITE):
                return at - first
        if _advise(at * HUGE_PAGE_BYTES, count * HUGE_PAGE_BYTES, _MADV_COLLAPSE):
            return at - first
        seconds = time.perf_counter() - started
        if count * HUGE_PAGE_BYTES < LEAST_COLLAPSED * seconds:
            return at + count - first
    return max(0, last - first)


def _populate(address: int, nbytes: int) -> int:
    """Take a range's pages without the interpreter's lock; return the system's error, or 0."""
    return _advise(address, nbytes, _MADV_POPULATE_WRITE)


def _advise(address: int, nbytes: int, advice: int) -> int:
    """Call madvise without the interpreter's lock; return the system's error, or 0."""
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    while advise(address, nbytes, advice):
        error = ctypes.get_errno()
        if error != errno.EINTR:
            return error
    return 0
