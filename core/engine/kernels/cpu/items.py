"""Items of which several share a packed row, gathered by id; see item_ranges.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..format import MAX_SLABS, PAD_WORDS, CacheStorage, RowLayout, TableStorage
from .compiling import prepare
from .constants import UNSIGNED, constants_of
from .loading import gathering
from .prepared import numbers_of
from .threads import POOL_BYTES, run_ranges

Array = np.ndarray[Any, Any]

#: An item is as much work as copying so many bytes.
_BYTES_PER_ITEM = 128
_NO_ENTRIES = np.empty((0, 2), np.int64)


class PreparedItems:
    """A table whose items share packed rows, made ready to be gathered from again and again.

    Like `prepared.PreparedTable` it holds the table's tensors, and what they hold may change.

    Parameters
    ----------
    table : TableStorage
        On the CPU, compact or in place.
    layout : RowLayout
        On the CPU.
    """

    def __init__(self, table: TableStorage, layout: RowLayout) -> None:
        gathering()
        from . import item_places as places
        from .item_ranges import gather_items as kernel

        f = layout.format
        constants = constants_of(layout)
        field, tables, starts = constants.field, constants.tables, constants.starts
        if table.lengths is None and table.flags is None:
            raise ValueError("table: raw, of which each item is a row")
        self._each = table.items_per_row
        self._item_bytes = f.row_bytes // self._each
        numbers = {
            **numbers_of(table, layout, None if field is None else field.values),
            places.N_ITEMS: table.n_items,
            places.ITEM_BYTES: self._item_bytes,
            places.ITEMS_PER_ROW: self._each,
            # Lengths are what find rows where there are both.
            places.FLAGS: 0
            if table.flags is None or table.lengths is not None
            else table.flags.data_ptr(),
            places.TABLES: tables.ctypes.data,
            places.POSITIONS: tables.shape[2],
            places.SECTIONS: tables.shape[1],
            places.STARTS: starts.ctypes.data,
            places.UNIFORM: f.uniform,
            places.KEEP_SECTION: f.keep_section,
            places.LEVELS: f.levels,
        }
        self._numbers = np.zeros(places.ITEM_SIZES, np.int64)
        for place, number in numbers.items():
            self._numbers[place] = number
        self._numbers[places.SLAB_LIMITS :] = -1
        self._n_items = table.n_items
        self._like = UNSIGNED[f.chunk_bytes](0)
        self._kernel: Any = kernel
        self._compiled: set[Any] = set()
        self._holds = (table, constants)

    def gather(
        self,
        ids: torch.Tensor,
        out: torch.Tensor,
        *,
        cache: CacheStorage | None = None,
        counters: torch.Tensor | None = None,
    ) -> tuple[int, int]:
        """Decode items by id.

        Parameters
        ----------
        ids : torch.Tensor
            int32 or int64 ``[n]``, contiguous, negative ones counted from the end, checked.
        out : torch.Tensor
            uint8 ``[n, item_bytes]``, contiguous.
        cache, counters : optional
            As for `gather_rows`.

        Returns
        -------
        bad : int
            -1, or the number of the first item of a damaged row; then what `out` holds is
            undefined, and nothing was counted.
        words : int
            Words of the rows of the table, counted once for items that follow one another.
        """
        numbers = self._numbers if cache is None else self._with_slabs(cache)
        entries = _NO_ENTRIES if cache is None else cache.entries.numpy()
        # Where they have that dtype, `to` still takes several microseconds.
        wanted = (ids if ids.dtype is torch.int64 else ids.to(torch.int64)).numpy()
        target = out.data_ptr()

        kernel, like = self._kernel, self._like
        kind = (entries.flags.num, wanted.flags.num)
        if kind not in self._compiled:
            counts = np.zeros((2, MAX_SLABS + 1), np.int64)
            prepare(kernel, numbers, like, entries, wanted, target, counts, 0, 0)
            self._compiled.add(kind)

        def work(begin: int, end: int) -> tuple[int, Array]:
            counts = np.zeros((2, MAX_SLABS + 1), np.int64)
            bad = kernel(numbers, like, entries, wanted, target, counts, begin, end)
            return int(bad), counts

        n = len(wanted)
        few = n * _BYTES_PER_ITEM < POOL_BYTES
        results = [work(0, n)] if few else run_ranges(work, n, _BYTES_PER_ITEM)
        for bad, _ in results:
            if bad >= 0:
                item = int(wanted[bad])
                item += self._n_items if item < 0 else 0
                return item // self._each * self._each, 0
        total: Array = np.sum([counts for _, counts in results], axis=0)
        if counters is not None:
            counters.numpy().reshape(2, MAX_SLABS + 1)[:] += total
        return -1, int(total[1, MAX_SLABS])

    def _with_slabs(self, cache: CacheStorage) -> Array:
        """Return the numbers of the table with those of a cache."""
        from . import item_places as places

        numbers = self._numbers.copy()
        numbers[places.HOLDS_ITEMS] = cache.holds_items
        for slab, words in enumerate(cache.slabs):
            numbers[places.SLABS + slab] = words.data_ptr()
            numbers[places.SLAB_LIMITS + slab] = max(0, words.numel() - PAD_WORDS)
        return numbers


def without_items(table: TableStorage) -> TableStorage:
    """Return a table whose ids name its rows."""
    return replace(table, items_per_row=1, filler_items=0)
