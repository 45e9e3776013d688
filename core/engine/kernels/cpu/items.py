"""Items of which several share a packed row: whole rows are decoded, and the items copied out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..format import (
    MAX_CACHED_ROW_WORDS,
    MAX_SLABS,
    NOT_CACHED,
    OFFSET_SHIFT,
    PAD_WORDS,
    SLAB_SHIFT,
    CacheStorage,
    TableStorage,
)
from .compiling import call
from .constants import unsigned
from .loading import gathering, mapping
from .threads import run_ranges

Array = np.ndarray[Any, Any]

#: Decoded rows that are held at once.
SCRATCH_BYTES = 2 << 20

#: Takes rows int64 ``[m]``, uint8 ``[m, row_bytes]`` to decode them to, and int64 ``[m]``, how many
#: items are wanted of each; returns the number of a damaged row, or -1.
DecodeRows = Callable[[torch.Tensor, torch.Tensor, Array], int]


def gather_items(
    n_items: int,
    items_per_row: int,
    row_bytes: int,
    ids: torch.Tensor,
    out: torch.Tensor,
    decode: DecodeRows,
) -> int:
    """Gather items by id; those in one row that follow one another share its decoding.

    Parameters
    ----------
    n_items, items_per_row : int
        Items of the table and of a row.
    row_bytes : int
        Bytes of a decoded row.
    ids : torch.Tensor
        int32 or int64 ``[n]``, negative ones counted from the end, checked.
    out : torch.Tensor
        uint8 ``[n, item_bytes]``, contiguous.
    decode : callable
        Decodes rows of the table.

    Returns
    -------
    int
        -1, or the number of the first item of a damaged row.
    """
    each, item_bytes = items_per_row, out.shape[1]
    step = max(1, SCRATCH_BYTES // row_bytes)
    numbers = _from_the_start(ids, n_items)
    for begin in range(0, len(numbers), step):
        some = numbers[begin : begin + step]
        rows = some // each
        starts = np.ones(len(rows), bool)
        np.not_equal(rows[1:], rows[:-1], out=starts[1:])
        first = np.flatnonzero(starts)
        wanted, shared = rows[first], np.diff(first, append=len(rows))
        scratch = torch.empty((len(wanted), row_bytes), dtype=torch.uint8)
        bad = decode(torch.from_numpy(wanted), scratch, shared)
        if bad >= 0:
            return bad * each
        at = (np.cumsum(starts) - 1) * row_bytes + (some - rows * each) * item_bytes
        _copy_runs(scratch.numpy(), at, out[begin : begin + step].numpy())
    return -1


def gather_cached_items(
    n_items: int,
    cache: CacheStorage,
    ids: torch.Tensor,
    out: torch.Tensor,
    counters: torch.Tensor | None,
    gather_missing: Callable[[torch.Tensor, torch.Tensor], int],
) -> int:
    """Gather items that a cache holds one by one, and the others from the table.

    Parameters
    ----------
    n_items, ids, out
        As for `gather_items`.
    cache : CacheStorage
        It `holds_items`.
    counters : torch.Tensor or None
        As for `gather_rows`, to which what the slabs give is added.
    gather_missing : callable
        Gathers ids int64 ``[m]`` to uint8 ``[m, item_bytes]``; returns what `gather_items` does.
    """
    numbers, item_bytes = _from_the_start(ids, n_items), out.shape[1]
    locations = np.empty(len(numbers), np.int64)
    entries = cache.entries.numpy()
    call(mapping().map_find, entries, numbers, n_items, locations, 0, len(numbers))
    missing = np.flatnonzero(locations == NOT_CACHED)
    if len(missing):
        rows = torch.empty((len(missing), item_bytes), dtype=torch.uint8)
        bad = gather_missing(torch.from_numpy(numbers[missing]), rows)
        if bad >= 0:
            return bad
        out.numpy()[missing] = rows.numpy()
    bits = locations.view(np.uint64)
    offsets = bits << np.uint64(64 - SLAB_SHIFT) >> np.uint64(64 - SLAB_SHIFT + OFFSET_SHIFT)
    slab_of = _source_of(locations)
    for number, slab in enumerate(cache.slabs):
        here = np.flatnonzero(slab_of == number)
        if not len(here):
            continue
        at = offsets[here].astype(np.int64)
        outside = at > 4 * (slab.numel() - PAD_WORDS) - item_bytes
        if outside.any():
            return int(numbers[here[outside][0]])
        found = np.empty((len(here), item_bytes), np.uint8)
        _copy_runs(unsigned(slab).view(np.uint8).reshape(-1, 1), at, found)
        out.numpy()[here] = found
        if counters is not None:
            counters[number] += len(here)
            words = int((locations[here] & MAX_CACHED_ROW_WORDS).sum())
            counters[MAX_SLABS + 1 + number] += words
    return -1


def count_items(
    counters: torch.Tensor,
    of_rows: torch.Tensor,
    cache: CacheStorage | None,
    rows: torch.Tensor,
    shared: Array,
) -> None:
    """Add what a gather of rows counted, where each row stands for the items wanted of it.

    Parameters
    ----------
    counters, of_rows : torch.Tensor
        As for `gather_rows`: to add to, and of the rows.
    cache : CacheStorage or None
        What the rows were looked for in.
    rows : torch.Tensor
        int64 ``[m]``.
    shared : numpy.ndarray
        int64 ``[m]``, items that are wanted of each.
    """
    counters[MAX_SLABS + 1 :] += of_rows[MAX_SLABS + 1 :]
    if cache is None:
        counters[MAX_SLABS] += int(shared.sum())
        return
    locations = np.empty(len(shared), np.int64)
    call(mapping().map_find, cache.entries.numpy(), rows.numpy(), 0, locations, 0, len(shared))
    items = np.bincount(_source_of(locations), shared, MAX_SLABS + 1).astype(np.int64)
    counters[: MAX_SLABS + 1] += torch.from_numpy(items)


def _source_of(locations: Array) -> Array:
    """Return the slab of each location, MAX_SLABS for what is not cached."""
    slabs = (locations.view(np.uint64) >> np.uint64(SLAB_SHIFT)).astype(np.int64)
    return np.where(locations == NOT_CACHED, MAX_SLABS, slabs)


def without_items(table: TableStorage) -> TableStorage:
    """Return a table whose ids name its rows."""
    return replace(table, items_per_row=1, filler_items=0)


def _from_the_start(ids: torch.Tensor, n_items: int) -> Array:
    """Return ids as int64 from 0 on."""
    numbers = ids.to(torch.int64).numpy()
    return np.where(numbers < 0, numbers + n_items, numbers)


def _copy_runs(source: Array, at: Array, out: Array) -> None:
    """Copy the bytes that start at byte ``at[n]`` of a matrix to ``out[n]``."""
    kernel, count = gathering().copy_rows, out.shape[1]
    # Rows one byte apart, so that an id is an offset; none is negative.
    arguments = (source, 1, count, at, 0, out)
    run_ranges(lambda begin, end: call(kernel, *arguments, begin, end), len(at), count)
