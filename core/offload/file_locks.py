"""Which files of packed weights are in use, by models of any process.

Whoever reads a file holds a shared lock on it (flock), whoever is about to replace it asks for an
exclusive one. The system gives locks up with the process that holds them, however it ends. File
systems that have no such locks, as some network ones, say of every file that it is free.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import ArgumentError

try:
    import fcntl
except ImportError:  # a system without such locks
    fcntl = None  # type: ignore[assignment]


def hold(fd: int) -> None:
    """Mark an open file as used until `release`, or until its last descriptor is closed."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH)


def release(fd: int, owner: int) -> None:
    """Close a file that `hold` marked; a forked child, which is not the `owner`, leaves the mark.

    The mark would else last as long as the file's memory map, which has a descriptor of its own.
    """
    if os.getpid() == owner:
        _unlock(fd)
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
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        _unlock(fd)
        os.close(fd)


def _is_used(path: str | os.PathLike[str]) -> bool:
    """Return whether somebody has marked a file as used."""
    if fcntl is None:
        return False
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False  # there is none, or the attempt to replace it will say what is wrong
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        _unlock(fd)
        os.close(fd)
    return False


def _unlock(fd: int) -> None:
    """Give a lock up, not by closing alone: a child that was forked has the file open too."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
