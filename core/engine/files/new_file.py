"""Files that appear whole or not at all: the one way in which files are written.

A file is written under a temporary name in the folder of its target, synced, and renamed. The
writer holds a lock on it (`flock`) for as long as that takes, and the system releases the lock
however the process ends. So a temporary file that nobody has locked is left over from a process
that was killed, and the next write into that folder removes it. Locks of other machines cannot be
seen on every shared file system: a file of another machine, or of this one before it was started
again, is removed when it has not changed for a day as well.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import secrets
import stat
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from types import TracebackType

PathLike = str | os.PathLike[str]

SUFFIX = ".bitslab-tmp"
#: After so long without a change, files of other machines are left over too.
FOREIGN_SECONDS = 24 * 3600
_BOOT_ID = "/proc/sys/kernel/random/boot_id"

_ADVICE = {
    errno.ENOSPC: "free some space there or choose another disk",
    errno.EDQUOT: "free some space there or choose another disk",
    errno.EFBIG: "the file system, or the limit of this process (ulimit -f), allows no such size",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "choose a folder that can be written to",
    errno.EPERM: "choose a folder that can be written to",
}


class NewFile:
    """A file that takes its name when it is complete, by ``with``.

    At the end of the block the file is synced and replaces what had its name. When the block
    raises, the file is removed and what had its name is as it was. An `OSError` of the block that
    names no file, or the temporary one, is raised as one that names `path` and says what to do.

    Parameters
    ----------
    path : str or os.PathLike
        The file to make or to replace, whose permissions are kept. A symbolic link is followed.

    Attributes
    ----------
    requested : str
        `path`, as it was given.
    temporary : pathlib.Path
        Empty at first. It may be opened, truncated and closed any number of times, not replaced.

    Raises
    ------
    OSError
        When the folder does not exist or cannot be written to, or `path` is there and no file: a
        folder, a device or a pipe, which would be replaced.
    """

    def __init__(self, path: PathLike) -> None:
        self.requested = os.fspath(path)
        self.target = Path(os.path.realpath(path))
        if self.target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.requested)
        if self.target.exists() and not self.target.is_file():
            raise OSError(errno.EINVAL, "no regular file, which would be replaced", self.requested)
        folder = self.target.parent
        if not folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such folder", str(folder))
        remove_abandoned(folder)
        try:
            self.temporary, self._locked = make_temporary(folder)
        except OSError as error:
            raise _named(error, self.requested) from error
        self._process = os.getpid()
        state = os.fstat(self._locked.fileno())
        self._identity = (state.st_dev, state.st_ino)

    @property
    def complete(self) -> bool:
        """Whether the file has its name: whatever interrupted the writer, it is whole."""
        try:
            state = os.stat(self.target)
        except OSError:
            return False
        return (state.st_dev, state.st_ino) == self._identity

    def commit(self) -> None:
        """Sync the file and give it its name.

        Raises
        ------
        OSError
            When that fails; it names the file that was asked for.
        """
        try:
            with contextlib.suppress(FileNotFoundError):
                mode = stat.S_IMODE(self.target.stat().st_mode)
                if mode != stat.S_IMODE(os.fstat(self._locked.fileno()).st_mode):
                    os.fchmod(self._locked.fileno(), mode)
            os.fsync(self._locked.fileno())
            os.replace(self.temporary, self.target)
            _sync_folder(self.target.parent)
        except OSError as error:
            raise _named(error, self.requested) from error

    def close(self) -> None:
        """Release the lock, and remove the file unless it has its name; again does nothing.

        A child that was forked meanwhile only forgets the file, which its parent writes.
        """
        if self._locked.closed:
            return
        if os.getpid() == self._process:
            self.temporary.unlink(missing_ok=True)  # after a rename there is none
            # Not by closing alone: a forked child has the file open too.
            with contextlib.suppress(OSError):
                fcntl.flock(self._locked, fcntl.LOCK_UN)
        self._locked.close()

    def named(self, error: OSError) -> OSError:
        """Return an error of writing as one that names the file that was asked for.

        Errors of other files, and those that have no number, are returned as they are.
        """
        ours = error.filename in (None, str(self.temporary), self.temporary)
        return _named(error, self.requested) if ours and error.errno is not None else error

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.close()
        if isinstance(error, OSError):
            named = self.named(error)
            if named is not error:
                raise named from error


@contextlib.contextmanager
def replacing(path: PathLike) -> Iterator[Path]:
    """Give the temporary file of a `NewFile`, which replaces `path` at the end of the block."""
    with NewFile(path) as new:
        yield new.temporary


def _named(error: OSError, path: str) -> OSError:
    """Return an error that says which file cannot be written, and what to do."""
    return OSError(error.errno, f"cannot be written: {reason(error)}", path)


def reason(error: OSError) -> str:
    """Return what the system says against writing, and what to do."""
    advice = _ADVICE.get(error.errno or 0, "")
    return str(error.strerror) + (f"; {advice}" if advice else "")


def make_temporary(folder: Path) -> tuple[Path, FileIO]:
    """Make an empty file and lock it; return its name and what holds the lock while it is open.

    The system releases the lock with the process, and `remove_abandoned` removes the file then.
    """
    while True:
        # Not tempfile.mkstemp, whose files nobody else may read.
        path = folder / f".{_boot()}-{secrets.token_hex(8)}{SUFFIX}"
        locked = FileIO(path, "xb+")
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(locked, fcntl.LOCK_EX)
            if os.fstat(locked.fileno()).st_nlink:
                return path, locked
        except BaseException:
            path.unlink(missing_ok=True)
            locked.close()
            raise
        locked.close()  # removed by another writer before it was locked


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files whose writers are gone; what cannot be removed is left."""
    try:
        with os.scandir(folder) as entries:
            found = [entry.path for entry in entries if entry.name.endswith(SUFFIX)]
    except OSError:  # a folder may be written to and not listed
        return
    for path in found:
        with contextlib.suppress(OSError):
            _remove_if_abandoned(path)


def _remove_if_abandoned(path: str) -> None:
    # For writing, because locks of network file systems ask for it. Neither a link nor a pipe.
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        state = os.fstat(lock)
        if not stat.S_ISREG(state.st_mode):
            return
        boot = _boot()
        ours = boot and os.path.basename(path).startswith(f".{boot}-")
        if not ours and time.time() - state.st_mtime < FOREIGN_SECONDS:
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)  # while it is locked, so that no writer begins with it
    finally:
        os.close(lock)


@functools.cache
def _boot() -> str:
    """Return a word for this machine since its start, or nothing where it has none.

    Every process that has the same word can see the locks of the others.
    """
    try:
        return Path(_BOOT_ID).read_text().replace("-", "").strip()[:16]
    except OSError:
        return ""


def _sync_folder(path: Path) -> None:
    """Sync a folder, so that the names in it survive a loss of power."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
