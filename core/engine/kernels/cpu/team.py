"""Work on the threads that torch keeps for its own operations: the team of its OpenMP runtime.

Behind an operation of torch these threads wait for the next one without going to sleep, for
milliseconds. Threads of another pool would have to share the processors with them, and to be woken
each time; asked through OpenMP, they start at once. Where no runtime is found, and in a forked
child, where the team's threads do not exist, there is none, and the pool of threads.py serves.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# Below so many bytes of rows for each thread, one thread is as fast.
BYTES_PER_THREAD = 1 << 15

_forked = False


def _forget_team() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_team)


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
