"""Exchanges of tensors on a GPU: coded there, sent by NCCL from a thread, decoded on a stream."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..dtypes import flat_bytes
from ..engine.advisor.link import own_stream, work_seconds
from ..engine.kernels.cuda import kernels_on
from ..engine.kernels.vector_chunks import VectorOptions, send_bytes
from ..engine.transfer import StreamLane
from ..errors import CorruptedDataError
from .exchange import Agreement, Rows
from .faults import Faults
from .helpers import Helper
from .messages import Candidate
from .stats import Counters
from .wire import FAILED, PART_SIZE


class Coder(Protocol):
    """Codes tensors on one device, any number at once, without waiting for it."""

    def encode_vectors(
        self, values: Sequence[torch.Tensor], options: Sequence[VectorOptions], out: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write bodies of tensors of one dtype to `out`; return offsets and sizes, int64 there."""

    def decode_vectors(
        self, bodies: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], bounded: Sequence[bool]
    ) -> None:
        """Write the tensors of bodies, of one dtype, whose memory begins at words."""


@dataclass(frozen=True)
class _Part:
    """Rows of a table for a rank."""

    to: int
    table: int
    rows: torch.Tensor


@dataclass(frozen=True)
class _Coded:
    """Parts of one dtype: their bodies in one buffer, places and sizes on the device."""

    parts: list[_Part]
    out: torch.Tensor
    offsets: torch.Tensor
    sizes: torch.Tensor


class DeviceExchange:
    """Rows of several tables for every rank of a group, and what comes back, on a GPU.

    All tables' rows for all ranks are encoded by one pipeline of kernels on torch's current stream.
    The helper's thread waits for the sizes, exchanges them and the messages on a stream and a
    communicator of its own, and queues decoding behind them. The calling thread waits until that is
    queued, its stream until it is done; the host waits for no decoding.

    The messages are those of `Exchange`, but that rows of one id are not sent once.

    Parameters
    ----------
    helper : Helper
        Of the group, for the tensors' device.
    tables : sequence of Rows
        As for `Exchange`; bounds may be relative to the rows for each rank.
    counters : Counters
        Are added to: bytes, and the seconds of the thread; those of the GPU are not known.
    faults : Faults
        Of the caller.
    numbers : sequence of int, optional
        As for `Exchange`.
    coder : Coder, optional
        The kernels of the device when left out.
    lane : StreamLane, optional
        The stream on which messages cross; needed on a GPU.
    """

    def __init__(
        self,
        helper: Helper,
        tables: Sequence[Rows],
        counters: Counters,
        faults: Faults,
        *,
        numbers: Sequence[int] = (),
        coder: Coder | None = None,
        lane: StreamLane | None = None,
    ) -> None:
        self._helper, self._tables = helper, tables
        self._counters, self._faults = counters, faults
        self._numbers = list(numbers)
        self._rank, self._size = dist.get_rank(helper.group), helper.group.size()
        self._device = tables[0].sent.device
        self._coder = coder or kernels_on(self._device)
        self._lane = lane
        self._agreement = Agreement(helper.group, tables)

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
        self._faults.check()
        for table in self._tables:
            table.repeats, table.places = None, [None] * self._size
            self._raw_of_own(table)
        coded = [] if self._faults.to_report else self._encoded(self._parts())
        host, encoded = self._to_host([t for each in coded for t in (each.offsets, each.sizes)])
        task = self._helper.lane.submit(self._stages, coded, host, encoded)
        numbers, done = task.result()
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)
        self._counters.calls += 1
        self._counters.raw_bytes += sum(table.raw_bytes(self._rank) for table in self._tables)
        return numbers

    def trial(self) -> tuple[float, float, int]:
        """Return the seconds of encoding and decoding what is sent, and its bytes; waits."""
        coded: list[_Coded] = []
        with own_stream(self._device):
            encode = self._best(
                lambda: coded.__setitem__(slice(None), self._encoded(self._parts()))
            )
            moved, decode = 0, 0.0
            for each in coded:
                pieces = self._pieces(each, each.offsets.tolist(), each.sizes.tolist())
                moved += sum(piece.nbytes for piece in pieces)
                bodies = [
                    (piece, torch.empty_like(part.rows))
                    for part, piece in zip(each.parts, pieces, strict=True)
                    if piece.nbytes < part.rows.nbytes
                ]
                decode += self._best(partial(self._decode, bodies))
        return encode, decode, moved

    def _best(self, work: Any) -> float:
        return min(work_seconds(self._device, work) for _ in range(2))

    # Coding

    def _raw_of_own(self, table: Rows) -> None:
        own = torch.split(table.sent, list(table.send_rows))[self._rank]
        into = torch.split(table.received, list(table.receive_rows))[self._rank]
        if own.shape == into.shape:  # else the ranks' check says so
            into.copy_(own)

    def _parts(self) -> list[_Part]:
        return [
            _Part(to, number, rows)
            for number, table in enumerate(self._tables)
            for to, rows in enumerate(torch.split(table.sent, list(table.send_rows)))
            if to != self._rank and rows.numel()
        ]

    def _encoded(self, parts: Sequence[_Part]) -> list[_Coded]:
        """Encode the parts of each dtype by one pipeline."""
        by_dtype: dict[torch.dtype, list[_Part]] = {}
        for part in parts:
            by_dtype.setdefault(part.rows.dtype, []).append(part)
        found = []
        for of_dtype in by_dtype.values():
            values = [part.rows for part in of_dtype]
            options = [_options(self._tables[part.table]) for part in of_dtype]
            out = torch.empty(send_bytes(values), dtype=torch.uint8, device=self._device)
            offsets, sizes = self._coder.encode_vectors(values, options, out)
            found.append(_Coded(of_dtype, out, offsets, sizes))
        return found

    def _to_host(
        self, numbers: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Return numbers copied to page-locked memory, and the event behind the copy."""
        if not numbers:
            return torch.empty(0, dtype=torch.int64), None
        joined = torch.cat(list(numbers))
        if self._device.type == "cpu":
            return joined, None
        host = torch.empty(len(joined), dtype=torch.int64, pin_memory=True)
        host.copy_(joined, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return host, event

    def _pieces(
        self, coded: _Coded, offsets: Sequence[int], sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the bytes of each part: its body, or its rows where that is no shorter."""
        return [
            coded.out[at : at + n] if n < part.rows.nbytes else flat_bytes(part.rows)
            for part, at, n in zip(coded.parts, offsets, sizes, strict=False)
        ]

    # In the helper's thread

    def _stages(
        self, coded: list[_Coded], host: torch.Tensor, encoded: torch.cuda.Event | None
    ) -> tuple[list[list[int]], torch.cuda.Event | None]:
        started = time.perf_counter()
        if encoded is not None:
            encoded.synchronize()
        self._counters.encode_s += time.perf_counter() - started
        on: AbstractContextManager[Any] = nullcontext()
        if self._lane is not None:
            on = self._lane.on()
            if encoded is not None:
                encoded.wait(self._lane.stream)
            self._lane.keep(*(table.received for table in self._tables))
        with on:
            numbers = self._exchanged(self._messages(coded, host.tolist()))
            return numbers, None if self._lane is None else self._lane.record()

    def _messages(self, coded: list[_Coded], numbers: list[int]) -> list[list[torch.Tensor]]:
        """Return what is sent to each rank, as tensors one behind the other."""
        by_rank: list[list[tuple[int, torch.Tensor]]] = [[] for _ in range(self._size)]
        at = 0
        for each in coded:
            count = len(each.parts)
            offsets, sizes = numbers[at : at + count], numbers[at + count + 1 : at + 2 * count + 1]
            at += 2 * count + 1
            if self._lane is not None:
                self._lane.keep(each.out, *(part.rows for part in each.parts))
            for part, piece in zip(each.parts, self._pieces(each, offsets, sizes), strict=True):
                by_rank[part.to].append((part.table, piece))
                self._tables[part.table].moved_bytes += piece.nbytes
        found = []
        for of_rank in by_rank:
            pieces = [piece for _, piece in sorted(of_rank, key=lambda each: each[0])]
            lengths = b"".join(PART_SIZE.pack(len(piece)) for piece in pieces[:-1])
            head = [self._uploaded(lengths)] if lengths else []
            found.append(head + pieces)
        return found

    def _uploaded(self, data: bytes) -> torch.Tensor:
        t = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return t if self._device.type == "cpu" else t.to(self._device)

    def _exchanged(self, messages: list[list[torch.Tensor]]) -> list[list[int]]:
        """Exchange sizes and messages, and queue decoding; return the numbers of each rank."""
        group, counters, reporting = self._helper.group, self._counters, self._faults.to_report
        sizes = [sum(piece.nbytes for piece in pieces) for pieces in messages]
        started = time.perf_counter()
        given = self._agreement.descriptors([FAILED] * self._size if reporting else sizes)
        rows = torch.tensor([[d, *self._numbers] for d in given], dtype=torch.int64)
        sent = rows.to(self._device)
        found = torch.empty_like(sent)
        self._faults.stage("sizes", lambda: dist.all_to_all_single(found, sent, group=group))
        of_ranks = found.tolist()
        if reporting:
            raise self._faults.reported()
        checks, come = self._agreement.sizes_of([row[0] for row in of_ranks], self._faults)
        sized = time.perf_counter()
        counters.sizes_s += sized - started
        pieces = [piece for of_rank in messages for piece in of_rank]
        joined = torch.cat(pieces) if pieces else sent.new_empty(0, dtype=torch.uint8)
        data = joined.new_empty(sum(come))
        self._faults.stage(
            "payload",
            lambda: dist.all_to_all_single(data, joined, come, sizes, group=group),
        )
        counters.payload_s += time.perf_counter() - sized
        counters.moved_bytes += sum(sizes) + rows[0].nbytes * (self._size - 1)
        self._agreement.check(checks, self._faults)
        try:
            self._decode_messages(torch.split(data, come))
        except CorruptedDataError as error:
            self._faults.failed(str(error), known_to_all=False)
            raise
        return [row[1:] for row in of_ranks]

    def _decode_messages(self, messages: Sequence[torch.Tensor]) -> None:
        bodies: list[tuple[torch.Tensor, torch.Tensor]] = []
        parts_of = [torch.split(t.received, list(t.receive_rows)) for t in self._tables]
        for source, message in enumerate(messages):
            if source == self._rank:
                continue
            outs = [parts[source] for parts in parts_of if parts[source].numel()]
            for data, out in zip(self._cut(message, len(outs), source), outs, strict=True):
                if len(data) == out.nbytes:
                    out.view(-1).view(torch.uint8).copy_(data)
                else:
                    bodies.append((data, out))
        self._decode(bodies)

    def _cut(self, message: torch.Tensor, parts: int, source: int) -> list[torch.Tensor]:
        """Return the parts of a message; their sizes are read, where there are several."""
        at = PART_SIZE.size * max(0, parts - 1)
        whole = len(message)
        sizes = []
        if at and at <= whole:
            head = message[:at].cpu().numpy().tobytes()
            sizes = [n for (n,) in struct.iter_unpack(PART_SIZE.format, head)]
        if at > whole or sum(sizes) > whole - at or (parts == 0 and whole):
            raise CorruptedDataError(
                f"message of rank {source} of the group: {whole} bytes, expected {parts} parts"
            )
        if not parts:
            return []
        return list(torch.split(message[at:], [*sizes, whole - at - sum(sizes)]))

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


def _options(table: Rows) -> VectorOptions:
    candidate: Candidate = table.candidate
    return VectorOptions(
        table.bound if candidate.bounded else 0.0,
        table.relative,
        candidate.window,
        candidate.references,
    )
