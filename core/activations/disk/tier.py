"""The disk tier: bytes of host memory in files, written and read by threads."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch

from ...engine.memory import Reservation, host_arena
from ...engine.memory.locks import call_after_fork
from ...engine.memory.pieces import Pending
from ...engine.tasks import CLOSE_SECONDS, ThreadTask
from ...engine.transfer import Mark, ThreadLane
from ...errors import ArgumentError, BitslabError
from ..limits import bytes_to_reserve
from .arguments import check_bytes, check_number
from .budget import DAY_S, WriteBudget
from .endurance import Drive, lifespan_days
from .folder_files import FolderFiles
from .folders import Folders, checked_folders, warn_of_kind
from .known_rates import disk_rates
from .local_ranks import local_ranks
from .moves import Counters, Reading, forwarded, read_piece, write_piece
from .rates import DiskRates
from .stripe import Extent, Stripe
from .tensor_file import ALIGN_BYTES, DiskError, OpenFile
from .tickets import Piece, State, Stored, Ticket

#: Bytes that wait to be written, at most.
QUEUE_BYTES = 1 << 30
#: How long drives last is looked at whenever so much more was written.
WEAR_BYTES = 100e9
#: Less than this is warned of.
SHORT_LIFE_DAYS = 365.0
TERA = 1e12

#: Why bytes were not taken: the disk is behind, full, failed, or has its bytes of the day.
Refusal = Literal["behind", "full", "failed", "budget"]


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
        Terabytes (1e12 bytes) that may be written a day, by all ranks of the machine together. They
        come evenly over the day, and those of an hour may be saved up.
    verify : bool
        Compare checksums of what comes back.
    queue_bytes : int
        Bytes that wait to be written at most: what comes when there are as many is not taken.
    rates : DiskRates, optional
        What each folder's device carries; measured, or known from before, when left out.
    drive : Drive, optional
        The SSDs, for `stats` to say how long they last, and a warning when that is less than a
        year.
    open_file : callable, optional
        Makes the file in a folder; the one that the rates are of when left out, or `PosixFile`
        where that is kvikio's and cannot be used.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For an argument that is not accepted.
    DiskError
        When a folder cannot be written to.

    Warns
    -----
    UserWarning
        When a folder is in memory (tmpfs), or on another machine; and once, when the drives last
        less than a year at the rate so far.

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
        drive: Drive | None = None,
        open_file: OpenFile | None = None,
    ) -> None:
        self._folders = checked_folders(folders)
        check_number("disk_bytes", disk_bytes, int)
        check_number("write_budget", write_budget, float)
        check_number("queue_bytes", queue_bytes, int)
        self._options: dict[str, Any] = {
            "disk_bytes": disk_bytes,
            "write_budget": write_budget,
            "verify": verify,
            "queue_bytes": queue_bytes,
            "rates": rates,
            "drive": drive,
            "open_file": open_file,
        }
        self.drive = drive
        self.disk_bytes = disk_bytes
        self.queue_bytes = queue_bytes
        self.verify = bool(verify)
        self.local_ranks = local_ranks()
        self._write_budget = None if write_budget is None else write_budget / self.local_ranks.ranks
        warn_of_kind(self._folders)
        self.rates = tuple(rates or disk_rates(folder) for folder in self._folders)
        self._files = FolderFiles(self._folders, self.rates, open_file)
        self._request_bytes = max(
            ALIGN_BYTES, max(rate.request_bytes for rate in self.rates) // ALIGN_BYTES * ALIGN_BYTES
        )
        self._begin()
        self._open_stripes()
        # Last: at the interpreter's exit threads end before files with a name are closed.
        self._open_lanes()
        call_after_fork(self)

    @property
    def write_bytes_per_s(self) -> float:
        """The rank's share of the measured rate of writing, of all folders together."""
        return sum(rate.write_bytes_per_s for rate in self.rates) / self.local_ranks.ranks

    @property
    def read_bytes_per_s(self) -> float:
        """The rank's share of the measured rate of reading, of all folders together."""
        return sum(rate.read_bytes_per_s for rate in self.rates) / self.local_ranks.ranks

    @property
    def budget_bytes_per_s(self) -> float | None:
        """Bytes that may be written a second on the average; None without a budget."""
        return None if self._write_budget is None else self._write_budget * TERA / DAY_S

    @property
    def error(self) -> BaseException | None:
        """Why nothing is written any more; None while a folder takes bytes."""
        errors = self._folder_errors()
        return errors[self._folders[-1]] if set(self._folders) <= errors.keys() else None

    @property
    def file_bytes(self) -> int:
        """Bytes that the files take."""
        return sum(stripe.file.nbytes for stripe in self._stripes)

    def refused_bytes(self, why: Refusal) -> int:
        """Return the bytes that were not taken for a cause so far."""
        with self._counters.lock:
            return self._counters.refused_bytes[why]

    def _folder_errors(self) -> dict[str, BaseException]:
        found = {each.file.path: each.error for each in self._stripes if each.error is not None}
        return self._errors | found

    def _open_lanes(self) -> None:
        self._store_lane = ThreadLane("bitslab-store", sum(r.write_threads for r in self.rates))
        self._load_lane = ThreadLane("bitslab-load", sum(r.read_threads for r in self.rates))

    def _begin(self) -> None:
        budget = self._write_budget
        self._lock = threading.Lock()
        self._counters = Counters(None if budget is None else WriteBudget(budget * TERA))
        self._reservation: Reservation | None = None
        self._stripes: list[Stripe] = []
        #: Of folders whose files were given up: why nothing is written there any more.
        self._errors: dict[str, BaseException] = {}
        # Ranks begin in different folders, so that they seldom write to one at once.
        self._turn = itertools.count(self.local_ranks.rank)
        self._closed = False
        self._begun = time.monotonic()
        self._wear_seen_bytes: float = WEAR_BYTES

    def _open_stripes(self) -> list[Stripe]:
        """Make the files of folders that have not failed, unless they are there."""
        if not self._stripes:
            each = None if self.disk_bytes is None else self.disk_bytes // len(self._folders)
            folders = [folder for folder in self._folders if folder not in self._errors]
            self._stripes = [Stripe(self._files.open(folder), each) for folder in folders]
        return self._stripes

    def after_fork(self) -> None:
        """Begin anew in a forked child: files and tickets are the parent's."""
        closed = self._closed
        self._begin()
        self._closed = closed

    # Out

    def host_buffer(self, nbytes: int, pending: Pending | None = None) -> torch.Tensor:
        """Return memory that is written and read with no further copy.

        Parameters
        ----------
        nbytes : int
            How much.
        pending : callable, optional
            Returns events behind the work of GPUs that may still use the memory, once nobody has
            it; as for `Reservation.cut`.

        Returns
        -------
        torch.Tensor
            uint8 ``[nbytes]`` of the host's arena, page-locked where there is a GPU.

        Raises
        ------
        BitslabError
            When the memory cannot be had.
        """
        memory = self._cut(nbytes + ALIGN_BYTES, pending)
        begin = -memory.data_ptr() % ALIGN_BYTES
        return memory[begin : begin + nbytes]

    def _cut(self, nbytes: int, pending: Pending | None) -> torch.Tensor:
        with self._lock:
            if self._reservation is None or self._reservation.nbytes < nbytes:
                self._reservation = None
                self._reservation = host_arena().reserve(nbytes, bytes_to_reserve(nbytes))
            return self._reservation.cut(nbytes, pending)

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
        check_bytes("data", data)
        with self._lock:
            if self._closed:
                raise BitslabError("this DiskTier is closed")
            stored = Stored(data, after)
            sent = 0
            try:
                why = self._place(stored)
                if why is None:
                    ticket = Ticket(stored)
                    for piece in stored.pieces:
                        self._store_lane.submit(
                            write_piece, self._counters, stored, piece, self.verify
                        )
                        sent += 1
                    self._warn_of_wear()
                    return ticket
            except BaseException:
                stored.drop()
                stored.begun = True
                for piece in stored.pieces[sent:]:  # an interruption leaves nothing in the queue
                    piece.state = State.CANCELLED
                    self._counters.left_queue(stored, piece.nbytes, cancelled=True)
                raise
        with self._counters.lock:
            self._counters.refused_bytes[why] += data.shape[0]
        return None

    def takes(self, nbytes: int) -> bool:
        """Return whether `store` would take so many bytes now, as far as it is known before.

        `stats` counts what it would not take as refused.
        """
        with self._lock:
            if self._closed:
                return False
            why = self._refusal(nbytes)
        if why is None:
            return True
        with self._counters.lock:
            self._counters.refused_bytes[why] += nbytes
        return False

    def _refusal(self, nbytes: int) -> Refusal | None:
        counters = self._counters
        try:
            stripes = self._open_stripes()
        except DiskError as error:  # a folder that is gone since
            self._errors.update(dict.fromkeys(self._folders, error))
            return "failed"
        if all(stripe.error is not None for stripe in stripes):
            return "failed"
        with counters.lock:
            if counters.is_behind(nbytes, self.queue_bytes):
                return "behind"
            if counters.budget is not None and nbytes > counters.budget.left_bytes:
                return "budget"
        return None

    def _place(self, stored: Stored) -> Refusal | None:
        """Take the place of what is to be written, and count it; or return why it is not taken."""
        nbytes = stored.nbytes
        counters = self._counters
        why = self._refusal(nbytes)
        if why is not None:
            return why
        with counters.lock:
            if counters.budget is not None and not counters.budget.take(nbytes):
                return "budget"
        pieces = []
        for begin in range(0, nbytes, self._request_bytes):
            end = min(begin + self._request_bytes, nbytes)
            extent = self._take(end - begin)
            if extent is None:
                counters.left_queue(stored, nbytes, refused=True)
                return "full"
            pieces.append(Piece(extent, begin, end))
        stored.pieces = pieces
        counters.enter_queue(stored)
        return None

    def _take(self, nbytes: int) -> Extent | None:
        """Return an extent of the next folder, or of one that has room."""
        first = next(self._turn)
        for i in range(len(self._stripes)):
            extent = self._stripes[(first + i) % len(self._stripes)].take(nbytes)
            if extent is not None:
                return extent
        return None

    # And back

    def fetch(
        self,
        ticket: Ticket,
        out: torch.Tensor | None = None,
        room: Callable[[int], torch.Tensor] | None = None,
    ) -> ThreadTask[torch.Tensor]:
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
        room : callable, optional
            Returns `out` for a number of bytes, where they are not in memory and `out` is left out;
            `host_buffer` when left out.

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
            check_bytes("out", out)
            if out.shape[0] != ticket.nbytes:
                raise ArgumentError(f"out: {out.shape[0]} bytes, expected {ticket.nbytes}")
        if self._closed:
            raise BitslabError("this DiskTier is closed")
        with stored.lock:
            data = stored.data
            waiting = [piece for piece in stored.pieces if piece.state is State.WAITS]
            if data is not None:
                stored.begun = True
                for piece in waiting:
                    piece.state = State.CANCELLED
        if data is not None:
            cancelled_bytes = sum(piece.nbytes for piece in waiting)
            self._counters.left_queue(stored, cancelled_bytes, cancelled=True)
            with self._counters.lock:
                self._counters.forwarded_bytes += ticket.nbytes
            return self._forward(data, out, stored.after)
        if out is None:
            out = (room or self.host_buffer)(ticket.nbytes)
        reading = Reading(self._counters, stored, out)
        left = list(stored.pieces)
        try:
            while left:
                task = self._load_lane.submit(read_piece, reading, left[0], self.verify)
                reading.watch(left[0], task)
                del left[0]
        except BaseException as error:
            for piece in left:  # an interruption leaves no read that is waited for
                reading.over(piece, error)
            raise
        return reading.task

    def _forward(
        self, data: torch.Tensor, out: torch.Tensor | None, after: Mark | None
    ) -> ThreadTask[torch.Tensor]:
        if out is None and after is None:
            return ThreadTask.of(data)
        task = self._load_lane.run(forwarded, data, out, after, after=after)
        self._counters.begin_read(task)
        return task

    @property
    def lifespan_days(self) -> float | None:
        """How long the drives last at the rate so far; None without a `drive`, or before it."""
        written = self._counters.written_bytes
        if self.drive is None or not written:
            return None
        seconds = max(time.monotonic() - self._begun, 1e-9)
        return lifespan_days(self.drive.endurance_bytes(), written, seconds)

    def _warn_of_wear(self) -> None:
        if self.drive is None or self._counters.written_bytes < self._wear_seen_bytes:
            return
        self._wear_seen_bytes = self._counters.written_bytes + WEAR_BYTES
        days = self.lifespan_days
        if days is not None and days < SHORT_LIFE_DAYS:
            self._wear_seen_bytes = float("inf")
            warnings.warn(
                f"disk: at the rate so far the drives last {days:.0f} days; write_budget= limits "
                "what is written a day",
                stacklevel=3,
            )

    def forget(self, ticket: Ticket) -> None:
        """Give a ticket's place up; what of it waits is not written. Dropping it does the same."""
        ticket.forget()

    # All of it

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until nothing waits to be written; return whether that is so in time."""
        end = None if seconds is None else time.monotonic() + seconds
        with self._counters.lock:
            while not self._counters.all_written:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._counters.idle.wait(left)
        return True

    def wait(self, ticket: Ticket) -> None:
        """Wait until nothing of a ticket waits to be written, or is being written."""
        counters = self._counters
        with counters.lock:
            counters.idle.wait_for(lambda: not ticket.pending or counters.all_written)

    def rest(self) -> None:
        """End the threads once all is written and read, and give up what holds nothing.

        That is memory that is reserved, and files in which no ticket has bytes. All of it begins
        anew with the next bytes. A device that does not answer is waited for so long as lanes wait.
        """
        self.drain(CLOSE_SECONDS)
        with self._counters.lock:
            self._counters.idle.wait_for(lambda: not self._counters.reads, CLOSE_SECONDS)
        with self._lock:
            if self._closed:
                return
            lanes = self._store_lane, self._load_lane
            self._open_lanes()
            self._reservation = None
            idle: list[Stripe] = []
            if not any(stripe.used_bytes for stripe in self._stripes):
                idle, self._stripes = self._stripes, []
                for stripe in idle:
                    if stripe.error is not None:
                        self._errors[stripe.file.path] = stripe.error
        for lane in lanes:
            lane.close()
        self._counters.forget_queue()
        for stripe in idle:
            stripe.file.close()

    def stats(self) -> dict[str, Any]:
        """Return what was moved.

        Returns
        -------
        dict
            ``written_bytes``, ``read_bytes``, ``write_seconds`` and ``read_seconds`` (of all
            threads together), ``forwarded_bytes`` that came from memory, ``cancelled_bytes`` that
            were not written for that, ``failed_bytes`` whose writing failed, ``queued_bytes``,
            ``refused_bytes`` by cause, ``lifespan_days`` of the drives or None, ``disk_bytes`` that
            the files take, ``used_bytes`` of these, and ``folders``: for each its ``path``,
            ``file_system``, whether that is ``in_memory`` or of the ``network``, ``direct``
            (whether the page cache is bypassed), ``file`` ("posix", "kvikio"), ``file_reason``
            (why that one), ``measured`` (the rates of each file that was timed) and ``error``, or
            None.
        """
        stripes = self._stripes
        folders = self._files.rows(stripes, self._folder_errors())
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
                "local_ranks": self.local_ranks.ranks,
                "refused_bytes": dict(counters.refused_bytes),
                "lifespan_days": self.lifespan_days,
                "disk_bytes": self.file_bytes,
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
        self._counters.forget_queue()
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
