"""Where the rows of items lie of which several share a packed row; see item_ranges.py.

As in lookups.py a table comes as an array of addresses and sizes, int64 each: the places of
lookups.py, and behind them those below. Any kind of table with packed rows is served, with a cache
or without one. What `find_items` lets pass lies inside its array, whatever ids, tables and maps may
hold.
"""

from __future__ import annotations

import numpy as np

from ..format import (
    MAX_CACHED_ROW_WORDS,
    MAX_SLABS,
    NOT_CACHED,
    OFFSET_SHIFT,
    PACKED_BIT,
    SLAB_SHIFT,
)
from .bits import ONE, ZERO
from .jit import njit
from .lookups import (
    BASES,
    DAMAGED,
    LENGTH_BYTES,
    LENGTHS,
    MOVED,
    N_ROWS,
    OVERFLOW,
    OVERFLOW_LIMIT,
    ROW_BYTES,
    ROW_CLUSTERS,
    ROW_WORDS,
    SIZES,
    WORDS,
    WORDS_LIMIT,
    find_row,
    find_short_row,
)
from .maps import find_location, prefetch_bucket
from .memory import load_32, load_signed, prefetch_line, prefetch_lines, store_signed

N_ITEMS = SIZES
ITEM_BYTES = SIZES + 1
ITEMS_PER_ROW = SIZES + 2
FLAGS = SIZES + 3  # 0: the table is compact
TABLES = SIZES + 4  # of constants.Constants, sections of POSITIONS entries
POSITIONS = SIZES + 5
SECTIONS = SIZES + 6
STARTS = SIZES + 7  # of constants.Constants, POSITIONS + 1 entries a cluster
UNIFORM = SIZES + 8
KEEP_SECTION = SIZES + 9
LEVELS = SIZES + 10
HOLDS_ITEMS = SIZES + 11  # as CacheStorage.holds_items
SLABS = SIZES + 12
SLAB_LIMITS = SLABS + MAX_SLABS  # words that rows may take of each slab, -1 where there is none
ITEM_SIZES = SLAB_LIMITS + MAX_SLABS

BATCH = 32  # items that take each step together, a power of two
PLACES = 2 * BATCH - 1
PLACE_BYTES = 32
# What is known of an item's row, by its place: where it starts, its words (0 for a raw row, ALONE
# for an item that is cached by itself), its number, and where it comes from: a slab, or MAX_SLABS.
START = 0
COUNT = 8
ROW = 16
SOURCE = 24
ALONE = -2

OFFSET_MASK = (1 << (SLAB_SHIFT - OFFSET_SHIFT)) - 1


@njit(nogil=True, cache=True, forceinline=True)
def item_at(ids, n, n_items):
    """Return the item that an id stands for."""
    item = ids[np.uint64(n)]
    return item + n_items if item < 0 else item


@njit(nogil=True, cache=True, forceinline=True)
def row_of(item, items_per_row, share):
    """Return the row of an item; `share` is 1 / items_per_row, which is many times as fast."""
    row = np.int64(np.float64(item) * share)
    rest = item - row * items_per_row
    return row + (np.int64(1) if rest >= items_per_row else np.int64(0)) - (rest < 0)


@njit(nogil=True, cache=True)
def ask_places(table, entries, ids, begin, end):
    """Ask for what tells where the rows of items ``ids[begin:end]`` lie."""
    n_items = load_signed(table + 8 * N_ITEMS)
    each = load_signed(table + 8 * ITEMS_PER_ROW)
    bases = load_signed(table + 8 * BASES)
    lengths = load_signed(table + 8 * LENGTHS)
    length_bytes = load_signed(table + 8 * LENGTH_BYTES)
    flags = load_signed(table + 8 * FLAGS)
    row_clusters = load_signed(table + 8 * ROW_CLUSTERS)
    holds_items = load_signed(table + 8 * HOLDS_ITEMS) != 0
    share = 1.0 / each
    for n in range(begin, end):
        item = item_at(ids, n, n_items)
        row = row_of(item, each, share)
        if entries.shape[0] > 0:
            prefetch_bucket(entries, item if holds_items else row)
        if flags != 0:
            prefetch_line(flags + 4 * (row >> 5))
        else:
            prefetch_line(bases + 8 * (row >> 5))
            prefetch_line(lengths + length_bytes * (row & ~31))
            prefetch_line(lengths + length_bytes * (row | 31))
        if row_clusters != 0:
            prefetch_line(row_clusters + row)


@njit(nogil=True, cache=True, forceinline=True)
def find_row_in_place(table, row):
    """Do what `lookups.find_row` does for a table in place."""
    row_words = load_signed(table + 8 * ROW_WORDS)
    if row < 0 or row >= load_signed(table + 8 * N_ROWS):
        return np.int64(0), np.int64(DAMAGED)
    place = row * row_words
    words_of = np.int64(0)
    if (load_32(load_signed(table + 8 * FLAGS) + 4 * (row >> 5)) >> (row & 31)) & 1 == 1:
        words_of = row_words - 1
    start = load_signed(table + 8 * WORDS)
    limit = load_signed(table + 8 * WORDS_LIMIT)
    moved = load_signed(table + 8 * MOVED)
    if moved != 0 and (load_32(moved + 4 * (row >> 5)) >> (row & 31)) & 1 == 1:
        if place >= limit:
            return np.int64(0), np.int64(DAMAGED)
        place = load_32(start + 4 * place) * row_words
        start = load_signed(table + 8 * OVERFLOW)
        limit = load_signed(table + 8 * OVERFLOW_LIMIT)
        words_of = np.int64(0)
    if place > limit - (words_of if words_of > 0 else row_words):
        return np.int64(0), np.int64(DAMAGED)
    return start + 4 * place, words_of


@njit(nogil=True, cache=True)
def find_cached(table, location):
    """Return where a location says that a row or an item lies, and its words, as `find_row`."""
    bits = np.uint64(location)
    slab = np.int64(bits >> np.uint64(SLAB_SHIFT))
    offset = np.int64((bits >> np.uint64(OFFSET_SHIFT)) & np.uint64(OFFSET_MASK))
    start = load_signed(table + 8 * (SLABS + slab)) + offset
    limit = load_signed(table + 8 * (SLAB_LIMITS + slab))
    row_words = load_signed(table + 8 * ROW_WORDS)
    if load_signed(table + 8 * HOLDS_ITEMS) != 0:
        inside = offset <= 4 * limit - load_signed(table + 8 * ITEM_BYTES)
        return start, np.int64(ALONE) if inside else np.int64(DAMAGED)
    place = offset >> 2
    if (bits >> np.uint64(PACKED_BIT)) & ONE == ZERO:
        size = ((offset & 3) + load_signed(table + 8 * ROW_BYTES) + 3) >> 2
        return start, np.int64(0) if place <= limit - size else np.int64(DAMAGED)
    words_of = np.int64(bits & np.uint64(MAX_CACHED_ROW_WORDS))
    if words_of == 0:  # not known: as many as a packed row may have
        words_of = min(row_words - 1, limit - place)
    sound = offset & 3 == 0 and 0 < words_of < row_words and place <= limit - words_of
    return start, words_of if sound else np.int64(DAMAGED)


@njit(nogil=True, cache=True)
def find_items(table, entries, ids, begin, end, found):
    """Find the rows of items ``ids[begin:end]`` and ask for their words.

    What is known of item n goes to place ``n & PLACES`` of `found`.
    """
    n_items = load_signed(table + 8 * N_ITEMS)
    each = load_signed(table + 8 * ITEMS_PER_ROW)
    n_rows = load_signed(table + 8 * N_ROWS)
    row_words = load_signed(table + 8 * ROW_WORDS)
    bases = load_signed(table + 8 * BASES)
    lengths = load_signed(table + 8 * LENGTHS)
    words = load_signed(table + 8 * WORDS)
    limit = load_signed(table + 8 * WORDS_LIMIT)
    in_place = load_signed(table + 8 * FLAGS) != 0
    holds_items = load_signed(table + 8 * HOLDS_ITEMS) != 0
    cached = entries.shape[0] > 0
    share = 1.0 / each
    # As in `lookups.ask_words`.
    short = load_signed(table + 8 * LENGTH_BYTES) == 1 and load_signed(table + 8 * MOVED) == 0
    whole = (n_rows & ~31) if short and not in_place else np.int64(0)
    for n in range(begin, end):
        item = item_at(ids, n, n_items)
        row = row_of(item, each, share)
        source = np.int64(MAX_SLABS)
        location = np.int64(NOT_CACHED)
        if cached:
            location = find_location(entries, item if holds_items else row)
        if location != NOT_CACHED:
            source = np.int64(np.uint64(location) >> np.uint64(SLAB_SHIFT))
            start, words_of = find_cached(table, location)
        elif 0 <= row < whole:
            start, words_of = find_short_row(bases, lengths, words, limit, row_words, row)
        elif in_place:
            start, words_of = find_row_in_place(table, row)
        else:
            start, words_of = find_row(table, row)
        place = found + PLACE_BYTES * (n & PLACES)
        store_signed(place + START, start)
        store_signed(place + COUNT, words_of)
        store_signed(place + ROW, row)
        store_signed(place + SOURCE, source)
        if words_of > 0:
            prefetch_lines(start, 4 * words_of)
        elif words_of == 0:
            prefetch_line(start + (item - row * each) * load_signed(table + 8 * ITEM_BYTES))
        elif words_of == ALONE:
            prefetch_line(start)
