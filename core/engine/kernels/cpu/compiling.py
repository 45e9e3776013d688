"""Compiling the Numba functions, one process at a time.

Numba keeps compiled code on disk in an index per function that it reads, changes and writes with no
lock: two processes that compile different dtypes at once can file them under one name, and the
function then fails for good. So every first use for new argument types happens under a lock file.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..compile_notice import CompileNotice

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
    key = tuple(map(_kind, args))
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
    """Hold the locks under which functions are compiled into the cache that `kernel` is in."""
    with _lock, _only_process(kernel.stats.cache_path), _watched():
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


def _kind(argument: Any) -> Any:
    """Return what Numba's type of an argument depends on; asking Numba itself takes far longer."""
    if isinstance(argument, np.ndarray):
        return argument.dtype, argument.ndim, argument.flags.num
    return type(argument)


@contextlib.contextmanager
def _only_process(folder: str | None) -> Iterator[None]:
    """Hold the lock file of a cache folder; nothing to hold where there is no cache."""
    try:
        import fcntl

        os.makedirs(folder or "", exist_ok=True)
        handle = os.open(os.path.join(folder or "", "bitslab.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except (ImportError, OSError):  # no such locks on this system, or no cache that could be hurt
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        # Not by closing alone: a child forked meanwhile has the file open too.
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)
