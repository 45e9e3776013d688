"""Locks that processes hold on files of a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def lock_file(folder: str | None, name: str) -> Iterator[None]:
    """Hold a lock file of a folder, which is made; nothing where there is no such folder.

    Not for a process that holds it already, which would wait for itself.

    Parameters
    ----------
    folder : str or None
        Where the file is.
    name : str
        Its name.
    """
    try:
        import fcntl

        os.makedirs(folder or "", exist_ok=True)
        handle = os.open(os.path.join(folder or "", name), os.O_RDWR | os.O_CREAT, 0o666)
    except (ImportError, OSError):  # no such locks on this system, or nothing to be hurt
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        # Not by closing alone: a child forked meanwhile has the file open too.
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)
