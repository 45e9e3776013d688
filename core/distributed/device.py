"""Exchanges of tensors on a GPU: coded there, sent by NCCL from a thread, decoded on a stream."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..engine.advisor.link import own_stream, work_seconds
from ..engine.kernels.cuda import kernels_on
from ..engine.kernels.cuda.stream import current_stream
from ..engine.kernels.vector_chunks import VectorOptions, send_bytes
from ..engine.transfer import StreamLane, ThreadTask
from ..errors import BitslabError, CorruptedDataError
from .agreement import Difference
from .buffers import Buffers
from .device_parts import Came, Coded, Coder, Message, Part, Places, Section
from .faults import ExchangeError, Faults
from .helpers import Helper
from .layout import Layout, Rows, sizes_of_tables
from .messages import Array, Fields
from .stats import Counters
from .wire import BY_ID_HEADER, DESCRIPTOR_BYTES, FAILED, PART_SIZE


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
        self._layout, self._agreement = layout, layout.agreement(pieces)
        self._difference: Difference | None = None
        self._received = [table.parts or table.received_parts() for table in tables]
        self._sent: dict[int, Sequence[torch.Tensor]] = {}
        self._begun_on: torch.cuda.Stream | None = None
        self._stopped = self._own_rows_copied = False
        self._damage: Exception | None = None
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

    def start(self) -> None:
        """Queue encoding on torch's current stream, and all else in the helper's thread."""
        if self._device.type == "cuda":
            self._begun_on = current_stream(self._device)
        for table in self._tables:
            table.places = []
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

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait until all is queued, and let torch's current stream wait for it; see `run`.

        Raises
        ------
        TimeoutError
            When it takes longer; the exchange goes on.
        """
        self._tasks[-1].exception(timeout_s)  # in order: the first one that failed says why
        for task in self._tasks:
            done = task.result()
        if done is not None:
            current_stream(self._device).wait_event(done)
        if not self._own_rows_copied:
            self._own_rows_copied = True
            self._copy_own()

    def _copy_own(self) -> None:
        """Copy what this rank has for itself, of all tables at once, once all else came."""
        rank, tables = self._copied, self._layout.own
        if rank is None or not tables:
            return
        sent = self._sent_by_rank()
        if self._device.type == "cuda" and current_stream(self._device) is not self._begun_on:
            for number in tables:  # memory of the stream on which this began
                self._tables[number].sent.record_stream(current_stream(self._device))
        into = [self._received[number][rank] for number in tables]
        torch._foreach_copy_(into, [sent[number][rank] for number in tables])

    def _sent_by_rank(self) -> dict[int, Sequence[torch.Tensor]]:
        """Return by table its rows for each rank."""
        if not self._sent:
            tables = ((number, self._tables[number]) for number in self._layout.wide)
            self._sent = {i: t.sent.split_with_sizes(list(t.send_rows)) for i, t in tables}
        return self._sent

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
        event.record(current_stream(self._device))
        return host, event

    def _bodies(
        self, coded: Coded, offsets: Sequence[int], sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the bytes of each part's rows: a body, or as they are where that is no shorter."""
        cuts: list[int] = []
        for i, n in enumerate(sizes):
            cuts += [n, offsets[i + 1] - offsets[i] - n]
        cuts.append(len(coded.out) - offsets[len(sizes)])
        bodies = coded.out.split_with_sizes(cuts)
        return [
            bodies[2 * i] if sizes[i] < part.coded.nbytes else _bytes_of(part.coded)
            for i, part in enumerate(coded.parts)
        ]

    # In the helper's thread

    def _stages(
        self,
        piece: int,
        coded: list[Coded],
        host: torch.Tensor,
        encoded: torch.cuda.Event | None,
    ) -> torch.cuda.Event | None:
        """Exchange a piece; return the event behind all that was queued."""
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
            received = (t.received if t.memory is None else t.memory for t in self._tables)
            self._lane.keep(*{id(t): t for t in received}.values())
        with on:
            try:
                self._exchanged(piece, self._messages(coded, host.tolist()))
            except BaseException as error:
                self._buffers.forget(*self._taken)
                self._taken.clear()
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

    def _say_failed(self, reason: str) -> None:
        """Have the other ranks know where they wait for what is not encoded: they raise, too."""
        try:
            if self._stopped:
                return  # with an earlier piece, of which all know
            self._stopped = True
            self._faults.check()
            self._faults.failed(reason, known_to_all=False)
            with nullcontext() if self._lane is None else self._lane.on():
                self._exchanged(0, [[] for _ in range(self._size)])
        finally:
            self._buffers.forget(*self._taken)
            self._taken.clear()
            if self._faults.to_report:
                self._faults.broken(reason)

    def _messages(self, coded: list[Coded], numbers: list[int]) -> list[Message]:
        """Return what is sent to each rank."""
        found: list[Message] = [[] for _ in range(self._size)]
        kept, at = [], 0
        for each in coded:
            count = len(each.parts)
            offsets, sizes = numbers[at : at + count + 1], numbers[at + count + 1 :][:count]
            at += 2 * count + 1
            kept.append(each.out)
            for part, body, n in zip(
                each.parts, self._bodies(each, offsets, sizes), sizes, strict=True
            ):
                table, head = self._tables[part.table], b""
                if part.repeats is not None:
                    written = np.empty(part.repeats.nbytes, np.uint8)
                    part.repeats.write(written)
                    head = written.tobytes()
                    if len(head) + body.nbytes >= part.rows.nbytes:
                        head, body = b"", _bytes_of(part.rows)
                    kept += [part.rows, part.coded]
                elif n >= part.rows.nbytes:
                    kept.append(part.rows)  # they cross from where they are
                if table.repeats and not head:
                    table.repeats[part.to] = None
                n_bytes = len(head) + body.nbytes
                found[part.to].append(Section(part.table, head, body, n_bytes))
                table.moved_bytes += n_bytes
        if self._lane is not None:
            self._lane.keep(*kept)
        if len(coded) > 1:  # of several dtypes
            for message in found:
                message.sort(key=lambda section: section.table)
        return found

    def _joined(
        self, messages: Sequence[Message], descriptors: Callable[[Sequence[int]], list[int]]
    ) -> tuple[torch.Tensor, list[int], torch.Tensor]:
        """Return all messages in one buffer, the bytes of each, and what the sizes stage says.

        What the host writes of both goes to the device by one copy.
        """
        heads: list[bytes] = []
        for message in messages:
            of_parts = [section.n_bytes for section in message[:-1]]
            heads.append(struct.pack(f"<{len(of_parts)}I", *of_parts))
            heads += [section.head for section in message]
        at, sizes = 0, []
        for message in messages:
            end = at + 1 + len(message)
            sizes.append(len(heads[at]) + sum(section.n_bytes for section in message))
            at = end
        by_id = (any(section.head for section in message) for message in messages)
        rows = [n for row in zip(descriptors(sizes), by_id, strict=True) for n in row]
        said = struct.pack(f"<{len(rows)}q", *rows)
        uploaded = self._uploaded(b"".join([said, *heads]))
        said_there, *heads_there = uploaded.split_with_sizes([len(said), *map(len, heads)])
        pieces, written = [], iter(heads_there)
        for message in messages:
            pieces.append(next(written))
            for section in message:
                pieces += [next(written), section.body]
        total = sum(sizes)
        joined = self._take(total)[:total]
        if total:
            torch.cat([piece for piece in pieces if piece.shape[0]], out=joined)
        return joined, sizes, said_there.view(torch.int64).view(self._size, 2)

    def _uploaded(self, data: bytes) -> torch.Tensor:
        t = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if self._device.type == "cpu":
            return t
        return t.pin_memory().to(self._device, non_blocking=True)

    def _exchanged(self, piece: int, messages: list[Message]) -> None:
        """Exchange sizes and messages, and queue decoding."""
        self._faults.check()
        group, counters, reporting = self._helper.group, self._counters, self._faults.to_report

        def descriptors(sizes: Sequence[int]) -> list[int]:
            return self._agreement.descriptors([FAILED] * self._size if reporting else sizes)

        joined, sizes, said = self._joined(messages, descriptors)
        started = time.perf_counter()
        found = torch.empty_like(said)
        self._faults.stage("sizes", lambda: dist.all_to_all_single(found, said, group=group))
        of_ranks = found.tolist()
        if reporting:
            raise self._faults.reported()
        checks, come = self._agreement.sizes_of([row[0] for row in of_ranks], self._faults)
        sized = time.perf_counter()
        counters.sizes_s += sized - started
        total = sum(come)
        data = self._take(total)[:total]
        self._faults.stage(
            "payload",
            lambda: dist.all_to_all_single(data, joined, come, sizes, group=group),
        )
        counters.payload_s += time.perf_counter() - sized
        counters.moved_bytes += sum(sizes) + 2 * DESCRIPTOR_BYTES * (self._size - 1)
        if piece == 0:
            self._difference = self._agreement.difference(checks, group, self._device)
        # Pieces that follow cross whatever they are of: ranks that differ hang nobody.
        last = piece == self._pieces - 1
        if self._difference is not None:
            if last:
                for extra in range(self._pieces, self._difference.most_pieces):
                    self._exchanged(extra, [[] for _ in range(self._size)])
                raise self._difference.error(self._rank, self._faults)
            return
        started = time.perf_counter()
        try:
            self._decode_messages(piece, data, come, [row[1] for row in of_ranks])
        except Exception as error:  # whatever it is, pieces that follow cross
            self._damage = self._damage or error
        if last and self._damage is not None:
            damaged = isinstance(self._damage, CorruptedDataError)
            reason = str(self._damage) if damaged else f"decoding: {self._damage!r:.200}"
            self._faults.failed(reason, known_to_all=False)
            raise self._damage
        counters.decode_s += time.perf_counter() - started

    # What came

    def _decode_messages(
        self, piece: int, data: torch.Tensor, come: Sequence[int], by_id: Sequence[int]
    ) -> None:
        """Queue the decoding of messages, all of which are cut before a row is written."""
        came = self._cut(piece, data, come)
        fields: dict[int, Places] = {}
        spread: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        if any(by_id):
            fields = self._fields(came, by_id)
            given = _end_to_end([f.places for f in fields.values()], np.int64)
            places = self._uploaded(given.tobytes()).view(torch.int64) if fields else data[:0]
        bodies: list[tuple[torch.Tensor, torch.Tensor]] = []
        at = 0
        for number, each in enumerate(came):
            body, out = each.data, each.out
            if number in fields:
                of_part = fields[number]
                body = body[of_part.fields.nbytes :]
                rows = len(of_part.places)
                shape = (of_part.fields.sent_rows, out.shape[1])
                out = torch.empty(shape, dtype=out.dtype, device=self._device)
                spread.append((out, places[at : at + rows], each.out))
                at += rows
                table = self._tables[each.table]
                table.places = table.places or [None] * self._size
                table.places[each.source] = of_part.places
            if body.nbytes == out.nbytes:
                _bytes_of(out).copy_(body)
            else:
                bodies.append((body, out))
        self._decode(bodies)
        for crossed, of_rows, out in spread:
            torch.index_select(crossed, 0, of_rows, out=out)

    def _cut(self, piece: int, data: torch.Tensor, come: Sequence[int]) -> list[Came]:
        """Return the parts of messages; their sizes are read by one copy, where there are some."""
        spans = self._layout.received_spans(piece, self._pieces)
        begins = [0, *accumulate(come)]
        heads = [PART_SIZE.size * max(0, len(of_rank) - 1) for of_rank in spans]
        for source, n_bytes in enumerate(come):
            if heads[source] > n_bytes and source != self._copied:
                raise self._damaged(source, n_bytes, len(spans[source]))
        read = [data[at : at + n] for at, n in zip(begins, heads, strict=False) if n]
        numbers = self._on_host(read).view("<u4").tolist()
        cuts: list[int] = []
        at = 0
        for source, (of_rank, n_bytes) in enumerate(zip(spans, come, strict=True)):
            sizes = numbers[at : at + len(of_rank) - 1] if of_rank else []
            at += len(sizes)
            rest = n_bytes - heads[source] - sum(sizes)
            if source != self._copied and (rest < 0 or (not of_rank and rest)):
                raise self._damaged(source, n_bytes, len(of_rank))
            cuts += [heads[source], *sizes, rest]
        found, pieces = [], iter(data.split_with_sizes(cuts))
        for source, of_rank in enumerate(spans):
            next(pieces)  # the sizes of its parts
            for number, _, first, rows in of_rank:
                if self._pieces == 1:
                    out = self._received[number][source]
                else:
                    out = self._tables[number].received[first : first + rows]
                found.append(Came(source, number, next(pieces), out))
            if not of_rank:
                next(pieces)  # what this rank would send itself
        return found

    def _damaged(self, source: int, n_bytes: int, parts: int) -> CorruptedDataError:
        return CorruptedDataError(
            f"message of rank {source} of the group: {n_bytes} bytes, expected {parts} parts"
        )

    def _on_host(self, pieces: Sequence[torch.Tensor]) -> Array:
        """Return bytes on the device one behind the other on the host; waits for them."""
        if not pieces:
            return np.empty(0, np.uint8)
        joined = torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]
        found: Array = np.frombuffer(joined.cpu().numpy().tobytes(), np.uint8)
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
        by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for data, out in bodies:
            data_of, outs = by_dtype.setdefault(out.dtype, ([], []))
            # A part behind rows of odd bytes begins at no word.
            data_of.append(data if data.data_ptr() % PART_SIZE.size == 0 else data.clone())
            outs.append(out)
        for data_of, outs in by_dtype.values():
            self._coder.decode_vectors(data_of, outs, [True] * len(outs))


def _bytes_of(rows: torch.Tensor) -> torch.Tensor:
    """Return rows ``[n, row]``, contiguous, as bytes."""
    return rows.view(-1).view(torch.uint8)


def _end_to_end(arrays: Sequence[Array], dtype: Any) -> Array:
    return np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype)


def _options(table: Rows) -> VectorOptions:
    candidate = table.candidate
    bound = table.bound if candidate.bounded else 0.0
    if isinstance(bound, torch.Tensor):
        return VectorOptions(bound, table.relative, candidate.window, candidate.references)
    return _options_of(bound, table.relative, candidate.window, candidate.references)


#: Those of one bound are one object: kernels then know it for the same.
_options_of = lru_cache(1024)(VectorOptions)
