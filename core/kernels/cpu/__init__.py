"""The kernels on the CPU: Numba functions over torch tensors in ordinary memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ...errors import ArgumentError, CorruptedDataError, load_optional
from ..format import (
    BLOCK_ROWS,
    GROUP_CHUNKS,
    MAX_SLABS,
    PAD_WORDS,
    WORD_BITS,
    CacheStorage,
    RowLayout,
    RowStorage,
    TableStorage,
    ceil_div,
    read_together,
)
from .compiling import call
from .threads import run_ranges

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_constants_of: WeakKeyDictionary[RowLayout, Any] = WeakKeyDictionary()
_NO_IDS = np.empty(0, np.int64)
_NO_WORDS = np.empty(0, np.uint32)
_NO_BYTES = np.empty(0, np.uint8)

# Rows whose places are looked up at once: 14 bytes each.
_PLACED_ROWS = 1 << 16
# Sources of rows, as in gather.py: the table's words, its overflow, then the slabs.
_SOURCES = 2 + MAX_SLABS
_HOST_SOURCES = 2


def _jitted() -> Any:
    """Load the Numba functions on first use, so that importing bitslab does not load Numba."""
    load_optional("numba", extra=None, purpose="packing rows on the CPU")
    from . import rows

    return rows


def _gathering() -> Any:
    """Load the Numba functions that gather, like `_jitted`."""
    load_optional("numba", extra=None, purpose="gathering rows on the CPU")
    from . import gather

    return gather


def _mapping() -> Any:
    """Load the Numba functions of the map, like `_jitted`."""
    load_optional("numba", extra=None, purpose="looking up rows on the CPU")
    from . import maps

    return maps


def _unsigned(t: torch.Tensor) -> np.ndarray[Any, Any]:
    """View a tensor of integers as the unsigned numpy array of the same width."""
    return t.numpy().view(_UNSIGNED[t.element_size()])


def _chunks(rows: torch.Tensor, chunk_bytes: int) -> np.ndarray[Any, Any]:
    """View contiguous ``[N, row_bytes]`` uint8 rows as ``[N, C]`` chunks.

    An address that is no multiple of the chunk is fine: numpy marks such a view, and Numba
    compiles accesses for it.
    """
    return rows.numpy().view(_UNSIGNED[chunk_bytes])


def _tables(layout: RowLayout) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return tables and starts as the kernels read them: for each position, or 32 times the one."""
    tables, starts, _ = _constants(layout)
    return tables, starts


def _constants(
    layout: RowLayout,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return tables, starts and field values of a layout, worked out at its first use.

    Field values are uint8 ``[K, 8]``, by code, shifted down to bit 0, for rows that fields.py
    decodes; K is 0 for others.
    """
    found = _constants_of.get(layout)
    if found is None:
        f = layout.format
        tables, starts = _unsigned(layout.tables), layout.starts.numpy()
        values = np.empty((0, 8), np.uint8)
        low, width = layout.fields[0]
        # A value of the field has to fit into a byte there.
        one_field = f.uniform and 0 < width <= 8 and {*layout.fields} == {(low, width)}
        if one_field and f.code_bits == 3 and f.chunk_bytes <= 4:
            values = (tables[:, :8, 0] >> low).astype(np.uint8)
        if f.uniform:
            tables = np.repeat(tables, GROUP_CHUNKS, axis=2)
            starts = starts[:, 1:] * np.arange(GROUP_CHUNKS + 1, dtype=np.int32)
        found = _constants_of[layout] = (tables, starts, values)
    return found


def count_bits(rows: torch.Tensor, chunk_bytes: int) -> torch.Tensor:
    """Count, for every bit of every chunk position, the rows that have it set.

    Parameters
    ----------
    rows : torch.Tensor
        uint8 ``[N, row_bytes]``, contiguous.
    chunk_bytes : int
        Bytes of a chunk; divides row_bytes.

    Returns
    -------
    torch.Tensor
        int64 ``[C, 8 * chunk_bytes]``, bit 0 the least significant.
    """
    kernel = _jitted().count_bits
    chunks = _chunks(rows, chunk_bytes)

    def work(begin: int, end: int) -> np.ndarray[Any, Any]:
        counts = np.zeros((chunks.shape[1], 8 * chunk_bytes), np.int64)
        call(kernel, chunks, counts, begin, end)
        return counts

    return torch.from_numpy(sum(run_ranges(work, *rows.shape)))


def packed_words(rows: torch.Tensor, layout: RowLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Measure packed rows.

    Parameters
    ----------
    rows : torch.Tensor
        uint8 ``[N, row_bytes]``, contiguous.
    layout : RowLayout
        On the same device.

    Returns
    -------
    lengths : torch.Tensor
        ``[N]`` of the format's length dtype: words of the packed row, 0 for a row kept raw.
    row_clusters : torch.Tensor
        uint8 ``[N]``: the cluster that packs the row best; ``[0]`` when there is only one.
    """
    f = layout.format
    lengths = torch.empty(rows.shape[0], dtype=f.length_dtype)
    row_clusters = torch.empty(rows.shape[0] if f.clusters > 1 else 0, dtype=torch.uint8)
    kernel = _jitted().packed_words
    chunks = _chunks(rows, f.chunk_bytes)
    tables, starts = _tables(layout)
    lengths_out, clusters_out = _unsigned(lengths), row_clusters.numpy()

    def work(begin: int, end: int) -> None:
        call(
            kernel,
            chunks,
            tables,
            starts,
            f.code_bits,
            f.grouped,
            f.uniform,
            f.row_words,
            lengths_out,
            clusters_out,
            begin,
            end,
        )

    run_ranges(work, rows.shape[0], f.row_bytes * f.clusters)
    return lengths, row_clusters


def encode_rows(
    rows: torch.Tensor,
    layout: RowLayout,
    lengths: torch.Tensor,
    row_clusters: torch.Tensor,
    bases: torch.Tensor,
    n_words: int,
) -> torch.Tensor:
    """Pack rows whose places are known.

    Parameters
    ----------
    rows : torch.Tensor
        uint8 ``[N, row_bytes]``, contiguous.
    layout : RowLayout
        On the same device.
    lengths, row_clusters : torch.Tensor
        What `packed_words` gave for these rows.
    bases : torch.Tensor
        int64 ``[ceil(N / 32) + 1]``, the first word of each block of 32 rows.
    n_words : int
        Words of all rows together.

    Returns
    -------
    torch.Tensor
        int32 ``[n_words + PAD_WORDS]``.
    """
    f = layout.format
    words = torch.empty(n_words + PAD_WORDS, dtype=torch.int32)
    words[n_words:] = 0
    kernel = _jitted().encode_rows
    chunks = _chunks(rows, f.chunk_bytes)
    words_out = _unsigned(words)
    arguments = (
        chunks,
        rows.numpy(),
        *_tables(layout),
        f.code_bits,
        f.grouped,
        f.uniform,
        f.row_words,
        f.keep_section,
        f.levels,
        _unsigned(lengths),
        row_clusters.numpy(),
        bases.numpy(),
        words_out,
        words_out.view(np.uint8),
    )
    run_ranges(lambda begin, end: call(kernel, *arguments, begin, end), rows.shape[0], f.row_bytes)
    return words


def check_ids(ids: torch.Tensor, n_rows: int) -> int:
    """Return the first position of an id outside -n_rows..n_rows - 1, or -1."""
    return int(call(_jitted().check_ids, ids.numpy(), n_rows))


def check_rows(storage: RowStorage, layout: RowLayout, ids: torch.Tensor | None = None) -> int:
    """Return the first row that is damaged, or -1.

    Parameters
    ----------
    storage : RowStorage
        Packed rows; their words may be damaged in any way, the other tensors too.
    layout : RowLayout
        On the same device.
    ids : torch.Tensor, optional
        int64 rows to look at, checked by `check_ids`; all rows when left out.
    """
    n = storage.lengths.shape[0] if ids is None else ids.shape[0]
    return _check_range(storage, layout, ids, 0, n)


def _check_range(
    storage: RowStorage, layout: RowLayout, ids: torch.Tensor | None, first: int, count: int
) -> int:
    if count == 0:
        return -1
    f = layout.format
    kernel = _jitted().check_rows
    arguments = (
        _unsigned(storage.words),
        storage.bases.numpy(),
        _unsigned(storage.lengths),
        storage.row_clusters.numpy(),
        _tables(layout)[1],
        f.chunks,
        8 * f.chunk_bytes,
        f.code_bits,
        f.grouped,
        f.uniform,
        f.row_words,
        _NO_IDS if ids is None else ids.numpy(),
    )
    bad = run_ranges(
        lambda begin, end: int(call(kernel, *arguments, first + begin, first + end)),
        count,
        f.row_bytes,
    )
    return next((row for row in bad if row >= 0), -1)


def decode_rows(
    storage: RowStorage,
    layout: RowLayout,
    ids: torch.Tensor | None,
    row_begin: int,
    out: torch.Tensor,
    facts: Mapping[str, int] | None = None,
    sm_budget: int | None = None,
) -> int:
    """Decode rows to `out`, after checking that they are sound.

    Parameters
    ----------
    storage : RowStorage
        Packed rows.
    layout : RowLayout
        On the same device.
    ids : torch.Tensor or None
        int64 ``[n]`` rows to decode, negative ones counted from the end, checked by `check_ids`;
        None for the rows from `row_begin` on.
    row_begin : int
        First row when `ids` is None.
    out : torch.Tensor
        uint8 ``[n, row_bytes]``, contiguous.
    facts, sm_budget
        For the launch on a GPU; not needed here.

    Returns
    -------
    int
        -1, or the number of a damaged row; then nothing was written.
    """
    n = out.shape[0]
    if n == 0:
        return -1
    f = layout.format
    bad = _check_range(storage, layout, ids, 0 if ids is not None else row_begin, n)
    if bad >= 0:
        return bad
    table = TableStorage(
        storage.lengths.shape[0],
        storage.words,
        storage.bases,
        storage.lengths,
        storage.row_clusters if storage.row_clusters.numel() else None,
    )
    places = _Places(table, f.row_words, f.clusters, ids, row_begin)
    bad, _ = _decode_places(places, layout, out)
    return bad if bad < 0 else places.row(bad)


def copy_rows(
    rows: torch.Tensor,
    row_bytes: int,
    ids: torch.Tensor,
    out: torch.Tensor,
    *,
    first_bad: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    sm_budget: int | None = None,
) -> None:
    """Copy raw rows by id.

    Parameters
    ----------
    rows : torch.Tensor
        uint8 ``[N, stride]``, contiguous, at any address; stride is at least `row_bytes`.
    row_bytes : int
        Bytes of a row.
    ids : torch.Tensor
        int32 or int64 ``[n]``, contiguous, negative ones counted from the end, checked by
        `check_ids`.
    out : torch.Tensor
        uint8 ``[n, row_bytes]``, contiguous.
    first_bad : torch.Tensor, optional
        int64 ``[1]``; nothing is copied unless it is -1.
    order, sm_budget
        For the launch on a GPU; not needed here.
    """
    if first_bad is not None and int(first_bad) != -1:
        return
    n_rows, stride = rows.shape
    kernel = _gathering().copy_rows
    arguments = (rows.numpy(), stride, row_bytes, ids.numpy(), n_rows, out.numpy())
    run_ranges(lambda begin, end: call(kernel, *arguments, begin, end), ids.shape[0], row_bytes)


def map_insert(entries: torch.Tensor, ids: torch.Tensor, locations: torch.Tensor) -> int:
    """Insert ids into a map; one that is there already gets its new location.

    Parameters
    ----------
    entries : torch.Tensor
        int64 ``[buckets * BUCKET_ENTRIES, 2]``, contiguous, `buckets` a power of two; see
        `CacheStorage`.
    ids : torch.Tensor
        int32 or int64 ``[n]``, not negative. Of equal ones the last stays.
    locations : torch.Tensor
        int64 ``[n]``.

    Returns
    -------
    int
        How many ids found no free entry, or were negative; they are not in the map.
    """
    return int(call(_mapping().map_insert, entries.numpy(), ids.numpy(), locations.numpy()))


def map_find(entries: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Look ids up in a map.

    Parameters
    ----------
    entries : torch.Tensor
        As for `map_insert`.
    ids : torch.Tensor
        int32 or int64 ``[n]``.

    Returns
    -------
    torch.Tensor
        int64 ``[n]``: locations, NOT_CACHED for ids that are not in the map.
    """
    kernel = _mapping().map_find
    locations = torch.empty(ids.shape[0], dtype=torch.int64)
    arguments = (entries.numpy(), ids.numpy(), 0, locations.numpy())
    run_ranges(lambda begin, end: call(kernel, *arguments, begin, end), ids.shape[0], 128)
    return locations


class _Places:
    """Looks up where rows of a table lie; see gather.py.

    Parameters
    ----------
    table, row_words, clusters
        The table, words of a raw row, and how many clusters its layout has.
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
        row_words: int,
        clusters: int,
        ids: torch.Tensor | None,
        row_begin: int = 0,
        cache: CacheStorage | None = None,
    ) -> None:
        _check_sizes(table, clusters)
        overflow = _NO_WORDS if table.overflow is None else _unsigned(table.overflow)
        slabs = () if cache is None else tuple(_unsigned(slab) for slab in cache.slabs)
        self.sources = (_unsigned(table.words), overflow, *slabs)
        sizes = [max(0, len(words) - PAD_WORDS) for words in self.sources]
        limits = np.array(sizes + [-1] * (_SOURCES - len(sizes)), np.int64)
        compact = table.lengths is not None
        flags = table.flags
        self.ids = _NO_IDS if ids is None else ids.to(torch.int64).numpy()
        self.row_begin = row_begin
        self.n_rows = table.n_rows
        self._kernel = _gathering().find_rows
        self._arguments = (
            table.n_rows,
            self.sources[0],
            compact,
            _NO_IDS if table.bases is None else table.bases.numpy(),
            _NO_BYTES if table.lengths is None else _unsigned(table.lengths),
            _NO_BYTES if table.row_clusters is None else table.row_clusters.numpy(),
            clusters,
            _NO_WORDS if flags is None else _unsigned(flags),
            _NO_WORDS if table.moved is None else _unsigned(table.moved),
        )
        self._limits = limits
        self._row_words = row_words
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
            The position of a row whose place is damaged, or -1.
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
        ids, locations = self.ids[begin:end], _NO_IDS
        if self._entries is not None and count:
            locations = np.empty(count, np.int64)
            map_find = _mapping().map_find
            call(map_find, self._entries, ids, self.n_rows, locations, 0, count)
        bad = int(
            call(
                self._kernel,
                ids,
                self.row_begin + begin,
                *self._arguments,
                locations,
                self._limits,
                self._row_words,
                *found,
            )
        )
        return (bad if bad < 0 else begin + bad), found


def _check_sizes(table: TableStorage, clusters: int) -> None:
    """Refuse a table whose tensors are too small for its number of rows."""
    blocks, words = ceil_div(table.n_rows, BLOCK_ROWS), ceil_div(table.n_rows, WORD_BITS)
    wanted = {
        "bases": (table.bases if table.lengths is not None else None, blocks),
        "lengths": (table.lengths, table.n_rows),
        "row_clusters": (table.row_clusters, table.n_rows if clusters > 1 else 0),
        "flags": (table.flags, words),
        "moved": (table.moved, words),
    }
    for name, (part, size) in wanted.items():
        if part is not None and part.numel() < size:
            raise ArgumentError(
                f"table.{name}: {part.numel()} entries, a table of {table.n_rows} rows has {size}"
            )
    if table.lengths is not None and table.bases is None:
        raise ArgumentError("table.bases: None, a table with lengths has them")


def gather_rows(
    table: TableStorage,
    layout: RowLayout,
    ids: torch.Tensor,
    out: torch.Tensor,
    *,
    cache: CacheStorage | None = None,
    counters: torch.Tensor | None = None,
    first_bad: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    sm_budget: int | None = None,
) -> int:
    """Decode rows by id, out of a table and the slabs of its cache.

    Every row is checked as it is decoded: nothing outside the table's and the cache's tensors is
    read, whatever they hold.

    Parameters
    ----------
    table : TableStorage
        On the CPU.
    layout : RowLayout
        On the CPU; a cache may bring another, see `format.read_together`.
    ids : torch.Tensor
        int32 or int64 ``[n]`` rows, negative ones counted from the end, checked by `check_ids`.
    out : torch.Tensor
        uint8 ``[n, row_bytes]``, contiguous.
    cache : CacheStorage, optional
        Rows whose ids its map holds are decoded from its slabs.
    counters : torch.Tensor, optional
        int64 ``[2 * (MAX_SLABS + 1)]``, added to: rows from each slab, rows from the table, words
        of the rows from each slab (packed, or row_words), words of those from the table.
    first_bad : torch.Tensor, optional
        int64 ``[1]``; nothing is gathered unless it is -1.
    order, sm_budget
        For the launch on a GPU; not needed here.

    Returns
    -------
    int
        -1, or the number of a damaged row; then what `out` holds is undefined, and `counters` are
        left alone.
    """
    n = out.shape[0]
    if n == 0 or (first_bad is not None and int(first_bad) != -1):
        return -1
    table, layout = read_together(table, layout, cache)
    f = layout.format
    places = _Places(table, f.row_words, f.clusters, ids, cache=cache)
    bad, counts = _decode_places(places, layout, out)
    if bad >= 0:
        return places.row(bad)
    if counters is not None:
        by_place = counters.numpy().reshape(2, MAX_SLABS + 1)
        by_place[:, :MAX_SLABS] += counts[_HOST_SOURCES:].T
        by_place[:, MAX_SLABS] += counts[:_HOST_SOURCES].sum(0)
    return -1


def _decode_places(
    places: _Places, layout: RowLayout, out: torch.Tensor
) -> tuple[int, np.ndarray[Any, Any]]:
    """Decode rows to `out`.

    Returns the position of a damaged row or -1, and int64 ``[sources, 2]``, rows and words.
    """
    f = layout.format
    gather = _gathering()
    tables, starts, values = _constants(layout)
    chunks, raw = _chunks(out, f.chunk_bytes), out.numpy()
    general = (f.code_bits, f.grouped, f.uniform, f.row_words, f.keep_section, f.levels, chunks)

    def decode(
        words: np.ndarray[Any, Any],
        which: int,
        found: tuple[np.ndarray[Any, Any], ...],
        first: int,
        counts: np.ndarray[Any, Any],
    ) -> int:
        call(gather.copy_found, words, which, *found[:3], f.row_words, raw, first, counts)
        if len(values):
            options = (values, *layout.fields[0], f.grouped, f.row_words, chunks)
            arguments = (words, words.view(np.uint8), which, *found, *options, first, counts)
            return int(call(gather.decode_fields, *arguments))
        arguments = (words, which, *found, tables, starts, *general, first, counts)
        return int(call(gather.decode_found, *arguments))

    def work(begin: int, end: int) -> tuple[int, np.ndarray[Any, Any]]:
        counts = np.zeros((_SOURCES, 2), np.int64)
        for first in range(begin, end, _PLACED_ROWS):
            bad, found = places.find(first, min(first + _PLACED_ROWS, end))
            if bad >= 0:
                return bad, counts
            for which, words in enumerate(places.sources):
                bad = decode(words, which, found, first, counts) if len(words) else -1
                if bad >= 0:
                    return first + bad, counts
        return -1, counts

    results = run_ranges(work, out.shape[0], f.row_bytes)
    bad = next((bad for bad, _ in results if bad >= 0), -1)
    return bad, np.sum([counts for _, counts in results], axis=0)


def row_places(
    table: TableStorage, layout: RowLayout, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the exact places of a table's rows, to copy them with `move_rows`.

    Parameters
    ----------
    table : TableStorage
        On the CPU.
    layout : RowLayout
        On the CPU.
    ids : torch.Tensor
        int32 or int64 ``[n]`` rows, negative ones counted from the end.

    Returns
    -------
    at : torch.Tensor
        int64 ``[n]``: the first word of each row.
    words : torch.Tensor
        int32 ``[n]``: its words when it is packed, as many as its codes ask for; 0 when it is raw.
    kind : torch.Tensor
        uint8 ``[n]``: 0 for a row in ``table.words``, 1 for one in ``table.overflow``.

    Raises
    ------
    CorruptedDataError
        When a row is damaged.
    """
    f = layout.format
    places = _Places(table, f.row_words, f.clusters, ids)
    starts = _tables(layout)[1]
    kernel = _gathering().measure_found
    constants = (starts, f.chunks, 8 * f.chunk_bytes, f.code_bits, f.grouped, f.uniform)

    def work(begin: int, end: int) -> tuple[int, tuple[np.ndarray[Any, Any], ...]]:
        bad, found = places.find(begin, end)
        if bad < 0:
            # Packed rows lie in the table's words alone.
            bad = int(call(kernel, places.sources[0], 0, *found, *constants))
            bad = bad if bad < 0 else begin + bad
        return bad, found

    n = ids.shape[0]
    results = run_ranges(work, n, f.row_bytes) if n else [(-1, places.find(0, 0)[1])]
    for bad, _ in results:
        if bad >= 0:
            raise CorruptedDataError(f"table: row {places.row(bad)} is damaged")
    source, at, length, _ = (
        torch.from_numpy(np.concatenate(parts))
        for parts in zip(*(found for _, found in results), strict=True)
    )
    return at, length, source


def move_rows(
    source_words: torch.Tensor,
    at: torch.Tensor,
    n_words: torch.Tensor,
    target_words: torch.Tensor,
    target_at: torch.Tensor,
) -> None:
    """Copy runs of words, in parallel.

    Parameters
    ----------
    source_words, target_words : torch.Tensor
        int32, contiguous, in memory of their own.
    at, target_at : torch.Tensor
        int64 ``[n]``: where run i starts in the source and in the target. Runs do not overlap in
        the target.
    n_words : torch.Tensor
        int32 or int64 ``[n]``: words of run i.

    Raises
    ------
    ArgumentError
        When a run is not inside the source or the target; nothing was copied.
    """
    n = at.shape[0]
    outside = _gathering().find_outside
    places = (("at", at, source_words), ("target_at", target_at, target_words))
    for name, starts, words in places:
        bad = int(call(outside, starts.numpy(), n_words.numpy(), words.shape[0]))
        if bad >= 0:
            raise ArgumentError(
                f"{name}: run {bad} starts at word {int(starts[bad])} and has {int(n_words[bad])} "
                f"words, the words there are 0 to {words.shape[0] - 1}"
            )
    kernel = _gathering().move_rows
    arguments = (
        source_words.numpy(),
        at.numpy(),
        n_words.numpy(),
        target_words.numpy(),
        target_at.numpy(),
    )
    bytes_per_run = 4 * int(n_words.sum()) // max(1, n)
    run_ranges(lambda begin, end: call(kernel, *arguments, begin, end), n, bytes_per_run)
