"""`numba.njit` with a cache on disk that several processes may fill at once.

Numba keeps compiled code on disk in an index per function that it reads, changes and writes with no
lock: two processes that compile different dtypes at once can file them under one name, and the
function then fails for good. Here the index is read and written under a lock file, also for what a
function calls; compiling needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.runtime.nrt import rtsys

from .lock_files import lock_file


class LockedCache(FunctionCache):
    """Numba's cache of a function, one process at a time."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return what is compiled for a signature, or None.

        Numba's own method first loads what it knows of every function and type, which takes longer
        than all that a process has to load, and which Numba does again before it compiles. What is
        compiled already needs the runtime alone.
        """
        rtsys.initialize(target_context)
        with lock_file(self.cache_path, "bitslab.lock"), self._guard_against_spurious_io_errors():
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
        return kernel

    return compiled
