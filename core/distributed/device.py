"""Exchanges of tensors on a GPU: coded there, sent by NCCL from a thread, decoded on a stream."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import distributed_c10d

from ..engine.advisor.link import own_stream, work_seconds
from ..engine.kernels.cuda import kernels_on
from ..engine.kernels.cuda.stream import current_stream
from ..engine.kernels.vector_chunks import send_bytes
from ..engine.on_host import on_host
from ..engine.tasks import ThreadTask
from ..engine.tensor_bits import copy_rows
from ..engine.transfer import StreamLane
from ..errors import BitslabError, CorruptedDataError
from .agreement import Difference
from .buffers import Buffers
from .device_parts import (
    Coded,
    Coder,
    Joined,
    Message,
    Part,
    Section,
    bytes_of,
    options_of,
    uploaded,
)
from .device_reader import DeviceReader
from .device_selection import Trial
from .faults import ExchangeError, Faults, cause_of
from .helpers import Helper
from .layout import Layout, Rows, memory_of, sizes_of_tables
from .stats import Counters
from .streams import keep_on_current
from .wire import DESCRIPTOR_BYTES, Turn
from .work import error_of, not_begun, refuse_to_wait, this_thread


class DeviceExchange:
    """Rows of several tables for every rank of a group, and what comes back, on a GPU.

    All tables' rows for all ranks are encoded by one pipeline of kernels on torch's current stream.
    The helper's thread waits for the sizes, exchanges them and the messages on a stream and a
    communicator of its own, and queues decoding behind them. With pieces the current stream encodes
    one while another crosses. The host waits for no decoding.

    The messages are those of `Exchange`. A number follows each descriptor: whether a part of the
    message has rows by id, whose fields are then checked on the host.

    Parameters
    ----------
    helper : Helper
        Of the group, for the tensors' device.
    tables : sequence of Rows
        As for `Exchange`; bounds may be relative to the rows for each rank, or on the device.
    counters : Counters
        Are added to: bytes, and the seconds of the thread; those of the GPU are not known.
    faults : Faults
        Of the caller.
    buffers : Buffers
        Of the caller: where messages stand.
    pieces : int
        As for `Exchange`.
    coder : Coder, optional
        The kernels of the device when left out.
    lane : StreamLane, optional
        The stream on which messages cross; needed on a GPU.
    own_rows_cross : bool
        Whether rows of this rank for itself are coded and cross like others; else they are copied.
    layout : Layout, optional
        Of the tables' sizes, where it is known.
    turn : Turn
        Which call this is.
    async_op : bool
        Whether it may be waited for on any stream, more than once or never: rows of this rank for
        itself are then copied with those that come, and else by `finish`.
    """

    def __init__(
        self,
        helper: Helper,
        tables: Sequence[Rows],
        counters: Counters,
        faults: Faults,
        *,
        buffers: Buffers,
        pieces: int = 1,
        coder: Coder | None = None,
        lane: StreamLane | None = None,
        own_rows_cross: bool = False,
        layout: Layout | None = None,
        turn: Turn = Turn(),  # noqa: B008 - a constant
        async_op: bool = False,
    ) -> None:
        self._helper, self._tables = helper, tables
        self._counters, self._faults = counters, faults
        self._buffers, self._taken = buffers, list[torch.Tensor]()
        self._pieces = pieces
        self._rank, self._size = helper.group.rank(), helper.group.size()
        self._copied = None if own_rows_cross else self._rank
        self._device = tables[0].sent.device
        self._coder = coder or kernels_on(self._device)
        self._lane = lane
        if layout is None:
            layout = Layout(sizes_of_tables(tables), self._rank, self._size, self._copied)
        self._layout, self._calls = layout, turn.calls
        self._agreement = layout.agreement(pieces, turn.decide_every)
        self._reader = DeviceReader(tables, layout, pieces, self._coder, self._copied)
        self._difference: Difference | None = None
        self._sent: dict[int, Sequence[torch.Tensor]] = {}
        self._begun_on: torch.cuda.Stream | None = None
        self._stopped, self._async = False, async_op
        self._damage: Exception | None = None
        self._some_raw = False
        #: Whether all has crossed: what fails then, fails on this rank alone.
        self.crossed = False
        self._tasks: list[ThreadTask[torch.cuda.Event | None]] = []

    def run(self) -> None:
        """Exchange; torch's current stream waits for what is written to `Rows.received`.

        Raises
        ------
        ExchangeError
            When a stage fails, or ranks disagree. What is received into may hold anything.
        CorruptedDataError
            When a message is cut. Damage in a body is reported by a later call on the GPU.
        """
        self.start()
        self.finish()

    def start(self) -> ThreadTask[torch.cuda.Event | None]:
        """Queue encoding on torch's current stream, and all else in the helper's thread.

        Returns
        -------
        ThreadTask
            Which ends once all is queued, or failed.
        """
        if self._device.type == "cuda":
            self._begun_on = current_stream(self._device)
        deferred = False
        for table in self._tables:
            table.places = []
            if table.deferred is not None:
                deferred = True
            if table.candidate.raw:
                self._some_raw = True
        submit = self._helper.submit
        try:
            if deferred:  # the helper's thread waits for the ids, and encodes
                self._tasks.append(submit(self._stages, 0, None, self._event()))
                return self._tasks[-1]
            self._drop_own_repeats()
            for piece in range(self._pieces):
                self._tasks.append(submit(self._stages, piece, *self._coded(piece)))
        except BaseException as error:
            if isinstance(error, Exception):
                self._helper.submit(self._fail, error).wait()
            self._faults.interrupted(error)  # one waits for no rank
            raise
        return self._tasks[-1]

    def _drop_own_repeats(self) -> None:
        """Forget which rows of this rank for itself share an id: these are copied."""
        for table in self._tables:
            if table.repeats is not None:
                table.repeats = list(table.repeats)
                if self._copied is not None:
                    table.repeats[self._copied] = None

    def done(self) -> bool:
        """Return whether all is queued, or failed."""
        return all(task.done() for task in self._tasks)

    def exception(self) -> BaseException | None:
        """Return the error of the first piece that failed, or None; waits until all is queued."""
        return next((error for task in self._tasks if (error := error_of(task))), None)

    def call_when_over(self, call: Callable[[], object]) -> None:
        """Have ``call()`` called behind all that is queued, in the helper's thread or here."""

        def behind(task: ThreadTask[torch.cuda.Event | None]) -> None:
            with nullcontext() if self._lane is None else self._lane.on():
                call()

        self._tasks[-1].add_done_callback(behind)

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait until all is queued, and let torch's current stream wait for it; see `run`.

        Raises
        ------
        TimeoutError
            When it takes longer; the exchange goes on.
        """
        if this_thread.completes and not self.done():
            refuse_to_wait()
        try:
            self._tasks[-1].exception(timeout_s)  # in order: the first one that failed says why
            for task in self._tasks:
                done = task.result()
        except CancelledError:
            raise not_begun() from None
        if done is not None:
            current_stream(self._device).wait_event(done)
        if not self._async:
            self._copy_own()

    def _copy_own(self) -> None:
        """Copy what this rank has for itself, of all tables at once, once all else came."""
        rank, tables = self._copied, self._layout.own
        if rank is None or not tables:
            return
        sent = self._sent_by_rank()
        if self._begun_on is not None:
            keep_on_current(self._begun_on, [self._tables[number].sent for number in tables])
        into = [self._reader.received[number][rank] for number in tables]
        copy_rows(into, [sent[number][rank] for number in tables])

    def _sent_by_rank(self) -> dict[int, Sequence[torch.Tensor]]:
        """Return by table its rows for each rank."""
        if not self._sent:
            tables = ((number, self._tables[number]) for number in self._layout.wide)
            self._sent = {i: t.sent.split_with_sizes(t.send_rows) for i, t in tables}
        return self._sent

    def trial(self) -> Trial:
        """Return what encoding and decoding what is sent takes; waits."""
        coded: list[Coded] = []
        parts = self._parts(0)
        raw_bytes, moved_bytes = ([0] * len(self._tables) for _ in range(2))
        for part in parts:
            raw_bytes[part.table] += part.rows.nbytes

        def encode_all() -> None:
            self._give_back()
            coded[:] = self._encoded(self._not_raw(parts))[0]

        with own_stream(self._device):
            encode = self._best(encode_all)
            decode = 0.0
            for part in self._raw(parts):
                moved_bytes[part.table] += part.coded.nbytes
            for each in coded:
                pieces = self._bodies(each, each.numbers.tolist())
                for part, piece in zip(each.parts, pieces, strict=True):
                    moved_bytes[part.table] += piece.nbytes
                bodies = [
                    (piece, torch.empty_like(part.coded))
                    for part, piece in zip(each.parts, pieces, strict=True)
                    if piece.nbytes < part.coded.nbytes
                ]
                decode += self._best(partial(self._reader.decode, bodies))
        self._give_back()
        return Trial(encode, decode, raw_bytes, moved_bytes)

    def _best(self, work: Any) -> float:
        return min(work_seconds(self._device, work) for _ in range(2))

    def _take(self, n_bytes: int) -> torch.Tensor:
        found = self._buffers.take(n_bytes, self._device)
        self._taken.append(found)
        return found

    def _give_back(self, mark: torch.cuda.Event | None = None) -> None:
        self._buffers.give(*self._taken, mark=mark)
        self._taken.clear()

    # Coding

    def _parts(self, piece: int) -> list[Part]:
        """Return the rows of tables that cross, rank after rank."""
        found, one = [], self._pieces == 1
        by_rank = self._sent_by_rank() if one else {}
        for of_rank in self._layout.sent_spans(piece, self._pieces):
            for number, to, first, rows in of_rank:
                table = self._tables[number]
                given = by_rank[number][to] if one else table.sent[first : first + rows]
                repeats = table.repeats[to] if table.repeats else None
                coded = given
                if repeats is not None:
                    coded = given[repeats.first_on(self._device)]
                found.append(Part(to, number, given, coded, repeats))
        return found

    def _encoded(self, parts: Sequence[Part]) -> tuple[list[Coded], torch.Tensor]:
        """Encode the parts of each dtype by one pipeline; return them, and all their numbers."""
        by_dtype: dict[torch.dtype, list[Part]] = {}
        for part in parts:
            by_dtype.setdefault(part.rows.dtype, []).append(part)
        found, counts = [], [2 * len(of_dtype) + 1 for of_dtype in by_dtype.values()]
        # In one tensor, which one copy brings to the host.
        numbers = torch.empty(sum(counts), dtype=torch.int64, device=self._device)
        pairs = zip(by_dtype.values(), numbers.split_with_sizes(counts), strict=True)
        for of_dtype, of_bodies in pairs:
            values = [part.coded for part in of_dtype]
            options = [options_of(self._tables[part.table]) for part in of_dtype]
            out = self._take(send_bytes(values))
            self._coder.encode_vectors(values, options, out, numbers=of_bodies)
            found.append(Coded(of_dtype, out, of_bodies))
        return found, numbers

    def _coded(self, piece: int) -> tuple[_OnTheWay, torch.cuda.Event | None]:
        """Encode a piece; return it, and the event behind its sizes."""
        parts, raw = self._parts(piece), list[Part]()
        if self._some_raw:
            parts, raw = self._not_raw(parts), self._raw(parts)
        coded, numbers = self._encoded(parts)
        host, encoded = self._to_host(numbers)
        return _OnTheWay(coded, raw, host), encoded

    def _raw(self, parts: Sequence[Part]) -> list[Part]:
        """Return those of tables that are sent as they are."""
        return [part for part in parts if self._tables[part.table].candidate.raw]

    def _not_raw(self, parts: Sequence[Part]) -> list[Part]:
        return [part for part in parts if not self._tables[part.table].candidate.raw]

    def _to_host(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Return numbers copied to page-locked memory, and the event behind all that is queued."""
        if self._device.type == "cpu":
            return numbers, None
        host = torch.empty(len(numbers), dtype=torch.int64, device="cpu", pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        return host, self._event()

    def _event(self) -> torch.cuda.Event | None:
        """Return the event behind all that is queued; None on the CPU."""
        if self._device.type == "cpu":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(current_stream(self._device))
        return event

    def _bodies(self, coded: Coded, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Return the bytes of each part's rows: a body, or as they are where that is no shorter."""
        count, cuts = len(coded.parts), list[int]()
        for i in range(count):
            n = numbers[count + 1 + i]
            cuts += n, numbers[i + 1] - numbers[i] - n
        cuts.append(len(coded.out) - numbers[count])
        bodies = coded.out.split_with_sizes(cuts)[::2]
        return [
            body if body.shape[0] < part.coded.nbytes else bytes_of(part.coded)
            for body, part in zip(bodies, coded.parts, strict=False)
        ]

    # In the helper's thread

    def _stages(
        self,
        piece: int,
        sent: _OnTheWay | None,
        behind: torch.cuda.Event | None,
    ) -> torch.cuda.Event | None:
        """Exchange a piece; return the event behind all that was queued."""
        if self._stopped or self._faults.is_known:
            self._forget()
            self._faults.check()
            raise ExchangeError("sizes stage: not reached, an earlier piece failed")
        self._stopped = True
        on: AbstractContextManager[Any] = nullcontext()
        if self._lane is not None:
            on = self._lane.on()
        with on:
            try:
                joined = self._prepared(sent, behind)
            except BaseException as error:
                self._failed_before(error)
                raise
            try:
                self._exchanged(piece, *joined)
            except BaseException as error:
                self._forget()
                if not (isinstance(error, BitslabError) or self._faults.to_report):
                    # Those are known to all, or will be.
                    self._faults.broken(f"exchange: {error!r:.200}")
                raise
            done = None if self._lane is None else self._lane.record()
        if piece == self._pieces - 1:
            self._give_back(done)
            self._counters.calls += 1
            self._counters.raw_bytes += self._layout.all_raw_bytes
        self._stopped = False
        return done

    def _prepared(self, sent: _OnTheWay | None, behind: torch.cuda.Event | None) -> Joined:
        """Wait for the sizes of what was encoded, here where it was not; return what is sent."""
        started = time.perf_counter()
        if sent is None:
            if self._faults.to_report:
                raise self._faults.pending()
            sent, behind = self._coded_on_lane(behind)
        if behind is not None:
            behind.synchronize()
        self._counters.encode_s += time.perf_counter() - started
        if self._lane is not None:
            if behind is not None:
                behind.wait(self._lane.stream)
            self._lane.keep(*memory_of(self._tables))
        if self._faults.to_report:
            raise self._faults.pending()
        return self._joined(self._messages(sent))

    def _coded_on_lane(
        self, behind: torch.cuda.Event | None
    ) -> tuple[_OnTheWay, torch.cuda.Event | None]:
        """Encode rows once it is known which share an id, on the stream of the helper."""
        if self._lane is not None:
            if behind is not None:
                behind.wait(self._lane.stream)
            self._lane.keep(*(t for table in self._tables for t in table.read_to_encode()))
        for table in self._tables:
            table.know_repeats()
        self._drop_own_repeats()
        return self._coded(0)

    def _fail(self, error: Exception) -> None:
        """Have the other ranks know that rows were not encoded, where they wait for them."""
        if not self._stopped:  # else they know from an earlier piece
            self._stopped = True
            self._failed_before(error)

    def _failed_before(self, error: BaseException) -> None:
        """Have the other ranks know where they wait for what is not sent: they raise, too."""
        self._forget()
        self._helper.say_failed(self._faults, error)

    def _forget(self) -> None:
        taken, self._taken = self._taken, []
        self._buffers.forget(*taken)

    def _messages(self, sent: _OnTheWay) -> list[Message]:
        """Return what is sent to each rank."""
        found: list[Message] = [[] for _ in range(self._size)]
        kept, at, numbers = list[torch.Tensor](), 0, sent.numbers.tolist()
        pairs: list[tuple[Part, torch.Tensor]] = []
        for each in sent.coded:
            begin, at = at, at + 2 * len(each.parts) + 1
            kept.append(each.out)
            pairs += zip(each.parts, self._bodies(each, numbers[begin:at]), strict=True)
        if sent.raw:
            pairs += [(part, bytes_of(part.coded)) for part in sent.raw]
        for part, body in pairs:
            to, number, rows, coded, repeats = part
            table, head, n_bytes = self._tables[number], b"", body.shape[0]
            if repeats is not None:
                written = np.empty(repeats.nbytes, np.uint8)
                repeats.write(written)
                head = written.tobytes()
                if len(head) + n_bytes >= rows.nbytes:
                    head, body = b"", bytes_of(rows)
                n_bytes = len(head) + body.shape[0]
                kept += [rows, coded]
            elif n_bytes >= rows.nbytes:
                kept.append(rows)  # they cross from where they are
            if table.repeats and not head:
                table.repeats[to] = None
            found[to].append(Section(number, head, body, n_bytes))
            table.moved_bytes += n_bytes
        if self._lane is not None:
            self._lane.keep(*kept)
        if len(sent.coded) > 1 or sent.raw:  # of several dtypes, say
            for message in found:
                message.sort(key=lambda section: section.table)
        return found

    def _joined(self, messages: Sequence[Message]) -> Joined:
        """Return what is sent in both stages.

        What the host writes of both goes to the device by one copy. A message that is one body
        crosses from where that is.
        """
        heads: list[bytes] = []
        bodies: list[list[torch.Tensor]] = []  # behind each head
        sizes, by_id = list[int](), list[bool]()
        for message in messages:
            n_bytes = [section.n_bytes for section in message]
            heads.append(struct.pack(f"<{len(n_bytes[:-1])}I", *n_bytes[:-1]))
            sizes.append(len(heads[-1]) + sum(n_bytes))
            bodies.append([])
            by_id.append(False)
            for _, head, body, _ in message:
                if head:
                    by_id[-1] = True
                    heads.append(head)
                    bodies.append([])
                bodies[-1].append(body)
        descriptors = self._agreement.descriptors(sizes, self._calls)
        rows = [n for row in zip(descriptors, by_id, strict=True) for n in row]
        said = struct.pack(f"<{len(rows)}q", *rows)
        uploads = uploaded(bytearray().join([said, *heads]), self._device)
        said_on_device, *cut = uploads.split_with_sizes([len(said), *map(len, heads)])
        pieces: list[torch.Tensor] = []
        for head, on_device, behind in zip(heads, cut, bodies, strict=True):
            if head:
                pieces.append(on_device)
            pieces += behind
        if len(pieces) == 1:
            joined = pieces[0]
        else:
            total = sum(sizes)
            joined = self._take(total)[:total]
            if pieces:
                torch.cat(pieces, out=joined)
        said_on_device = said_on_device.view(torch.int64).view(self._size, 2)
        return Joined(joined, sizes, said_on_device, torch.empty_like(said_on_device))

    def _exchanged(
        self,
        piece: int,
        joined: torch.Tensor,
        sizes: list[int],
        said: torch.Tensor,
        found: torch.Tensor,
    ) -> None:
        """Exchange sizes and messages, and queue decoding."""
        group, counters = self._helper.group, self._counters
        started = time.perf_counter()
        self._faults.stage(
            "sizes", lambda: distributed_c10d.all_to_all_single(found, said, group=group)
        )
        of_ranks = on_host(found, self._helper.words_on_host).tolist()
        checks, come = self._agreement.sizes_of([row[0] for row in of_ranks], self._faults)
        sized = time.perf_counter()
        counters.sizes_s += sized - started
        total = sum(come)
        data = self._take(total)[:total]
        self._faults.stage(
            "payload",
            lambda: distributed_c10d.all_to_all_single(data, joined, come, sizes, group=group),
        )
        counters.payload_s += time.perf_counter() - sized
        counters.moved_bytes += sum(sizes) + 2 * DESCRIPTOR_BYTES * (self._size - 1)
        if piece == 0:
            self._difference = self._agreement.difference(checks, self._calls, group, self._device)
        # Pieces that follow cross whatever they are of: ranks that differ hang nobody.
        last = self.crossed = piece == self._pieces - 1
        if self._difference is not None:
            if last:
                for extra in range(self._pieces, self._difference.most_pieces):
                    self.crossed = False
                    self._exchanged(extra, *self._joined([[] for _ in range(self._size)]))
                self.crossed = True
                raise self._difference.error(self._rank, self._faults)
            return
        started = time.perf_counter()
        try:
            self._reader.read(piece, data, come, [row[1] for row in of_ranks])
            if last and self._async and self._damage is None:
                self._copy_own()
        except Exception as error:  # whatever it is, pieces that follow cross
            self._damage = self._damage or error
        if last and self._damage is not None:
            damaged = isinstance(self._damage, CorruptedDataError)
            reason = str(self._damage) if damaged else f"decoding: {self._damage!r:.200}"
            self._faults.failed(reason, known_to_all=False, cause=cause_of(self._damage))
            raise self._damage
        counters.decode_s += time.perf_counter() - started


class _OnTheWay(NamedTuple):
    """What was encoded, what crosses as it is, and places and sizes of the former.

    The host may read these behind an event.
    """

    coded: list[Coded]
    raw: list[Part]
    numbers: torch.Tensor
