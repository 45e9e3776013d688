"""Finding where the rows of a gather lie, and decoding them; see gather.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..format import (
    MAX_SLABS,
    PAD_WORDS,
    CacheStorage,
    RowFormat,
    RowLayout,
    TableStorage,
    check_sizes,
)
from .compiling import call
from .constants import UNSIGNED, chunks_of, constants_of, unsigned
from .loading import gathering, mapping
from .threads import run_ranges

NO_IDS = np.empty(0, np.int64)
_NO_WORDS = np.empty(0, np.uint32)
_NO_BYTES = np.empty(0, np.uint8)

# Rows that are located at once: 14 bytes each.
_FOUND_ROWS = 1 << 16
# Sources of rows, as in gather.py: the table's words, its overflow, then the slabs.
SOURCES = 2 + MAX_SLABS
HOST_SOURCES = 2


class RowFinder:
    """Finds the source, offset and length of rows of a table; see gather.py.

    Parameters
    ----------
    table, row_format
        The table, and how its rows are packed.
    ids : torch.Tensor or None
        Rows; None for those from `row_begin` on.
    row_begin : int
        First row when `ids` is None.
    cache : CacheStorage or None
        Where rows are looked for first.
    """

    def __init__(
        self,
        table: TableStorage,
        row_format: RowFormat,
        ids: torch.Tensor | None,
        row_begin: int = 0,
        cache: CacheStorage | None = None,
    ) -> None:
        clusters = row_format.clusters
        check_sizes(table, clusters)
        overflow = _NO_WORDS if table.overflow is None else unsigned(table.overflow)
        slabs = () if cache is None else tuple(unsigned(slab) for slab in cache.slabs)
        self.sources = (unsigned(table.words), overflow, *slabs)
        sizes = [max(0, len(words) - PAD_WORDS) for words in self.sources]
        limits = np.array(sizes + [-1] * (SOURCES - len(sizes)), np.int64)
        compact = table.lengths is not None
        flags = table.flags
        self.ids = NO_IDS if ids is None else ids.to(torch.int64).numpy()
        self.row_begin = row_begin
        self.n_rows = table.n_rows
        self._kernel = gathering().find_rows
        self._arguments = (
            table.n_rows,
            self.sources[0],
            compact,
            NO_IDS if table.bases is None else table.bases.numpy(),
            _NO_BYTES if table.lengths is None else unsigned(table.lengths),
            _NO_BYTES if table.row_clusters is None else table.row_clusters.numpy(),
            clusters,
            _NO_WORDS if flags is None else unsigned(flags),
            _NO_WORDS if table.moved is None else unsigned(table.moved),
        )
        self._limits = limits
        self._row_sizes = (row_format.row_words, row_format.row_bytes)
        self._entries = None if cache is None else cache.entries.numpy()

    def row(self, position: int) -> int:
        """Return the number of the row at a position of the ids."""
        if not len(self.ids):
            return self.row_begin + position
        row = int(self.ids[position])
        return row + self.n_rows if row < 0 else row

    def find(self, begin: int, end: int) -> tuple[int, tuple[np.ndarray[Any, Any], ...]]:
        """Find rows begin..end.

        Returns
        -------
        bad : int
            The position of a row whose location is damaged, or -1.
        found : tuple of arrays
            source, at, length and cluster of each row; see gather.py.
        """
        count = end - begin
        found = (
            np.empty(count, np.uint8),
            np.empty(count, np.int64),
            np.empty(count, np.int32),
            np.empty(count, np.uint8),
        )
        ids, locations = self.ids[begin:end], NO_IDS
        if self._entries is not None and count:
            locations = np.empty(count, np.int64)
            map_find = mapping().map_find
            call(map_find, self._entries, ids, self.n_rows, locations, 0, count)
        bad = int(
            call(
                self._kernel,
                ids,
                self.row_begin + begin,
                *self._arguments,
                locations,
                self._limits,
                *self._row_sizes,
                *found,
            )
        )
        return (bad if bad < 0 else begin + bad), found


def decode_found_rows(
    finder: RowFinder, layout: RowLayout, out: torch.Tensor
) -> tuple[int, np.ndarray[Any, Any]]:
    """Decode rows to `out`.

    Returns the position of a damaged row or -1, and int64 ``[sources, 2]``, rows and words.
    """
    f = layout.format
    gather = gathering()
    constants = constants_of(layout)
    field, raw = constants.field, out.numpy()
    by_cluster = None if field is None else field.values.view(np.uint8).reshape(f.clusters, -1)
    chunks = chunks_of(out, f.chunk_bytes)
    general = (f.code_bits, f.grouped, f.uniform, f.row_words, f.keep_section, f.levels, chunks)

    def decode(
        words: np.ndarray[Any, Any],
        which: int,
        found: tuple[np.ndarray[Any, Any], ...],
        first: int,
        counts: np.ndarray[Any, Any],
    ) -> int:
        call(gather.copy_found, words, which, *found[:3], f.row_words, raw, first, counts)
        if field is not None:
            like = UNSIGNED[f.chunk_bytes](0)
            values = (by_cluster, field.group_values_bytes, field.each)
            options = (f.code_bits, f.grouped, f.row_words, f.chunks, raw, first, counts)
            arguments = (words, which, *found, like, field.numbers, *values, *options)
            return int(call(gather.decode_fields, *arguments))
        arguments = (words, which, *found, constants.tables, constants.starts)
        return int(call(gather.decode_found, *arguments, *general, first, counts))

    def work(begin: int, end: int) -> tuple[int, np.ndarray[Any, Any]]:
        counts = np.zeros((SOURCES, 2), np.int64)
        for first in range(begin, end, _FOUND_ROWS):
            bad, found = finder.find(first, min(first + _FOUND_ROWS, end))
            if bad >= 0:
                return bad, counts
            for which, words in enumerate(finder.sources):
                bad = decode(words, which, found, first, counts) if len(words) else -1
                if bad >= 0:
                    return first + bad, counts
        return -1, counts

    results = run_ranges(work, out.shape[0], f.row_bytes)
    bad = next((bad for bad, _ in results if bad >= 0), -1)
    return bad, np.sum([counts for _, counts in results], axis=0)
