"""The two stages of an exchange: descriptors and short messages, then long messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from ..engine.transfer import ThreadLane, ThreadTask
from ..errors import CorruptedDataError
from .buffers import Buffers
from .faults import ExchangeError, Faults
from .messages import (
    REFERENCES,
    Array,
    Candidate,
    Repeats,
    decode_part,
    encode_part,
    most_part_bytes,
)
from .pairs import FIRST, LONG, TERMS, Pairs
from .stats import Counters
from .wire import (
    DESCRIPTOR_BYTES,
    DTYPES,
    FAILED,
    MOST_TERMS,
    PART_SIZE,
    SHORT_BYTES,
    TableTerms,
    Terms,
    descriptor,
    read_descriptor,
)


@dataclass
class Rows:
    """Rows of one table for every rank of a group, and where those that come are written.

    Parameters
    ----------
    sent, received : torch.Tensor
        ``[N, row]`` and ``[M, row]`` on the CPU, contiguous: what is sent and what comes, rank
        after rank.
    send_rows, receive_rows : sequence of int
        Rows for each rank and of each.
    bound : float or torch.Tensor
        How far a delivered element may be from the one that was sent; 0: every bit is kept. Rows of
        this rank for itself are copied. On a GPU it may be there, float64 without dimensions.
    relative : bool
        On a GPU, whether the bound is a share of the range of the rows for each rank.
    candidate : Candidate
        How they are written.
    repeats : list, optional
        For each rank the `Repeats` among its rows, or None. After the exchange, those by which
        rows crossed.
    name : str
        Of the table, for errors.

    Attributes
    ----------
    places : list
        After the exchange, for each rank int64 ``[rows]``: which row that crossed each of its rows
        is, or None where there were as many.
    moved_bytes : int
        After the exchange, bytes of the parts for other ranks.
    """

    sent: torch.Tensor
    received: torch.Tensor
    send_rows: Sequence[int]
    receive_rows: Sequence[int]
    bound: float | torch.Tensor = 0.0
    relative: bool = False
    candidate: Candidate = REFERENCES
    repeats: list[Repeats | None] | None = None
    name: str = ""
    places: list[Array | None] = field(default_factory=list)
    moved_bytes: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.sent.shape[1] * self.sent.element_size()

    def raw_bytes(self, rank: int | None) -> int:
        """Return the bytes of the rows for other ranks than this one; of all for None."""
        copied = 0 if rank is None else self.send_rows[rank]
        return (sum(self.send_rows) - copied) * self.row_bytes


@dataclass(frozen=True)
class _Sent:
    """Messages of a piece, in one buffer.

    Parameters
    ----------
    data : torch.Tensor
        uint8: for each other rank room for descriptor and numbers, and behind it the message.
    places, sizes : list of int
        By rank, where that room begins, and the bytes of the message.
    """

    data: torch.Tensor
    places: list[int]
    sizes: list[int]


@dataclass(frozen=True)
class _Received:
    """What came of a piece.

    Parameters
    ----------
    checks : list of int
        Of the descriptors.
    messages : list of numpy.ndarray
        uint8, by rank; of this one nothing.
    numbers : list
        The numbers of each rank.
    """

    checks: list[int]
    messages: list[Array]
    numbers: list[list[int]]


class Exchange:
    """Rows of several tables for every rank of a group, and what comes back, over gloo.

    Parameters
    ----------
    group : ProcessGroup
        Whose ranks exchange.
    tables : sequence of Rows
        The same tables in the same order on every rank.
    counters : Counters
        Are added to.
    faults : Faults
        Of the caller.
    buffers : Buffers
        Of the caller: where messages stand.
    pieces : int
        Pieces that each table's rows for a rank are cut into: while one crosses, the next one is
        encoded. The same on all ranks.
    lane : ThreadLane, optional
        Of one thread, where pieces cross; needed for two pieces and more.
    numbers : sequence of int, optional
        int64 that cross with the descriptors, as many on all ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        counters: Counters,
        faults: Faults,
        *,
        buffers: Buffers,
        pieces: int = 1,
        lane: ThreadLane | None = None,
        numbers: Sequence[int] = (),
    ) -> None:
        self._group, self._tables = group, tables
        self._counters, self._faults = counters, faults
        self._pieces, self._lane = pieces, lane
        self._buffers, self._taken = buffers, list[torch.Tensor]()
        self._numbers = list(numbers)
        self._head_bytes = DESCRIPTOR_BYTES * (1 + len(self._numbers))
        self._stopped = False
        self._rank, self._size = dist.get_rank(group), group.size()
        self._others = [rank for rank in range(self._size) if rank != self._rank]
        self._agreement = Agreement(group, tables)

    def run(self) -> list[list[int]]:
        """Exchange, and write what came, or raise.

        Returns
        -------
        list
            The numbers of each rank.

        Raises
        ------
        ExchangeError
            When a rank fails, or ranks disagree. What is received into may hold anything.
        CorruptedDataError
            When a message is damaged. Likewise.
        """
        self._faults.check()
        for table in self._tables:
            table.places = [None] * self._size
            if table.repeats:
                table.repeats[self._rank] = None  # those are copied
        try:
            if self._faults.to_report:
                raise self._reported()
            if self._pieces == 1 or self._lane is None:
                # Before encoding: a message whose buffer is known there leaves at once.
                expected = self._expected()
                try:
                    sent = self._encode(0)
                except BaseException as error:
                    self._encoding_failed(error, lambda: self._reported(expected))
                    raise
                found = self._stages(sent, expected)
                self._agreement.check(found.checks, self._faults)
                self._decode(0, found)
            else:
                found = self._in_pieces(self._lane)
        except BaseException:
            self._buffers.forget(*self._taken)
            raise
        self._buffers.give(*self._taken)
        for table in self._tables:
            own = torch.split(table.sent, list(table.send_rows))[self._rank]
            torch.split(table.received, list(table.receive_rows))[self._rank].copy_(own)
            self._counters.raw_bytes += table.raw_bytes(self._rank)
        self._counters.calls += 1
        return found.numbers

    def _in_pieces(self, lane: ThreadLane) -> _Received:
        """Encode one piece after the other; the lane's thread exchanges them."""
        tasks: list[ThreadTask[_Received]] = []

        def say() -> None:
            for task in tasks:
                task.wait()  # in order: ranks wait for this piece then, or all know of a failure
            if not self._stopped:
                self._reported()

        try:
            for piece in range(self._pieces):
                tasks.append(lane.submit(self._stages, self._encode(piece)))
        except BaseException as error:
            self._encoding_failed(error, say)
            raise
        try:
            for task in tasks:
                task.wait()  # the last one too, before an error is raised: it uses the group
        except BaseException as error:
            self._faults.broken(f"waiting for pieces: {error!r:.200}")
            raise
        first = tasks[0].result()
        self._agreement.check(first.checks, self._faults)
        for piece, task in enumerate(tasks):
            self._decode(piece, task.result())
        return first

    # Coding

    def _take(self, n_bytes: int) -> torch.Tensor:
        found = self._buffers.take(n_bytes, self._tables[0].sent.device)
        self._taken.append(found)
        return found

    def _encoding_failed(self, error: BaseException, say: Callable[[], object]) -> None:
        """Have the other ranks know where they wait for what is not encoded: they raise, too.

        Else what comes next would take the place of this exchange's messages.
        """
        reason = f"encoding: {error!r:.200}"
        self._faults.failed(reason, known_to_all=False)
        try:
            if isinstance(error, Exception):  # an interrupt waits for no rank
                with suppress(Exception):  # the error of encoding is raised
                    say()
        finally:
            if self._faults.to_report:
                self._faults.broken(reason)

    def _reported(self, expected: _Expected | None = None) -> ExchangeError:
        """Say to all ranks that this one failed; return the error to raise."""
        nothing = self._nothing()
        self._first(expected or self._expected(), nothing)
        return self._faults.reported()

    def _nothing(self) -> _Sent:
        """Return messages that say that this rank failed."""
        places = [self._head_bytes * rank for rank in range(self._size)]
        return _Sent(self._take(self._head_bytes * self._size), places, [FAILED] * self._size)

    def _encode(self, piece: int) -> _Sent:
        """Return the messages of a piece."""
        started = time.perf_counter()
        spans = [spans_of(table.send_rows, piece, self._pieces) for table in self._tables]
        most = sum(
            PART_SIZE.size + most_part_bytes(rows, table.row_bytes)
            for table, of_table in zip(self._tables, spans, strict=True)
            for to, (_, rows) in enumerate(of_table)
            if to != self._rank
        )
        data = self._take(most + self._head_bytes * self._size)
        out = data.numpy()
        places, sizes, at = [0] * self._size, [0] * self._size, 0
        for to in self._others:
            places[to] = at
            begin = at = at + self._head_bytes
            parts = [i for i, of_table in enumerate(spans) if of_table[to][1]]
            at += PART_SIZE.size * max(0, len(parts) - 1)
            for number, i in enumerate(parts):
                table, (first, rows) = self._tables[i], spans[i][to]
                repeats = table.repeats[to] if table.repeats else None
                used, by_id = encode_part(
                    table.sent[first : first + rows],
                    float(table.bound),
                    table.candidate,
                    repeats,
                    out[at : at + most_part_bytes(rows, table.row_bytes)],
                )
                if table.repeats and not by_id:
                    table.repeats[to] = None
                if number < len(parts) - 1:
                    PART_SIZE.pack_into(out.data, begin + PART_SIZE.size * number, used)
                table.moved_bytes += used
                at += used
            sizes[to] = at - begin
        self._counters.encode_s += time.perf_counter() - started
        return _Sent(data, places, sizes)

    def _decode(self, piece: int, received: _Received) -> None:
        started = time.perf_counter()
        spans = [spans_of(table.receive_rows, piece, self._pieces) for table in self._tables]
        for source in self._others:
            parts = [i for i, of_table in enumerate(spans) if of_table[source][1]]
            try:
                cut = _cut(received.messages[source], len(parts))
                for i, data in zip(parts, cut, strict=True):
                    table, (first, rows) = self._tables[i], spans[i][source]
                    places = decode_part(data, table.received[first : first + rows])
                    table.places[source] = places
            except CorruptedDataError as error:
                reason = f"message of rank {source} of the group: {error}"
                self._faults.failed(reason, known_to_all=False)
                raise CorruptedDataError(reason) from None
        self._counters.decode_s += time.perf_counter() - started

    # Stages

    def _expected(self) -> _Expected:
        """Let first messages of all ranks come."""

        def posted() -> _Expected:
            room = self._head_bytes + SHORT_BYTES
            data = self._take(room * len(self._others))
            buffers = dict(zip(self._others, torch.split(data, room), strict=False))
            return buffers, Pairs(self._group, buffers, FIRST)

        return self._faults.stage("sizes", posted)

    def _first(self, expected: _Expected, sent: _Sent) -> list[list[int]]:
        """Exchange descriptors, numbers and short messages; return the former of each rank."""
        started = time.perf_counter()
        buffers, pairs = expected
        descriptors, messages = self._agreement.descriptors(sent.sizes), {}
        for to in self._others:
            at, size = sent.places[to], sent.sizes[to]
            head = sent.data[at : at + self._head_bytes]
            head.numpy()[:] = np.array([descriptors[to], *self._numbers], "<i8").view(np.uint8)
            end = at + self._head_bytes + (size if size <= SHORT_BYTES else 0)
            messages[to] = sent.data[at:end]
        self._faults.stage("sizes", lambda: pairs.cross(messages))
        self._counters.sizes_s += time.perf_counter() - started
        self._counters.moved_bytes += self._head_bytes * len(self._others)
        own = [descriptors[self._rank], *self._numbers]
        heads = (buffers.get(rank) for rank in range(self._size))
        return [
            own if head is None else head.numpy()[: self._head_bytes].view("<i8").tolist()
            for head in heads
        ]

    def _stages(self, sent: _Sent, expected: _Expected | None = None) -> _Received:
        """Exchange messages, whatever they are of: ranks that differ hang nobody.

        Raises
        ------
        ExchangeError
            When a stage fails, or a rank says that it failed.
        """
        if self._stopped:
            raise ExchangeError("sizes stage: not reached, an earlier piece failed")
        self._stopped = True
        expected = expected or self._expected()
        rows = self._first(expected, sent)
        checks, sizes = self._agreement.sizes_of([row[0] for row in rows], self._faults)
        messages = [np.empty(0, np.uint8)] * self._size
        for rank, data in expected[0].items():
            messages[rank] = data.numpy()[self._head_bytes :][: sizes[rank]]
        coming = {rank: sizes[rank] for rank in self._others if sizes[rank] > SHORT_BYTES}
        going = {rank: n for rank in self._others if (n := sent.sizes[rank]) > SHORT_BYTES}
        if coming or going:
            for rank, found in self._payload(coming, going, sent).items():
                messages[rank] = found.numpy()
        self._counters.moved_bytes += sum(sent.sizes)
        self._stopped = False
        return _Received(checks, messages, [row[1:] for row in rows])

    def _payload(
        self, coming: dict[int, int], going: dict[int, int], sent: _Sent
    ) -> dict[int, torch.Tensor]:
        """Exchange long messages, bytes by rank; return those that come."""
        started = time.perf_counter()
        begins = {rank: sent.places[rank] + self._head_bytes for rank in going}
        messages = {rank: sent.data[begins[rank] :][:n] for rank, n in going.items()}

        def crossed() -> dict[int, torch.Tensor]:
            data = self._take(sum(coming.values()))[: sum(coming.values())]
            found = dict(zip(coming, torch.split(data, list(coming.values())), strict=True))
            Pairs(self._group, found, LONG).cross(messages)
            return found

        found = self._faults.stage("payload", crossed)
        self._counters.payload_s += time.perf_counter() - started
        return found


#: Of first messages: by rank the buffer that one comes to, and the receives.
_Expected = tuple[dict[int, torch.Tensor], Pairs]


def spans_of(rows: Sequence[int], piece: int, pieces: int) -> list[tuple[int, int]]:
    """Return for each rank where its rows of a piece begin, and how many there are."""
    found, at = [], 0
    for n in rows:
        begin, end = piece * n // pieces, (piece + 1) * n // pieces
        found.append((at + begin, end - begin))
        at += n
    return found


class Agreement:
    """What a rank knows of the rows between it and each other one, and whether they know the same.

    Parameters
    ----------
    group : ProcessGroup
        Whose ranks exchange.
    tables : sequence of Rows
        As for `Exchange`.
    """

    def __init__(self, group: dist.ProcessGroup, tables: Sequence[Rows]) -> None:
        self._group, self._tables = group, tables
        self._rank, self._size = dist.get_rank(group), group.size()
        self._terms = [self._terms_with(other) for other in range(self._size)]
        self._checks = [terms.check() for terms in self._terms]

    def descriptors(self, sizes: Sequence[int]) -> list[int]:
        """Return the descriptors of messages of so many bytes for each rank."""
        return [descriptor(check, n) for check, n in zip(self._checks, sizes, strict=True)]

    def sizes_of(self, descriptors: Sequence[int], faults: Faults) -> tuple[list[int], list[int]]:
        """Return checks and sizes of what comes.

        Raises
        ------
        ExchangeError
            When a rank says that it failed.
        """
        checks, sizes = zip(*map(read_descriptor, descriptors), strict=True)
        failed = [rank for rank, n in enumerate(sizes) if n == FAILED]
        if failed:
            reason = (
                f"sizes stage: this or an earlier exchange failed on {_ranks(failed)} of the group"
            )
            faults.failed(reason, known_to_all=True)
            raise ExchangeError(reason)
        return list(checks), list(sizes)

    def agrees(self, checks: Sequence[int]) -> bool:
        """Return whether all others know the same, and this rank of the rows for itself."""
        own = all(t.send_rows[self._rank] == t.receive_rows[self._rank] for t in self._tables)
        return own and all(
            rank == self._rank or check == self._checks[rank] for rank, check in enumerate(checks)
        )

    def check(self, checks: Sequence[int], faults: Faults) -> None:
        """Raise where ranks disagree; both of a pair find it alike."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        wrong = [rank for rank in others if checks[rank] != self._checks[rank]]
        said = [f"rank {rank}: {why}" for rank, why in self._reasons(wrong).items()]
        for table in self._tables:
            sent, expected = table.send_rows[self._rank], table.receive_rows[self._rank]
            if sent != expected:
                of = f"table {table.name}: " if table.name else ""
                said.append(
                    f"rank {self._rank}: {of}{sent} rows sent, {expected} are expected here"
                )
        if said:
            reason = f"sizes stage: rank {self._rank} of the group disagrees with {'; '.join(said)}"
            faults.failed(reason, known_to_all=wrong == others)
            raise ExchangeError(reason)

    def _terms_with(self, other: int) -> Terms:
        return Terms(
            [
                TableTerms(
                    DTYPES.index(table.sent.dtype),
                    table.sent.shape[1],
                    table.send_rows[other],
                    table.receive_rows[other],
                )
                for table in self._tables
            ],
            lower=self._rank <= other,
        )

    def _reasons(self, wrong: Sequence[int]) -> dict[int, str]:
        """Exchange the terms themselves with ranks whose check differs; return why."""
        names = [table.name for table in self._tables]
        device = self._tables[0].sent.device
        found = {}
        for rank in wrong:
            ours = self._terms[rank].numbers()
            other = dist.get_global_rank(self._group, rank)
            try:
                theirs = _swapped(ours, other, self._group, device, first=self._rank < rank)
            except RuntimeError as error:
                found[rank] = f"other rows, dtype or version ({error})"
            else:
                found[rank] = self._terms[rank].disagreement(theirs, names)
        return found


def _swapped(
    ours: Sequence[int],
    other: int,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    first: bool,
) -> list[int]:
    """Exchange numbers with a rank, as many as each has; the `first` one sends first."""

    def send() -> None:
        for given in ([len(ours)], ours):
            numbers = torch.tensor(given, dtype=torch.int64, device=device)
            dist.send(numbers, other, group=group, tag=TERMS)

    def receive() -> list[int]:
        count = torch.empty(1, dtype=torch.int64, device=device)
        dist.recv(count, other, group=group, tag=TERMS)
        found = torch.empty(min(MOST_TERMS, int(count)), dtype=torch.int64, device=device)
        dist.recv(found, other, group=group, tag=TERMS)
        return list(map(int, found.tolist()))

    if first:
        send()
        return receive()
    theirs = receive()
    send()
    return theirs


def _cut(message: Array, parts: int) -> list[Array]:
    """Return the parts of a message."""
    at = PART_SIZE.size * max(0, parts - 1)
    if at > len(message) or (parts == 0 and len(message)):
        raise CorruptedDataError(f"message: {len(message)} bytes, expected {parts} parts")
    found = []
    for size in np.frombuffer(message[:at].tobytes(), "<u4").tolist():
        if size > len(message) - at:
            raise CorruptedDataError("message: it ends in a part")
        found.append(message[at : at + size])
        at += size
    return [*found, message[at:]] if parts else []


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
