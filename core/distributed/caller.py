"""What a user of the collective keeps between exchanges: an object, or a group's function."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist

from ..engine.advisor import NetworkModel, network_model
from ..engine.codecs import BoundedVectorCodec
from ..engine.kernels.cuda.stream import current_stream
from ..engine.transfer import ThreadLane
from ..errors import ArgumentError
from .buffers import MOST_BYTES, Buffers
from .device import DeviceExchange
from .exchange import Exchange
from .faults import ExchangeError, Faults
from .helpers import helper_of
from .layout import Kept, Layout, Plain, Rows, sizes_of_tables
from .selection import (
    COMPRESSED,
    MODES,
    PIECES,
    PLAIN,
    TRIALS,
    Decision,
    Measured,
    TableChoice,
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
        self._layouts = Kept[Layout]()

    def choice_for(self, rows: Rows) -> TableChoice:
        """Return how rows of a dtype, size and kind of bound are written."""
        key = (rows.sent.dtype, rows.sent.shape[1], bool(rows.bound > 0))
        if key not in self._choices and len(self._choices) >= MOST_CHOICES:
            self._choices.clear()
        return self._choices.setdefault(key, TableChoice())

    def is_plain(self, way: int = 0) -> bool:
        """Return whether torch's own collective delivers the next exchange."""
        return self.codec == "raw" or self._mode(way) == PLAIN

    def _mode(self, way: int) -> str:
        """Return how the next exchange crosses; nothing is decided but by "auto"."""
        if self.codec == "auto":
            return self.decision.modes[way]
        return PIECES if self._pieces > 1 else COMPRESSED

    def copied_rank(self, group: dist.ProcessGroup) -> int | None:
        """Return the rank of a group whose rows are copied: this one, or None for none."""
        return None if self.own_rows_cross else group.rank()

    def layout_of(self, group: dist.ProcessGroup, tables: Sequence[Rows]) -> Layout:
        """Return the layout of tables' rows, which calls of the same sizes share."""
        sizes, rank, copied = sizes_of_tables(tables), group.rank(), self.copied_rank(group)
        key = sizes, rank, group.size(), copied
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts.keep(key, Layout(sizes, rank, group.size(), copied))
        return found

    def coded_on_device(self, device: torch.device) -> bool:
        """Return whether rows are coded where they are, not by the host."""
        return device.type != "cpu"

    def exchange(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        choices: Sequence[TableChoice],
        way: int = 0,
        layout: Layout | None = None,
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
        layout : Layout, optional
            Of the tables' sizes, where it is known.
        """
        device = tables[0].sent.device
        layout = layout or self.layout_of(group, tables)
        if self.coded_on_device(device):
            started = self.start(group, tables, way, layout)
            if isinstance(started, DeviceExchange):
                started.finish()
            return
        if self.codec == "raw":
            self._plain(group, tables, self.counters[way], layout)
            return
        self.faults.check()
        model = self._due_model(group, device, way)
        if model is not None:
            self._choose(group, tables, choices, model)
        if self.is_plain(way):
            if model is not None:
                self._decide_while_plain(group, tables, choices, model, way)
            self._plain(group, tables, self.counters[way], layout)
            return
        numbers = self._predictions(group, model)
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
            pieces=self._pieces if self._mode(way) == PIECES else 1,
            lane=self._pieces_lane(),
            numbers=numbers,
        )
        try:
            exchange.run()
        finally:
            # Also where this rank alone fails: the others go on with what was decided.
            if numbers and exchange.of_ranks is not None:
                self.decision.decide(exchange.of_ranks)
        record = self.decision.records[way]
        record.calls += 1
        for name in RECORDED:
            took = getattr(counters, name) - before[name]
            setattr(record, name, getattr(record, name) + took)

    def _due_model(
        self, group: dist.ProcessGroup, device: torch.device, way: int
    ) -> NetworkModel | None:
        """Count a call; return the model of the group's network where this one decides."""
        due = self.decision.begin(way) and self.codec == "auto" and group.size() > 1
        if due and self._model is None:
            self._model = self.faults.stage("sizes", lambda: network_model(group, device))
        return self._model if due else None

    def start(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        way: int = 0,
        layout: Layout | None = None,
        *,
        async_op: bool = False,
    ) -> DeviceExchange | dist.Work | None:
        """Begin an exchange of rows that are coded on their device.

        Where this call decides, exchanges of each mode are measured first, and waited for.

        Parameters
        ----------
        group, tables, way, layout
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
        layout = layout or self.layout_of(group, tables)
        if self.codec == "raw" or not codes or alone:
            # Without counting: nothing is decided.
            return self._plain(group, tables, self.counters[way], layout, async_op=async_op)
        self.faults.check()
        if self.codec == "auto" and self.decision.is_due(way):
            self._measure_modes(group, tables, way, layout)
        mode = self._mode(way)
        if mode == PLAIN:
            return self._plain(group, tables, self.counters[way], layout, async_op=async_op)
        exchange = self._coded(group, tables, self.counters[way], layout, mode)
        exchange.start()
        return exchange

    def _coded(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        counters: Counters,
        layout: Layout,
        mode: str,
    ) -> DeviceExchange:
        helper = helper_of(group, tables[0].sent.device.type)
        return DeviceExchange(
            helper,
            tables,
            counters,
            self.faults,
            buffers=self.buffers,
            pieces=self._pieces if mode == PIECES else 1,
            lane=helper.stream,
            own_rows_cross=self.own_rows_cross,
            layout=layout,
        )

    def _measure_modes(
        self, group: dist.ProcessGroup, tables: Sequence[Rows], way: int, layout: Layout
    ) -> None:
        """Exchange these rows in each mode, and decide by what the slowest rank's exchanges took.

        As a whole: what coding takes a GPU, and a link for fewer bytes, says nothing of the host,
        which takes most of an exchange of small tables.
        """
        device = tables[0].sent.device
        seconds = []
        for mode in MODES:
            trials = 0 if mode == PIECES and self._pieces == 1 else 1 + TRIALS
            took = [self._seconds_of(group, tables, layout, mode, device) for _ in range(trials)]
            # The first one may compile, or make connections.
            seconds.append(min(took[1:], default=-1.0))
        self._agree(group, seconds, device, partial(self.decision.decide_way, way))

    def _together(
        self, group: dist.ProcessGroup, device: torch.device, error: Exception | None
    ) -> None:
        """Wait for all ranks; where one has failed alone, all of them raise.

        Else it would not take part in what the others do next.
        """
        failed = torch.full((1,), float(error is not None), device=device)
        stage = partial(dist.all_reduce, failed, dist.ReduceOp.MAX, group=group)
        self.faults.stage("sizes", stage)
        if not float(failed):
            return
        if error is not None:
            self.faults.reported()
            raise error
        reason = "another rank failed in an exchange by which modes are measured"
        self.faults.failed(reason, known_to_all=True)
        raise ExchangeError(reason)

    def _seconds_of(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        layout: Layout,
        mode: str,
        device: torch.device,
    ) -> float:
        """Return the seconds of an exchange of copies of these tables, begun by all ranks at once.

        What is received is written, as it is again by the exchange that counts.
        """
        copies = [
            replace(t, repeats=None if t.repeats is None else list(t.repeats), places=[])
            for t in tables
        ]
        self._together(group, device, None)
        started, failed = time.perf_counter(), None
        try:
            if mode == PLAIN:
                self._plain(group, copies, Counters(), layout)
            else:
                self._coded(group, copies, Counters(), layout, mode).run()
            _wait(device)
        except Exception as error:
            if not self.faults.to_report:  # all know, or the group is of no more use
                raise
            failed = error
        seconds = time.perf_counter() - started
        if mode != PLAIN:
            self._together(group, device, failed)
        return seconds

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
        own = group.rank()
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
        rank = group.rank()
        record.calls = 1
        record.raw_bytes = record.moved_bytes = record.encode_s = record.decode_s = 0.0
        for table, choice in zip(tables, choices, strict=True):
            raw = table.raw_bytes(rank)
            found = choice.measured.get(choice.candidate.name, Measured(1.0, 0.0, 0.0))
            record.raw_bytes += raw
            record.moved_bytes += raw / found.ratio
            record.encode_s += raw * found.encode_s_per_byte
            record.decode_s += raw * found.decode_s_per_byte
        predicted = as_floats(self._predictions(group, model))
        self._agree(group, predicted, tables[0].sent.device, self.decision.decide_by)

    def _predictions(self, group: dist.ProcessGroup, model: NetworkModel | None) -> list[int]:
        """Return this rank's predictions as numbers, none where nothing is decided."""
        if model is None:
            return []
        return self.decision.predictions(model, group.size() - 1, SHORT_BYTES)

    def _agree(
        self,
        group: dist.ProcessGroup,
        seconds: Sequence[float],
        device: torch.device,
        decide: Callable[[list[float]], None],
    ) -> None:
        """Decide by the seconds of the slowest rank, found by one small all-reduce."""
        slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
        self.faults.stage("sizes", lambda: dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group))
        decide(slowest.tolist())

    def _plain(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        counters: Counters,
        layout: Layout,
        *,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Let torch's own collective deliver the rows of all tables at once; return what it did."""
        self.faults.check()
        started = time.perf_counter()
        work = None
        if len(layout.wide) == 1:
            table = tables[layout.wide[0]]
            received, sent = table.received.view(torch.uint8), table.sent.view(torch.uint8)
            work = self._delivered(
                group, received, sent, table.receive_rows, table.send_rows, async_op
            )
        elif layout.wide:
            self._deliver_together(group, tables, layout)
        for table, n_bytes in zip(tables, layout.plain.raw_bytes, strict=True):
            table.repeats, table.places, table.moved_bytes = None, [], n_bytes
        counters.raw_bytes += layout.plain.all_raw_bytes
        counters.moved_bytes += layout.plain.all_raw_bytes
        counters.payload_s += time.perf_counter() - started
        counters.plain_calls += 1
        return work

    def _deliver_together(
        self, group: dist.ProcessGroup, tables: Sequence[Rows], layout: Layout
    ) -> None:
        """Deliver the rows of several tables by one collective, rank after rank."""
        device, plain = tables[layout.wide[0]].sent.device, layout.plain
        taken: list[torch.Tensor] = []
        try:
            for sizes in (plain.send_bytes, plain.receive_bytes):
                taken.append(self.buffers.take(sum(sizes), device))
            given, found = (
                data[: sum(sizes)]
                for data, sizes in zip(taken, (plain.send_bytes, plain.receive_bytes), strict=True)
            )
            self._gather(tables, layout, given)
            self._delivered(group, found, given, plain.receive_bytes, plain.send_bytes, False)
            self._spread(tables, layout, found)
        except BaseException:
            self.buffers.forget(*taken)
            raise
        mark = None
        if device.type == "cuda":
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record(current_stream(device))
        self.buffers.give(*taken, mark=mark)

    def _gather(self, tables: Sequence[Rows], layout: Layout, given: torch.Tensor) -> None:
        """Write rows to bytes, rank after rank and table after table."""
        plain = layout.plain
        rows = {i: tables[i].sent for i in layout.wide}
        if not plain.alike:
            rows = {i: t.view(-1).view(torch.uint8) for i, t in rows.items()}
        parts = {i: t.split_with_sizes(plain.sent_units[i]) for i, t in rows.items()}
        pieces = [parts[table][rank] for rank, table in plain.sent]
        if pieces:
            torch.cat(pieces, out=_in_units(given, plain, tables[layout.wide[0]].sent))

    def _spread(self, tables: Sequence[Rows], layout: Layout, found: torch.Tensor) -> None:
        """Write what came, rank after rank and table after table, to the tables."""
        plain = layout.plain
        parts = [table.parts or table.received_parts() for table in tables]
        into = [parts[table][rank] for rank, table in plain.received]
        if not into:
            return
        if not plain.alike:
            into = [part.view(-1).view(torch.uint8) for part in into]
        rows = _in_units(found, plain, tables[layout.wide[0]].received)
        torch._foreach_copy_(into, list(rows.split_with_sizes(plain.units)))

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


def _in_units(data: torch.Tensor, plain: Plain, like: torch.Tensor) -> torch.Tensor:
    """Return bytes as rows of a tensor's kind, where all tables have one."""
    return data.view(like.dtype).view(-1, like.shape[1]) if plain.alike else data


def _wait(device: torch.device) -> None:
    """Wait for what is queued on torch's current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


_callers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Caller]] = (
    weakref.WeakKeyDictionary()
)


def function_caller(group: dist.ProcessGroup, codec: str) -> Caller:
    """Return what the function keeps between its exchanges over a communicator."""
    of_group = _callers.setdefault(group, {})
    if codec not in of_group:
        of_group[codec] = Caller(codec=codec, lasting=False)
    return of_group[codec]
