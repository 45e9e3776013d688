"""Writing what is in the page cache to the disk while more is being made."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any

_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin, wait for nothing


def start_writeback(fd: int, begin: int, n_bytes: int) -> None:
    """Let the system write a part of a file to the disk from now on, not first when it is synced.

    A hint, which says nothing about when it is there; systems that do not know it ignore it.

    Parameters
    ----------
    fd : int
        Descriptor of the file.
    begin, n_bytes : int
        The part.
    """
    call = _sync_file_range()
    if call is not None and n_bytes:
        call(fd, begin, n_bytes, _WRITE)


@functools.cache
def _sync_file_range() -> Any:
    """Return Linux's function, or None."""
    with contextlib.suppress(OSError, AttributeError):
        call = ctypes.CDLL(None).sync_file_range
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        return call
    return None
