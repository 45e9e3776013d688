"""A file of tensors' bytes through the system's own calls, past the page cache where that works.

The file has no name (O_TMPFILE, or it is unlinked as soon as it is made), so that nothing of it is
left however its process ends. A file system that can do neither keeps a name: the process holds a
lock on it, and the next file that is made in the folder removes those whose lock is free.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...engine.files.new_file import make_temporary, reason, remove_abandoned
from ...engine.files.positioned import read_into, write_from
from ...engine.files.writeback import start_writeback
from ...engine.memory.host import HostBuffer
from ...engine.memory.locks import call_after_fork
from ...engine.tasks import CLOSE_SECONDS
from .tensor_file import ALIGN_BYTES, DiskError, FileKind

#: Memory that does not begin at a multiple of ALIGN_BYTES is copied through a buffer of so many.
BOUNCE_BYTES = 1 << 20
#: What is left free of a file system for others: a share of it, and at most so many bytes.
SPARE_SHARE = 0.02
MAX_SPARE_BYTES = 1 << 30
#: How a file system says that it has no files without a name.
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
_MOUNTS = "/proc/self/mountinfo"
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "ceph", "afs", "beegfs", "gpfs", "fuse"}


class PosixFile:
    """A preallocated file that only this process has; see `TensorFile`.

    Parameters
    ----------
    path : str or os.PathLike
        A folder that can be written to.

    Attributes
    ----------
    file_system : FileSystem
        What holds the folder.
    named : str or None
        Its name, on a file system where a file that is in use cannot be without one.
    bounced_bytes : int
        Bytes that were copied to or from aligned memory, because the caller's was not.

    Raises
    ------
    DiskError
        When there is no such folder, or it cannot be written to.

    Notes
    -----
    Threads may use it at once, for ranges that do not overlap. In a forked child it is closed: the
    space goes back with the parent.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.nbytes = 0
        self.bounced_bytes = 0
        self.named: str | None = None
        folder = Path(self.path)
        if not folder.is_dir():
            what = "is no folder" if folder.exists() else "there is no such folder"
            raise DiskError(f"disk: {self.path}: {what}; give a folder on an SSD")
        remove_abandoned(folder)
        try:
            self._fd, self.named = _open(folder)
        except OSError as error:
            raise DiskError(f"disk: {self.path}: cannot be written: {reason(error)}") from error
        self.file_system = file_system(self.path)
        self.direct = not self.file_system.in_memory and set_direct(self._fd, True)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._users = 0
        self._closed = False
        self._bounces = threading.local()
        self._finalize = weakref.finalize(self, _release, self._fd, self.named, self._process)
        # The system closes it behind all threads. One with a name is to lose that before.
        self._finalize.atexit = self.named is not None
        call_after_fork(self)

    @property
    def kind(self) -> FileKind:
        """Who makes the calls."""
        return "posix"

    def after_fork(self) -> None:
        """Close the child's descriptor, which would keep the space when the parent has ended."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._users = 0
        self._closed = True
        if self._finalize.detach() is not None:
            os.close(self._fd)

    def grow(self, nbytes: int) -> None:
        """Take more of the file system, now; `nbytes` is the new size.

        Raises
        ------
        DiskError
            When the file system has not as much to spare; nothing has changed then.
        """
        with self._using():
            more, spare = nbytes - self.nbytes, free_bytes(self._fd)
            if more > spare:
                raise DiskError(
                    f"disk: {self.path}: {more} bytes more are needed, the file system has {spare} "
                    "to spare"
                )
            try:
                _allocate(self._fd, self.nbytes, more)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, self.nbytes)
                raise DiskError(f"disk: {self.path}: {more} bytes more: {reason(error)}") from error
            self.nbytes = nbytes

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Write uint8 ``[n]`` of host memory from a multiple of ALIGN_BYTES on.

        Raises
        ------
        DiskError
            When not all of it is written.
        """
        with self._using():
            try:
                self._each(self._write_piece, offset, data)
            except OSError as error:
                end = offset + data.shape[0]
                raise DiskError(
                    f"{self._name()}: bytes {offset} to {end} cannot be written: {reason(error)}"
                ) from error
            if not self.direct:
                start_writeback(self._fd, offset, data.shape[0])

    def read(self, offset: int, out: torch.Tensor) -> None:
        """Read to uint8 ``[n]`` of host memory from a multiple of ALIGN_BYTES on.

        Raises
        ------
        DiskError
            When not all of it is read.
        """
        with self._using():
            end = offset + out.shape[0]
            try:
                self._check_size(end)
                self._each(self._read_piece, offset, out)
            except OSError as error:
                raise DiskError(
                    f"{self._name()}: bytes {offset} to {end} cannot be read: {error.strerror}"
                ) from error

    def sync(self) -> None:
        """Wait until the device has all that was written, page cache or not."""
        with self._using():
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Give the space back, once nobody writes or reads; again does nothing.

        A device that does not answer is waited for so long as lanes wait; the space goes back when
        it does, then.
        """
        with self._lock:
            self._closed = True
            idle = self._changed.wait_for(lambda: not self._users, CLOSE_SECONDS)
        if idle and os.getpid() == self._process:
            self._finalize()

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Keep the descriptor open meanwhile."""
        with self._lock:
            if self._closed:
                raise DiskError(f"{self._name()}: is closed")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                self._changed.notify_all()

    def _name(self) -> str:
        return f"disk: the file of process {self._process} in {self.path}"

    def _check_size(self, end: int) -> None:
        size = os.fstat(self._fd).st_size
        if size < end:
            raise DiskError(
                f"{self._name()}: was cut from {self.nbytes} to {size} bytes by somebody else"
            )

    # What the device itself takes: whole blocks, from memory that begins at one.

    def _each(
        self, move: Callable[[int, torch.Tensor, bool], None], offset: int, t: torch.Tensor
    ) -> None:
        """Move the bytes of a tensor, through memory that is aligned where its own is not."""
        aligned = not self.direct or t.data_ptr() % ALIGN_BYTES == 0
        step = t.shape[0] if aligned else BOUNCE_BYTES
        for begin in range(0, t.shape[0], max(1, step)):
            piece = t[begin : begin + step]
            try:
                move(offset + begin, piece, not aligned)
            except OSError as error:
                # Some file systems take the flag, and no request with it.
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                self.direct = set_direct(self._fd, False)
                move(offset + begin, piece, False)

    def _write_piece(self, offset: int, piece: torch.Tensor, bounced: bool) -> None:
        if bounced:
            buffer = self._bounce().data
            piece = buffer[: piece.shape[0]].copy_(piece)
            self.bounced_bytes += piece.shape[0]
        self.write_blocks(offset, piece)

    def _read_piece(self, offset: int, piece: torch.Tensor, bounced: bool) -> None:
        into = self._bounce().data[: piece.shape[0]] if bounced else piece
        self.read_blocks(offset, into)
        if bounced:
            piece.copy_(into)
            self.bounced_bytes += piece.shape[0]

    def write_blocks(self, offset: int, piece: torch.Tensor) -> None:
        """Write bytes, as `write`, from memory that is aligned where the page cache is bypassed.

        With `read_blocks` all that another file does in its own way.

        Raises
        ------
        OSError
            When not all of them are written.
        """
        if not self.direct:
            write_from(self._fd, offset, [piece.numpy().data])
            return
        body, rest = split_blocks(piece)
        buffers = [body.numpy().data] if body.shape[0] else []
        if rest.shape[0]:
            tail = self._bounce().tail
            tail[: rest.shape[0]].copy_(rest)
            buffers.append(tail.numpy().data)
        write_from(self._fd, offset, buffers, align_bytes=ALIGN_BYTES)

    def read_blocks(self, offset: int, into: torch.Tensor) -> None:
        """Read bytes, as `read`, to memory that is aligned where the page cache is bypassed.

        Raises
        ------
        OSError
            When not all of them are read.
        """
        body, rest = split_blocks(into) if self.direct else (into, into[:0])
        buffers = [body.numpy().data] if body.shape[0] else []
        if rest.shape[0]:
            tail = self._bounce().tail
            buffers.append(tail.numpy().data)
        align_bytes = ALIGN_BYTES if self.direct else 1
        got = read_into(self._fd, offset, buffers, align_bytes=align_bytes)
        if got < into.shape[0]:
            raise OSError(errno.EIO, f"the file ends at byte {offset + got}, it was cut")
        if rest.shape[0]:
            rest.copy_(tail[: rest.shape[0]])

    def _bounce(self) -> _Bounce:
        """Return this thread's aligned memory."""
        found: _Bounce | None = getattr(self._bounces, "memory", None)
        if found is None:
            found = self._bounces.memory = _Bounce()
        return found


class _Bounce:
    """Aligned memory of a thread: for pieces, and for the last block of a piece."""

    def __init__(self) -> None:
        self._memory = HostBuffer.allocate(BOUNCE_BYTES + ALIGN_BYTES, pin=False, private=True)
        self.data = self._memory.tensor[:BOUNCE_BYTES]
        self.tail = self._memory.tensor[BOUNCE_BYTES:]


@dataclass(frozen=True)
class FileSystem:
    """What holds a folder.

    Parameters
    ----------
    kind : str
        As the system calls it ("ext4", "tmpfs"), or "" where it does not say.
    in_memory, network : bool
        Whether it is no disk at all, or one of another machine.
    """

    kind: str
    in_memory: bool = False
    network: bool = False


def file_system(path: str | os.PathLike[str]) -> FileSystem:
    """Return what holds a folder, as far as Linux says."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        device = os.stat(path).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in Path(_MOUNTS).read_text().splitlines():
            words = line.split()
            if words[2] == wanted:
                kind = words[words.index("-") + 1]
                family = kind.split(".")[0]
                return FileSystem(kind, kind in _IN_MEMORY, family in _NETWORK)
    return FileSystem("")


def free_bytes(place: int | str) -> int:
    """Return the bytes that may be taken of the file system of a descriptor or path."""
    state = os.statvfs(place)
    spare = min(MAX_SPARE_BYTES, int(SPARE_SHARE * state.f_blocks * state.f_frsize))
    return max(0, state.f_bavail * state.f_frsize - spare)


def _open(folder: Path) -> tuple[int, str | None]:
    """Return the descriptor of a new file, and its name if it must have one."""
    flags = os.O_RDWR | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, flags | os.O_TMPFILE, 0o600), None
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
    made, locked = make_temporary(folder)
    fd = os.dup(locked.fileno())
    locked.close()  # the lock is that of the descriptor's file, which is open still
    try:
        os.unlink(made)
    except OSError:
        return fd, os.fspath(made)
    return fd, None


def set_direct(fd: int, direct: bool) -> bool:
    """Bypass the page cache from now on, or no more; return whether it is bypassed."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag if direct else flags & ~flag)
    except OSError:
        return False
    return direct and bool(flag)


def _release(fd: int, named: str | None, process: int) -> None:
    """Close the file, and remove its name, in the process that made it."""
    if os.getpid() != process:
        return
    if named is not None:
        with contextlib.suppress(OSError):
            os.unlink(named)
    os.close(fd)
    # Where a name cannot be removed while the file is open.
    if named is not None:
        with contextlib.suppress(OSError):
            os.unlink(named)


def _allocate(fd: int, offset: int, nbytes: int) -> None:
    """Take space for a file; where there is no call that does, it is taken when it is written."""
    call = _fallocate()
    if call is not None:
        if call(fd, 0, offset, nbytes) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(number, os.strerror(number))
    os.ftruncate(fd, offset + nbytes)


@functools.cache
def _fallocate() -> Any:
    """Return Linux's function; that of POSIX writes to each block where the system has none."""
    with contextlib.suppress(OSError, AttributeError):
        call = ctypes.CDLL(None, use_errno=True).fallocate
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        return call
    return None


def split_blocks(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole blocks of a piece, and what is left."""
    body = t.shape[0] - t.shape[0] % ALIGN_BYTES
    return t[:body], t[body:]
