"""Row ranges on the threads of this process.

Numba's own threading layers are not used: the one that is always there aborts when two threads
enter it, and none survives a fork after its first use. The kernels release the lock, so a plain
pool of Python threads does the same work, and a forked child starts a pool of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from ..format import BLOCK_ROWS

T = TypeVar("T")

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_threads = 0


def _forget_pool() -> None:
    """Drop the parent's pool in a forked child: its threads do not exist there."""
    global _pool, _pool_threads, _lock
    _pool, _pool_threads, _lock = None, 0, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _get_pool(threads: int) -> ThreadPoolExecutor:
    global _pool, _pool_threads
    with _lock:
        if _pool is None or _pool_threads < threads:
            # A smaller pool that another thread still uses ends with its last reference.
            _pool = ThreadPoolExecutor(threads, thread_name_prefix="bitslab")
            _pool_threads = threads
        return _pool


def run_ranges(work: Callable[[int, int], T], n_rows: int, bytes_per_row: int) -> list[T]:
    """Call ``work(begin, end)`` over ranges that cover ``range(n_rows)`` and return the results.

    Ranges start at multiples of 32 rows. As many threads as torch uses take part, one when the
    work is less than a megabyte. The results come in the order of the ranges.
    """
    threads = min(torch.get_num_threads(), max(1, n_rows * bytes_per_row >> 20))
    if threads <= 1:
        return [work(0, n_rows)]
    step = -(-n_rows // threads)
    step = -(-step // BLOCK_ROWS) * BLOCK_ROWS
    ranges = [(begin, min(begin + step, n_rows)) for begin in range(0, n_rows, step)]
    pool = _get_pool(threads)
    futures = [pool.submit(work, begin, end) for begin, end in ranges[1:]]
    first = work(*ranges[0])
    return [first, *(future.result() for future in futures)]
