"""The disk tier: bytes of host memory in files, written and read by threads."""

from __future__ import annotations

import itertools
import os
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Any, Literal

import torch

from ...engine.memory import Reservation, host_arena
from ...engine.memory.locks import call_after_fork
from ...engine.transfer import Mark, ThreadLane, ThreadTask, wait_on_host
from ...errors import ArgumentError, ArgumentTypeError, BitslabError
from .budget import WriteBudget
from .posix_file import PosixFile, file_system
from .rates import DiskRates, disk_rates
from .stripe import Extent, Stripe
from .tensor_file import ALIGN_BYTES, DiskError, OpenFile

#: Bytes that wait to be written, at most.
QUEUE_BYTES = 1 << 30
#: Host memory is reserved in pieces of this many bytes or more: page-locking costs by the call.
RESERVED_BYTES = 64 << 20
TERA = 1e12

Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
#: Why bytes were not taken: the disk is behind, full, failed, or has its bytes of the day.
Refusal = Literal["behind", "full", "failed", "budget"]


class _State(Enum):
    """Of a piece: only one that waits can be cancelled."""

    WAITS = "waits"
    WRITING = "writing"
    WRITTEN = "written"
    CANCELLED = "cancelled"
    FAILED = "failed"


class _Piece:
    """Bytes of a ticket that lie in one extent."""

    __slots__ = ("begin", "crc32", "end", "extent", "state")

    def __init__(self, extent: Extent, begin: int, end: int) -> None:
        self.extent = extent
        self.begin = begin
        self.end = end
        self.crc32 = 0
        self.state = _State.WAITS

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


class _Stored:
    """What threads know of a ticket: its bytes while they are in memory, and where they lie."""

    __slots__ = ("after", "data", "dropped", "error", "lock", "nbytes", "pieces")

    def __init__(self, data: torch.Tensor, after: Mark | None) -> None:
        self.nbytes = data.shape[0]
        self.data: torch.Tensor | None = data
        self.after = after
        self.pieces: list[_Piece] = []
        self.error: BaseException | None = None
        self.dropped = False
        self.lock = threading.Lock()

    def drop(self) -> None:
        """Let threads pass over what waits. Takes no lock: the garbage collector may run it."""
        self.dropped = True


class Ticket:
    """Bytes that were given to a tier; when this object is gone, their place is free again.

    Attributes
    ----------
    nbytes : int
        How many.
    """

    def __init__(self, stored: _Stored) -> None:
        self.nbytes = stored.nbytes
        self._stored: _Stored | None = stored
        self._process = os.getpid()
        self._finalize = weakref.finalize(self, stored.drop)
        self._finalize.atexit = False

    @property
    def in_memory(self) -> bool:
        """Whether the tier still holds the memory that it was given: not all of it is written."""
        return self._stored is not None and self._stored.data is not None

    @property
    def error(self) -> BaseException | None:
        """Why they could not be written; they are kept in memory then."""
        return None if self._stored is None else self._stored.error

    def stored(self) -> _Stored:
        """Return what threads know of it, for the tier.

        Raises
        ------
        BitslabError
            When it was forgotten, or is the parent's.
        """
        if os.getpid() != self._process:
            raise BitslabError(
                f"ticket: was given by process {self._process}, whose disk tier a forked child has "
                "not"
            )
        if self._stored is None:
            raise BitslabError("ticket: was forgotten")
        return self._stored

    def forget(self) -> None:
        """Give its place up."""
        self._finalize()
        self._stored = None


class _Counters:
    """What threads of a tier count, and what they may still write today."""

    def __init__(self, budget: WriteBudget | None) -> None:
        self.budget = budget
        self.lock = threading.Lock()
        self.idle = threading.Condition(self.lock)
        self.queued_bytes = 0
        self.written_bytes = self.read_bytes = 0
        self.write_seconds = self.read_seconds = 0.0
        self.forwarded_bytes = self.cancelled_bytes = self.failed_bytes = 0
        self.refused_bytes: dict[str, int] = {"behind": 0, "full": 0, "failed": 0, "budget": 0}

    def left_queue(self, nbytes: int, *, cancelled: bool = False, refused: bool = False) -> None:
        """Count bytes that wait no more: written, cancelled, or refused after all."""
        with self.lock:
            self.queued_bytes -= nbytes
            self.cancelled_bytes += nbytes if cancelled else 0
            if self.budget is not None and (cancelled or refused):
                self.budget.give_back(nbytes)
            self.idle.notify_all()


class DiskTier:
    """Bytes of host memory, kept in one preallocated file a folder.

    Large bytes are cut into requests of the size that the folders' devices like best, which are
    spread over all folders. They are written in the order in which they came, by threads, and read
    by others. Nothing is left of the files however the process ends.

    Parameters
    ----------
    folders : str, os.PathLike or sequence of these
        One or several, best each on a device of its own.
    disk_bytes : int, optional
        What the files take at most, all together; what the file systems have to spare when left
        out.
    write_budget : float, optional
        Terabytes (1e12 bytes) that may be written a day. They come evenly over the day, and those
        of an hour may be saved up.
    verify : bool
        Compare checksums of what comes back.
    queue_bytes : int
        Bytes that wait to be written at most: what comes when there are as many is not taken.
    rates : DiskRates, optional
        What each folder's device carries; measured, or known from before, when left out.
    open_file : callable
        Makes the file in a folder.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For an argument that is not accepted.
    DiskError
        When a folder cannot be written to.

    Warns
    -----
    UserWarning
        When a folder is in memory (tmpfs), or on another machine.

    Notes
    -----
    Threads may share it. A forked child has files and threads of its own, from its first bytes on;
    tickets of its parent are refused there. A copy or pickle is a tier with files of its own.

    Examples
    --------
    >>> import tempfile, torch
    >>> from bitslab.activations.disk import DiskRates, DiskTier
    >>> rates = DiskRates(1 << 20, 1, 1, 1e9, 1e9, 1e9, 1e9, direct=True)
    >>> tier = DiskTier(tempfile.gettempdir(), rates=rates)
    >>> data = tier.host_buffer(5000).fill_(7)
    >>> ticket = tier.store(data)
    >>> tier.drain()
    True
    >>> bool(tier.fetch(ticket).result().eq(7).all())
    True
    >>> tier.close()
    """

    def __init__(
        self,
        folders: Folders,
        *,
        disk_bytes: int | None = None,
        write_budget: float | None = None,
        verify: bool = False,
        queue_bytes: int = QUEUE_BYTES,
        rates: DiskRates | None = None,
        open_file: OpenFile = PosixFile,
    ) -> None:
        self._folders = _checked_folders(folders)
        _check_number("disk_bytes", disk_bytes, int)
        _check_number("write_budget", write_budget, float)
        _check_number("queue_bytes", queue_bytes, int)
        self._options: dict[str, Any] = {
            "disk_bytes": disk_bytes,
            "write_budget": write_budget,
            "verify": verify,
            "queue_bytes": queue_bytes,
            "rates": rates,
            "open_file": open_file,
        }
        self.disk_bytes = disk_bytes
        self.queue_bytes = queue_bytes
        self.verify = bool(verify)
        self._open_file = open_file
        self._write_budget = write_budget
        _warn_of_kind(self._folders)
        self.rates = tuple(rates or disk_rates(folder) for folder in self._folders)
        self._request_bytes = max(
            ALIGN_BYTES, max(rate.request_bytes for rate in self.rates) // ALIGN_BYTES * ALIGN_BYTES
        )
        self._begin()
        self._open_stripes()
        # Last: at the interpreter's exit threads end before their files are closed.
        self._store_lane = ThreadLane("bitslab-store", sum(r.write_threads for r in self.rates))
        self._load_lane = ThreadLane("bitslab-load", sum(r.read_threads for r in self.rates))
        call_after_fork(self)

    def _begin(self) -> None:
        budget = self._write_budget
        self._lock = threading.Lock()
        self._counters = _Counters(None if budget is None else WriteBudget(budget * TERA))
        self._reservation: Reservation | None = None
        self._stripes: list[Stripe] = []
        self._turn = itertools.count()
        self._closed = False

    def _open_stripes(self) -> list[Stripe]:
        """Make the files, unless they are there."""
        if not self._stripes:
            each = None if self.disk_bytes is None else self.disk_bytes // len(self._folders)
            self._stripes = [Stripe(self._open_file(folder), each) for folder in self._folders]
        return self._stripes

    def after_fork(self) -> None:
        """Begin anew in a forked child: files and tickets are the parent's."""
        closed = self._closed
        self._begin()
        self._closed = closed

    # Out

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Return memory that is written and read with no further copy.

        Returns
        -------
        torch.Tensor
            uint8 ``[nbytes]`` of the host's arena, page-locked where there is a GPU.

        Raises
        ------
        BitslabError
            When the memory cannot be had.
        """
        memory = self._cut(nbytes + ALIGN_BYTES)
        begin = -memory.data_ptr() % ALIGN_BYTES
        return memory[begin : begin + nbytes]

    def _cut(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            if self._reservation is None or self._reservation.nbytes < nbytes:
                self._reservation = None
                try:
                    self._reservation = host_arena().reserve(nbytes, max(nbytes, RESERVED_BYTES))
                except BitslabError:  # it may have what is needed
                    self._reservation = host_arena().reserve(nbytes)
            return self._reservation.cut(nbytes)

    def store(self, data: torch.Tensor, after: Mark | None = None) -> Ticket | None:
        """Queue bytes to be written; wait for nothing.

        The memory must not change until it is written, or the ticket is gone; the tier holds it for
        as long.

        Parameters
        ----------
        data : torch.Tensor
            uint8 ``[n]`` on the CPU, contiguous, n > 0; best of `host_buffer`.
        after : event or task, optional
            When the bytes are there.

        Returns
        -------
        Ticket or None
            None where the bytes are not taken, and remain where they are: the disk is behind
            (`queue_bytes`) or full, has failed before, or has had its bytes of the day.
            `stats` counts each.
        """
        _check_bytes("data", data)
        with self._lock:
            if self._closed:
                raise BitslabError("this DiskTier is closed")
            made = self._taken(data, after)
            if isinstance(made, _Stored):
                for piece in made.pieces:
                    self._store_lane.submit(_write, self._counters, made, piece, self.verify)
                return Ticket(made)
        with self._counters.lock:
            self._counters.refused_bytes[made] += data.shape[0]
        return None

    def _taken(self, data: torch.Tensor, after: Mark | None) -> _Stored | Refusal:
        """Return what is to be written, its place taken; or why it is not."""
        nbytes = data.shape[0]
        counters = self._counters
        if all(stripe.error is not None for stripe in self._open_stripes()):
            return "failed"
        with counters.lock:
            if counters.queued_bytes and counters.queued_bytes + nbytes > self.queue_bytes:
                return "behind"
            if counters.budget is not None and not counters.budget.take(nbytes):
                return "budget"
            counters.queued_bytes += nbytes
        stored = _Stored(data, after)
        for begin in range(0, nbytes, self._request_bytes):
            end = min(begin + self._request_bytes, nbytes)
            extent = self._take(end - begin)
            if extent is None:
                counters.left_queue(nbytes, refused=True)
                return "full"
            stored.pieces.append(_Piece(extent, begin, end))
        return stored

    def _take(self, nbytes: int) -> Extent | None:
        """Return an extent of the next folder, or of one that has room."""
        first = next(self._turn)
        for i in range(len(self._stripes)):
            extent = self._stripes[(first + i) % len(self._stripes)].take(nbytes)
            if extent is not None:
                return extent
        return None

    # And back

    def fetch(self, ticket: Ticket, out: torch.Tensor | None = None) -> ThreadTask[torch.Tensor]:
        """Begin to bring bytes back; wait for nothing.

        Bytes that are not written yet come from memory, and what of them waits to be written is
        not written any more; they may be fetched again all the same.

        Parameters
        ----------
        ticket : Ticket
            Of `store`.
        out : torch.Tensor, optional
            uint8 ``[n]`` on the CPU, contiguous; best of `host_buffer`. When left out, what is
            still in memory comes back as the very tensor that was stored.

        Returns
        -------
        ThreadTask
            Its result are the bytes, uint8 ``[n]``; its error a `DiskError` that names the file.

        Raises
        ------
        BitslabError
            When the tier is closed, or the ticket forgotten or of another process.
        """
        stored = ticket.stored()
        if out is not None:
            _check_bytes("out", out)
            if out.shape[0] != ticket.nbytes:
                raise ArgumentError(f"out: {out.shape[0]} bytes, expected {ticket.nbytes}")
        if self._closed:
            raise BitslabError("this DiskTier is closed")
        with stored.lock:
            data = stored.data
            waiting = [piece for piece in stored.pieces if piece.state is _State.WAITS]
            if data is not None:
                for piece in waiting:
                    piece.state = _State.CANCELLED
        if data is not None:
            for piece in waiting:
                self._counters.left_queue(piece.nbytes, cancelled=True)
            with self._counters.lock:
                self._counters.forwarded_bytes += ticket.nbytes
            return self._forward(data, out, stored.after)
        if out is None:
            out = self.host_buffer(ticket.nbytes)
        reading = _Reading(self._counters, stored, out)
        for piece in stored.pieces:
            reading.watch(self._load_lane.submit(_read, reading, piece, self.verify))
        return reading.task

    def _forward(
        self, data: torch.Tensor, out: torch.Tensor | None, after: Mark | None
    ) -> ThreadTask[torch.Tensor]:
        if out is None and after is None:
            task: ThreadTask[torch.Tensor] = ThreadTask()
            task.set_result(data)
            return task
        return self._load_lane.run(_copy, data, out, after, after=after)

    def forget(self, ticket: Ticket) -> None:
        """Give a ticket's place up; what of it waits is not written. Dropping it does the same."""
        ticket.forget()

    # All of it

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until nothing waits to be written; return whether that is so in time."""
        end = None if seconds is None else time.monotonic() + seconds
        with self._counters.lock:
            while self._counters.queued_bytes:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._counters.idle.wait(left)
        return True

    def stats(self) -> dict[str, Any]:
        """Return what was moved.

        Returns
        -------
        dict
            ``written_bytes``, ``read_bytes``, ``write_seconds`` and ``read_seconds`` (of all
            threads together), ``forwarded_bytes`` that came from memory, ``cancelled_bytes`` that
            were not written for that, ``failed_bytes`` whose writing failed, ``queued_bytes``,
            ``refused_bytes`` by cause, ``disk_bytes`` that the files take, ``used_bytes`` of these,
            and ``folders``: for each its ``path``, ``file_system``, ``direct`` (whether the page
            cache is bypassed) and ``error``, or None.
        """
        stripes = self._stripes
        folders = [
            {
                "path": stripe.file.path,
                "file_system": file_system(stripe.file.path).kind,
                "direct": stripe.file.direct,
                "error": None if stripe.error is None else str(stripe.error),
            }
            for stripe in stripes
        ]
        counters = self._counters
        with counters.lock:
            return {
                "written_bytes": counters.written_bytes,
                "read_bytes": counters.read_bytes,
                "write_seconds": counters.write_seconds,
                "read_seconds": counters.read_seconds,
                "forwarded_bytes": counters.forwarded_bytes,
                "cancelled_bytes": counters.cancelled_bytes,
                "failed_bytes": counters.failed_bytes,
                "queued_bytes": counters.queued_bytes,
                "refused_bytes": dict(counters.refused_bytes),
                "disk_bytes": sum(stripe.file.nbytes for stripe in stripes),
                "used_bytes": sum(stripe.used_bytes for stripe in stripes),
                "folders": folders,
            }

    def close(self) -> None:
        """End the threads, and give the files up with all that is in them; again does nothing.

        What waits is not written.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._reservation = None
        for lane in (self._store_lane, self._load_lane):
            lane.close()
        with self._counters.lock:
            # What the closed lane has cancelled.
            self._counters.cancelled_bytes += self._counters.queued_bytes
            self._counters.queued_bytes = 0
            self._counters.idle.notify_all()
        for stripe in self._stripes:
            stripe.file.close()

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out files and threads, which belong to a process."""
        return {"folders": self._folders, **self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _write(counters: _Counters, stored: _Stored, piece: _Piece, verify: bool) -> None:
    """Write a piece, in a thread, unless it is not wanted any more."""
    after = stored.after
    if after is not None:
        wait_on_host(after)
    with stored.lock:
        if piece.state is not _State.WAITS:
            return  # cancelled, and counted
        data = stored.data
        wanted = data is not None and not stored.dropped
        piece.state = _State.WRITING if wanted else _State.CANCELLED
    if data is None or not wanted:
        counters.left_queue(piece.nbytes, cancelled=True)
        return
    stripe, part = piece.extent.stripe, data[piece.begin : piece.end]
    begin = time.perf_counter()
    try:
        if isinstance(after, Future):
            after.result()
        if verify:
            piece.crc32 = zlib.crc32(part.numpy().data)
        stripe.file.write(piece.extent.begin, part)
    except BaseException as error:
        # Kept in memory. Nothing more is written there, and the step goes on.
        stored.error = error
        if isinstance(error, DiskError):
            stripe.error = error
        with stored.lock:
            piece.state = _State.FAILED
        with counters.lock:
            counters.failed_bytes += piece.nbytes
    else:
        with counters.lock:
            counters.written_bytes += piece.nbytes
            counters.write_seconds += time.perf_counter() - begin
        with stored.lock:
            piece.state = _State.WRITTEN
            if all(each.state is _State.WRITTEN for each in stored.pieces):
                stored.data = stored.after = None
    finally:
        counters.left_queue(piece.nbytes)


class _Reading:
    """Pieces on their way to one tensor, and the task that is done with the last of them."""

    def __init__(self, counters: _Counters, stored: _Stored, out: torch.Tensor) -> None:
        self.counters = counters
        self.stored = stored  # whose extents are not given to others meanwhile
        self.out = out
        self.task: ThreadTask[torch.Tensor] = ThreadTask()
        self._left = len(stored.pieces)
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def watch(self, task: ThreadTask[None]) -> None:
        """Count a piece's task when it is done."""
        task.add_done_callback(self._done)

    def _done(self, task: Any) -> None:
        error = BitslabError("this DiskTier is closed") if task.cancelled() else task.exception()
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            last = self._left == 0
        if not last:
            return
        if self._error is not None:
            self.task.set_exception(self._error)
        else:
            self.task.set_result(self.out)


def _read(reading: _Reading, piece: _Piece, verify: bool) -> None:
    """Read a piece, in a thread."""
    stripe, part = piece.extent.stripe, reading.out[piece.begin : piece.end]
    begin = time.perf_counter()
    try:
        stripe.file.read(piece.extent.begin, part)
        if verify and zlib.crc32(part.numpy().data) != piece.crc32:
            raise DiskError(
                f"disk: {stripe.file.path}: bytes {piece.extent.begin} to "
                f"{piece.extent.begin + piece.nbytes} of the file came back other than they were "
                "written: their checksum differs"
            )
    except DiskError as error:
        stripe.error = error
        raise
    with reading.counters.lock:
        reading.counters.read_bytes += piece.nbytes
        reading.counters.read_seconds += time.perf_counter() - begin


def _copy(data: torch.Tensor, out: torch.Tensor | None, after: Mark | None) -> torch.Tensor:
    """Return bytes that are still in memory, in a thread that has waited for them."""
    if isinstance(after, Future):
        after.result()
    return data if out is None else out.copy_(data)


def _checked_folders(folders: Folders) -> tuple[str, ...]:
    some = [folders] if isinstance(folders, str | os.PathLike) else folders
    if not isinstance(some, Sequence) or not all(isinstance(f, str | os.PathLike) for f in some):
        raise ArgumentTypeError(f"disk: expected a folder or several, got {folders!r}")
    if not some:
        raise ArgumentError("disk: expected one folder or more, got none")
    return tuple(os.fspath(folder) for folder in some)


def _check_number(name: str, value: object, kind: type) -> None:
    accepted = (int,) if kind is int else (int, float)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise ArgumentTypeError(f"{name}: expected {kind.__name__} or None, got {value!r}")
    if not 0 < value < float("inf"):
        raise ArgumentError(f"{name}: {value}, accepted are numbers above 0")


def _check_bytes(name: str, t: object) -> None:
    if not isinstance(t, torch.Tensor) or t.dtype != torch.uint8 or t.device.type != "cpu":
        what = f"{t.dtype} on {t.device}" if isinstance(t, torch.Tensor) else repr(t)[:60]
        raise ArgumentTypeError(f"{name}: expected uint8 on the CPU, got {what}")
    if t.dim() != 1 or not t.is_contiguous() or not t.shape[0]:
        raise ArgumentError(f"{name}: shape {list(t.shape)}, expected [n] with n > 0, contiguous")


def _warn_of_kind(folders: tuple[str, ...]) -> None:
    for folder in folders:
        system = file_system(folder)
        if system.in_memory or system.network:
            what = "memory, so that nothing is saved" if system.in_memory else "on another machine"
            warnings.warn(
                f"disk: {folder} is {what} ({system.kind}); give a folder on an SSD", stacklevel=3
            )
