"""Host memory that GPUs read by themselves and that processes share without a copy."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import multiprocessing.reduction
import operator
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from ...errors import ArgumentError, ArgumentTypeError, BitslabError
from .numa import nearest_node, prefer_node
from .page_locking import MappedMemory, release_or_wait, release_waiting
from .page_taking import HUGE_PAGE_BYTES, take_pages

#: Whether memory is page-locked: now (or, with no GPU to be had, at the first use by one), never,
#: or at the first use by a GPU.
Pin = bool | Literal["lazily"]

#: Buffers from this size on are first compared with the memory that is available; for smaller ones
#: that costs as much as the buffer.
LARGE_BYTES = 16 << 20
#: Called where memory is lacking: each returns what its owner holds idle to the system.
reclaimers: list[Callable[[], object]] = []

_NAME = "bitslab-"  # of memory files; a random token follows
_MAP_FIXED = 0x10
_HANDLE = re.compile(r"bitslab-memory:(\d+):(\d+):(\d+):([0-9a-f]{16}):(True|False|lazily)")
_PINS: dict[str, Pin] = {"True": True, "False": False, "lazily": "lazily"}

_files_lock = threading.Lock()
_taking = threading.Lock()  # large buffers: one at a time, by several threads
_MADV_POPULATE_READ = 22  # Python has no name for it


class HostBuffer:
    """Host memory of an exact size, page-aligned, that GPUs read and processes share.

    The memory is an unnamed file (memfd), mapped: forked processes see it, others map it from its
    file descriptor, and the size of ``/dev/shm`` does not matter. Page-locked and mapped for GPUs,
    it has for them the address that it has for the CPU. Each process page-locks for itself.

    How a buffer crosses processes:

    - through `multiprocessing` (arguments of a spawned process, queues, pipes, DataLoader workers):
      the same memory, as a file descriptor;
    - through `handle` and `attach`, between processes of one user and one machine: the same memory;
    - through `pickle` and `copy`: a copy.

    Tensors and arrays made from `tensor` keep the memory mapped and page-locked after the buffer
    itself is freed. It is released with the last of them, after every GPU in use has finished its
    work; while a stream is captured, that is put off to a later allocation or release.

    Threads may use one buffer; two threads that use two buffers never wait for each other.

    Attributes
    ----------
    nbytes : int
        Size in bytes.
    owner : bool
        False when the memory was made by another process.
    shared : bool
        True when a handle or a file descriptor was given away, or when attached.
    """

    def __init__(
        self,
        fd: int | None,
        nbytes: int,
        token: str,
        pin: Pin,
        owner: bool,
        *,
        private: bool = False,
    ) -> None:
        self.nbytes = nbytes
        self.private = private
        self.owner = owner
        self.shared = not owner
        self._fd = fd
        self._token = token
        self._pin = pin
        self._memory: MappedMemory | None = None
        self._tensor: torch.Tensor | None = torch.empty(0, dtype=torch.uint8)
        if nbytes:
            # Large files begin where a huge page may: of more memory, which is only reserved.
            spare = HUGE_PAGE_BYTES if fd is not None and nbytes >= LARGE_BYTES else 0
            memory = _private_memory(nbytes) if private else MappedMemory(-1, nbytes + spare)
            start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            memory.begin, memory.nbytes = -start % (spare or 1), nbytes
            memory.address = start + memory.begin
            self._memory = memory
            self._tensor = torch.frombuffer(
                memory, dtype=torch.uint8, count=nbytes, offset=memory.begin
            )
            if fd is not None:
                _map_over(memory.address, nbytes, fd)
        # Last: until here a failure leaves the descriptor to the caller.
        self._close_fd = None if fd is None else weakref.finalize(self, os.close, fd)

    @classmethod
    def allocate(cls, nbytes: int, *, pin: Pin = True, private: bool = False) -> HostBuffer:
        """Make a buffer of zeros.

        Parameters
        ----------
        nbytes : int
            Size in bytes; 0 is allowed.
        pin : bool or "lazily"
            True page-locks the memory now where this process can use a GPU, else at the first use
            by one. "lazily" waits for that use in any case. False never page-locks it. What is
            page-locked now is on the NUMA node of the current GPU, where the system says which
            one that is.
        private : bool
            Whether only this process will ever use it: huge pages, which are page-locked in half
            the time. It is no file, cannot be shared, and is not there in forked children.

        Raises
        ------
        BitslabError
            When the memory cannot be had. It is taken from the system here, not at its first use.
        """
        try:
            nbytes = operator.index(nbytes)
        except TypeError:
            raise ArgumentTypeError(f"nbytes: expected an int, got {type(nbytes)}") from None
        if nbytes < 0:
            raise ArgumentError(f"nbytes: expected 0 or more, got {nbytes}")
        if not isinstance(pin, bool) and pin != "lazily":
            raise ArgumentError(f"pin: expected True, False or 'lazily', got {pin!r}")
        release_waiting()
        # What a thread is taking is still counted as available.
        with _taking if nbytes >= LARGE_BYTES else contextlib.nullcontext():
            check_available(nbytes)
            buffer = cls._taken(nbytes, pin, private)
        if pin is True:
            buffer.ensure_pinned()
        return buffer

    @classmethod
    def _taken(cls, nbytes: int, pin: Pin, private: bool) -> HostBuffer:
        """Return a new buffer whose pages were taken from the system, and are not locked yet."""
        token = secrets.token_hex(8)
        # Where memory comes from is said before its pages are taken.
        node = nearest_node() if pin is True and nbytes else None
        by_threads = nbytes >= LARGE_BYTES or node is not None
        fd = None
        try:
            fd = None if private else make_file(token, nbytes, taken=not by_threads)
            buffer = cls(fd, nbytes, token, pin, owner=True, private=private)
            fd = None  # the buffer's own
            if node is not None:
                prefer_node(buffer.tensor.data_ptr(), nbytes, node)
            if private or by_threads:
                buffer.take_pages()
        except OSError as error:
            if fd is not None:
                os.close(fd)
            raise BitslabError(f"nbytes: {nbytes} bytes of host memory: {error}") from error
        return buffer

    @classmethod
    def attach(cls, handle: str) -> HostBuffer:
        """Map the memory of another process of this user on this machine.

        It is page-locked in this process by `ensure_pinned`, not before.

        Parameters
        ----------
        handle : str
            What `handle` returned there. The memory is kept when its maker releases it, but cannot
            be attached to any more from then on.

        Raises
        ------
        ArgumentError
            When it is no handle, or its maker has ended or released the memory.
        """
        if not isinstance(handle, str):
            raise ArgumentTypeError(f"handle: expected a str, got {type(handle)}")
        found = _HANDLE.fullmatch(handle)
        if found is None:
            raise ArgumentError(
                f"handle: expected what HostBuffer.handle() returns, got {handle!r}"
            )
        pid, fd_there, size, token, pin = found.groups()
        fd = -1
        try:
            fd = os.open(f"/proc/{pid}/fd/{fd_there}", os.O_RDWR | os.O_CLOEXEC)
            name = os.readlink(f"/proc/self/fd/{fd}")
            if f"memfd:{_NAME}{token}" not in name or os.fstat(fd).st_size != int(size):
                raise FileNotFoundError("another file is in its place")
            return cls(fd, int(size), token, _PINS[pin], owner=False)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise ArgumentError(
                f"handle: {handle!r} leads to no memory: process {pid} has ended, let it go, or is "
                f"another user's or container's ({error})"
            ) from error

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as a tensor: uint8 ``[nbytes]`` on the CPU, always the same one."""
        if self._tensor is None:
            raise BitslabError("this HostBuffer is closed")
        return self._tensor

    @property
    def token(self) -> str:
        """A name that is unique to this memory, and the same in every process that has it."""
        return self._token

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._tensor is None

    @property
    def pinned(self) -> bool:
        """True while the memory is page-locked by this process."""
        return self._memory is not None and self._memory.is_pinned()

    def ensure_pinned(self) -> bool:
        """Page-lock the memory for the GPUs of this process, unless that is done already.

        Returns
        -------
        bool
            False when there is no GPU, `pin` is False, the buffer is empty or the system refuses.
            A refusal gives one UserWarning per process; the buffer is then used as ordinary
            memory, and the system is not asked again.

        Raises
        ------
        BitslabError
            When the buffer is closed, or its first page-locking would fall into a graph capture.
        """
        if self.closed:
            raise BitslabError("this HostBuffer is closed")
        return self._pin is not False and self._memory is not None and self._memory.pin()

    def handle(self) -> str:
        """Return what `attach` takes in another process, as long as this buffer is open here."""
        fd = self._shareable_fd()
        return f"bitslab-memory:{os.getpid()}:{fd}:{self.nbytes}:{self._token}:{self._pin}"

    def close(self) -> None:
        """Unlock the pages and drop this object's reference to the memory; again does nothing.

        Waits for the GPUs that may still read it. Tensors made from it are usable on the CPU still.
        """
        release_waiting()
        memory, self._memory, self._tensor = self._memory, None, None
        if memory is not None:
            release_or_wait(memory)
        if self._close_fd is not None:
            self._close_fd()

    def _shareable_fd(self) -> int:
        """Return the file descriptor to give away."""
        if self.closed:
            raise BitslabError("this HostBuffer is closed")
        if self.private:
            raise BitslabError("this memory is private to its process: share a copy of its tensor")
        with _files_lock:
            if self._fd is None:
                self._get_file()
        if self._fd is None:
            raise BitslabError(
                "this system has no memfd_create, so that memory reaches forked processes only"
            )
        self.shared = True
        return self._fd

    def _get_file(self) -> None:
        """Back the memory by a file with the same bytes, at the same address; no writes meanwhile.

        Children that were forked before keep the memory as it was.
        """
        fd = make_file(self._token, self.nbytes)
        if fd is None:
            return
        try:
            if self._memory is not None:
                os.pwrite(fd, self.tensor.numpy().data, 0)
                _map_over(self._memory.address, self.nbytes, fd)
        except OSError:
            os.close(fd)
            raise
        self._fd, self._close_fd = fd, weakref.finalize(self, os.close, fd)

    def __deepcopy__(self, memo: dict[int, Any]) -> HostBuffer:
        return _copy_of(self.tensor, self._pin)

    def populate(self) -> None:
        """Map all pages now, so that reading rows at random does not wait for one after another.

        A hint: systems that do not know it (Linux before 5.14) are left to map them one by one.
        """
        memory = self._memory
        if memory is not None and memory.nbytes:
            with contextlib.suppress(OSError):
                memory.madvise(_MADV_POPULATE_READ, memory.begin, memory.nbytes)

    def take_pages(self) -> None:
        """Take the pages of new memory from the system; other threads go on meanwhile."""
        collapse = self._fd is not None and self.nbytes >= LARGE_BYTES  # see `__init__`
        if not self.nbytes:
            return
        if not take_pages(self.tensor.data_ptr(), self.nbytes, collapse=collapse):
            # Before Linux 5.14.
            if self._fd is None:
                self.tensor[:: mmap.PAGESIZE].zero_()
            else:
                os.posix_fallocate(self._fd, 0, self.nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _copy_of, (self.tensor, self._pin)

    def reduce_shared(self) -> tuple[Any, ...]:
        """Return what `multiprocessing` pickles: the file descriptor; private memory's bytes."""
        if self.private:
            return self.__reduce__()
        fd = multiprocessing.reduction.DupFd(self._shareable_fd())
        return _receive, (fd, self.nbytes, self._token, self._pin)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "page-locked" if self.pinned else "ordinary memory"
        return f"HostBuffer({self.nbytes} bytes, {state})"


def _forget_lock() -> None:
    """Replace the locks in a forked child: a thread that does not exist there may hold them."""
    global _files_lock, _taking
    _files_lock, _taking = threading.Lock(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


def make_file(token: str, nbytes: int, *, taken: bool = True) -> int | None:
    """Return the descriptor of a memory file of zeros; None where the system has no such files.

    Its pages are taken from the system now, or by who writes to them where `taken` is False.
    """
    if not hasattr(os, "memfd_create"):
        return None
    fd = os.memfd_create(_NAME + token, os.MFD_CLOEXEC)
    try:
        if nbytes and taken:
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _private_memory(nbytes: int) -> MappedMemory:
    """Map anonymous memory, of huge pages where the system has some."""
    memory = MappedMemory(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        # Pages that a GPU reads must not be copied on write: a child that had them would make the
        # parent's next write go elsewhere.
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # a system that was built without
                memory.madvise(getattr(mmap, advice))
    return memory


def _map_over(address: int, nbytes: int, fd: int) -> None:
    """Map a file in the place of mapped memory; Python's mmap would keep a second descriptor."""
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if call(address, nbytes, protection, flags, fd, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _copy_of(tensor: torch.Tensor, pin: Pin) -> HostBuffer:
    """Return a new buffer with the bytes of another."""
    buffer = HostBuffer.allocate(tensor.numel(), pin=pin)
    buffer.tensor.copy_(tensor)
    return buffer


def _receive(fd: Any, nbytes: int, token: str, pin: Pin) -> HostBuffer:
    return HostBuffer(fd.detach(), nbytes, token, pin, owner=False)


multiprocessing.reduction.ForkingPickler.register(HostBuffer, HostBuffer.reduce_shared)


def check_available(nbytes: int) -> None:
    """Refuse what is large, and more than can be had without ending some process.

    Raises
    ------
    BitslabError
        That says how much is available.
    """
    room = room_for(nbytes) if nbytes >= LARGE_BYTES else math.inf
    if nbytes > room:
        raise BitslabError(
            f"nbytes: {nbytes} bytes of host memory asked for, {room:.0f} are available"
        )


def room_for(nbytes: int) -> float:
    """Return the bytes that can be allocated; idle memory goes first where these are too few."""
    room = available_bytes()
    if room < nbytes and reclaimers:
        for reclaim in reclaimers:
            reclaim()
        room = available_bytes()
    return room


def available_bytes() -> float:
    """Return the bytes that can be allocated; infinity where the system does not say.

    A memory file is bounded by nothing else: allocating more starts the system's out-of-memory
    killer and raises no error.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        sizes = {words[0]: int(words[1]) << 10 for words in lines}
        available = sizes["MemAvailable:"] + sizes["SwapFree:"]
        return min(available, _available_in_container())
    return math.inf


def _available_in_container() -> float:
    """Bytes under the limit of this process's control group (version 2), its file cache freed."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        own = Path("/proc/self/cgroup").read_text().strip().removeprefix("0::/")
        group = Path("/sys/fs/cgroup", own)
        limit = int((group / "memory.max").read_text())  # ValueError: "max", no limit
        lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        stat = {words[0]: int(words[1]) for words in lines}
        used = int((group / "memory.current").read_text())
        return limit - used + stat["active_file"] + stat["inactive_file"]
    return math.inf
