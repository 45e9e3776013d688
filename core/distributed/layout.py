"""Rows of tables in an exchange, and what follows from their sizes, worked out once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import torch

from ..engine.kernels.format import ceil_div
from ..errors import ArgumentError
from .agreement import Agreement, TableSizes
from .bounds import share_of_range
from .device_repeats import DeferredRepeats
from .messages import REFERENCES, Array, Candidate, Repeats, most_part_bytes
from .wire import MOST_BYTES, PART_SIZE

#: Things that are kept at most, such as layouts: sizes hardly change from step to step, or in each.
MOST_KEPT = 16

T = TypeVar("T")


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
        Whether the bound is a share of the range of the rows of a message.
    candidate : Candidate
        How they are written.
    repeats : list, optional
        For each rank the `Repeats` among its rows, or None. After the exchange, those by which
        rows crossed.
    name : str
        Of the table, for errors.
    parts : list of torch.Tensor, optional
        What is received by rank, views of it; made where left out.
    memory : torch.Tensor, optional
        What `received` is a part of; itself where left out.
    summed_back : bool
        Whether gradients go back for these rows, of those of one id that crossed once their sum.
    deferred : DeferredRepeats, optional
        In place of `repeats` where the host does not know them yet: see `know_repeats`.

    Attributes
    ----------
    places : list
        After the exchange, for each rank int64 ``[rows]``: which row that crossed each of its rows
        is, or None where there were as many; empty where that holds of all ranks.
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
    parts: Sequence[torch.Tensor] | None = None
    memory: torch.Tensor | None = None
    summed_back: bool = False
    deferred: DeferredRepeats | None = None
    places: list[Array | None] = field(default_factory=list)
    moved_bytes: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.sent.shape[1] * self.sent.element_size()

    def received_parts(self) -> Sequence[torch.Tensor]:
        """Return where the rows of each rank go."""
        if self.parts is None:
            self.parts = self.received.split_with_sizes(list(self.receive_rows))
        return self.parts

    def bound_of(self, rows: torch.Tensor) -> float:
        """Return the bound of some rows on the CPU, in their units; 0: every bit is kept."""
        bound = float(self.bound)
        return share_of_range(bound, rows) if bound and self.relative else bound

    def know_repeats(self) -> None:
        """Wait for what `deferred` stands for, where there is some.

        Raises
        ------
        ContentError
            When rows of one id differ.
        """
        if self.deferred is not None:
            self.repeats = list(self.deferred.found.of(self.deferred.number))
            self.deferred = None

    def read_to_encode(self) -> Iterator[torch.Tensor]:
        """Yield what is read on the device to encode rows: these, a bound, and which are sent."""
        yield self.sent
        if isinstance(self.bound, torch.Tensor):
            yield self.bound
        if self.deferred is not None:
            yield self.deferred.found.first

    def raw_bytes(self, rank: int | None) -> int:
        """Return the bytes of the rows for other ranks than this one; of all for None."""
        copied = 0 if rank is None else self.send_rows[rank]
        return (sum(self.send_rows) - copied) * self.row_bytes

    def rows_for(self, rank: int) -> int:
        """Return the rows for a rank."""
        return self.send_rows[rank]

    def saved_back_bytes(self, rank: int) -> int:
        """Return the bytes of gradients that need not come back to this rank; waits for ids."""
        self.know_repeats()
        if not self.summed_back or not self.repeats:
            return 0
        saved = sum(
            n - len(repeated.first)
            for to, (n, repeated) in enumerate(zip(self.send_rows, self.repeats, strict=True))
            if repeated is not None and to != rank
        )
        return saved * self.row_bytes


class Span(NamedTuple):
    """Rows of a table for a rank, or of it: from which one on, and how many."""

    table: int
    rank: int
    first: int
    rows: int


class Memory(NamedTuple):
    """Where rows come to, by table.

    Parameters
    ----------
    received : sequence of torch.Tensor
        ``[M, row]``.
    parts : sequence of sequences of torch.Tensor, or None
        What each rank's rows are of it; None where that is cut once it is needed.
    whole : sequence of torch.Tensor
        What it is a part of.
    """

    received: Sequence[torch.Tensor]
    parts: Sequence[Sequence[torch.Tensor] | None]
    whole: Sequence[torch.Tensor]


class _Alike(NamedTuple):
    """Tables of one dtype and row, whose rows are received into one tensor."""

    dtype: torch.dtype
    row_elements: int
    tables: list[int]
    rows: list[int]
    rows_by_rank: list[int]


class Plain(NamedTuple):
    """How the rows of all tables cross by torch's own collective.

    Parameters
    ----------
    alike : bool
        Whether all have one dtype and row: what crosses is rows then, else it is bytes.
    sent, received : list of (int, int)
        Ranks and tables in the order in which their rows cross.
    sent_units : dict of list of int
        By table and rank, rows or bytes.
    units : list of int
        Of each of `received`.
    send_bytes, receive_bytes : list of int
        By rank.
    raw_bytes : list of int
        By table, of rows for other ranks.
    all_raw_bytes : int
        Of all tables.
    """

    alike: bool
    sent: list[tuple[int, int]]
    received: list[tuple[int, int]]
    sent_units: dict[int, list[int]]
    units: list[int]
    send_bytes: list[int]
    receive_bytes: list[int]
    raw_bytes: list[int]
    all_raw_bytes: int


class Layout:
    """What the sizes of the tables' rows in an exchange say; nothing of it differs between calls.

    Parameters
    ----------
    tables : sequence of TableSizes
        In the order of the tables.
    rank, size : int
        Of the group.
    copied : int or None
        The rank whose rows do not cross: this one, or none.
    """

    def __init__(
        self, tables: Sequence[TableSizes], rank: int, size: int, copied: int | None
    ) -> None:
        self.tables, self.rank, self.size, self.copied = tables, rank, size, copied
        of_own = [0 if copied is None else table.send_rows[copied] for table in tables]
        self.row_bytes = [table.row_bytes for table in tables]
        #: Of the rows that cross, by table.
        self.raw_bytes = [
            (sum(table.send_rows) - own) * n
            for table, own, n in zip(tables, of_own, self.row_bytes, strict=True)
        ]
        self.all_raw_bytes = sum(self.raw_bytes)
        self.wide = [i for i, n in enumerate(self.row_bytes) if n]
        self._agreements: dict[tuple[int, int, int], Agreement] = {}
        self._rooms: dict[tuple[int, int], int] = {}
        self._spans: dict[tuple[bool, int, int], list[list[Span]]] = {}

    def agreement(self, pieces: int, decide_every: int, numbers: int = 0) -> Agreement:
        """Return what ranks must know alike of messages; see `Agreement`."""
        key = pieces, decide_every, numbers
        found = self._agreements.get(key)
        if found is None:
            self._check_messages(pieces)
            found = Agreement(
                self.tables,
                self.rank,
                self.size,
                pieces=pieces,
                numbers=numbers,
                decide_every=decide_every,
            )
            self._agreements[key] = found
        return found

    def _check_messages(self, pieces: int) -> None:
        """Refuse messages of more bytes than a descriptor has place for."""
        for way in ("sent", "received"):
            of_tables = [t.send_rows if way == "sent" else t.receive_rows for t in self.tables]
            for rank in range(self.size):
                if rank == self.copied:
                    continue
                most = sum(
                    PART_SIZE.size + most_part_bytes(ceil_div(rows[rank], pieces), row_bytes)
                    for rows, row_bytes in zip(of_tables, self.row_bytes, strict=True)
                )
                if most >= MOST_BYTES:
                    preposition = "to" if way == "sent" else "from"
                    raise ArgumentError(
                        f"inputs: {most} bytes in one message {preposition} rank {rank} of the "
                        f"group, of {len(self.tables)} tables in {pieces} pieces, expected fewer "
                        f"than {MOST_BYTES}: give more pieces"
                    )

    def sent_spans(self, piece: int, pieces: int) -> list[list[Span]]:
        """Return by rank the rows of tables that cross to it, in the order of the tables."""
        return self._spans_of(True, piece, pieces)

    def sent_room(self, piece: int, pieces: int) -> int:
        """Return the bytes that messages of a piece take at most, without what goes before them."""
        key = piece, pieces
        found = self._rooms.get(key)
        if found is None:
            found = self._rooms[key] = sum(
                PART_SIZE.size + most_part_bytes(span.rows, self.row_bytes[span.table])
                for spans in self.sent_spans(piece, pieces)
                for span in spans
            )
        return found

    def received_spans(self, piece: int, pieces: int) -> list[list[Span]]:
        """Return by rank the rows of tables that come from it."""
        return self._spans_of(False, piece, pieces)

    def _spans_of(self, sent: bool, piece: int, pieces: int) -> list[list[Span]]:
        key = sent, piece, pieces
        found = self._spans.get(key)
        if found is None:
            found = [[] for _ in range(self.size)]
            for number in self.wide:
                table = self.tables[number]
                of_ranks = table.send_rows if sent else table.receive_rows
                for rank, (first, rows) in enumerate(spans_of(of_ranks, piece, pieces)):
                    if rows and rank != self.copied:
                        found[rank].append(Span(number, rank, first, rows))
            self._spans[key] = found
        return found

    @cached_property
    def own(self) -> list[int]:
        """Tables with rows of this rank for itself, which are copied."""
        rank = self.copied
        if rank is None:
            return []
        return [i for i in self.wide if self.tables[i].send_rows[rank]]

    @cached_property
    def plain(self) -> Plain:
        """How rows cross by torch's own collective."""
        tables, ranks = self.tables, range(self.size)
        alike = len({(tables[i].dtype, tables[i].row_elements) for i in self.wide}) == 1
        units = [1 if alike else n for n in self.row_bytes]
        sent = [(rank, i) for rank in ranks for i in self.wide if tables[i].send_rows[rank]]
        came = [(rank, i) for rank in ranks for i in self.wide if tables[i].receive_rows[rank]]
        out, into = [0] * self.size, [0] * self.size
        for i, table in enumerate(tables):
            for rank in ranks:
                out[rank] += table.send_rows[rank] * self.row_bytes[i]
                into[rank] += table.receive_rows[rank] * self.row_bytes[i]
        raw_bytes = [
            (sum(table.send_rows) - table.send_rows[self.rank]) * n
            for table, n in zip(tables, self.row_bytes, strict=True)
        ]
        return Plain(
            alike,
            sent,
            came,
            {i: [n * units[i] for n in tables[i].send_rows] for i in self.wide},
            [tables[i].receive_rows[rank] * units[i] for rank, i in came],
            out,
            into,
            raw_bytes,
            sum(raw_bytes),
        )

    @cached_property
    def _alike(self) -> list[_Alike]:
        found: dict[tuple[torch.dtype, int], _Alike] = {}
        for number, table in enumerate(self.tables):
            key = table.dtype, table.row_elements
            of_key = found.setdefault(key, _Alike(*key, [], [], []))
            of_key.tables.append(number)
            of_key.rows.append(sum(table.receive_rows))
            of_key.rows_by_rank.extend(table.receive_rows)
        return list(found.values())

    def memory_on(self, device: torch.device) -> Memory:
        """Return where rows of all tables come to: one tensor for those of one dtype and row.

        A table's tensor is written to without others hearing of it: `unsafe_split` gives each a
        version of its own, by which autograd sees changes.
        """
        size = self.size
        by_table: dict[int, tuple[torch.Tensor, Sequence[torch.Tensor] | None, torch.Tensor]] = {}
        for dtype, row, tables, rows, by_rank in self._alike:
            data = torch.empty((sum(rows), row), dtype=dtype, device=device)
            if len(tables) == 1:
                by_table[tables[0]] = data, None, data
                continue
            each = torch.unsafe_split_with_sizes(data, rows)
            parts = data.split_with_sizes(by_rank)
            for at, number in enumerate(tables):
                by_table[number] = each[at], parts[size * at : size * (at + 1)], data
        received, parts_of, whole = zip(
            *(by_table[i] for i in range(len(self.tables))), strict=True
        )
        return Memory(received, parts_of, whole)


class Kept(Generic[T]):
    """At most so many things by what they follow from: those that were used last."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._kept: dict[Hashable, T] = {}

    def get(self, key: Hashable) -> T | None:
        """Return what is kept, or None."""
        found = self._kept.pop(key, None)
        if found is not None:
            self._kept[key] = found
        return found

    def peek(self, key: Hashable) -> T | None:
        """Return what is kept, or None; it is not used."""
        return self._kept.get(key)

    def keep(self, key: Hashable, made: T) -> T:
        """Keep it; return it."""
        if len(self._kept) >= self._most:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = made
        return made


def memory_of(tables: Sequence[Rows]) -> list[torch.Tensor]:
    """Return the memory that rows of tables are received into, each once."""
    received = (t.received if t.memory is None else t.memory for t in tables)
    return list({id(t): t for t in received}.values())


def sizes_of_tables(tables: Sequence[Rows]) -> tuple[TableSizes, ...]:
    """Return the sizes of tables' rows."""
    return tuple(
        TableSizes(t.name, t.sent.dtype, t.sent.shape[1], tuple(t.send_rows), tuple(t.receive_rows))
        for t in tables
    )


def saved_back_bytes(rank: int, tables: Sequence[Rows]) -> int:
    """Return the bytes of all tables' gradients that need not come back to this rank."""
    return sum(table.saved_back_bytes(rank) for table in tables)


def spans_of(rows: Sequence[int], piece: int, pieces: int) -> list[tuple[int, int]]:
    """Return for each rank where its rows of a piece begin, and how many there are."""
    found, at = [], 0
    for n in rows:
        begin, end = piece * n // pieces, (piece + 1) * n // pieces
        found.append((at + begin, end - begin))
        at += n
    return found
