"""Compiling the Numba functions, each in one process at a time.

Processes that need the same function for new argument types would compile it several times: the
others wait for the first one, and load it. What the cache itself needs is in jit.py.
"""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..compile_notice import CompileNotice
from .lock_files import lock_file

notice = CompileNotice("kernels for the CPU")

_lock = threading.RLock()
_compiled: dict[Any, set[tuple[Any, ...]]] = {}


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    # No fork while a thread compiles: the child could neither finish that nor know that it is not.
    os.register_at_fork(
        before=lambda: _lock.acquire(),
        after_in_parent=lambda: _lock.release(),
        after_in_child=_renew_lock,
    )


def call(kernel: Any, *args: Any) -> Any:
    """Call a Numba function, compiling it for these arguments first where that is new."""
    prepare(kernel, *args)
    return kernel(*args)


def prepare(kernel: Any, *args: Any) -> None:
    """Compile `kernel` for these arguments, or load it from the cache, if this process has not."""
    # What Numba's types depend on; asking Numba itself takes far longer.
    key = tuple(
        [(a.dtype, a.ndim, a.flags.num) if isinstance(a, np.ndarray) else type(a) for a in args]
    )
    compiled = _compiled.setdefault(kernel, set())
    if key in compiled:
        return
    from numba import typeof

    signature = tuple(typeof(argument) for argument in args)
    if signature not in kernel.overloads:
        with compiling_with_cache_of(kernel):
            kernel.compile(signature)
    compiled.add(key)


@contextlib.contextmanager
def compiling_with_cache_of(kernel: Any) -> Iterator[None]:
    """Hold the locks under which `kernel` is compiled into its cache, and what goes with it."""
    function = kernel.py_func
    name = f"{function.__module__}.{function.__qualname__}"
    # Few files: functions that share one wait for each other.
    file = f"bitslab-{zlib.crc32(name.encode()) % 16}.lock"
    with _lock, lock_file(kernel.stats.cache_path, file), _watched():
        yield


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """Count what Numba compiles meanwhile, not what it loads from its cache."""
    from numba.core import event

    with contextlib.ExitStack() as watch:

        class Listener(event.Listener):
            depth = 0  # a function compiles those that it calls

            def on_start(self, _: Any) -> None:
                if self.depth == 0:
                    watch.enter_context(notice.watching())
                self.depth += 1

            def on_end(self, _: Any) -> None:
                self.depth -= 1
                if self.depth == 0:
                    watch.close()

        with event.install_listener("numba:compile", Listener()):
            yield
