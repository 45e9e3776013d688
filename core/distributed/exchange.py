"""The two stages of an exchange: descriptors of all messages, then the messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from ..engine.transfer import ThreadLane
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
from .stats import Counters
from .wire import (
    DTYPES,
    FAILED,
    MOST_TERMS,
    PART_SIZE,
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
class _Received:
    """What came of a piece.

    Parameters
    ----------
    checks, sizes : list of int
        Of the descriptors.
    data : torch.Tensor
        uint8: the messages, and what is behind them in the buffer.
    numbers : list
        The numbers of each rank.
    """

    checks: list[int]
    sizes: list[int]
    data: torch.Tensor
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
        self._stopped = False
        self._rank, self._size = dist.get_rank(group), group.size()
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
        if self._faults.to_report:
            self._sizes([FAILED] * self._size)
            raise self._faults.reported()
        for table in self._tables:
            table.places = [None] * self._size
            if table.repeats:
                table.repeats[self._rank] = None  # those are copied
        try:
            if self._pieces == 1 or self._lane is None:
                found = self._stages(*self._encode(0))
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
        tasks = [lane.submit(self._stages, *self._encode(piece)) for piece in range(self._pieces)]
        for task in tasks:
            task.wait()  # the last one too, before an error is raised: it uses the group
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

    def _encode(self, piece: int) -> tuple[list[int], torch.Tensor]:
        """Return the bytes of the messages of a piece for each rank, and the messages."""
        started = time.perf_counter()
        spans = [spans_of(table.send_rows, piece, self._pieces) for table in self._tables]
        most = sum(
            PART_SIZE.size + most_part_bytes(rows, table.row_bytes)
            for table, of_table in zip(self._tables, spans, strict=True)
            for to, (_, rows) in enumerate(of_table)
            if to != self._rank
        )
        data = self._take(most)
        out = data.numpy()
        sizes, at = [0] * self._size, 0
        for to in range(self._size):
            if to == self._rank:
                continue
            begin = at
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
        return sizes, data[:at]

    def _decode(self, piece: int, received: _Received) -> None:
        started = time.perf_counter()
        data = received.data.numpy()[: sum(received.sizes)]
        messages = np.split(data, np.cumsum(received.sizes)[:-1])
        spans = [spans_of(table.receive_rows, piece, self._pieces) for table in self._tables]
        for source, message in enumerate(messages):
            if source == self._rank:
                continue
            parts = [i for i, of_table in enumerate(spans) if of_table[source][1]]
            try:
                for i, data in zip(parts, _cut(message, len(parts)), strict=True):
                    table, (first, rows) = self._tables[i], spans[i][source]
                    places = decode_part(data, table.received[first : first + rows])
                    table.places[source] = places
            except CorruptedDataError as error:
                reason = f"message of rank {source} of the group: {error}"
                self._faults.failed(reason, known_to_all=False)
                raise CorruptedDataError(reason) from None
        self._counters.decode_s += time.perf_counter() - started

    # Stages

    def _sizes(self, sizes: Sequence[int]) -> list[list[int]]:
        """Exchange descriptors, and the numbers with them; return those of each rank."""
        started = time.perf_counter()
        descriptors = self._agreement.descriptors(sizes)
        sent = torch.tensor([[d, *self._numbers] for d in descriptors], dtype=torch.int64)
        found = torch.empty_like(sent)
        self._faults.stage("sizes", lambda: dist.all_to_all_single(found, sent, group=self._group))
        self._counters.sizes_s += time.perf_counter() - started
        self._counters.moved_bytes += sent[0].nbytes * (self._size - 1)
        return found.tolist()

    def _stages(self, sizes: list[int], sent: torch.Tensor) -> _Received:
        """Exchange descriptors, then messages, whatever they are of: ranks that differ hang nobody.

        Raises
        ------
        ExchangeError
            When a stage fails, or a rank says that it failed before.
        """
        if self._stopped:
            raise ExchangeError("sizes stage: not reached, an earlier piece failed")
        self._stopped = True
        rows = self._sizes(sizes)
        checks, come = self._agreement.sizes_of([row[0] for row in rows], self._faults)
        started = time.perf_counter()
        data = self._take(sum(come))
        found = data[: sum(come)]

        def payload() -> None:
            dist.all_to_all_single(found, sent, come, sizes, group=self._group)

        self._faults.stage("payload", payload)
        self._counters.payload_s += time.perf_counter() - started
        self._counters.moved_bytes += sum(sizes)
        self._stopped = False
        return _Received(checks, come, data, [row[1:] for row in rows])


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
            When a rank says that it failed before.
        """
        checks, sizes = zip(*map(read_descriptor, descriptors), strict=True)
        failed = [rank for rank, n in enumerate(sizes) if n == FAILED]
        if failed:
            reason = f"sizes stage: an earlier exchange failed on {_ranks(failed)} of the group"
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
            dist.send(torch.tensor(given, dtype=torch.int64, device=device), other, group=group)

    def receive() -> list[int]:
        count = torch.empty(1, dtype=torch.int64, device=device)
        dist.recv(count, other, group=group)
        found = torch.empty(min(MOST_TERMS, int(count)), dtype=torch.int64, device=device)
        dist.recv(found, other, group=group)
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
