"""What a user of the collective keeps between exchanges: an object, or a group's function."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ..engine.advisor import NetworkModel, network_model
from ..engine.codecs import BoundedVectorCodec
from ..engine.tasks import ThreadTask
from ..engine.transfer import ThreadLane
from ..errors import ArgumentError, ArgumentTypeError
from .agreement import agree
from .buffers import MOST_BYTES, Buffers
from .device import DeviceExchange
from .device_selection import choose_on_device, seconds_of
from .exchange import Exchange, say_failed
from .faults import ContentError, Faults, cause_of, reason_of
from .helpers import helper_of
from .host_selection import choose_on_host, record_of_plain
from .kinds import Kinds
from .layout import Layout, Rows, saved_back_bytes
from .plain import PlainExchange
from .selection import (
    COMPRESSED,
    MODES,
    PIECES,
    PLAIN,
    TRIALS,
    Decision,
    TableChoice,
    as_floats,
    saved_seconds,
)
from .stats import Counters
from .wire import SHORT_BYTES, Turn
from .work import OVER, UnderWay, refuse_to_wait, this_thread

#: What `codec` accepts.
CODECS = ("auto", "compressed", "raw")

#: What decisions need of the counters.
RECORDED = ("raw_bytes", "moved_bytes", "encode_s", "decode_s")


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
        #: False where rows on their device do not cross, or have no codec there.
        self._codes = True
        self._lane: ThreadLane | None = None
        self._last: ThreadTask[Any] | None = None
        self._model: NetworkModel | None = None
        self._kinds = Kinds()

    def begin_call(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        kind: Hashable,
        own: Hashable,
        *,
        bounded: bool,
    ) -> TableChoice:
        """Begin a call of the function; return how its rows are written.

        From here on `decision` is that of such calls.

        Parameters
        ----------
        group, device
            Where ranks agree.
        kind : hashable
            What all ranks have alike.
        own : hashable
            By what the call differs from others on this rank.
        bounded : bool
            Whether rows may be off by a bound.
        """
        if self.codec != "auto" or group.size() == 1:
            return TableChoice()
        self.faults.check()
        if self.faults.parted:  # all ranks found it in one call, which they may count apart
            self.faults.parted, self._kinds = False, Kinds()
        of_kind = self._kinds.of(kind)
        if of_kind.begin(own):
            self.wait()
            self.faults.check()
            of_kind.agree(agree(group, device, self.faults, of_kind.misfits()))
        self.decision = of_kind.decision
        return of_kind.choice(bounded=bounded)

    def looks_at_rows_of(self, group: dist.ProcessGroup, kind: Hashable) -> bool:
        """Return what `looks_at_rows` does of the next call of a kind; begins nothing."""
        if self.codec != "auto" or group.size() == 1:
            return not self.is_plain()
        decision = self._kinds.next_decision(kind)
        return decision is None or decision.mode() != PLAIN or decision.decides_next()

    def wait(self) -> None:
        """Wait until exchanges of rows on their device are queued, or failed; that is not raised.

        So that all ranks know of a failure before one takes part in a collective of its own thread,
        in which the others do not.

        Raises
        ------
        BitslabError
            In a callback of a future: its thread would wait for itself.
        """
        last = self._last
        if last is not None:
            if not last.done():
                if this_thread.completes:
                    refuse_to_wait()
                last.wait()
            self._last = None

    def is_plain(self, way: int = 0) -> bool:
        """Return whether torch's own collective delivers the next exchange."""
        return self.codec == "raw" or self._mode(way) == PLAIN

    def looks_at_rows(self, way: int = 0) -> bool:
        """Return whether ids and bounds of rows count in the next exchange: it codes, or decides.

        Else torch's own collective delivers all bytes.
        """
        return not self.is_plain(way) or (self.codec == "auto" and self.decision.decides_next(way))

    def _meets_in_this_thread(self, way: int) -> bool:
        """Return whether ranks meet in the calling thread in the next exchange on their device."""
        return self.is_plain(way) or (self.codec == "auto" and self.decision.decides_next(way))

    @property
    def modes(self) -> list[str]:
        """How exchanges cross, each way: as was decided, or given."""
        if self.codec == "raw" or not self._codes:
            return [PLAIN] * len(self.counters)
        if self.codec == "auto":
            return list(self.decision.modes)
        return [self._mode(way) for way in range(len(self.counters))]

    def _mode(self, way: int) -> str:
        """Return how the next exchange crosses; nothing is decided but by "auto"."""
        if self.codec == "auto":
            return self.decision.mode(way)
        return PIECES if self._pieces > 1 else COMPRESSED

    def _takes_pieces(self, group: dist.ProcessGroup, way: int) -> bool:
        """Return whether an exchange on the host that was begun crosses in pieces."""
        if self.codec == "auto" and group.size() > 1:
            return self.decision.takes_pieces(way)
        return self._mode(way) == PIECES

    def _turn(self, way: int) -> Turn:
        return self.decision.turn(way) if self.codec == "auto" else Turn()

    def copied_rank(self, group: dist.ProcessGroup) -> int | None:
        """Return the rank of a group whose rows are copied: this one, or None for none."""
        return None if self.own_rows_cross else group.rank()

    def coded_on_device(self, device: torch.device) -> bool:
        """Return whether rows are coded where they are, not by the host."""
        return device.type != "cpu"

    def exchange(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        choices: Sequence[TableChoice],
        layout: Layout,
        way: int = 0,
        *,
        async_op: bool = False,
    ) -> UnderWay:
        """Exchange rows of tables; see `Exchange.run`, and `Rows` for what is written to.

        Parameters
        ----------
        group : ProcessGroup
            Whose ranks exchange.
        tables : sequence of Rows
            As for `Exchange`.
        choices : sequence of TableChoice
            One a table; measured anew where this call decides.
        layout : Layout
            Of the tables' sizes.
        way : int
            0: forward, 1: backward.
        async_op : bool
            Whether rows that are coded on their device are still under way when it returns.

        Returns
        -------
        UnderWay
            What is to be finished then.
        """
        begun: UnderWay = OVER
        try:
            if not self.coded_on_device(tables[0].sent.device):
                self._exchange_on_host(group, tables, choices, way, layout)
            elif async_op:
                begun = self.start(group, tables, choices, layout, way, async_op=True)
            else:
                if this_thread.completes:
                    refuse_to_wait()
                self.start(group, tables, choices, layout, way).finish()
        except BaseException as error:
            self.faults.interrupted(error)
            raise
        return begun

    def _exchange_on_host(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        choices: Sequence[TableChoice],
        way: int,
        layout: Layout,
    ) -> None:
        if self.codec == "raw":
            self._plain(group, tables, self.counters[way], layout).run()
            return
        self.faults.check()
        turn = self._turn(way)
        due = self._begin(group, way)
        try:
            exchange = self._exchange_of(group, tables, choices, way, layout, turn, due)
        except Exception as error:
            self._fail(group, tables[0].sent.device, error, way, due=due)
            raise
        if exchange is None:
            if due:
                self._decide_while_plain(group, tables, choices, way)
            self._plain(group, tables, self.counters[way], layout).run()
            return
        in_pieces = self._takes_pieces(group, way)
        self.decision.agreed(way)
        counters = self.counters[way]
        before = {name: getattr(counters, name) for name in RECORDED}
        started = time.perf_counter()
        try:
            exchange.run()
        finally:
            # Also where this rank alone fails: the others go on with what was decided.
            if due and exchange.of_ranks is not None:
                self.decision.decide(exchange.of_ranks)
        seconds = time.perf_counter() - started
        n_bytes = sum(table.sent.nbytes + table.received.nbytes for table in tables)
        record = self.decision.took(way, seconds, n_bytes, in_pieces=in_pieces)
        record.calls += 1
        record.saved_back_bytes += saved_back_bytes(group.rank(), tables)
        for name in RECORDED:
            took = getattr(counters, name) - before[name]
            setattr(record, name, getattr(record, name) + took)

    def _exchange_of(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        choices: Sequence[TableChoice],
        way: int,
        layout: Layout,
        turn: Turn,
        due: bool,
    ) -> Exchange | None:
        """Return the exchange of a call, None of one that is plain; measure where it decides."""
        if due:
            model = self._network(group, tables[0].sent.device)
            assert model is not None  # of several ranks
            choose_on_host(tables, choices, model, group.rank())
        if self.is_plain(way):
            return None
        for table, choice in zip(tables, choices, strict=True):
            table.candidate = choice.candidate
        return Exchange(
            group,
            tables,
            self.counters[way],
            self.faults,
            buffers=self.buffers,
            pieces=self._pieces if self._takes_pieces(group, way) else 1,
            lane=self._pieces_lane(),
            numbers=self._predictions(group) if due else [],
            turn=turn,
            layout=layout,
        )

    def _begin(self, group: dist.ProcessGroup, way: int) -> bool:
        """Count a call on the host; return whether it decides."""
        return self.decision.begin(way) and self.codec == "auto" and group.size() > 1

    def fail_call(
        self, group: dist.ProcessGroup, device: torch.device, way: int, error: Exception
    ) -> None:
        """Have the other ranks know that this one failed before its exchange of a call.

        It takes part in what they do first in that call, and says so: they raise. What is wrong
        with an argument, but by what it holds in this call, is raised alone; and torch's own
        collective has no place to say it: there others wait, and this rank raises from now on.
        """
        of_call = isinstance(error, (ArgumentError, ArgumentTypeError))
        if group.size() == 1 or (of_call and not isinstance(error, ContentError)):
            return
        if self.codec == "raw" or self.faults.is_known:
            return
        if self.coded_on_device(device):
            if self._meets_in_this_thread(way):
                self.wait()
            due = self.codec == "auto" and self.decision.is_due(way)
        else:
            due = self._begin(group, way)
            if due:
                with suppress(Exception):  # the error that is reported is raised
                    self._network(group, device)
        self._fail(group, device, error, way, due=due)

    def _fail(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        error: Exception,
        way: int,
        *,
        due: bool,
    ) -> None:
        """Say that this rank failed where the others wait for it first in a call."""
        if self.faults.is_known:
            return  # a collective failed, of which they know, too
        on_device, plain = self.coded_on_device(device), self.is_plain(way)
        with suppress(Exception):  # the error that is reported is raised
            if due and (on_device or plain):
                numbers = 1 if on_device else self.decision.count
                agree(group, device, self.faults, [-1.0] * numbers, error)
            elif plain:
                self.faults.broken(reason_of(error))
            elif on_device:
                helper = helper_of(group, device)
                helper.submit(helper.say_failed, self.faults, error).result()
            else:
                self.faults.failed(reason_of(error), known_to_all=False, cause=cause_of(error))
                say_failed(group, self.faults)
        if self.faults.to_report:
            self.faults.broken(reason_of(error))

    def _network(self, group: dist.ProcessGroup, device: torch.device) -> NetworkModel | None:
        """Return the model of the group's network: all ranks ask for it first in the same call."""
        if self._model is None:
            self._model = self.faults.stage("sizes", lambda: network_model(group, device))
        return self._model

    def start(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        choices: Sequence[TableChoice],
        layout: Layout,
        way: int = 0,
        *,
        async_op: bool = False,
    ) -> UnderWay:
        """Begin an exchange of rows that are coded on their device.

        Where this call decides, exchanges of each mode are measured first, and waited for.

        Parameters
        ----------
        group, tables, choices, layout, way
            As for `exchange`.
        async_op : bool
            Whether torch's own collective is asynchronous, and the exchange may be finished on any
            stream.

        Returns
        -------
        UnderWay
            What is to be finished.
        """
        device, counters = tables[0].sent.device, self.counters[way]
        codes = device.type in BoundedVectorCodec.device_types
        alone = group.size() == 1 and not self.own_rows_cross
        self._codes = codes and not alone
        if self.codec == "raw" or not self._codes:
            # Without counting: nothing is decided.
            return self._plain(group, tables, counters, layout).run(async_op=async_op)
        turn = self._turn(way)
        if self._last is not None and self._meets_in_this_thread(way):
            self.wait()
        self.faults.check()
        if self.codec == "auto" and self.decision.is_due(way):
            self._measure_modes(group, tables, choices, way, layout, turn)
        mode = self._mode(way)
        if mode == PLAIN:
            return self._plain(group, tables, counters, layout).run(async_op=async_op)
        for table, choice in zip(tables, choices, strict=True):
            table.candidate = choice.candidate
        exchange = self._coded(group, tables, counters, layout, mode, turn, async_op)
        self.decision.agreed(way)
        last = exchange.start()
        if async_op:
            self._last = last
        return exchange

    def _coded(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        counters: Counters,
        layout: Layout,
        mode: str,
        turn: Turn,
        async_op: bool = False,
    ) -> DeviceExchange:
        device = tables[0].sent.device
        helper = helper_of(group, device)
        try:
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
                turn=turn,
                async_op=async_op,
            )
        except Exception as error:
            helper.submit(helper.say_failed, self.faults, error).wait()
            raise

    def _measure_modes(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        choices: Sequence[TableChoice],
        way: int,
        layout: Layout,
        turn: Turn,
    ) -> None:
        """Exchange these rows in each mode, and decide by what the slowest rank's exchanges took.

        Before, it is chosen how each table's rows are written. As a whole: what coding takes a GPU,
        and a link for fewer bytes, says nothing of the host, which takes most of an exchange of
        small tables. Where all rows cross, so do all gradients back: what that takes is counted,
        too.
        """
        device, saved, failed = tables[0].sent.device, 0, None
        try:
            saved = saved_back_bytes(group.rank(), tables)
        except Exception as error:  # this rank's alone
            failed = error
        (any_saved,) = agree(group, device, self.faults, [float(saved > 0)], failed)
        model = self._network(group, device)
        try:
            if model is not None:
                trial = self._coded(group, tables, Counters(), layout, COMPRESSED, turn)
                choose_on_device(trial, tables, choices, model)
        except Exception as error:
            failed = error
        agree(group, device, self.faults, error=failed)
        seconds = []
        for mode in MODES:
            trials = 0 if mode == PIECES and self._pieces == 1 else 1 + TRIALS
            took = [self._seconds_of(group, tables, layout, mode, turn) for _ in range(trials)]
            # The first one may compile, or make connections.
            seconds.append(min(took[1:], default=-1.0))
        if model is not None and any_saved:
            seconds[MODES.index(PLAIN)] += saved_seconds(model, layout.all_raw_bytes, saved)
        self.decision.decide_way(way, agree(group, device, self.faults, seconds))

    def _seconds_of(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        layout: Layout,
        mode: str,
        turn: Turn,
    ) -> float:
        """Return the seconds of an exchange in a mode, which counts nowhere."""

        def made(copies: Sequence[Rows]) -> DeviceExchange | PlainExchange:
            if mode == PLAIN:
                return self._plain(group, copies, Counters(), layout)
            return self._coded(group, copies, Counters(), layout, mode, turn)

        return seconds_of(made, tables, group, self.faults)

    def _pieces_lane(self) -> ThreadLane | None:
        if self._pieces > 1 and self._lane is None:
            self._lane = ThreadLane("bitslab-pieces")
        return self._lane

    def _decide_while_plain(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        choices: Sequence[TableChoice],
        way: int,
    ) -> None:
        """Decide by what compressing these rows would take, agreed in one small all-reduce."""
        self.decision.records[way] = record_of_plain(tables, choices, group.rank())
        predicted = as_floats(self._predictions(group))
        slowest = agree(group, tables[0].sent.device, self.faults, predicted)
        self.decision.decide_by(slowest)

    def _predictions(self, group: dist.ProcessGroup) -> list[int]:
        """Return this rank's predictions as numbers, of a call that decides."""
        assert self._model is not None  # `_exchange_of` asked for it
        return self.decision.predictions(self._model, group.size() - 1, SHORT_BYTES)

    def _plain(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        counters: Counters,
        layout: Layout,
    ) -> PlainExchange:
        """Return an exchange by torch's own collective, of the rows of all tables."""
        return PlainExchange(
            group, tables, counters, self.faults, buffers=self.buffers, layout=layout
        )
