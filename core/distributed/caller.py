"""What a user of the collective keeps between exchanges: an object, or a group's function."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ..engine.advisor import NetworkModel, network_model
from ..engine.codecs import BoundedVectorCodec
from ..engine.transfer import ThreadLane
from ..errors import ArgumentError
from .buffers import MOST_BYTES, Buffers
from .device import DeviceExchange
from .exchange import Exchange, Rows
from .faults import Faults
from .helpers import helper_of
from .selection import (
    PIECES,
    PLAIN,
    Decision,
    Measured,
    TableChoice,
    WayRecord,
    as_floats,
)
from .stats import Counters
from .wire import SHORT_BYTES

#: What `codec` accepts.
CODECS = ("auto", "compressed", "raw")

#: What decisions need of the counters.
RECORDED = ("raw_bytes", "moved_bytes", "encode_s", "decode_s")

#: Kinds of rows of which the function remembers how they are written.
MOST_CHOICES = 64


def checked_codec(codec: str) -> str:
    """Return the name of a codec that is accepted, or refuse it."""
    if codec not in CODECS:
        raise ArgumentError(f"codec: {codec!r:.60}, accepted are {', '.join(CODECS)}")
    return codec


class Caller:
    """Exchanges of one user, of which each decides how the next ones go.

    Parameters
    ----------
    codec : str
        ``"auto"``, ``"compressed"`` or ``"raw"``.
    lasting : bool
        Whether every call after a failed one raises.
    ways : int
        1, or 2: forward and backward.
    pieces, every : int
        As for `Decision`.
    buffer_bytes : int
        Of `Buffers` that are kept.

    Attributes
    ----------
    own_rows_cross : bool
        Whether rows on a GPU for this rank itself cross like others, and a group of one rank
        exchanges: for tests of what one GPU can do.
    """

    own_rows_cross: ClassVar[bool] = False

    def __init__(
        self,
        *,
        codec: str,
        lasting: bool,
        ways: int = 1,
        pieces: int = 1,
        every: int | None = None,
        buffer_bytes: int = MOST_BYTES,
    ) -> None:
        self.codec = codec
        self.buffers = Buffers(buffer_bytes)
        self.faults = Faults(lasting=lasting)
        self.counters = [Counters() for _ in range(ways)]
        given = {} if every is None else {"every": every}
        self.decision = Decision(ways=ways, pieces=pieces, **given)
        self._pieces = pieces
        self._lane: ThreadLane | None = None
        self._model: NetworkModel | None = None
        self._choices: dict[tuple[torch.dtype, int, bool], TableChoice] = {}

    def choice_for(self, rows: Rows) -> TableChoice:
        """Return how rows of a dtype, size and kind of bound are written."""
        key = (rows.sent.dtype, rows.sent.shape[1], bool(rows.bound > 0))
        if key not in self._choices and len(self._choices) >= MOST_CHOICES:
            self._choices.clear()
        return self._choices.setdefault(key, TableChoice())

    def is_plain(self, way: int = 0) -> bool:
        """Return whether torch's own collective delivers the next exchange."""
        return self.codec == "raw" or self.decision.modes[way] == PLAIN

    def copied_rank(self, group: dist.ProcessGroup) -> int | None:
        """Return the rank of a group whose rows are copied: this one, or None for none."""
        return None if self.own_rows_cross else dist.get_rank(group)

    def coded_on_device(self, device: torch.device) -> bool:
        """Return whether rows are coded where they are, not by the host."""
        return device.type != "cpu"

    def exchange(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        choices: Sequence[TableChoice],
        way: int = 0,
    ) -> None:
        """Exchange rows of tables; see `Exchange.run`, and `Rows` for what is written to.

        Parameters
        ----------
        group : ProcessGroup
            Whose ranks exchange.
        tables : sequence of Rows
            As for `Exchange`.
        choices : sequence of TableChoice
            One a table; measured anew where this call decides.
        way : int
            0: forward, 1: backward.
        """
        device = tables[0].sent.device
        if self.coded_on_device(device):
            started = self.start(group, tables, way)
            if isinstance(started, DeviceExchange):
                started.finish()
            return
        if self.codec == "raw":
            self._plain(group, tables, way)
            return
        self.faults.check()
        model = self._due_model(group, device)
        if model is not None:
            self._choose(group, tables, choices, model)
        if self.is_plain(way):
            if model is not None:
                self._decide_while_plain(group, tables, choices, model, way)
            self._plain(group, tables, way)
            return
        numbers = self._predictions(group, model, SHORT_BYTES)
        for table, choice in zip(tables, choices, strict=True):
            table.candidate = choice.candidate
        counters = self.counters[way]
        before = {name: getattr(counters, name) for name in RECORDED}
        exchange = Exchange(
            group,
            tables,
            counters,
            self.faults,
            buffers=self.buffers,
            pieces=self._pieces if self.decision.modes[way] == PIECES else 1,
            lane=self._pieces_lane(),
            numbers=numbers,
        )
        of_ranks = exchange.run()
        if numbers:
            self.decision.decide(of_ranks)
        record = self.decision.records[way]
        record.calls += 1
        for name in RECORDED:
            took = getattr(counters, name) - before[name]
            setattr(record, name, getattr(record, name) + took)

    def _due_model(self, group: dist.ProcessGroup, device: torch.device) -> NetworkModel | None:
        """Count a call; return the model of the group's network where this one decides."""
        due = self.decision.begin() and self.codec == "auto" and group.size() > 1
        if due and self._model is None:
            self._model = self.faults.stage("sizes", lambda: network_model(group, device))
        return self._model if due else None

    def start(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        way: int = 0,
        *,
        async_op: bool = False,
    ) -> DeviceExchange | dist.Work | None:
        """Begin an exchange of rows that are coded on their device.

        Where this call decides, what coding them takes is measured, and it is waited for.

        Parameters
        ----------
        group, tables, way
            As for `exchange`.
        async_op : bool
            Whether torch's own collective is asynchronous.

        Returns
        -------
        DeviceExchange, Work or None
            What is to be finished, what torch's own collective of one table returned, or None.
        """
        device = tables[0].sent.device
        codes = device.type in BoundedVectorCodec.device_types
        alone = group.size() == 1 and not self.own_rows_cross
        if self.codec == "raw" or not codes or alone:
            # Without counting: nothing is decided.
            return self._plain(group, tables, way, async_op=async_op)
        self.faults.check()
        model = self._due_model(group, device)
        helper = helper_of(group, device.type)

        def made(counters: Counters, faults: Faults, **options: Any) -> DeviceExchange:
            return DeviceExchange(
                helper,
                tables,
                counters,
                faults,
                buffers=self.buffers,
                lane=helper.stream,
                own_rows_cross=self.own_rows_cross,
                **options,
            )

        if model is not None:
            encode_s, decode_s, moved_bytes = made(Counters(), Faults(lasting=False)).trial()
            raw = sum(table.raw_bytes(self.copied_rank(group)) for table in tables)
            self.decision.records[way] = WayRecord(1, raw, moved_bytes, encode_s, decode_s)
        plain = self.is_plain(way)
        numbers = self._predictions(group, model, 0)
        if plain:
            if numbers:
                self._agree(group, numbers, device)
            return self._plain(group, tables, way, async_op=async_op)
        pieces = self._pieces if self.decision.modes[way] == PIECES else 1
        exchange = made(self.counters[way], self.faults, pieces=pieces, numbers=numbers)
        exchange.start()
        if numbers:
            # In this call on all ranks, whenever they wait for what it fetches.
            self.decision.decide(exchange.finish())
        return exchange

    def _pieces_lane(self) -> ThreadLane | None:
        if self._pieces > 1 and self._lane is None:
            self._lane = ThreadLane("bitslab-pieces")
        return self._lane

    def _choose(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        choices: Sequence[TableChoice],
        model: NetworkModel,
    ) -> None:
        """Measure each table's candidates on the rows for the rank that gets most."""
        own = dist.get_rank(group)
        for table, choice in zip(tables, choices, strict=True):
            parts = torch.split(table.sent, list(table.send_rows))
            others = [part for rank, part in enumerate(parts) if rank != own]
            choice.choose(max(others, key=len), float(table.bound), model)

    def _decide_while_plain(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        choices: Sequence[TableChoice],
        model: NetworkModel,
        way: int,
    ) -> None:
        """Decide by what compressing these rows would take, agreed in one small all-reduce."""
        record = self.decision.records[way]
        rank = dist.get_rank(group)
        record.calls = 1
        record.raw_bytes = record.moved_bytes = record.encode_s = record.decode_s = 0.0
        for table, choice in zip(tables, choices, strict=True):
            raw = table.raw_bytes(rank)
            found = choice.measured.get(choice.candidate.name, Measured(1.0, 0.0, 0.0))
            record.raw_bytes += raw
            record.moved_bytes += raw / found.ratio
            record.encode_s += raw * found.encode_s_per_byte
            record.decode_s += raw * found.decode_s_per_byte
        self._agree(group, self._predictions(group, model, SHORT_BYTES), tables[0].sent.device)

    def _predictions(
        self, group: dist.ProcessGroup, model: NetworkModel | None, short_bytes: int
    ) -> list[int]:
        """Return this rank's predictions as numbers, none where nothing is decided."""
        if model is None:
            return []
        return self.decision.predictions(model, group.size() - 1, short_bytes)

    def _agree(
        self, group: dist.ProcessGroup, numbers: Sequence[int], device: torch.device
    ) -> None:
        """Decide by the predictions of all ranks, by one small all-reduce."""
        slowest = torch.tensor(as_floats(numbers), dtype=torch.float64, device=device)
        self.faults.stage("sizes", lambda: dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group))
        self.decision.decide_by(slowest.tolist())

    def _plain(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        way: int,
        *,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Let torch's own collective deliver the rows of all tables at once; return what it did."""
        self.faults.check()
        counters = self.counters[way]
        started = time.perf_counter()
        work = None
        wide = [table for table in tables if table.row_bytes]
        if len(wide) == 1:
            (table,) = wide
            received, sent = (t.view(torch.uint8) for t in (table.received, table.sent))
            work = self._delivered(
                group, received, sent, table.receive_rows, table.send_rows, async_op
            )
        elif wide:
            self._deliver_together(group, wide)
        for table in tables:
            table.repeats = None
            table.places = [None] * group.size()
            table.moved_bytes = table.raw_bytes(dist.get_rank(group))
            counters.raw_bytes += table.moved_bytes
            counters.moved_bytes += table.moved_bytes
        counters.payload_s += time.perf_counter() - started
        counters.plain_calls += 1
        return work

    def _deliver_together(self, group: dist.ProcessGroup, tables: Sequence[Rows]) -> None:
        """Deliver the rows of several tables by one collective, rank after rank."""
        device = tables[0].sent.device
        sent = _by_rank((t.sent, t.send_rows) for t in tables)
        into = _by_rank((t.received, t.receive_rows) for t in tables)
        sizes_out, sizes_in = ([sum(map(len, part)) for part in each] for each in (sent, into))
        taken: list[torch.Tensor] = []
        try:
            for sizes in (sizes_out, sizes_in):
                taken.append(self.buffers.take(sum(sizes), device))
            given, found = taken[0][: sum(sizes_out)], taken[1][: sum(sizes_in)]
            torch.cat([piece for part in sent for piece in part], out=given)
            self._delivered(group, found, given, sizes_in, sizes_out, False)
            pieces = [piece for part in into for piece in part]
            cut = torch.split(found, list(map(len, pieces)))
            torch._foreach_copy_(pieces, list(cut))
        except BaseException:
            self.buffers.forget(*taken)
            raise
        mark = None
        if device.type == "cuda":
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record(torch.cuda.current_stream(device))
        self.buffers.give(*taken, mark=mark)

    def _delivered(
        self,
        group: dist.ProcessGroup,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive: Sequence[int],
        send: Sequence[int],
        async_op: bool,
    ) -> dist.Work | None:
        """Deliver bytes by torch's own collective: gloo knows few dtypes."""
        sizes = list(receive), list(send)
        work: dist.Work | None = self.faults.stage(
            "payload", lambda: dist.all_to_all_single(received, sent, *sizes, group, async_op)
        )
        return work


def _by_rank(
    tables: Iterable[tuple[torch.Tensor, Sequence[int]]],
) -> list[tuple[torch.Tensor, ...]]:
    """Return by rank the bytes of tables ``[N, row]``, of so many rows each."""
    cut = [
        [part.view(-1).view(torch.uint8) for part in torch.split(t, list(rows))]
        for t, rows in tables
    ]
    return list(zip(*cut, strict=True))


_callers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Caller]] = (
    weakref.WeakKeyDictionary()
)


def function_caller(group: dist.ProcessGroup, codec: str) -> Caller:
    """Return what the function keeps between its exchanges over a communicator."""
    of_group = _callers.setdefault(group, {})
    if codec not in of_group:
        of_group[codec] = Caller(codec=codec, lasting=False)
    return of_group[codec]
