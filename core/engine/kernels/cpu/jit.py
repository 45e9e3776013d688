"""`numba.njit` that leaves no frames behind, with a cache that processes may fill at once.

Numba keeps compiled code on disk in an index per function that it reads, changes and writes with no
lock: two processes that compile different dtypes at once can file them under one name, and the
function then fails for good. Here the index is read and written under a lock file, also for what a
function calls; compiling needs none.

What Numba compiles leaves cycles of tracebacks behind, and with them the frames of all callers,
whose tensors then live until Python collects garbage: gigabytes, where a model packs its first
prompt. So the collector is off while it compiles, for them to remain young, and the young objects
are collected behind that.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
from numba.core import runtime
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from .lock_files import lock_file

#: What loads compiled code by itself: no public name of Numba's, so that one may do without.
_LOADING = ("_load_overload", "_guard_against_spurious_io_errors")
_rtsys: Any = getattr(runtime, "rtsys", None)
_loads_alone = _rtsys is not None and all(hasattr(FunctionCache, name) for name in _LOADING)


class _Collector:
    """Python's garbage collector, off while any thread compiles."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # entered again by what a collection calls
        self._users: set[object] = set()
        self._was_on = False

    def off(self, user: object) -> None:
        """Turn it off, until `on` was called for all users."""
        with self._lock:
            if not self._users and gc.isenabled():
                self._was_on = True  # before an interrupt that ends in `on`
                gc.disable()
            self._users.add(user)

    def on(self, user: object) -> None:
        """Turn it on again behind the last user, where it was on."""
        with self._lock:
            self._users.discard(user)
            if not self._users and self._was_on:
                self._was_on = False
                gc.enable()


_collector = _Collector()


def _compile_cleanly(kernel: Any, compile_any: Callable[[Any], Any], signature: Any) -> Any:
    """Compile a kernel for a signature, or load what is compiled, and leave no frame behind."""
    if global_compiler_lock.is_locked():  # for a kernel that calls it
        return compile_any(signature)
    user = object()
    loaded = _loads(kernel)
    try:
        _collector.off(user)
        found = compile_any(signature)
    finally:
        _collector.on(user)
    if _loads(kernel) == loaded:
        gc.collect(0)
    return found


def _loads(kernel: Any) -> int:
    """Return how often a kernel was loaded in place of being compiled."""
    return sum(kernel.stats.cache_hits.values())


class LockedCache(FunctionCache):
    """Numba's cache of a function, one process at a time."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return what is compiled for a signature, or None.

        Numba's own method first loads what it knows of every function and type, which takes longer
        than all that a process has to load, and which Numba does again before it compiles. What is
        compiled already needs the runtime alone.
        """
        with lock_file(self.cache_path, "bitslab.lock"):
            if not _loads_alone:
                return super().load_overload(sig, target_context)
            _rtsys.initialize(target_context)
            with self._guard_against_spurious_io_errors():
                return self._load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write what was compiled for a signature."""
        with lock_file(self.cache_path, "bitslab.lock"):
            super().save_overload(sig, data)


def njit(*, cache: bool, **options: Any) -> Callable[[Any], Any]:
    """Return Numba's decorator of the same name; its options are by keyword."""

    def compiled(function: Any) -> Any:
        kernel = numba.njit(**options)(function)
        if cache:
            kernel._cache = LockedCache(function)
        kernel.compile = partial(_compile_cleanly, kernel, kernel.compile)
        return kernel

    return compiled


def compiles_for(*features: str) -> bool:
    """Return whether Numba compiles for a processor that has features, named as LLVM names them."""
    found: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return {f"+{name}" for name in features} <= set(found.split(","))
