"""The kernels on the CPU: Numba functions over torch tensors in ordinary memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ....errors import ArgumentError, CorruptedDataError
from ..format import (
    MAX_SLABS,
    PAD_WORDS,
    CacheStorage,
    RowLayout,
    RowStorage,
    TableStorage,
    read_together,
)
from .blobs import decode_zvc as decode_zvc
from .blobs import encode_zvc as encode_zvc
from .compiling import call
from .constants import chunks_of, constants_of, unsigned
from .items import PreparedItems
from .loading import encoding_shorts, gathering, mapping, packing
from .packed_linear import prepare_linear as prepare_linear
from .planning import agreed_masks as agreed_masks
from .planning import count_bits as count_bits
from .planning import frequent_values as frequent_values
from .planning import plan_memory as plan_memory
from .planning import sizes_by_option as sizes_by_option
from .prepared import PreparedTable
from .rewrites import rewrite_rows as rewrite_rows
from .row_finder import HOST_SOURCES, NO_IDS, RowFinder, decode_found_rows
from .sparse import count_zeros as count_zeros
from .sparse import decode_csr as decode_csr
from .sparse import decode_rle as decode_rle
from .sparse import decode_zfp as decode_zfp
from .sparse import encode_csr as encode_csr
from .sparse import encode_rle as encode_rle
from .sparse import encode_zfp as encode_zfp
from .threads import run_ranges
from .tiles import decode_tiles as decode_tiles
from .tiles import encode_tiles as encode_tiles
from .tiles import measure_tiles as measure_tiles


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
    kernel = packing().packed_words
    chunks = chunks_of(rows, f.chunk_bytes)
    # Kernels know one dtype of lengths: each further one is compiled again for every chunk width.
    wide, clusters_out = np.empty(rows.shape[0], np.uint32), row_clusters.numpy()
    if encoding_shorts().serves(layout):
        short = encoding_shorts().tables_of(layout)
        codes = (short.codes, short.mask, short.values, short.together)
        sizes = (short.payload_bits, short.masked_bits, f.code_bits, f.row_words)
        measured = (chunks, *codes, *sizes, wide)
        measure = encoding_shorts().measure_rows
        run_ranges(lambda begin, end: call(measure, *measured, begin, end), len(rows), f.row_bytes)
        unsigned(lengths)[:] = wide
        return lengths, row_clusters
    constants = constants_of(layout)

    def work(begin: int, end: int) -> None:
        call(
            kernel,
            chunks,
            constants.tables,
            constants.starts,
            f.code_bits,
            f.grouped,
            f.uniform,
            f.row_words,
            wide,
            clusters_out,
            begin,
            end,
        )

    run_ranges(work, rows.shape[0], f.row_bytes * f.clusters)
    unsigned(lengths)[:] = wide
    return lengths, row_clusters


def encode_rows(
    rows: torch.Tensor,
    layout: RowLayout,
    lengths: torch.Tensor,
    row_clusters: torch.Tensor,
    bases: torch.Tensor,
    n_words: int,
) -> torch.Tensor:
    """Pack rows whose offsets are known.

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
    kernel = packing().encode_rows
    constants = constants_of(layout)
    chunks = chunks_of(rows, f.chunk_bytes)
    words_out, wide = unsigned(words), unsigned(lengths).astype(np.uint32)
    if encoding_shorts().serves(layout):
        short = encoding_shorts().tables_of(layout)
        written = (
            chunks,
            rows.numpy(),
            short.codes,
            short.payload,
            short.masked,
            short.mask,
            short.values,
            short.runs,
            short.together,
            short.payload_bits,
            short.masked_bits,
            f.code_bits,
            f.row_words,
            wide,
            bases.numpy(),
            words_out,
            words_out.view(np.uint8),
        )
        write = encoding_shorts().write_rows
        run_ranges(lambda begin, end: call(write, *written, begin, end), len(rows), f.row_bytes)
        return words
    arguments = (
        chunks,
        rows.numpy(),
        constants.tables,
        constants.starts,
        f.code_bits,
        f.grouped,
        f.uniform,
        f.row_words,
        f.keep_section,
        f.levels,
        wide,
        row_clusters.numpy(),
        bases.numpy(),
        words_out,
        words_out.view(np.uint8),
    )
    run_ranges(lambda begin, end: call(kernel, *arguments, begin, end), rows.shape[0], f.row_bytes)
    return words


def check_rows(storage: RowStorage, layout: RowLayout, ids: torch.Tensor | None = None) -> int:
    """Return the first row that is damaged, or -1.

    Parameters
    ----------
    storage : RowStorage
        Packed rows; their words may be damaged in any way, the other tensors too.
    layout : RowLayout
        On the same device.
    ids : torch.Tensor, optional
        int64 rows to look at, in range; all rows when left out.
    """
    n = storage.lengths.shape[0] if ids is None else ids.shape[0]
    return _check_range(storage, layout, ids, 0, n)


def _check_range(
    storage: RowStorage, layout: RowLayout, ids: torch.Tensor | None, first: int, count: int
) -> int:
    if count == 0:
        return -1
    f = layout.format
    kernel = packing().check_rows
    arguments = (
        unsigned(storage.words),
        storage.bases.numpy(),
        unsigned(storage.lengths),
        storage.row_clusters.numpy(),
        constants_of(layout).starts,
        f.chunks,
        8 * f.chunk_bytes,
        f.code_bits,
        f.grouped,
        f.uniform,
        f.row_words,
        NO_IDS if ids is None else ids.numpy(),
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
        int64 ``[n]`` rows to decode, negative ones counted from the end, in range;
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
    finder = RowFinder(table, f, ids, row_begin)
    bad, _ = decode_found_rows(finder, layout, out)
    return bad if bad < 0 else finder.row(bad)


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
        int32 or int64 ``[n]``, contiguous, negative ones counted from the end, in range.
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
    kernel = gathering().copy_rows
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
        int32 or int64 ``[n]``, not negative. Of equal ones the last is kept.
    locations : torch.Tensor
        int64 ``[n]``.

    Returns
    -------
    int
        How many ids found no free entry, or were negative; they are not in the map.
    """
    return int(call(mapping().map_insert, entries.numpy(), ids.numpy(), locations.numpy()))


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
    kernel = mapping().map_find
    locations = torch.empty(ids.shape[0], dtype=torch.int64)
    arguments = (entries.numpy(), ids.numpy(), 0, locations.numpy())
    run_ranges(lambda begin, end: call(kernel, *arguments, begin, end), ids.shape[0], 128)
    return locations


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
        On the CPU: of the packed rows of the table or, where that is raw, of the cache.
    ids : torch.Tensor
        int32 or int64 ``[n]`` items, negative ones counted from the end, in range.
    out : torch.Tensor
        uint8 ``[n, item_bytes]``, contiguous.
    cache : CacheStorage, optional
        Rows that its map holds are decoded from its slabs.
    counters : torch.Tensor, optional
        int64 ``[2 * (MAX_SLABS + 1)]``, added to: rows from each slab, rows from the table, words
        of the rows from each slab (packed, or row_words), words of those from the table. A row
        counts once for each item that is wanted of it, its words as often as they are read.
    first_bad : torch.Tensor, optional
        int64 ``[1]``; nothing is gathered unless it is -1.
    order, sm_budget
        For the launch on a GPU; not needed here.

    Returns
    -------
    int
        -1, or the number of the first item of a damaged row; then what `out` holds is undefined.
    """
    n = out.shape[0]
    if n == 0 or (first_bad is not None and int(first_bad) != -1):
        return -1
    if table.items_per_row > 1:
        bad, _ = PreparedItems(table, layout).gather(ids, out, cache=cache, counters=counters)
        return bad
    if cache is None and PreparedTable.serves(table, layout):
        bad, words = PreparedTable(table, layout).gather(ids, out)
        if counters is not None and bad < 0:
            counters[MAX_SLABS] += n
            counters[2 * MAX_SLABS + 1] += words
        return bad
    table = read_together(table, cache)
    f = layout.format
    finder = RowFinder(table, f, ids, cache=cache)
    bad, counts = decode_found_rows(finder, layout, out)
    if bad >= 0:
        return finder.row(bad)
    if counters is not None:
        by_place = counters.numpy().reshape(2, MAX_SLABS + 1)
        by_place[:, :MAX_SLABS] += counts[HOST_SOURCES:].T
        by_place[:, MAX_SLABS] += counts[:HOST_SOURCES].sum(0)
    return -1


def locate_rows(
    table: TableStorage, layout: RowLayout, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the exact locations of a table's rows, to copy them with `move_rows`.

    Parameters
    ----------
    table : TableStorage
        On the CPU, compact or in place.
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
    finder = RowFinder(table, f, ids)
    starts = constants_of(layout).starts
    kernel = gathering().measure_found
    constants = (starts, f.chunks, 8 * f.chunk_bytes, f.code_bits, f.grouped, f.uniform)

    def work(begin: int, end: int) -> tuple[int, tuple[np.ndarray[Any, Any], ...]]:
        bad, found = finder.find(begin, end)
        if bad < 0:
            # Packed rows lie in the table's words alone.
            bad = int(call(kernel, finder.sources[0], 0, *found, *constants))
            bad = bad if bad < 0 else begin + bad
        return bad, found

    n = ids.shape[0]
    results = run_ranges(work, n, f.row_bytes) if n else [(-1, finder.find(0, 0)[1])]
    for bad, _ in results:
        if bad >= 0:
            raise CorruptedDataError(f"table: row {finder.row(bad)} is damaged")
    source, at, length, _ = (
        torch.from_numpy(np.concatenate(parts))
        for parts in zip(*(found for _, found in results), strict=True)
    )
    return at >> 2, length, source


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
    outside = gathering().find_outside
    places = (("at", at, source_words), ("target_at", target_at, target_words))
    for name, starts, words in places:
        bad = int(call(outside, starts.numpy(), n_words.numpy(), words.shape[0]))
        if bad >= 0:
            raise ArgumentError(
                f"{name}: run {bad} starts at word {int(starts[bad])} and has {int(n_words[bad])} "
                f"words, the words there are 0 to {words.shape[0] - 1}"
            )
    kernel = gathering().move_rows
    arguments = (
        source_words.numpy(),
        at.numpy(),
        n_words.numpy(),
        target_words.numpy(),
        target_at.numpy(),
    )
    bytes_per_run = 4 * int(n_words.sum()) // max(1, n)
    run_ranges(lambda begin, end: call(kernel, *arguments, begin, end), n, bytes_per_run)
