"""Threads of the host that run the Numba kernels over ranges of rows.

Numba's own threading layers are not used: the one that is always there aborts when two threads
enter it, and none survives a fork after its first use. The kernels release the lock, so a plain
pool of Python threads does the same work, and a forked child starts a pool of its own.

Compiled functions that need no Python between two calls run on the threads that torch keeps for its
own operations: the team of its OpenMP runtime. Behind an operation of torch these wait for the next
one without going to sleep, for milliseconds. Threads of another pool would have to share the
processors with them, and to be woken each time; asked through OpenMP, they start at once. Where no
runtime is found, and in a forked child, where the team's threads do not exist, the pool serves.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...tasks import ThreadTask, Workers
from ..format import BLOCK_ROWS

T = TypeVar("T")

# Below so many bytes of rows for each thread, one thread of the team is as fast.
BYTES_PER_THREAD = 1 << 15
# Below so many bytes of rows one thread does the work of the pool.
POOL_BYTES = 2 << 20

_lock = threading.Lock()
_pool: Workers | None = None
_forked = False


def _after_fork() -> None:
    """Drop the parent's pool and team in a forked child: their threads do not exist there."""
    global _pool, _lock, _forked
    _pool, _lock, _forked = None, threading.Lock(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _get_pool(threads: int) -> Workers:
    global _pool
    with _lock:
        if _pool is None:
            _pool = Workers("bitslab", threads)
            weakref.finalize(_pool, _pool.close)  # at exit: holds it
        _pool.allow(threads)
        return _pool


def threads_of(n_rows: int, bytes_per_row: int) -> int:
    """Return how many threads `run_ranges` lets work on rows."""
    return min(torch.get_num_threads(), max(1, 2 * n_rows * bytes_per_row // POOL_BYTES))


def run_ranges(work: Callable[[int, int], T], n_rows: int, bytes_per_row: int) -> list[T]:
    """Call ``work(begin, end)`` over ranges that cover ``range(n_rows)`` and return the results.

    Ranges start at multiples of 32 rows. As many threads as torch uses take part, one when the
    work is less than a megabyte. The results come in the order of the ranges.
    """
    threads = threads_of(n_rows, bytes_per_row)
    if threads <= 1:
        return [work(0, n_rows)]
    step = -(-n_rows // threads)
    step = -(-step // BLOCK_ROWS) * BLOCK_ROWS
    ranges = [(begin, min(begin + step, n_rows)) for begin in range(0, n_rows, step)]
    others: list[ThreadTask[T]] = []
    try:
        pool = _get_pool(threads)
        for each in ranges[1:]:
            others.append(pool.submit(work, each))
        found = [work(*ranges[0])]
        for task, each in zip(others, ranges[1:], strict=True):
            # What no thread has begun, as where all of them are waiting here themselves.
            found.append(work(*each) if task.cancel() else task.result())
        return found
    except BaseException:
        # The caller may give the memory back that they read and write.
        for task in others:
            if not task.cancel():
                task.wait()
        raise


class Team:
    """The threads of an OpenMP runtime that this process has loaded.

    Attributes
    ----------
    thread_number, thread_count : int
        Addresses of C functions without arguments that return an int: the number of the thread
        that calls, and how many work with it.
    """

    def __init__(self, runtime: Any) -> None:
        self._parallel = runtime.GOMP_parallel
        self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None
        self.thread_number, self.thread_count = (
            ctypes.cast(function, ctypes.c_void_p).value or 0
            for function in (runtime.omp_get_thread_num, runtime.omp_get_num_threads)
        )

    def run(self, function: int, data: int, threads: int) -> None:
        """Call a C function on each of up to so many threads; it gets the address `data`."""
        self._parallel(function, data, threads, 0)


def threads_for(n_bytes: int) -> int:
    """Return how many threads are worth asking for so many bytes of rows."""
    return min(torch.get_num_threads(), max(1, n_bytes // BYTES_PER_THREAD))


def team_of_torch() -> Team | None:
    """Return torch's team, or None."""
    return None if _forked else _find_team()


@functools.cache
def _find_team() -> Team | None:
    if not hasattr(os, "RTLD_NOLOAD"):
        return None
    for name in _names():
        try:
            runtime = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            return Team(runtime)
        except (OSError, AttributeError):  # not loaded, or not one with these functions
            continue
    return None


def _names() -> Iterator[str]:
    """Yield runtimes that torch may have loaded: its own, then those of the system."""
    kinds = ("libgomp", "libiomp5", "libomp")
    folder = Path(torch.__file__).parent
    for place in (folder / "lib", folder.parent / "torch.libs"):
        for kind in kinds:
            yield from (str(path) for path in sorted(place.glob(f"{kind}[.-]*so*")))
    yield from ("libgomp.so.1", "libiomp5.so", "libomp.so")
