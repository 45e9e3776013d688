"""Rows of tables by torch's own collective: what an exchange is where compressing gains nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..engine.kernels.cuda.stream import current_stream
from ..engine.tensor_bits import copy_rows
from ..engine.transfer import record_on
from .buffers import Buffers
from .faults import Faults
from .layout import Layout, Plain, Rows, memory_of
from .stats import Counters
from .streams import keep_on_current
from .work import OVER, OfTorch, UnderWay


class PlainExchange:
    """Rows of several tables for every rank of a group, and what comes back, at once.

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
        Of the caller: where the rows of several tables are joined.
    layout : Layout
        Of the tables' sizes.
    """

    #: No rank goes on where torch's own collective fails.
    crossed = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[Rows],
        counters: Counters,
        faults: Faults,
        *,
        buffers: Buffers,
        layout: Layout,
    ) -> None:
        self._group, self._tables = group, tables
        self._counters, self._faults = counters, faults
        self._buffers, self._layout = buffers, layout

    def run(self, *, async_op: bool = False) -> UnderWay:
        """Deliver the rows, or begin to; return what is to be finished.

        Parameters
        ----------
        async_op : bool
            Whether torch's collective is. The rows of several tables are then written by the first
            `UnderWay.finish`.

        Raises
        ------
        ExchangeError
            When the collective fails.
        """
        self._faults.check()
        started = time.perf_counter()
        layout = self._layout
        begun: UnderWay = OVER
        try:
            if len(layout.wide) == 1:
                table = self._tables[layout.wide[0]]
                into, rows = table.received.view(torch.uint8), table.sent.view(torch.uint8)
                work = self._delivered(into, rows, table.receive_rows, table.send_rows, async_op)
                begun = OVER if work is None else OfTorch(work, self._faults)
            elif layout.wide:
                begun = self._deliver_together(async_op)
        except BaseException as error:
            # Others wait in the collective, which a later one of this rank is not to meet.
            self._faults.broken(f"payload stage: {error!r:.200}")
            raise
        for table, n_bytes in zip(self._tables, layout.plain.raw_bytes, strict=True):
            table.repeats, table.places, table.moved_bytes = None, [], n_bytes
        counters = self._counters
        counters.raw_bytes += layout.plain.all_raw_bytes
        counters.moved_bytes += layout.plain.all_raw_bytes
        counters.payload_s += time.perf_counter() - started
        counters.plain_calls += 1
        return begun

    def _deliver_together(self, async_op: bool) -> UnderWay:
        """Deliver the rows of several tables by one collective, rank after rank."""
        plain = self._layout.plain
        device = self._tables[self._layout.wide[0]].sent.device
        begun_on = current_stream(device) if device.type == "cuda" else None
        taken: list[torch.Tensor] = []
        try:
            for sizes in (plain.send_bytes, plain.receive_bytes):
                taken.append(self._buffers.take(sum(sizes), device))
            given, found = (
                data[: sum(sizes)]
                for data, sizes in zip(taken, (plain.send_bytes, plain.receive_bytes), strict=True)
            )
            self._gather(given)
            work = self._delivered(found, given, plain.receive_bytes, plain.send_bytes, async_op)
        except BaseException:
            self._buffers.forget(*taken)
            raise

        def written() -> None:
            mark = None
            try:
                if begun_on is not None:
                    keep_on_current(begun_on, (*taken, *memory_of(self._tables)))
                self._spread(found)
            except BaseException:
                self._buffers.forget(*taken)
                raise
            if begun_on is not None:
                mark = record_on(current_stream(device))
            self._buffers.give(*taken, mark=mark)

        if work is not None:
            return OfTorch(work, self._faults, written)
        written()
        return OVER

    def _gather(self, given: torch.Tensor) -> None:
        """Write rows to bytes, rank after rank and table after table."""
        tables, layout, plain = self._tables, self._layout, self._layout.plain
        rows = {i: tables[i].sent for i in layout.wide}
        if not plain.alike:
            rows = {i: t.view(-1).view(torch.uint8) for i, t in rows.items()}
        parts = {i: t.split_with_sizes(plain.sent_units[i]) for i, t in rows.items()}
        pieces = [parts[table][rank] for rank, table in plain.sent]
        if pieces:
            torch.cat(pieces, out=_in_units(given, plain, tables[layout.wide[0]].sent))

    def _spread(self, found: torch.Tensor) -> None:
        """Write what came, rank after rank and table after table, to the tables."""
        tables, plain = self._tables, self._layout.plain
        parts = [table.parts or table.received_parts() for table in tables]
        into = [parts[table][rank] for rank, table in plain.received]
        if not into:
            return
        if not plain.alike:
            into = [part.view(-1).view(torch.uint8) for part in into]
        rows = _in_units(found, plain, tables[self._layout.wide[0]].received)
        copy_rows(into, list(rows.split_with_sizes(plain.units)))

    def _delivered(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive: Sequence[int],
        send: Sequence[int],
        async_op: bool,
    ) -> dist.Work | None:
        """Deliver bytes by torch's own collective: gloo knows few dtypes."""
        sizes = list(receive), list(send)
        work: dist.Work | None = self._faults.stage(
            "payload",
            lambda: distributed_c10d.all_to_all_single(
                received, sent, *sizes, self._group, async_op
            ),
        )
        return work


def _in_units(data: torch.Tensor, plain: Plain, like: torch.Tensor) -> torch.Tensor:
    """Return bytes as rows of a tensor's kind, where all tables have one."""
    return data.view(like.dtype).view(-1, like.shape[1]) if plain.alike else data
