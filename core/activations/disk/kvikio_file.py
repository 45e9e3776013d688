"""The same file with kvikio's calls: its threads move whole blocks of host memory.

kvikio (RAPIDS) has GPU Direct Storage for memory of a GPU alone. Host memory, which is what the
disk tier has, it moves by pread and pwrite in threads of its own, whatever its compatibility mode
and with nvidia-fs or without. What it asks of NVIDIA's driver is whether memory is the host's.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import threading
import time
import weakref
from typing import Any

import torch

from ...engine.memory.host import HostBuffer
from ...engine.memory.locks import call_after_fork
from ...errors import load_optional
from .posix_file import PosixFile, set_direct, split_blocks
from .tensor_file import ALIGN_BYTES, DiskError, FileKind

#: Threads of kvikio while a file is open, at least: those that write and read in the probe (8), for
#: two folders at once.
THREADS = 16
#: How long the first block may take.
TRIAL_SECONDS = 10.0
EXTRA = "gds-cuda13"
_DRIVER = "libcuda.so.1"


def why_unusable() -> str | None:
    """Return why kvikio cannot be used here, as far as is known without importing it; else None."""
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed (extras gds-cuda12 and gds-cuda13)"
    try:
        ctypes.CDLL(_DRIVER)
    except OSError as error:
        return f"kvikio needs NVIDIA's driver even for host memory: {error}"
    return None


class KvikioFile(PosixFile):
    """A preallocated file whose whole blocks kvikio writes and reads; see `TensorFile`.

    The space, limits, locks and names are those of `PosixFile`, and so are the calls for what is no
    whole block, and for all once a file system has refused O_DIRECT.

    Parameters
    ----------
    path : str or os.PathLike
        A folder that can be written to.

    Raises
    ------
    DiskError
        When there is no such folder, it cannot be written to, or kvikio does not load or does not
        move a block there and back.

    Notes
    -----
    kvikio's threads are one set a process. While a file is open there are at least 16 of them;
    with the last one that is closed their number goes back to what it was. A forked child has none
    of them, and can open no such file; one that ends by `sys.exit`, and not by `os._exit`, waits
    for them for ever, as after any use of kvikio.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._end: weakref.finalize[Any, Any] | None = None
        super().__init__(path)
        try:
            if not self.direct:
                raise RuntimeError("the file system takes no O_DIRECT")
            self._handle = _threads.open_handle(self._fd)
            self._end = weakref.finalize(self, _close_handle, self._handle, self._process)
            self._end.atexit = False  # as of files without a name
            _try_block(self._handle, self._fd)
            _threads.enter(self)
        except BaseException as error:
            if self._end is not None and _is_unanswered(self._handle):
                self._end.detach()
            self.close()
            if not isinstance(error, Exception):  # an interruption
                raise
            # Of any kind: it is another package that loads.
            raise DiskError(
                f"disk: {self.path}: kvikio cannot be used: {_first_line(error)}"
            ) from error

    @property
    def kind(self) -> FileKind:
        """Who makes the calls."""
        return "kvikio" if self.direct else "posix"

    def after_fork(self) -> None:
        """Close the child's descriptors."""
        super().after_fork()
        if self._end is not None and self._end.detach() is not None:
            self._handle.close()

    def close(self) -> None:
        """Give the space back, once nobody writes or reads; again does nothing."""
        super().close()
        if not self._finalize.alive and self._end is not None and self._end.alive:
            self._end()
            _threads.leave(self)

    def write_blocks(self, offset: int, piece: torch.Tensor) -> None:
        """Write bytes, whole blocks of them by kvikio; see `PosixFile.write_blocks`."""
        body, rest = split_blocks(piece)
        if not self.direct or not body.shape[0]:
            super().write_blocks(offset, piece)
            return
        _wait(self._handle.pwrite, offset, body)
        if rest.shape[0]:
            super().write_blocks(offset + body.shape[0], rest)

    def read_blocks(self, offset: int, into: torch.Tensor) -> None:
        """Read bytes, whole blocks of them by kvikio; see `PosixFile.read_blocks`."""
        body, rest = split_blocks(into)
        if not self.direct or not body.shape[0]:
            super().read_blocks(offset, into)
            return
        _wait(self._handle.pread, offset, body)
        if rest.shape[0]:
            super().read_blocks(offset + body.shape[0], rest)


def _wait(move: Any, offset: int, blocks: torch.Tensor) -> None:
    """Move blocks in a thread of kvikio's, and wait for it.

    Raises
    ------
    OSError
        With the cause's number.
    """
    nbytes = blocks.shape[0]
    try:
        # As one task: the tier has cut its bytes to the requests that the device likes.
        moved = move(blocks.numpy(), nbytes, offset, nbytes).get()
    except RuntimeError as error:
        raise _as_os_error(error) from error
    if moved != nbytes:
        raise OSError(errno.EIO, f"{moved} of {nbytes} bytes were moved")


def _as_os_error(error: RuntimeError) -> OSError:
    """Return the error of the system that kvikio has put into words."""
    text = str(error)
    cause = text.rpartition(": ")[2]
    for number in errno.errorcode:
        if os.strerror(number) == cause:
            return OSError(number, cause)
    if cause == "EOF":
        cause = "the file ends before, it was cut"
    elif not cause:
        cause = text
    return OSError(errno.EIO, cause)


def _close_handle(handle: Any, process: int) -> None:
    if os.getpid() == process:
        handle.close()


#: Of calls of kvikio's that have not ended the handle, and what they may still use.
_unanswered: list[tuple[Any, object, HostBuffer]] = []


def _is_unanswered(handle: Any) -> bool:
    return any(each[0] is handle for each in _unanswered)


def _try_block(handle: Any, fd: int) -> None:
    """Write a block and read it again, or raise: nothing else shows that kvikio answers."""
    memory = HostBuffer.allocate(2 * ALIGN_BYTES, pin=False, private=True)
    put, got = memory.tensor.view(2, ALIGN_BYTES)
    put.copy_(torch.arange(ALIGN_BYTES))  # drawing bytes would change a training's random numbers
    end = time.monotonic() + TRIAL_SECONDS
    for move, t in ((handle.pwrite, put), (handle.pread, got)):
        future = move(t.numpy(), ALIGN_BYTES, 0, ALIGN_BYTES)
        _unanswered.append((handle, future, memory))
        while not future.done():
            if time.monotonic() > end:
                raise RuntimeError(f"a block was not moved in {TRIAL_SECONDS:g} s")
            time.sleep(0.0005)
        _unanswered[:] = [each for each in _unanswered if each[1] is not future]
        future.get()
    if not torch.equal(put, got):
        raise RuntimeError("a block came back other than it was written")
    memory.close()
    os.ftruncate(fd, 0)


class _Threads:
    """kvikio's threads, which are one set a process.

    Their number is changed with the first file and the last one alone: that waits for what is
    moved.
    """

    def __init__(self) -> None:
        self._process: int | None = None  # that has used kvikio
        self._lock = threading.Lock()
        self._files: weakref.WeakSet[KvikioFile] = weakref.WeakSet()
        self._before: int | None = None
        call_after_fork(self)

    def after_fork(self) -> None:
        """Give the lock up, which a thread of the parent may hold."""
        self._lock = threading.Lock()
        self._files = weakref.WeakSet()

    def open_handle(self, fd: int) -> Any:
        """Return kvikio's handle of a file that is open, in a process that has its threads."""
        if self._process not in (None, os.getpid()):
            raise RuntimeError(f"its threads are those of the parent process {self._process}")
        kvikio = load_optional("kvikio", extra=EXTRA, purpose="KvikioFile")
        settings = load_optional("kvikio.defaults", extra=EXTRA, purpose="KvikioFile")
        with self._lock:
            self._process = os.getpid()
            # By itself it may open the driver of cuFile, which host memory never uses.
            with settings.set("compat_mode", kvikio.CompatMode.ON):
                handle = kvikio.CuFile(f"/proc/self/fd/{fd}", "r+")
        # Reads pass through the page cache otherwise, unless kvikio's settings say else.
        set_direct(handle.fileno(), True)
        return handle

    def enter(self, file: KvikioFile) -> None:
        """Have enough of them while a file is open."""
        settings = load_optional("kvikio.defaults", extra=EXTRA, purpose="KvikioFile")
        with self._lock:
            if self._before is None:
                self._before = settings.get("num_threads")
                if self._before < THREADS:
                    settings.set("num_threads", THREADS)
            self._files.add(file)

    def leave(self, file: KvikioFile) -> None:
        """Have as many as before with the last file."""
        settings = load_optional("kvikio.defaults", extra=EXTRA, purpose="KvikioFile")
        with self._lock:
            self._files.discard(file)
            if self._files or self._before is None:
                return
            if self._before < THREADS == settings.get("num_threads"):
                settings.set("num_threads", self._before)
            self._before = None


_threads = _Threads()


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, RuntimeError) and text else f"{type(error).__name__}: {text}"
