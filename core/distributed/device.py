"""Exchanges of tensors on a GPU: coded there, sent by NCCL from a thread, decoded on a stream."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..dtypes import flat_bytes
from ..engine.advisor.link import own_stream, work_seconds
from ..engine.kernels.cuda import kernels_on
from ..engine.kernels.vector_chunks import VectorOptions, send_bytes
from ..engine.transfer import StreamLane, ThreadTask
from ..errors import BitslabError, CorruptedDataError
from .buffers import Buffers
from .device_parts import Came, Coded, Coder, Message, Outcome, Part, Places
from .exchange import Agreement, Rows, spans_of
from .faults import ExchangeError, Faults
from .helpers import Helper
from .messages import Array, Fields
from .stats import Counters
from .wire import BY_ID_HEADER, FAILED, PART_SIZE


class DeviceExchange:
    """Rows of several tables for every rank of a group, and what comes back, on a GPU.

    All tables' rows for all ranks are encoded by one pipeline of kernels on torch's current stream.
    The helper's thread waits for the sizes, exchanges them and the messages on a stream and a
    communicator of its own, and queues decoding behind them. With pieces the current stream encodes
    one while another crosses. The host waits for no decoding.

    The messages are those of `Exchange`. A second number follows each descriptor: whether a part of
    the message has rows by id, whose fields are then checked on the host.

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
    numbers : sequence of int, optional
        As for `Exchange`.
    coder : Coder, optional
        The kernels of the device when left out.
    lane : StreamLane, optional
        The stream on which messages cross; needed on a GPU.
    own_rows_cross : bool
        Whether rows of this rank for itself are coded and cross like others; else they are copied.
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
        numbers: Sequence[int] = (),
        coder: Coder | None = None,
        lane: StreamLane | None = None,
        own_rows_cross: bool = False,
    ) -> None:
        self._helper, self._tables = helper, tables
        self._counters, self._faults = counters, faults
        self._buffers, self._taken = buffers, list[torch.Tensor]()
        self._pieces, self._numbers = pieces, list(numbers)
        self._rank, self._size = dist.get_rank(helper.group), helper.group.size()
        self._copied = None if own_rows_cross else self._rank
        self._device = tables[0].sent.device
        self._coder = coder or kernels_on(self._device)
        self._lane = lane
        self._agreement = Agreement(helper.group, tables)
        self._checks: list[int] = []
        self._stopped = False
        self._damage: CorruptedDataError | None = None
        self._tasks: list[ThreadTask[Outcome]] = []

    def run(self) -> list[list[int]]:
        """Exchange; torch's current stream waits for what is written to `Rows.received`.

        Returns
        -------
        list
            The numbers of each rank.

        Raises
        ------
        ExchangeError
            When a stage fails, or ranks disagree. What is received into may hold anything.
        CorruptedDataError
            When a message is cut. Damage in a body is reported by a later call on the GPU.
        """
        self.start()
        return self.finish()

    def start(self) -> None:
        """Queue encoding on torch's current stream, and all else in the helper's thread."""
        for table in self._tables:
            table.places = [None] * self._size
            table.repeats = None if table.repeats is None else list(table.repeats)
            if table.repeats and self._copied is not None:
                table.repeats[self._copied] = None
        for piece in range(self._pieces):
            try:
                coded = self._encoded(self._parts(piece))
                numbers = [t for each in coded for t in (each.offsets, each.sizes)]
                host, encoded = self._to_host(numbers)
            except BaseException as error:
                reason = f"encoding: {error!r:.200}"
                if isinstance(error, Exception):
                    self._helper.lane.submit(self._say_failed, reason).wait()
                else:  # an interrupt waits for no rank
                    self._faults.broken(reason)
                raise
            self._tasks.append(self._helper.lane.submit(self._stages, piece, coded, host, encoded))

    def done(self) -> bool:
        """Return whether all is queued, or failed."""
        return all(task.done() for task in self._tasks)

    def exception(self) -> BaseException | None:
        """Return the error of the first piece that failed, or None; waits until all is queued."""
        return next((error for task in self._tasks if (error := task.exception())), None)

    def finish(self, timeout_s: float | None = None) -> list[list[int]]:
        """Wait until all is queued, and let torch's current stream wait for it; see `run`.

        Raises
        ------
        TimeoutError
            When it takes longer; the exchange goes on.
        """
        self._tasks[-1].exception(timeout_s)  # in order: the first one that failed says why
        for task in self._tasks:
            found = task.result()
        if found.done is not None:
            torch.cuda.current_stream(self._device).wait_event(found.done)
        return self._tasks[0].result().numbers

    def trial(self) -> tuple[float, float, int]:
        """Return the seconds of encoding and decoding what is sent, and its bytes; waits."""
        coded: list[Coded] = []

        def encode_all() -> None:
            self._give_back()
            coded[:] = self._encoded(self._parts(0))

        with own_stream(self._device):
            encode = self._best(encode_all)
            moved, decode = 0, 0.0
            for each in coded:
                pieces = self._bodies(each, each.offsets.tolist(), each.sizes.tolist())
                moved += sum(piece.nbytes for piece in pieces)
                bodies = [
                    (piece, torch.empty_like(part.coded))
                    for part, piece in zip(each.parts, pieces, strict=True)
                    if piece.nbytes < part.coded.nbytes
                ]
                decode += self._best(partial(self._decode, bodies))
        self._give_back()
        return encode, decode, moved

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
        found = []
        for number, table in enumerate(self._tables):
            for to, (first, rows) in enumerate(spans_of(table.send_rows, piece, self._pieces)):
                if to == self._copied or not rows * table.sent.shape[1]:
                    continue
                given = table.sent[first : first + rows]
                repeats = table.repeats[to] if table.repeats else None
                coded = given
                if repeats is not None:
                    coded = given[torch.from_numpy(repeats.first).to(self._device)]
                found.append(Part(to, number, given, coded, repeats))
        return found

    def _encoded(self, parts: Sequence[Part]) -> list[Coded]:
        """Encode the parts of each dtype by one pipeline."""
        by_dtype: dict[torch.dtype, list[Part]] = {}
        for part in parts:
            by_dtype.setdefault(part.rows.dtype, []).append(part)
        found = []
        for of_dtype in by_dtype.values():
            values = [part.coded for part in of_dtype]
            options = [_options(self._tables[part.table]) for part in of_dtype]
            out = self._take(send_bytes(values))
            offsets, sizes = self._coder.encode_vectors(values, options, out)
            found.append(Coded(of_dtype, out, offsets, sizes))
        return found

    def _to_host(
        self, numbers: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Return numbers copied to page-locked memory, and the event behind all that is queued."""
        joined = torch.cat(list(numbers)) if numbers else None
        if self._device.type == "cpu":
            return torch.empty(0, dtype=torch.int64) if joined is None else joined, None
        host = torch.empty(0, dtype=torch.int64)
        if joined is not None:
            host = torch.empty(len(joined), dtype=torch.int64, pin_memory=True)
            host.copy_(joined, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return host, event

    def _bodies(
        self, coded: Coded, offsets: Sequence[int], sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the bytes of each part's rows: a body, or as they are where that is no shorter."""
        return [
            coded.out[at : at + n] if n < part.coded.nbytes else flat_bytes(part.coded)
            for part, at, n in zip(coded.parts, offsets, sizes, strict=False)
        ]

    # In the helper's thread

    def _stages(
        self,
        piece: int,
        coded: list[Coded],
        host: torch.Tensor,
        encoded: torch.cuda.Event | None,
    ) -> Outcome:
        if self._stopped:
            raise ExchangeError("sizes stage: not reached, an earlier piece failed")
        self._stopped = True
        started = time.perf_counter()
        if encoded is not None:
            encoded.synchronize()
        self._counters.encode_s += time.perf_counter() - started
        on: AbstractContextManager[Any] = nullcontext()
        if self._lane is not None:
            on = self._lane.on()
            if encoded is not None:
                encoded.wait(self._lane.stream)
            self._lane.keep(*(t for table in self._tables for t in (table.sent, table.received)))
        with on:
            try:
                numbers = self._exchanged(piece, self._messages(coded, host.tolist()))
            except BaseException as error:
                self._buffers.forget(*self._taken)
                self._taken.clear()
                if not isinstance(error, BitslabError):  # those are known to all, or will be
                    self._faults.broken(f"exchange: {error!r:.200}")
                raise
            done = None if self._lane is None else self._lane.record()
        if piece == self._pieces - 1:
            self._give_back(done)
            self._counters.calls += 1
            self._counters.raw_bytes += sum(t.raw_bytes(self._copied) for t in self._tables)
        self._stopped = False
        return Outcome(numbers, done)

    def _say_failed(self, reason: str) -> None:
        """Have the other ranks know where they wait for what is not encoded: they raise, too."""
        try:
            if self._stopped:
                return  # with an earlier piece, of which all know
            self._stopped = True
            self._faults.check()
            self._faults.failed(reason, known_to_all=False)
            with nullcontext() if self._lane is None else self._lane.on():
                self._exchanged(0, [Message() for _ in range(self._size)])
        finally:
            self._buffers.forget(*self._taken)
            self._taken.clear()
            if self._faults.to_report:
                self._faults.broken(reason)

    def _messages(self, coded: list[Coded], numbers: list[int]) -> list[Message]:
        """Return what is sent to each rank."""
        found = [Message() for _ in range(self._size)]
        at = 0
        for each in coded:
            count = len(each.parts)
            offsets, sizes = numbers[at : at + count], numbers[at + count + 1 : at + 2 * count + 1]
            at += 2 * count + 1
            if self._lane is not None:
                self._lane.keep(each.out, *(part.coded for part in each.parts))
            for part, body in zip(each.parts, self._bodies(each, offsets, sizes), strict=True):
                table, head = self._tables[part.table], b""
                if part.repeats is not None:
                    written = np.empty(part.repeats.nbytes, np.uint8)
                    part.repeats.write(written)
                    head = written.tobytes()
                    if len(head) + body.nbytes >= part.rows.nbytes:
                        head, body = b"", flat_bytes(part.rows)
                if table.repeats and not head:
                    table.repeats[part.to] = None
                found[part.to].parts.append((part.table, head, body))
                table.moved_bytes += len(head) + body.nbytes
        return found

    def _joined(self, messages: Sequence[Message]) -> tuple[torch.Tensor, list[int]]:
        """Return all messages in one buffer, and the bytes of each."""
        sections = [message.sections() for message in messages]
        sizes = [sum(map(len, of_rank)) for of_rank in sections]
        heads = b"".join(s for of_rank in sections for s in of_rank if isinstance(s, bytes))
        uploaded, at = self._uploaded(np.frombuffer(heads, np.uint8)), 0
        pieces = []
        for section in (s for of_rank in sections for s in of_rank):
            if isinstance(section, bytes):
                pieces.append(uploaded[at : at + len(section)])
                at += len(section)
            else:
                pieces.append(section)
        joined = self._take(sum(sizes))[: sum(sizes)]
        if pieces:
            torch.cat(pieces, out=joined)
        return joined, sizes

    def _uploaded(self, data: Array) -> torch.Tensor:
        t = torch.from_numpy(data.copy())
        if self._device.type == "cpu" or not len(t):
            return t.to(self._device)
        return t.pin_memory().to(self._device, non_blocking=True)

    def _exchanged(self, piece: int, messages: list[Message]) -> list[list[int]]:
        """Exchange sizes and messages, and queue decoding; return the numbers of each rank."""
        self._faults.check()
        group, counters, reporting = self._helper.group, self._counters, self._faults.to_report
        joined, sizes = self._joined(messages)
        started = time.perf_counter()
        given = self._agreement.descriptors([FAILED] * self._size if reporting else sizes)
        rows = torch.tensor(
            [
                [d, int(message.by_id), *self._numbers]
                for d, message in zip(given, messages, strict=True)
            ],
            dtype=torch.int64,
        )
        sent = rows.to(self._device)
        found = torch.empty_like(sent)
        self._faults.stage("sizes", lambda: dist.all_to_all_single(found, sent, group=group))
        of_ranks = found.tolist()
        if reporting:
            raise self._faults.reported()
        checks, come = self._agreement.sizes_of([row[0] for row in of_ranks], self._faults)
        self._checks = self._checks or checks
        sized = time.perf_counter()
        counters.sizes_s += sized - started
        data = self._take(sum(come))[: sum(come)]
        self._faults.stage(
            "payload",
            lambda: dist.all_to_all_single(data, joined, come, sizes, group=group),
        )
        counters.payload_s += time.perf_counter() - sized
        counters.moved_bytes += sum(sizes) + rows[0].nbytes * (self._size - 1)
        # Pieces that follow cross whatever they are of: ranks that differ hang nobody.
        last = piece == self._pieces - 1
        if not self._agreement.agrees(self._checks):
            if last:
                self._agreement.check(self._checks, self._faults)
            return []
        started = time.perf_counter()
        try:
            self._decode_messages(piece, torch.split(data, come), [row[1] for row in of_ranks])
        except CorruptedDataError as error:
            self._damage = self._damage or error
        if last and self._damage is not None:
            self._faults.failed(str(self._damage), known_to_all=False)
            raise self._damage
        if last and self._copied is not None:
            self._copy_own()
        counters.decode_s += time.perf_counter() - started
        return [row[2:] for row in of_ranks]

    def _copy_own(self) -> None:
        for table in self._tables:
            own = torch.split(table.sent, list(table.send_rows))[self._rank]
            torch.split(table.received, list(table.receive_rows))[self._rank].copy_(own)

    # What came

    def _decode_messages(
        self, piece: int, messages: Sequence[torch.Tensor], by_id: Sequence[int]
    ) -> None:
        """Queue the decoding of messages, all of which are cut before a row is written."""
        came = self._cut(piece, messages)
        fields = self._fields(came, by_id)
        places = self._uploaded(_end_to_end([f.places for f in fields.values()], np.int64))
        bodies: list[tuple[torch.Tensor, torch.Tensor]] = []
        spread: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        at = 0
        for number, each in enumerate(came):
            data, out = each.data, each.out
            if number in fields:
                of_part = fields[number]
                data = data[of_part.fields.nbytes :]
                rows = len(of_part.places)
                shape = (of_part.fields.sent_rows, out.shape[1])
                out = torch.empty(shape, dtype=out.dtype, device=self._device)
                spread.append((out, places[at : at + rows], each.out))
                at += rows
                self._tables[each.table].places[each.source] = of_part.places
            if len(data) == out.nbytes:
                out.view(-1).view(torch.uint8).copy_(data)
            else:
                bodies.append((data, out))
        self._decode(bodies)
        for given, of_rows, out in spread:
            torch.index_select(given, 0, of_rows, out=out)

    def _cut(self, piece: int, messages: Sequence[torch.Tensor]) -> list[Came]:
        """Return the parts of messages; their sizes are read by one copy, where there are some."""
        outs: list[list[tuple[int, torch.Tensor]]] = [[] for _ in messages]
        for number, table in enumerate(self._tables):
            for of_rank, (first, rows) in zip(
                outs, spans_of(table.receive_rows, piece, self._pieces), strict=True
            ):
                if rows * table.received.shape[1]:
                    of_rank.append((number, table.received[first : first + rows]))
        sources = [source for source in range(self._size) if source != self._copied]
        heads = {s: PART_SIZE.size * max(0, len(outs[s]) - 1) for s in sources}
        for source in sources:
            if heads[source] > len(messages[source]):
                raise self._damaged(source, len(messages[source]), len(outs[source]))
        read = [messages[source][: heads[source]] for source in sources]
        numbers = iter(struct.iter_unpack(PART_SIZE.format, self._on_host(read).tobytes()))
        found = []
        for source in sources:
            message, parts = messages[source][heads[source] :], outs[source]
            sizes = [next(numbers)[0] for _ in parts[1:]]
            rest = len(message) - sum(sizes)
            if rest < 0 or (not parts and rest):
                raise self._damaged(source, len(messages[source]), len(parts))
            if parts:
                cut = torch.split(message, [*sizes, rest])
                found += [
                    Came(source, number, data, out)
                    for (number, out), data in zip(parts, cut, strict=True)
                ]
        return found

    def _damaged(self, source: int, n_bytes: int, parts: int) -> CorruptedDataError:
        return CorruptedDataError(
            f"message of rank {source} of the group: {n_bytes} bytes, expected {parts} parts"
        )

    def _on_host(self, pieces: Sequence[torch.Tensor]) -> Array:
        """Return bytes on the device one behind the other on the host; waits for them."""
        given = [piece for piece in pieces if len(piece)]
        found: Array = torch.cat(given).cpu().numpy() if given else np.empty(0, np.uint8)
        return found

    def _fields(self, came: Sequence[Came], by_id: Sequence[int]) -> dict[int, Places]:
        """Return by number the fields of parts whose rows cross once for each id.

        Two copies move headers and fields of all of them to the host, where they are checked: a
        kernel that reads rows by a wrong place would end the process.
        """
        flagged = [
            (number, each)
            for number, each in enumerate(came)
            if by_id[each.source] and len(each.data) != each.out.nbytes
        ]
        read = [each.data[: BY_ID_HEADER.size] for _, each in flagged]
        heads, at, known = self._on_host(read).tobytes(), 0, []
        for (number, each), part in zip(flagged, read, strict=True):
            fields = Fields.of(heads[at : at + len(part)], len(each.out), len(each.data))
            at += len(part)
            if fields is not None:
                known.append((number, fields))
        read = [came[number].data[BY_ID_HEADER.size : f.nbytes] for number, f in known]
        data, at, found = self._on_host(read), 0, {}
        for (number, fields), part in zip(known, read, strict=True):
            found[number] = Places(fields, fields.places(data[at : at + len(part)]))
            at += len(part)
        return found

    def _decode(self, bodies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Decode bodies of all dtypes, each dtype's by one pipeline."""
        by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for data, out in bodies:
            # A part behind rows of odd bytes begins at no word.
            aligned = data if data.data_ptr() % PART_SIZE.size == 0 else data.clone()
            by_dtype.setdefault(out.dtype, []).append((aligned, out))
        for of_dtype in by_dtype.values():
            data_of, outs = zip(*of_dtype, strict=True)
            self._coder.decode_vectors(data_of, outs, [True] * len(outs))


def _end_to_end(arrays: Sequence[Array], dtype: Any) -> Array:
    return np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype)


def _options(table: Rows) -> VectorOptions:
    candidate = table.candidate
    return VectorOptions(
        table.bound if candidate.bounded else 0.0,
        table.relative,
        candidate.window,
        candidate.references,
    )
