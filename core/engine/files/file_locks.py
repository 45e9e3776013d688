"""Which files of packed weights are in use, by models of any process.

Whoever reads a file holds a shared lock on it (flock), whoever is about to replace it asks for an
exclusive one. The system gives locks up with the process that holds them, however it ends. File
systems that have no such locks, as some network ones, say of every file that it is free.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ...errors import ArgumentError

#: Pauses, in seconds, before a file that is locked is looked at again.
_LOOKS_S = (0.005, 0.02, 0.05)


def hold(fd: int) -> None:
    """Mark an open file as used until `release`, or until its last descriptor is closed."""
    _lock(fd, "LOCK_SH")


def release(fd: int, owner: int) -> None:
    """Close a file that `hold` marked; a forked child, which is not the `owner`, leaves the mark.

    The mark would else last as long as the file's memory map, which has a descriptor of its own.
    """
    if os.getpid() == owner:
        _lock(fd, "LOCK_UN")
    os.close(fd)


def check_free(path: str | os.PathLike[str], argument: str) -> None:
    """Refuse a file that somebody uses.

    Parameters
    ----------
    path : str or os.PathLike
        A file to replace; there may be none.
    argument : str
        Name of the argument that says so.

    Raises
    ------
    ArgumentError
        When a model of this process or another reads its weights from there.
    """
    if _is_used(path):
        gc.collect()  # a deleted model may be part of a reference cycle
        if _is_used(path):
            raise ArgumentError(
                f"{argument}: {os.fspath(path)} holds packed weights that a model is using, in "
                "this process or another; give another file, or restore or delete that model first"
            )


@contextlib.contextmanager
def one_writer(folder: Path) -> Iterator[int]:
    """Enter a folder as the only writer of packed weights; yield its descriptor."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(fd, "LOCK_EX")
        yield fd
    finally:
        # Not by closing alone: a child that was forked meanwhile has the folder open too.
        _lock(fd, "LOCK_UN")
        os.close(fd)


def _is_used(path: str | os.PathLike[str]) -> bool:
    """Return whether somebody has marked a file as used.

    A mark lasts; another writer's look at the file, or the end of its writing, does not.
    """
    return _is_locked(path) and all(_is_locked(path, after_s) for after_s in _LOOKS_S)


def _is_locked(path: str | os.PathLike[str], after_s: float = 0.0) -> bool:
    """Return whether somebody has a lock on a file, after a pause."""
    time.sleep(after_s)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False  # there is none, or the attempt to replace it will say what is wrong
    try:
        return not _lock(fd, "LOCK_EX", "LOCK_NB")
    finally:
        _lock(fd, "LOCK_UN")
        os.close(fd)


def _lock(fd: int, *flags: str) -> bool:
    """Return False where somebody else has the lock; True where it is had, or there are none."""
    try:
        import fcntl

        fcntl.flock(fd, sum(getattr(fcntl, flag) for flag in flags))
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # no such locks on this system, or on this file system
        return True
    return True
