"""Resident rows as a cache that the kernels of a GPU read."""

from __future__ import annotations

import weakref
from typing import Protocol

import numpy as np
import torch

from ..engine.kernels.cuda import kernels_on
from ..engine.kernels.format import (
    BUCKET_ENTRIES,
    MAX_SLABS,
    NO_ID,
    OFFSET_SHIFT,
    PAD_WORDS,
    ceil_div,
)
from ..tables.cache import CacheView
from ..tables.counters import HOST, Counters
from ..tables.table import CompressedTable
from .slots import SlotTable

#: Calls of `MissRate.update` at which a copy of the counts is started; then every LOOK_EVERY.
FIRST_LOOKS = (2, 8)
LOOK_EVERY = 64


class RowsInSlots(Protocol):
    """Rows of a table in slots on a GPU; see `CacheState`."""

    device: torch.device
    parameter: torch.nn.Parameter
    slot_table: SlotTable

    @property
    def table(self) -> CompressedTable:
        """All rows."""
        ...


class ResidentCache:
    """The parameter of cached rows as a slab of raw rows, with a map from ids to them.

    The map is built on the GPU when a gather first needs it, and again after the resident rows
    change, which inference does not do.

    Parameters
    ----------
    rows : RowsInSlots
        The rows, on a GPU, of a whole number of words each.
    """

    def __init__(self, rows: RowsInSlots) -> None:
        self._rows = weakref.ref(rows)
        self.counters = Counters()
        self._storage: CacheView | None = None
        self._made_of: tuple[int, int] = (-1, 0)

    def storage(self, device: torch.device) -> CacheView | None:
        """Return the resident rows as the kernels of the GPU read them."""
        rows = self._rows()
        if rows is None or device != rows.device:
            return None
        made_of = (rows.slot_table.changes, rows.parameter.data_ptr())
        if self._storage is None or made_of != self._made_of:
            self._storage = _storage(rows)
            self._made_of = made_of
        return self._storage

    def forget(self, ids: torch.Tensor) -> None:
        """Do nothing: no resident row is older than the table's."""

    def counted(self) -> tuple[int, int]:
        """Return hits and misses so far; waits for the GPU."""
        hits = misses = 0
        for counts in self.counters.read().values():
            rows = counts[0].tolist()
            hits += sum(rows[:HOST])
            misses += rows[HOST]
        return hits, misses


class MissRate:
    """Share of looked-up rows that missed the GPU's memory, by its last counts that were read.

    The GPU counts hits and misses. An asynchronous copy of the counts is started now and then and
    read once it has ended, so nothing waits.

    Parameters
    ----------
    expected : float
        The share to assume before the first copy.
    """

    def __init__(self, expected: float) -> None:
        self.share = expected
        #: Whether missing rows are better fetched in order, by the bits of their number, as the
        #: model of the link decides it; asked again when the share has changed.
        self.sorts: dict[int, bool] = {}
        self._calls = 0
        self._coming: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._before = (0, 0)

    def update(self, counters: Counters, device: torch.device) -> float:
        """Return the share; start a copy of new counts, or read the one that has ended."""
        self._calls += 1
        if self._coming is not None:
            counts, event = self._coming
            if event.query():  # type: ignore[no-untyped-call]
                self._coming = None
                rows = counts.view(2, -1)[0].tolist()
                hits, misses = sum(rows[:HOST]), rows[HOST]
                new_hits, new_misses = hits - self._before[0], misses - self._before[1]
                self._before = (hits, misses)
                if new_hits + new_misses:
                    self.sorts.clear()
                    self.share = new_misses / (new_hits + new_misses)
        elif self._calls in FIRST_LOOKS or self._calls % LOOK_EVERY == 0:
            if not torch.cuda.is_current_stream_capturing():
                there = counters.on(device)
                counts = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
                counts.copy_(there, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))
                self._coming = (counts, event)
        return self.share


def fits(row_bytes: int) -> bool:
    """Return whether kernels can read rows of `row_bytes` in place: whole words only."""
    return row_bytes > 0 and row_bytes % 4 == 0


def with_spare(data: torch.Tensor) -> torch.Tensor:
    """Return rows ``[C, D]`` followed by padding that GPU kernels may read.

    On the CPU they are returned as they are.
    """
    row_bytes = data.shape[1] * data.element_size()
    if data.device.type != "cuda" or not fits(row_bytes):
        return data
    spare = ceil_div(4 * PAD_WORDS, row_bytes)
    roomy = torch.zeros(data.shape[0] + spare, data.shape[1], dtype=data.dtype, device=data.device)
    roomy[: data.shape[0]] = data
    return roomy[: data.shape[0]]


def _storage(rows: RowsInSlots) -> CacheView:
    slot_table, device, row_bytes = rows.slot_table, rows.device, rows.table.row_bytes
    slots = slot_table.resident()
    ids = slot_table.id_of[slots]
    locations = (
        (slots * row_bytes).astype(np.uint64) << np.uint64(OFFSET_SHIFT) | np.uint64(row_bytes // 4)
    ).view(np.int64)
    # A power of two of buckets, at most half full.
    n = len(ids)
    buckets = 1 << (ceil_div(2 * n, BUCKET_ENTRIES) - 1).bit_length() if n else 1
    entries = torch.full((buckets * BUCKET_ENTRIES, 2), NO_ID, dtype=torch.int64, device=device)
    if n:
        kernels_on(device, raise_errors=False).map.insert(
            entries, torch.from_numpy(ids).to(device), torch.from_numpy(locations).to(device)
        )
    data = rows.parameter.data
    addresses = torch.tensor([data.data_ptr()] + [0] * (MAX_SLABS - 1), dtype=torch.int64)
    slab = data.view(torch.uint8).view(-1).view(torch.int32)
    # The map knows rows of the table, of which several may share a packed row.
    holds_items = rows.table.rows_per_packed_row > 1
    return CacheView(
        entries, (slab,), addresses.to(device), row_bytes // 4, holds_items=holds_items
    )
