"""The two stages of an exchange: descriptors and short messages, then long messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from ..engine.tasks import ThreadTask
from ..engine.transfer import ThreadLane
from ..errors import BitslabError, CorruptedDataError
from .agreement import Difference
from .buffers import Buffers
from .faults import ExchangeError, Faults, cause_of
from .layout import Layout, Rows, sizes_of_tables
from .messages import Array, decode_part, encode_part
from .pairs import FIRST, LONG, Pairs
from .stats import Counters
from .wire import (
    DAMAGE,
    DESCRIPTOR_BYTES,
    FAILED,
    MOST_NUMBERS,
    PART_SIZE,
    SHORT_BYTES,
    Turn,
    descriptor,
)

#: Room for a first message: a rank that disagrees may have other numbers.
FIRST_BYTES = DESCRIPTOR_BYTES * (1 + MOST_NUMBERS) + SHORT_BYTES


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
    messages : list of numpy.ndarray
        uint8, by rank; of this one nothing.
    numbers : list
        The numbers of each rank.
    """

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
    turn : Turn
        Which call this is.
    layout : Layout, optional
        Of the tables' sizes, where it is known.
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
        turn: Turn = Turn(),  # noqa: B008 - a constant
        layout: Layout | None = None,
    ) -> None:
        self._group, self._tables = group, tables
        self._counters, self._faults = counters, faults
        self._pieces, self._lane = pieces, lane
        self._buffers, self._taken = buffers, list[torch.Tensor]()
        self._numbers = list(numbers)
        self._head_bytes = DESCRIPTOR_BYTES * (1 + len(self._numbers))
        self._stopped = False
        self._rank, self._size = group.rank(), group.size()
        self._others = [rank for rank in range(self._size) if rank != self._rank]
        if layout is None:
            layout = Layout(sizes_of_tables(tables), self._rank, self._size, self._rank)
        self._layout = layout
        self._calls = turn.calls
        self._agreement = layout.agreement(pieces, turn.decide_every, len(numbers))
        self._compared = False
        self._difference: Difference | None = None
        #: The numbers of each rank, once they have crossed.
        self.of_ranks: list[list[int]] | None = None

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
                error = self._faults.pending()
                say_failed(self._group, self._faults)
                raise error
            if self._pieces == 1 or self._lane is None:
                found = self._at_once()
            else:
                found = self._in_pieces(self._lane)
        except BaseException:
            self._buffers.forget(*self._taken)
            raise
        self._buffers.give(*self._taken)
        rank = self._rank
        for table in self._tables:
            if rows := table.send_rows[rank]:
                first = sum(table.send_rows[:rank])
                table.received_parts()[rank].copy_(table.sent[first : first + rows])
            self._counters.raw_bytes += table.raw_bytes(rank)
        self._counters.calls += 1
        return found.numbers

    def _at_once(self) -> _Received:
        """Exchange all rows in one piece."""
        expected: _Expected | None = None
        try:
            # Before encoding: a message whose buffer is known there leaves at once.
            expected = self._expected()
            sent = self._encode(0)
        except BaseException as error:
            self._failed_before(error, lambda: say_failed(self._group, self._faults, expected))
            raise
        found = self._stages(sent, expected)
        self.of_ranks = found.numbers
        self._check()
        self._decode(0, found)
        return found

    def _in_pieces(self, lane: ThreadLane) -> _Received:
        """Encode one piece after the other; the lane's thread exchanges them."""
        tasks: list[ThreadTask[_Received]] = []

        def say() -> None:
            for task in tasks:
                task.wait()  # in order: ranks wait for this piece then, or all know of a failure
            if not self._stopped:
                say_failed(self._group, self._faults)

        try:
            for piece in range(self._pieces):
                tasks.append(lane.submit(self._stages, self._encode(piece)))
        except BaseException as error:
            self._failed_before(error, say)
            raise
        try:
            for task in tasks:
                task.wait()  # the last one too, before an error is raised: it uses the group
        except BaseException as error:
            self._faults.broken(f"waiting for pieces: {error!r:.200}")
            raise
        first = tasks[0].result()
        self.of_ranks = first.numbers
        self._check()
        for piece, task in enumerate(tasks):
            self._decode(piece, task.result())
        return first

    def _check(self) -> None:
        """Raise where ranks disagree, behind as many pieces as the rank with most of them has."""
        difference = self._difference
        if difference is None:
            return
        for _ in range(self._pieces, difference.most_pieces):
            self._stages(self._nothing())
        raise difference.error(self._rank, self._faults)

    # Coding

    def _take(self, n_bytes: int) -> torch.Tensor:
        found = self._buffers.take(n_bytes, self._tables[0].sent.device)
        self._taken.append(found)
        return found

    def _failed_before(self, error: BaseException, say: Callable[[], object]) -> None:
        """Have the other ranks know where they wait for what is not sent: they raise, too.

        Else what comes next would take the place of this exchange's messages.
        """
        reason = f"encoding: {error!r:.200}"
        self._faults.failed(reason, known_to_all=False, cause=cause_of(error))
        if not self._faults.to_report:
            return  # a collective failed: all is over
        try:
            if isinstance(error, Exception):  # an interrupt waits for no rank
                with suppress(Exception):  # the error of encoding is raised
                    say()
        finally:
            if self._faults.to_report:
                self._faults.broken(reason)

    def _nothing(self) -> _Sent:
        """Return messages without bytes."""
        places = [self._head_bytes * rank for rank in range(self._size)]
        return _Sent(self._take(self._head_bytes * self._size), places, [0] * self._size)

    def _encode(self, piece: int) -> _Sent:
        """Return the messages of a piece."""
        started = time.perf_counter()
        spans = self._layout.sent_spans(piece, self._pieces)
        most = self._layout.sent_room(piece, self._pieces)
        data = self._take(most + self._head_bytes * self._size)
        out = data.numpy()
        places, sizes, at = [0] * self._size, [0] * self._size, 0
        for to in self._others:
            places[to] = at
            begin = at = at + self._head_bytes
            parts = spans[to]
            at += PART_SIZE.size * max(0, len(parts) - 1)
            for number, (i, _, first, rows) in enumerate(parts):
                table = self._tables[i]
                repeats = table.repeats[to] if table.repeats else None
                sent = table.sent[first : first + rows]
                used, by_id = encode_part(
                    sent,
                    table.bound_of(sent),
                    table.candidate,
                    repeats,
                    out[at:],
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
        spans = self._layout.received_spans(piece, self._pieces)
        for source in self._others:
            parts = spans[source]
            try:
                cut = _cut(received.messages[source], len(parts))
                for (i, _, first, rows), data in zip(parts, cut, strict=True):
                    table = self._tables[i]
                    if self._pieces == 1:
                        into = table.received_parts()[source]
                    else:
                        into = table.received[first : first + rows]
                    table.places[source] = decode_part(data, into)
            except CorruptedDataError as error:
                reason = f"message of rank {source} of the group: {error}"
                self._faults.failed(reason, known_to_all=False, cause=DAMAGE)
                raise CorruptedDataError(reason) from None
            except BaseException as error:
                # All else has crossed: only these rows are missing.
                reason = f"decoding: {error!r:.200}"
                self._faults.failed(reason, known_to_all=False, cause=cause_of(error))
                raise
        self._counters.decode_s += time.perf_counter() - started

    # Stages

    def _expected(self) -> _Expected:
        """Let first messages of all ranks come."""
        others = self._others
        data = self._take(FIRST_BYTES * len(others))
        places = range(0, FIRST_BYTES * len(others), FIRST_BYTES)
        buffers = {to: data[at : at + FIRST_BYTES] for to, at in zip(others, places, strict=True)}
        return self._faults.stage("sizes", lambda: (buffers, Pairs(self._group, buffers, FIRST)))

    def _first_messages(self, sent: _Sent) -> tuple[list[int], dict[int, torch.Tensor]]:
        """Write descriptors and numbers; return the former, and what goes at once, by rank."""
        descriptors, messages = self._agreement.descriptors(sent.sizes, self._calls), {}
        for to in self._others:
            at, size = sent.places[to], sent.sizes[to]
            head = sent.data[at : at + self._head_bytes]
            head.numpy()[:] = np.array([descriptors[to], *self._numbers], "<i8").view(np.uint8)
            end = at + self._head_bytes + (size if size <= SHORT_BYTES else 0)
            messages[to] = sent.data[at:end]
        return descriptors, messages

    def _first(
        self, expected: _Expected, descriptors: list[int], messages: dict[int, torch.Tensor]
    ) -> list[list[int]]:
        """Exchange descriptors, numbers and short messages; return the former of each rank."""
        started = time.perf_counter()
        buffers, pairs = expected
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
        try:
            expected = expected or self._expected()
            first = self._first_messages(sent)
        except BaseException as error:
            self._failed_before(error, lambda: say_failed(self._group, self._faults, expected))
            raise
        try:
            found = self._crossed(sent, expected, *first)
        except BitslabError:
            raise  # all know
        except BaseException as error:
            self._faults.broken(f"exchange: {error!r:.200}")
            raise
        self._stopped = False
        return found

    def _crossed(
        self,
        sent: _Sent,
        expected: _Expected,
        descriptors: list[int],
        first: dict[int, torch.Tensor],
    ) -> _Received:
        """Exchange first messages, and those that are too long to follow them at once."""
        rows = self._first(expected, descriptors, first)
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
        if not self._compared:
            self._compared = True
            device = self._tables[0].sent.device
            self._difference = self._agreement.difference(checks, self._calls, self._group, device)
        return _Received(messages, [row[1:] for row in rows])

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


def say_failed(group: dist.ProcessGroup, faults: Faults, expected: _Expected | None = None) -> None:
    """Say to all ranks, in the sizes stage, that this one failed.

    What they send is not read. Where no receive of it was posted, one has room for all of them, one
    after the other: memory may be short.

    Raises
    ------
    ExchangeError
        When the stage fails.
    """
    word = torch.tensor([descriptor(faults.cause, FAILED)]).view(torch.uint8)
    others = [rank for rank in range(group.size()) if rank != group.rank()]

    def said() -> None:
        if expected is not None:
            expected[1].cross(dict.fromkeys(others, word))
            return
        room = torch.empty(FIRST_BYTES, dtype=torch.uint8)
        going = [group.send([word], to, FIRST) for to in others]
        for rank in others:
            group.recv([room], rank, FIRST).wait()
        for work in going:
            work.wait()

    faults.stage("sizes", said)
    faults.reported()


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
