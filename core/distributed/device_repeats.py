"""Rows of one id, found where the rows are: the host knows later which they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..engine.codecs.base import rows_as_bytes
from ..engine.kernels.cuda.stream import current_stream
from .checks import named
from .faults import ContentError
from .messages import Array, Repeats, ids_on, on_device


class RowsById(NamedTuple):
    """A table's rows, and their ids.

    Parameters
    ----------
    name : str
        Of the table, for errors.
    rows : torch.Tensor
        ``[N, row]``.
    send_rows : sequence of int
        Rows for each rank.
    ids : torch.Tensor
        int64 ``[N]``, there or on the CPU.
    """

    name: str
    rows: torch.Tensor
    send_rows: Sequence[int]
    ids: torch.Tensor


class FoundRepeats:
    """Which rows of tables share an id, for each rank.

    Two stable sorts, by id and by part (a table's rows for a rank), put rows of one id behind each
    other, the first of them in front. All is queued on torch's current stream; a copy to
    page-locked memory follows, for which `of` waits.

    Parameters
    ----------
    tables : sequence of RowsById
        One or more, on one device.
    """

    def __init__(self, tables: Sequence[RowsById]) -> None:
        self._tables = tables
        device = tables[0].rows.device
        of_parts = [n for table in tables for n in table.send_rows]
        total = sum(of_parts)
        ids = torch.cat([ids_on(table.ids, device) for table in tables])
        rows_of_part = on_device(np.array(of_parts, np.int64), device)
        part = torch.repeat_interleave(rows_of_part, output_size=total)
        order = torch.argsort(ids, stable=True)
        order = order[torch.argsort(part[order], stable=True)]
        id_of, part_of = ids[order], part[order]
        is_first = torch.ones(total, dtype=torch.bool, device=device)
        is_first[1:] = (id_of[1:] != id_of[:-1]) | (part_of[1:] != part_of[:-1])
        group = torch.cumsum(is_first, 0) - 1
        counts = torch.zeros_like(rows_of_part).index_add_(0, part_of, is_first.long())
        before = torch.cumsum(counts, 0) - counts
        places = torch.empty_like(order)
        places[order] = group - before[part_of]
        # By group its first row; what is none is written behind them.
        first = torch.zeros(total + 1, dtype=torch.int64, device=device)
        first[torch.where(is_first, group, total)] = order
        source = torch.empty_like(order)
        source[order] = first[group]
        begins = torch.cumsum(rows_of_part, 0) - rows_of_part
        #: int64 on the device, by group: its first row, counted in its part.
        self.first = first[:total] - begins[part[first[:total]]] if total else first[:0]
        differ = self._differ(source)
        numbers = torch.cat([counts, differ, places, self.first]).int()
        self._event: torch.cuda.Event | None = None
        self._numbers = numbers
        if device.type == "cuda":
            self._numbers = torch.empty(
                len(numbers), dtype=torch.int32, device="cpu", pin_memory=True
            )
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(current_stream(device))
        self._found: list[list[Repeats | None]] | None = None

    def _differ(self, source: torch.Tensor) -> torch.Tensor:
        """Return for each table whether a row is not that of `source`, of the same id."""
        found, at = [], 0
        for _, rows, _, ids in self._tables:
            of_table, at = source[at : at + len(ids)] - at, at + len(ids)
            if rows.shape[1]:
                bits = rows_as_bytes(rows, rows.shape[1] * rows.element_size())
                found.append((bits[of_table] != bits).any())
            else:
                found.append(torch.zeros((), dtype=torch.bool, device=rows.device))
        return torch.stack(found).long()

    def of(self, number: int) -> list[Repeats | None]:
        """Return for each rank which rows of a table share an id; waits for the ids.

        Raises
        ------
        ContentError
            When rows of one id differ.
        """
        if self._found is None:
            self._found = self._read()
        return self._found[number]

    def _read(self) -> list[list[Repeats | None]]:
        if self._event is not None:
            self._event.synchronize()
        numbers: Array = self._numbers.numpy()
        parts = [n for table in self._tables for n in table.send_rows]
        counts, differ, rest = np.split(numbers, np.cumsum([len(parts), len(self._tables)]))
        for table, wrong in zip(self._tables, differ, strict=True):
            if wrong:
                raise ContentError(f"{named('row_ids', table.name)}: rows of one id differ")
        places, first = rest.astype(np.int64).reshape(2, -1)
        found: list[list[Repeats | None]] = []
        row = group = 0
        sent = iter(counts.tolist())
        for table in self._tables:
            found.append([])
            for n in table.send_rows:
                kept = next(sent)
                groups = slice(group, group + kept)
                repeats = Repeats(places[row : row + n], first[groups], self.first[groups])
                found[-1].append(repeats if kept < n else None)
                row, group = row + n, group + kept
        return found


class DeferredRepeats(NamedTuple):
    """Those of one table.

    Parameters
    ----------
    found : FoundRepeats
        Of several.
    number : int
        Of the table among these.
    """

    found: FoundRepeats
    number: int
