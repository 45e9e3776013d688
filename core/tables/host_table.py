"""HostTable: a table of rows in host memory as one process has it open: its state and its locks."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..engine.codecs import RowCodec
from ..engine.codecs.base import raise_bad_index, rows_as_bytes
from ..engine.kernels import cpu
from ..engine.kernels.cpu.items import PreparedItems
from ..engine.kernels.cpu.prepared import PreparedTable
from ..engine.memory.locks import ReadersAndWriter, call_after_fork
from ..errors import BitslabError, CorruptedDataError
from .arguments import checked_ids
from .build import rows_per_batch
from .cache import Cache
from .counters import HOST, Counters
from .device import DeviceCopies
from .parts import Layout, TableParts
from .rows import HostRows


class HostTable:
    """Rows packed in host memory, the locks that guard them, and what is counted of their gathers.

    `CompressedTable` is one, with what callers do to tables. The modules that do it (`making`,
    `files`, `gathering`, `changes`, `statistics`) work on a HostTable.

    Parameters
    ----------
    parts : TableParts
        The rows as they were packed.
    pin : bool
        Whether they are page-locked for GPUs, and so are those that move.
    read_only : bool
        Whether nobody may change them.
    """

    def __init__(self, parts: TableParts, *, pin: bool, read_only: bool = False) -> None:
        self._begin(HostRows(parts, pin=pin), pin=pin, read_only=read_only)

    def _begin(self, rows: HostRows, *, pin: bool, read_only: bool) -> None:
        self._rows = rows
        self._pin = pin
        self._read_only = read_only
        self._path: str | None = None  # of the file that is mapped, and its checksum
        self._checksum = ""
        self._pid = os.getpid()
        self._closed = False
        self._populated = False
        self._caches: weakref.WeakSet[Cache] = weakref.WeakSet()
        # What gathers on the CPU read, with the rows and the overflow's size that it was made for.
        self._prepared: tuple[HostRows, int, PreparedTable | PreparedItems | None] | None = None
        self.after_fork()
        call_after_fork(self)

    def after_fork(self) -> None:
        """Set up what belongs to one process: locks, copies on GPUs, counts."""
        # A child cannot let go what its parent has on GPUs, so it keeps that.
        inherited = ("_lock", "_device_copies", "counters", "_inherited")
        self._inherited = [self.__dict__.get(name) for name in inherited]
        self._lock = ReadersAndWriter()
        # Held by whoever changes the table and by whoever must not see it change. Reentrant, so
        # that a function that `compact` calls can save the table.
        self._update_lock = threading.RLock()
        self._busy = ""  # what changes the table: "update", "compact"
        self._device_copies = DeviceCopies()
        self._gpus: set[torch.device] = set()  # that gathered from this table
        self._totals_lock = threading.RLock()
        self._totals = {"gathers": 0, "rows": 0, "copied_words": 0}
        self.counters = Counters()
        # Of the caches that rows were gathered through; a cache that is gone has read them too.
        self._cache_counters: set[Counters] = set()

    @property
    def _parts(self) -> TableParts:
        return self._rows.parts

    # What it is

    @property
    def shape(self) -> torch.Size:
        """``[N, *row_shape]``."""
        return torch.Size(self._parts.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows' elements."""
        return self._parts.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def layout(self) -> Layout:
        """How rows lie."""
        return self._parts.layout

    @property
    def codec(self) -> RowCodec:
        """What packed the rows."""
        return self._parts.codec

    @property
    def rows_per_packed_row(self) -> int:
        """How many rows are packed as one: 1, but for narrow rows, which share a packed row."""
        return self._parts.items_per_row

    @property
    def row_bytes(self) -> int:
        """Bytes of a row before packing."""
        return self._parts.item_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of host memory: words, what finds rows in them, and rows that have moved."""
        return self._rows.nbytes

    @property
    def overflow_bytes(self) -> int:
        """Bytes of rows that updates have moved; see `compact`."""
        return self._rows.overflow_bytes

    @property
    def ratio(self) -> float:
        """Bytes of the rows over `nbytes`; 1 when there are none."""
        raw_bytes = len(self) * self.row_bytes
        return raw_bytes / self.nbytes if raw_bytes and self.nbytes else 1.0

    @property
    def pinned(self) -> bool:
        """Whether GPUs of this process can read the packed rows by themselves."""
        buffer = self._parts.buffers.get("words")
        return buffer is not None and buffer.pinned

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._parts.n_items

    # Reading it

    def _check_open(self) -> None:
        if self._closed:
            raise BitslabError("table: is closed")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock.reading():
            self._check_open()
            yield

    def _count(self, **more: int) -> None:
        with self._totals_lock:
            for name, n in more.items():
                self._totals[name] += n

    def counters_for(self, cache: Cache | None) -> Counters:
        """Return what a gather through a cache, or through none, adds to."""
        if cache is None:
            return self.counters
        self._cache_counters.add(cache.counters)
        return cache.counters

    def read_words(self) -> int:
        """Return the words of the table that were read by gathers; waits for the GPUs."""
        counted = [(0, self.counters), *((HOST, c) for c in self._cache_counters)]
        words = sum(
            int(counts[1, first:].sum())
            for first, counters in counted
            for counts in counters.read().values()
        )
        return words + self._totals["copied_words"]

    def check_ids(self, ids: torch.Tensor) -> None:
        """Raise IndexRangeError when one of the ids ``[n]`` on the CPU is out of range."""
        self._check_ids(checked_ids(ids))

    def _check_ids(self, ids: torch.Tensor) -> None:
        position = cpu.check_ids(ids, len(self))
        if position >= 0:
            raise_bad_index(int(ids[position]), position, len(self), "ids")

    @contextlib.contextmanager
    def unchanging(self) -> Iterator[None]:
        """Hold off updates, not readers; a thread may enter again."""
        with self._update_lock:
            self._check_open()
            yield

    def row_lengths(self, ids: torch.Tensor) -> tuple[np.ndarray[Any, Any], int]:
        """Return words of packed rows and of a raw row, by their numbers among packed rows.

        See `HostRows.row_lengths`.
        """
        with self._reading():
            return self._rows.row_lengths(ids)

    def packed_words_of(self, ids: torch.Tensor, n_words: int) -> torch.Tensor:
        """Return the words of packed rows; see `HostRows.packed_words_of`."""
        with self._reading():
            return self._rows.packed_words_of(ids, n_words)

    def _batches(self) -> Iterator[torch.Tensor]:
        """Yield all rows, decoded, batch after batch; these gathers are not counted."""
        step = rows_per_batch(self._parts.row_bytes) * self.rows_per_packed_row
        for begin in range(0, len(self), step):
            yield self.decoded(begin, min(begin + step, len(self)))

    def decoded(self, begin: int, end: int) -> torch.Tensor:
        """Return rows ``[end - begin, *row_shape]`` on the CPU; `stats` does not count them."""
        return self.rows_of(torch.from_numpy(np.arange(begin, end)))

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Do the same for int64 ``[n]`` ids on the CPU, in range."""
        rows = torch.empty((ids.shape[0], *self.shape[1:]), dtype=self.dtype)
        with self._reading():
            if self.row_bytes:
                raise_damaged(self._rows.decode(ids, rows_as_bytes(rows, self.row_bytes)))
        return rows

    def packed_rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return packed rows by their numbers int64 ``[m]``: ``[m, *codec.row_shape]``, decoded."""
        parts = self._parts
        rows = torch.empty((ids.shape[0], *parts.codec.row_shape), dtype=parts.dtype)
        with self._reading():
            if parts.row_bytes:
                bad = self._rows.decode_packed_rows(ids, rows_as_bytes(rows, parts.row_bytes))
                raise_damaged(bad if bad < 0 else bad * parts.items_per_row)
        return rows

    # Who else knows of it

    def add_cache(self, cache: Cache) -> None:
        """Tell `cache` of every update from now on; it is held weakly."""
        self._caches.add(cache)

    @property
    def token(self) -> str:
        """What tells the table's memory from any other, in every process that has it."""
        return self._checksum or self._parts.buffers["words"].token

    def hand_out(self) -> str:
        """Let the table change no more, and return its `token`."""
        with self._reading():
            self._read_only = True
            return self.token

    def close(self) -> None:
        """Let the memory go, after the gathers under way; closing twice is fine."""
        if self._closed:
            return
        with self._lock.writing():
            self._closed = True
            self._prepared = None
            self._device_copies.clear()
            self._rows.close()


def raise_damaged(row: int) -> None:
    """Raise CorruptedDataError for the damaged row that decoding told of; -1 says that none is."""
    if row >= 0:
        raise CorruptedDataError(f"table: row {row} is damaged; `out` is undefined")
