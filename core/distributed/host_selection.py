"""How tables' rows on the CPU are written: each way measured on rows for one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine.advisor import NetworkModel
from .layout import Rows, saved_back_bytes
from .selection import Measured, TableChoice, WayRecord


def choose_on_host(
    tables: Sequence[Rows], choices: Sequence[TableChoice], model: NetworkModel, rank: int
) -> None:
    """Measure each table's candidates on the rows for the rank that gets most; choose the fastest.

    Parameters
    ----------
    tables : sequence of Rows
        Of an exchange of several ranks.
    choices : sequence of TableChoice
        One a table.
    model : NetworkModel
        What the group's link takes.
    rank : int
        This one, whose rows for itself do not cross.
    """
    for table, choice in zip(tables, choices, strict=True):
        others = (to for to in range(len(table.send_rows)) if to != rank)
        to = max(others, key=table.rows_for)
        rows = torch.split(table.sent, list(table.send_rows))[to]
        repeats = table.repeats[to] if table.repeats else None
        choice.choose(rows, table.bound_of(rows), model, repeats)


def record_of_plain(tables: Sequence[Rows], choices: Sequence[TableChoice], rank: int) -> WayRecord:
    """Return what compressing rows would take that torch's own collective delivers, as measured."""
    record = WayRecord(calls=1)
    record.saved_back_bytes = saved_back_bytes(rank, tables)
    for table, choice in zip(tables, choices, strict=True):
        raw = table.raw_bytes(rank)
        found = choice.measured.get(choice.candidate.name, Measured(1.0, 0.0, 0.0))
        record.raw_bytes += raw
        record.moved_bytes += raw / found.ratio
        record.encode_s += raw * found.encode_s_per_byte
        record.decode_s += raw * found.decode_s_per_byte
    return record
