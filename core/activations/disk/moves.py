"""What threads of the disk tier do with the pieces of a ticket, and what they count."""

from __future__ import annotations

import threading
import time
import weakref
import zlib

import torch

from ...engine.tasks import ThreadTask
from ...engine.transfer import Mark, wait_on_host
from ...errors import BitslabError
from .budget import WriteBudget
from .tensor_file import DiskError
from .tickets import Piece, State, Stored


class Counters:
    """What threads of a tier count, and what they may still write today.

    What is queued and what is read are looked up where it is asked for: a number that is raised
    here and lowered there would be wrong forever behind an interrupt between both. Whoever is done
    with a piece looks at its own ticket alone: thousands of pieces may wait.
    """

    def __init__(self, budget: WriteBudget | None) -> None:
        self.budget = budget
        self.lock = threading.Lock()
        self.idle = threading.Condition(self.lock)
        self._queued: dict[Stored, None] = {}
        self._reading: weakref.WeakSet[ThreadTask[torch.Tensor]] = weakref.WeakSet()
        self.written_bytes = self.read_bytes = 0
        self.write_seconds = self.read_seconds = 0.0
        self.forwarded_bytes = self.cancelled_bytes = self.failed_bytes = 0
        self.refused_bytes: dict[str, int] = {"behind": 0, "full": 0, "failed": 0, "budget": 0}

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written, or are being written. With the lock held."""
        return sum(stored.pending_bytes for stored in self._queued)

    @property
    def all_written(self) -> bool:
        """Whether nothing waits to be written, or is being written. With the lock held."""
        return not any(stored.pending for stored in self._queued)

    def is_behind(self, nbytes: int, most_bytes: int) -> bool:
        """Return whether so many bytes more are more than may be queued. With the lock held.

        However large, what comes to an empty queue is not.
        """
        # Whole tickets are no less than what is left of them, and sooner added up.
        if sum(stored.nbytes for stored in self._queued) + nbytes <= most_bytes:
            return False
        queued_bytes = self.queued_bytes
        return queued_bytes > 0 and queued_bytes + nbytes > most_bytes

    @property
    def reads(self) -> int:
        """Reads that are under way. With the lock held."""
        return sum(not task.done() for task in self._reading)

    def enter_queue(self, stored: Stored) -> None:
        """Count what waits of a ticket from now on."""
        with self.lock:
            # An interrupt may have left one here of which nothing waits.
            for done in [each for each in self._queued if not each.pending]:
                del self._queued[done]
            self._queued[stored] = None

    def left_queue(
        self, stored: Stored, nbytes: int, *, cancelled: bool = False, refused: bool = False
    ) -> None:
        """Record that bytes of a ticket wait no more: written, cancelled, or refused after all."""
        with self.lock:
            self.cancelled_bytes += nbytes if cancelled else 0
            if self.budget is not None and (cancelled or refused):
                self.budget.give_back(nbytes)
            if not stored.pending:
                self._queued.pop(stored, None)
                self.idle.notify_all()

    def forget_queue(self) -> None:
        """Count what closed threads have cancelled."""
        with self.lock:
            self.cancelled_bytes += self.queued_bytes
            self._queued.clear()
            self.idle.notify_all()

    def begin_read(self, task: ThreadTask[torch.Tensor]) -> None:
        """Count a read until it is over, or nobody knows of it."""
        with self.lock:
            self._reading.add(task)
        task.add_done_callback(self._read)

    def _read(self, task: object) -> None:
        with self.lock:
            self.idle.notify_all()


def write_piece(counters: Counters, stored: Stored, piece: Piece, verify: bool) -> None:
    """Write a piece, in a thread, unless it is not wanted any more."""
    after = stored.after
    if after is not None:
        wait_on_host(after)
    with stored.lock:
        if piece.state is not State.WAITS:
            return  # cancelled, and counted
        data = stored.data
        stored.begun = True
        wanted = data is not None and not stored.dropped
        piece.state = State.WRITING if wanted else State.CANCELLED
    if data is None or not wanted:
        counters.left_queue(stored, piece.nbytes, cancelled=True)
        return
    stripe, part = piece.extent.stripe, data[piece.begin : piece.end]
    begin = time.perf_counter()
    try:
        if isinstance(after, ThreadTask):
            after.result()
        if verify:
            piece.crc32 = zlib.crc32(part.numpy().data)
        stripe.file.write(piece.extent.begin, part)
    except BaseException as error:
        # Kept in memory. Nothing more is written there, and the step goes on.
        stored.error = _without_frames(error)
        if isinstance(error, DiskError):
            stripe.error = error
        with stored.lock:
            piece.state = State.FAILED
        with counters.lock:
            counters.failed_bytes += piece.nbytes
    else:
        del data, part  # who waits for the piece goes on when its memory is given back
        with counters.lock:
            counters.written_bytes += piece.nbytes
            counters.write_seconds += time.perf_counter() - begin
        with stored.lock:
            piece.state = State.WRITTEN
            if all(each.state is State.WRITTEN for each in stored.pieces):
                stored.data = stored.after = None
    finally:
        counters.left_queue(stored, piece.nbytes)


def _without_frames(error: BaseException) -> BaseException:
    """Return an error without its frames, which hold the memory of tensors."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


class Reading:
    """Pieces on their way to one tensor, and the task that is done with the last of them."""

    def __init__(self, counters: Counters, stored: Stored, out: torch.Tensor) -> None:
        self.counters = counters
        self.stored = stored  # whose extents are not given to others meanwhile
        self.out = out
        self.task: ThreadTask[torch.Tensor] = ThreadTask()
        counters.begin_read(self.task)
        self._left = set(stored.pieces)
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def watch(self, piece: Piece, task: ThreadTask[None]) -> None:
        """Count a piece when its task is done."""
        task.add_done_callback(lambda done: self._done(piece, done))

    def _done(self, piece: Piece, task: ThreadTask[None]) -> None:
        closed = task.cancelled()
        self.over(piece, BitslabError("this DiskTier is closed") if closed else task.exception())

    def over(self, piece: Piece, error: BaseException | None) -> None:
        """Count a piece that is over: read, where there is no error. Again: nothing."""
        with self._lock:
            if piece not in self._left:
                return
            self._error = self._error or error
            self._left.discard(piece)
            last = not self._left
        if not last:
            return
        if self._error is not None:
            self.task.set_exception(self._error)
        else:
            self.task.set_result(self.out)


def read_piece(reading: Reading, piece: Piece, verify: bool) -> None:
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
        stripe.error = DiskError(str(error))  # whose frames would hold the memory
        raise
    with reading.counters.lock:
        reading.counters.read_bytes += piece.nbytes
        reading.counters.read_seconds += time.perf_counter() - begin


def forwarded(data: torch.Tensor, out: torch.Tensor | None, after: Mark | None) -> torch.Tensor:
    """Return bytes that are still in memory, in a thread that has waited for them."""
    if isinstance(after, ThreadTask):
        after.result()
    return data if out is None else out.copy_(data)
