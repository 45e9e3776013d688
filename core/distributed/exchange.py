"""The two stages of an exchange: descriptors of all messages, then the messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import BitslabError, CorruptedDataError
from .messages import Array, Message, Repeats, decode_message, encode_message
from .wire import DESCRIPTOR_NUMBERS, DTYPES, MAGIC, Descriptor

#: Bytes of the descriptors that a rank sends to another one.
DESCRIPTOR_BYTES = 8 * DESCRIPTOR_NUMBERS


class ExchangeError(BitslabError, RuntimeError):
    """An exchange between ranks failed, or they disagree; the message names stage and ranks."""


@dataclass
class Counters:
    """What exchanges moved between ranks, and how long their stages took.

    Parameters
    ----------
    calls : int
        Exchanges that were finished.
    plain_calls : int
        Calls that torch's own collective served.
    raw_bytes, moved_bytes : int
        Bytes of the rows that were sent; of what was sent for them, descriptors included.
    encode_s, sizes_s, payload_s, decode_s : float
        Seconds of the stages.
    """

    calls: int = 0
    plain_calls: int = 0
    raw_bytes: int = 0
    moved_bytes: int = 0
    encode_s: float = 0.0
    sizes_s: float = 0.0
    payload_s: float = 0.0
    decode_s: float = 0.0


@dataclass
class Exchange:
    """Rows for every rank of a group, and what comes back.

    Parameters
    ----------
    group : ProcessGroup
        Whose ranks exchange, over gloo.
    rows : torch.Tensor
        ``[N, row]`` on the CPU, contiguous: what is sent, rank after rank.
    send_rows, receive_rows : sequence of int
        Rows for each rank and of each.
    bound : float
        How far a delivered element may be from the one that was sent; 0: every bit is kept. Rows of
        this rank for itself are copied.
    repeats : sequence, optional
        For each rank the `Repeats` among its rows, or None.
    counters : Counters
        Are added to.
    """

    group: dist.ProcessGroup
    rows: torch.Tensor
    send_rows: Sequence[int]
    receive_rows: Sequence[int]
    bound: float
    repeats: Sequence[Repeats | None] | None = None
    counters: Counters = field(default_factory=Counters)

    def run(self, out: torch.Tensor) -> list[Array | None]:
        """Exchange, and write what came to `out` ``[M, row]``, contiguous, or raise.

        Returns
        -------
        list
            For each rank int64 ``[rows]``, which row of the body each of its rows is, or None where
            there were as many.

        Raises
        ------
        ExchangeError
            When a rank fails, or ranks disagree: nothing is written to `out`.
        CorruptedDataError
            When a message is damaged: nothing is written to `out`.
        """
        rank, counters = dist.get_rank(self.group), self.counters
        started = time.perf_counter()
        messages = self._messages(rank)
        encoded = time.perf_counter()
        ours = self._descriptors(messages, rank)
        theirs = self._sizes_stage(ours)
        sized = time.perf_counter()
        received = self._payload_stage(messages, theirs, rank)
        moved = time.perf_counter()
        self._check(ours, theirs, rank)
        scratch = torch.empty_like(out)
        places = self._decode(received, theirs, rank, scratch)
        out.copy_(scratch)
        counters.calls += 1
        counters.encode_s += encoded - started
        counters.sizes_s += sized - encoded
        counters.payload_s += moved - sized
        counters.decode_s += time.perf_counter() - moved
        row_bytes = self.rows.shape[1] * self.rows.element_size()
        counters.raw_bytes += (sum(self.send_rows) - self.send_rows[rank]) * row_bytes
        counters.moved_bytes += sum(len(m.data) for m in messages)
        counters.moved_bytes += DESCRIPTOR_BYTES * (len(messages) - 1)
        return places

    def _messages(self, rank: int) -> list[Message]:
        """Return the message for each rank; an empty one for this rank itself."""
        repeats = self.repeats or [None] * len(self.send_rows)
        parts = torch.split(self.rows, list(self.send_rows))
        return [
            Message(np.empty(0, np.uint8), n, 0)
            if to == rank or n == 0
            else encode_message(part, self.bound, repeated)
            for to, (n, part, repeated) in enumerate(
                zip(self.send_rows, parts, repeats, strict=True)
            )
        ]

    def _descriptors(self, messages: Sequence[Message], rank: int) -> list[Descriptor]:
        elements, dtype = self.rows.shape[1], DTYPES.index(self.rows.dtype)
        return [
            Descriptor(
                magic=MAGIC,
                dtype=dtype,
                field_bits=message.field_bits,
                row_elements=elements,
                rows=self.send_rows[to],
                expected_rows=self.receive_rows[to],
                n_bytes=len(message.data),
                body_rows=message.body_rows,
            )
            for to, message in enumerate(messages)
        ]

    def _sizes_stage(self, ours: Sequence[Descriptor]) -> list[Descriptor]:
        sent = torch.tensor([d.numbers() for d in ours], dtype=torch.int64)
        found = torch.empty_like(sent)
        _stage("sizes", lambda: dist.all_to_all_single(found, sent, group=self.group))
        return [Descriptor.of(numbers) for numbers in found.tolist()]

    def _payload_stage(
        self, messages: Sequence[Message], theirs: Sequence[Descriptor], rank: int
    ) -> list[Array]:
        """Exchange the messages, whatever they are of: ranks that disagree hang nobody."""
        for source, descriptor in enumerate(theirs):
            if descriptor.magic != MAGIC or descriptor.n_bytes < 0:
                raise ExchangeError(
                    f"sizes stage: rank {source} of the group sent no descriptor of this version"
                )
        sizes = [d.n_bytes for d in theirs]
        sent = torch.from_numpy(np.concatenate([m.data for m in messages]))
        found = torch.empty(sum(sizes), dtype=torch.uint8)
        sent_sizes = [len(m.data) for m in messages]

        def exchange() -> None:
            dist.all_to_all_single(found, sent, sizes, sent_sizes, group=self.group)

        _stage("payload", exchange)
        return [part.numpy() for part in torch.split(found, sizes)]

    def _check(self, ours: Sequence[Descriptor], theirs: Sequence[Descriptor], rank: int) -> None:
        wrong = []
        for other, (mine, found) in enumerate(zip(ours, theirs, strict=True)):
            why = None if other == rank else found.disagreement(mine)
            if other == rank and mine.rows != mine.expected_rows:
                why = f"{mine.rows} rows sent, {mine.expected_rows} are expected here"
            if why is not None:
                wrong.append(f"rank {other}: {why}")
        if wrong:
            raise ExchangeError(
                f"sizes stage: rank {rank} of the group disagrees with {'; '.join(wrong)}"
            )

    def _decode(
        self, received: Sequence[Array], theirs: Sequence[Descriptor], rank: int, out: torch.Tensor
    ) -> list[Array | None]:
        places: list[Array | None] = []
        own = torch.split(self.rows, list(self.send_rows))[rank]
        for source, part in enumerate(torch.split(out, list(self.receive_rows))):
            if source == rank:
                part.copy_(own)
            if source == rank or not len(part):
                places.append(None)
                continue
            d = theirs[source]
            try:
                places.append(decode_message(received[source], d.body_rows, d.field_bits, part))
            except CorruptedDataError as error:
                raise CorruptedDataError(
                    f"message of rank {source} of the group: {error}"
                ) from None
        return places


def _stage(name: str, work: Callable[[], Any]) -> None:
    try:
        work()
    except RuntimeError as error:
        raise ExchangeError(f"{name} stage: {error}") from error
