"""Which files of packed weights are in use, by models of any process.

Whoever reads a file holds a shared lock on it (flock), whoever is about to replace it asks for an
exclusive one. The system gives locks up with the process that holds them, however it ends. On file
systems that have no such locks, as some network ones, every file counts as free. Any other failure
to lock is an error: files in use would be replaced.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ...errors import ArgumentError

#: Pauses, in seconds, before a file that is locked is looked at again.
_LOOKS_S = (0.005, 0.02, 0.05)
#: How a file system or a system says that it has no such locks.
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
_HELD = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES}


def hold(fd: int, path: str | os.PathLike[str]) -> None:
    """Mark an open file as used until `release`, or until its last descriptor is closed.

    Raises
    ------
    OSError
        When its file system has locks and gives none; it names `path`.
    """
    _lock(fd, path, "LOCK_SH")


def release(fd: int, owner: int) -> None:
    """Close a file that `hold` marked; a forked child, which is not the `owner`, leaves the mark.

    The mark would else last as long as the file's memory map, which has a descriptor of its own.
    """
    try:
        if os.getpid() == owner:
            _unlock(fd)
    finally:
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
    OSError
        When its file system has locks and does not tell who holds one.
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
        _lock(fd, folder, "LOCK_EX")
        try:
            yield fd
        finally:
            # Not by closing alone: a child that was forked meanwhile has the folder open too.
            _unlock(fd)
    finally:
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
        free = _lock(fd, path, "LOCK_EX", "LOCK_NB")
        if free:
            _unlock(fd)
        return not free
    finally:
        os.close(fd)


def _lock(fd: int, path: str | os.PathLike[str], *flags: str) -> bool:
    """Return False where somebody else has the lock; True where it is had, or there are none.

    Only with LOCK_NB is it False: other locks are waited for.
    """
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        return True
    try:
        fcntl.flock(fd, sum(getattr(fcntl, flag) for flag in flags))
    except OSError as error:
        if error.errno in _HELD and "LOCK_NB" in flags:
            return False
        if error.errno in _NO_LOCKS or (error.errno == errno.EBADF and _is_open(fd)):
            return True
        said = f"cannot be locked ({error.strerror}), so that nobody can tell whether it is in use"
        raise OSError(error.errno, said, os.fspath(path)) from error
    return True


def _is_open(fd: int) -> bool:
    """Return whether a descriptor is open.

    Network file systems whose locks need a file that is open for writing say that it is not: there
    folders, and files that are read, have none.
    """
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _unlock(fd: int) -> None:
    """Give a lock up, if there is one; what the system says against it, closing says again."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_UN)
