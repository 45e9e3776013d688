"""Items of which several share a packed row, decoded without the rest of their rows.

Where a chunk's payload lies depends on the profile alone. Where its code and its exception lie
depends on how many codes are stored, and how many chunks are exceptions, before it: so of a row all
codes are looked at, but only the wanted chunks are decoded. All codes are needed anyway, to see
that the row is sound: a damaged one is refused just as when the whole of it is decoded.

item_places.py says where rows lie, and what is read of a table. A field (see constants.Field) is
decoded 32 chunks at once, any other profile one chunk after the other. Reads go up to
OVER_READ_BYTES behind a row.
"""

from __future__ import annotations

import numpy as np

from .bits import (
    GROUP,
    ONE,
    SPREADS,
    TWO,
    ZERO,
    bits_of,
    low_bits,
    lowest_bit,
    popcount,
    spread_bits,
)
from .fields import (
    FIELD_BITS,
    FIRST_FIELD_RUN,
    FIRST_RUN,
    FIXED,
    KIND,
    NUMBERS,
    PAYLOAD_BITS,
    SPARE_BYTES,
    SPARE_PAYLOAD_BYTES,
    read_exception,
)
from .groups import decode_group
from .item_places import (
    ALONE,
    BATCH,
    COUNT,
    ITEM_BYTES,
    ITEMS_PER_ROW,
    KEEP_SECTION,
    LEVELS,
    N_ITEMS,
    PLACE_BYTES,
    PLACES,
    POSITIONS,
    ROW,
    SECTIONS,
    SOURCE,
    START,
    STARTS,
    TABLES,
    UNIFORM,
    ask_places,
    find_items,
    item_at,
)
from .jit import njit
from .lookups import (
    CHUNKS,
    CLUSTER_VALUES_BYTES,
    CLUSTERS,
    CODE_BITS,
    EACH,
    FIELDS,
    GROUP_VALUES_BYTES,
    GROUPED,
    ROW_CLUSTERS,
    ROW_WORDS,
    VALUES,
)
from .memory import (
    address_of,
    copy_between,
    load_8,
    load_16,
    load_32,
    load_64,
    load_signed,
    or_chunk,
    stack_memory,
    store_chunk,
    store_signed,
)

# Fewer chunks are decoded one by one, more of them by groups where there is a field.
FEW_CHUNKS = 4
# The lowest bits of codes of 1 to 3 bits, of as many as are looked at together: 32 of the shortest,
# 16 of the others.
LOWEST_OF_1 = np.uint64(0xFFFFFFFF)
LOWEST_OF_2 = np.uint64(0x55555555)
LOWEST_OF_3 = np.uint64(0x249249249249)

# One place more than items have, for the row that was counted last.
places_of_items = stack_memory(PLACE_BYTES * (2 * BATCH + 1))
spare_group = stack_memory(SPARE_BYTES)


@njit(nogil=True, cache=True, forceinline=True)
def has_all_first(group_at, grouped, group):
    """Return whether no code of a group is stored, since all are 1."""
    return grouped and (load_32(group_at + 4 * (group >> 5)) >> (group & 31)) & 1 == 1


@njit(nogil=True, cache=True, forceinline=True)
def zeros_among(codes, code_bits, lowest):
    """Return a word with the lowest bit set of each code that is 0; `lowest` has those of all."""
    used = codes
    if code_bits > 1:
        used |= codes >> ONE
    if code_bits > 2:
        used |= codes >> TWO
    return ~used & lowest


@njit(nogil=True, cache=True, forceinline=True)
def count_zeros(codes_at, chunks, code_bits, at_once, lowest, until, most):
    """Do what `count_exceptions` does; far faster where `code_bits` to `lowest` are constants."""
    total = np.int64(0)
    passed = np.int64(0)
    of_until = ZERO
    last = chunks - at_once
    first = np.int64(0)
    while first <= last:
        zeros = zeros_among(load_64(codes_at), code_bits, lowest)
        passed = total if first <= until else passed
        of_until = zeros if first <= until else of_until
        total += popcount(zeros)
        # Looked at in the loop, which LLVM would else make into a far slower one of vectors.
        if total > most:
            return total, np.int64(-1)
        codes_at += (at_once * code_bits) >> 3
        first += at_once
    if first < chunks:
        stored = (ONE << np.uint64(code_bits * (chunks - first))) - ONE
        zeros = zeros_among(load_64(codes_at), code_bits, lowest) & stored
        passed = total if first <= until else passed
        of_until = zeros if first <= until else of_until
        total += popcount(zeros)
    # The codes that are looked at together begin at multiples of their number.
    before = (ONE << np.uint64(code_bits * (until & (at_once - 1)))) - ONE
    return passed + popcount(of_until & before), total


@njit(nogil=True, cache=True, forceinline=True)
def count_exceptions(codes_at, chunks, code_bits, until, most):
    """Return how many chunks before `until` are exceptions, and how many of all.

    All codes are stored, at an address. When it is more than `most`, the second number may be -1.
    """
    if code_bits == 3:
        return count_zeros(codes_at, chunks, 3, 16, LOWEST_OF_3, until, most)
    if code_bits == 2:
        return count_zeros(codes_at, chunks, 2, 16, LOWEST_OF_2, until, most)
    return count_zeros(codes_at, chunks, 1, 32, LOWEST_OF_1, until, most)


@njit(nogil=True, cache=True)
def look_at_codes(group_at, codes_at, chunks, code_bits, grouped, starts, uniform, width, until):
    """Return the bits of exceptions before chunk `until`, those of all, and where codes go on.

    That is the address of the codes of the group of `until`. `width` is the bits of a chunk, and
    the other arguments are as in `decode_chunks`, `uniform` whether all have as many bits of
    payload as the first. All codes are readable.
    """
    at_once = 32 if code_bits == 1 else 16
    lowest = LOWEST_OF_1
    if code_bits > 1:
        lowest = LOWEST_OF_2 if code_bits == 2 else LOWEST_OF_3
    bits = width - load_32(starts + 4)
    found_at = codes_at
    before = np.int64(0)
    total = np.int64(0)
    for group in range((chunks + 31) >> 5):
        if group == until >> 5:
            found_at = codes_at
        if has_all_first(group_at, grouped, group):
            continue
        first = GROUP * group
        end = min(first + GROUP, chunks)
        while first < end:
            codes = load_64(codes_at + (((first & 31) * code_bits) >> 3))
            zeros = zeros_among(codes, code_bits, lowest)
            zeros &= low_bits(code_bits * min(at_once, end - first))
            while zeros != ZERO:
                chunk = first + lowest_bit(zeros) // code_bits
                zeros &= zeros - ONE
                if not uniform:
                    begin = starts + 4 * chunk
                    bits = width - load_32(begin + 4) + load_32(begin)
                total += bits
                before += bits if chunk < until else np.int64(0)
            first += at_once
        codes_at += 4 * code_bits
    return before, total, found_at


@njit(nogil=True, cache=True, forceinline=True)
def find_exceptions(
    row, most, group_at, chunks, code_bits, grouped, starts, uniform, width, payload_bits, until
):
    """Return a row's words, where exceptions of chunk `until` and on begin, and codes of its group.

    The words are -1 for a damaged row; the others are a bit and a byte of memory. The arguments are
    as in `look_at_codes`.
    """
    groups = (chunks + 31) >> 5
    codes_at = group_at
    stored = groups
    if grouped:
        codes_at += 4 * ((groups + 31) >> 5)
        if codes_at > row + 4 * most:
            return np.int64(-1), np.int64(0), np.int64(0)
        for group in range(groups):
            stored -= np.int64(has_all_first(group_at, grouped, group))
    exceptions = codes_at + 4 * code_bits * stored
    room = 8 * (row + 4 * most - exceptions)
    if room < 0:
        return np.int64(-1), np.int64(0), np.int64(0)
    if uniform and not grouped:
        found_at = codes_at + 4 * code_bits * (until >> 5)
        before, total = count_exceptions(codes_at, chunks, code_bits, until, room)
        before *= width - payload_bits
        total *= width - payload_bits
    else:
        before, total, found_at = look_at_codes(
            group_at, codes_at, chunks, code_bits, grouped, starts, uniform, width, until
        )
    if total < 0 or total > room:
        return np.int64(-1), np.int64(0), np.int64(0)
    need = (8 * (exceptions - row) + total + 31) >> 5
    return need, 8 * exceptions + before, found_at


@njit(nogil=True, cache=True, forceinline=True)
def entry(at, entry_bytes):
    """Return the entry of a profile's table at an address."""
    return load_64(at) if entry_bytes == 8 else np.uint64(load_32(at))


@njit(nogil=True, cache=True, forceinline=True)
def spread(x, mask, steps, step_bytes, levels, entry_bytes):
    """Spread the low bits of `x` over the places of a mask.

    Without an instruction for it, by the steps of a position at an address, as `bits.deposit`.
    """
    if SPREADS:
        return spread_bits(x, mask)
    for back in range(levels):
        level = levels - 1 - back
        move = entry(steps + step_bytes * level, entry_bytes)
        if move != ZERO:
            x = (x & ~move) | ((x << np.uint64(1 << level)) & move)
    return x & mask


@njit(nogil=True, cache=True, forceinline=True)
def decode_chunks(like, table, row, most, cluster, begin, end, target, limit):
    """Decode bytes begin..end of a packed row, one chunk after the other, to an address.

    `row` is the row's address and `most` the words that it has at most; `like` is any number of the
    type of a chunk. What is behind the last byte, up to the address `limit`, may be written to.
    Returns the words of the whole row, or -1 when it is damaged.
    """
    chunk_bytes = bits_of(like) >> 3
    entry_bytes = 8 if chunk_bytes == 8 else 4
    chunks = load_signed(table + 8 * CHUNKS)
    code_bits = load_signed(table + 8 * CODE_BITS)
    grouped = load_signed(table + 8 * GROUPED) != 0
    uniform = load_signed(table + 8 * UNIFORM) != 0
    positions = load_signed(table + 8 * POSITIONS)
    levels = load_signed(table + 8 * LEVELS)
    section_bytes = entry_bytes * positions
    tables = load_signed(table + 8 * TABLES)
    tables += section_bytes * load_signed(table + 8 * SECTIONS) * cluster
    keep = section_bytes * load_signed(table + 8 * KEEP_SECTION)
    starts = load_signed(table + 8 * STARTS) + 4 * (positions + 1) * cluster
    payload_bits = load_32(starts + 4)
    all_bits = payload_bits * chunks if uniform else load_32(starts + 4 * chunks)
    group_at = row + 4 * ((all_bits + 31) >> 5)
    first = begin // chunk_bytes
    width = np.int64(bits_of(like))
    need, bit, at = find_exceptions(
        row, most, group_at, chunks, code_bits, grouped, starts, uniform, width, payload_bits, first
    )
    if need < 0:
        return np.int64(-1)
    chunk = first
    byte = begin
    while byte < end:
        place = np.int64(0)
        payload = payload_bits * chunk
        if not uniform:
            place = entry_bytes * chunk
            payload = load_32(starts + 4 * chunk)
            payload_bits = load_32(starts + 4 * chunk + 4) - payload
        code = np.int64(1)
        if not has_all_first(group_at, grouped, chunk >> 5):
            code_bit = (chunk & 31) * code_bits
            code = (load_16(at + (code_bit >> 3)) >> (code_bit & 7)) & ((1 << code_bits) - 1)
            at += 4 * code_bits if chunk & 31 == 31 else np.int64(0)
        position = tables + place
        mask = entry(position, entry_bytes)
        x = ZERO
        if payload_bits > 0:
            x = read_exception(like, 8 * row + payload)
            x = spread(x, ~mask, position + keep, section_bytes, levels, entry_bytes)
        if code > 0:
            x |= entry(position + section_bytes * code, entry_bytes)
        else:
            e = read_exception(like, bit)
            steps = position + keep + section_bytes * levels
            x |= spread(e, mask, steps, section_bytes, levels, entry_bytes)
            bit += 8 * chunk_bytes - payload_bits
        # A whole chunk is written, which reaches into what is decoded next.
        skip = byte - chunk_bytes * chunk
        size = chunk_bytes - skip
        x >>= np.uint64(8 * skip)
        if target + chunk_bytes <= limit:
            store_chunk(like, target, x)
        else:
            for _ in range(min(size, end - byte)):
                store_chunk(np.uint8(0), target, x)
                x >>= np.uint64(8)
                target += 1
            target -= min(size, end - byte)
        target += size
        byte += size
        chunk += 1
    return need


# Inlined, or LLVM would set up its constants for each call.
@njit(nogil=True, cache=True, forceinline=True)
def decode_groups(like, table, row, most, cluster, begin, end, spare, target):
    """Do what `decode_chunks` does for rows with a field, 32 chunks at once.

    `spare` is the address of SPARE_BYTES bytes to use.
    """
    chunk_bytes = bits_of(like) >> 3
    chunks = load_signed(table + 8 * CHUNKS)
    code_bits = load_signed(table + 8 * CODE_BITS)
    grouped = load_signed(table + 8 * GROUPED) != 0
    each = load_signed(table + 8 * EACH) != 0
    group_values_bytes = load_signed(table + 8 * GROUP_VALUES_BYTES)
    field = load_signed(table + 8 * FIELDS) + 8 * NUMBERS * cluster
    values = load_signed(table + 8 * VALUES)
    values += load_signed(table + 8 * CLUSTER_VALUES_BYTES) * cluster
    positions = load_signed(table + 8 * POSITIONS)
    starts = load_signed(table + 8 * STARTS) + 4 * (positions + 1) * cluster
    payload_bits = load_signed(field + 8 * PAYLOAD_BITS)
    kind = load_signed(field + 8 * KIND)
    fixed = load_signed(field + 8 * FIXED)
    field_bits = load_signed(field + 8 * FIELD_BITS)
    runs = field + 8 * FIRST_RUN
    places = field + 8 * FIRST_FIELD_RUN
    mask_1, shift_1 = load_64(places), load_64(places + 8)
    mask_2, shift_2 = load_64(places + 16), load_64(places + 24)
    mask_3, shift_3 = load_64(places + 32), load_64(places + 40)
    group_at = row + 4 * ((payload_bits * chunks + 31) >> 5)
    group_bytes = GROUP * chunk_bytes
    first = begin // group_bytes
    until = GROUP * first
    width = np.int64(bits_of(like))
    # All positions of a field have as many bits of payload.
    need, exception, at = find_exceptions(
        row, most, group_at, chunks, code_bits, grouped, starts, True, width, payload_bits, until
    )
    if need < 0:
        return np.int64(-1)
    for group in range(first, (end + group_bytes - 1) // group_bytes):
        # Bytes of the group that are wanted.
        low = max(np.int64(0), begin - group_bytes * group)
        high = min(group_bytes, end - group_bytes * group)
        count = min(GROUP, chunks - GROUP * group)
        payload_at = row + 4 * payload_bits * group
        if count < GROUP:
            # What is read for the chunks that are missing remains in bounds.
            copy_between(spare, payload_at, (payload_bits * count + 7) >> 3)
            payload_at = spare
        inside = low == 0 and high == group_bytes
        to = target if inside else spare + SPARE_PAYLOAD_BYTES
        bits = np.int64(0) if has_all_first(group_at, grouped, group) else code_bits
        rest = decode_group(
            like,
            payload_at,
            kind,
            fixed,
            runs,
            field + 8 * PAYLOAD_BITS,
            at,
            bits,
            values + group_values_bytes * group,
            each,
            to,
        )
        at += 4 * bits
        rest &= low_bits(count)
        # Of the exceptions those of other items are passed over.
        skipped = rest & low_bits(low // chunk_bytes)
        following = exception + field_bits * popcount(rest)
        exception += field_bits * popcount(skipped)
        rest &= ~skipped & low_bits((high + chunk_bytes - 1) // chunk_bytes)
        while rest != ZERO:
            x = read_exception(like, exception)
            placed = (x & mask_1) << shift_1
            placed |= ((x & mask_2) << shift_2) | ((x & mask_3) << shift_3)
            or_chunk(like, to + chunk_bytes * lowest_bit(rest), placed)
            exception += field_bits
            rest &= rest - ONE
        exception = following
        if not inside:
            copy_between(target, to + low, high - low)
        target += high - low
    return need


@njit(nogil=True, cache=True)
def decode_items(like, table, ids, begin, end, found, spare, target, limit, counts):
    """Decode items ``ids[begin:end]``, which `find_items` has found, item n to row n of `target`.

    Items that follow one another in a row are decoded together. Until the last item is decoded, all
    up to the address `limit` may be written to. `counts` is int64
    ``[2, MAX_SLABS + 1]``, to which items and words are added, as in `cpu.gather_rows`. Returns the
    position of an item whose row is damaged, or -1.
    """
    n_items = load_signed(table + 8 * N_ITEMS)
    each = load_signed(table + 8 * ITEMS_PER_ROW)
    item_bytes = load_signed(table + 8 * ITEM_BYTES)
    row_words = load_signed(table + 8 * ROW_WORDS)
    row_clusters = load_signed(table + 8 * ROW_CLUSTERS)
    has_field = load_signed(table + 8 * FIELDS) != 0
    few_bytes = FEW_CHUNKS * (bits_of(like) >> 3)
    last = found + PLACE_BYTES * (PLACES + 1)
    n = begin
    while n < end:
        place = found + PLACE_BYTES * (n & PLACES)
        start = load_signed(place + START)
        words_of = load_signed(place + COUNT)
        row = load_signed(place + ROW)
        source = np.uint64(load_signed(place + SOURCE))
        item = item_at(ids, n, n_items)
        to = target + n * item_bytes
        if words_of == ALONE:
            copy_between(to, start, item_bytes)
            counts[ZERO, source] += 1
            counts[ONE, source] += (item_bytes + 3) >> 2
            n += 1
            continue
        if words_of < 0:
            return n
        stop = min(end, n + each - (item - row * each))
        following = n + 1
        while (
            following < stop
            and item_at(ids, following, n_items) - item == following - n
            and load_signed(found + PLACE_BYTES * (following & PLACES) + START) == start
        ):
            following += 1
        first_byte = (item - row * each) * item_bytes
        size = (following - n) * item_bytes
        need = row_words
        if words_of == 0:
            copy_between(to, start + first_byte, size)
        else:
            cluster = np.int64(0)
            if row_clusters != 0:
                cluster = load_8(row_clusters + row)
                if cluster >= load_signed(table + 8 * CLUSTERS):
                    return n
            end_byte = first_byte + size
            if has_field and size > few_bytes:
                need = decode_groups(
                    like, table, start, words_of, cluster, first_byte, end_byte, spare, to
                )
            else:
                need = decode_chunks(
                    like, table, start, words_of, cluster, first_byte, end_byte, to, limit
                )
            if need < 0:
                return n
        counts[ZERO, source] += following - n
        if start != load_signed(last):
            counts[ONE, source] += need
            store_signed(last, start)
        n = following
    return np.int64(-1)


@njit(nogil=True, cache=True)
def gather_items(numbers, like, entries, ids, target, counts, begin, end):
    """Gather items ``ids[begin:end]`` to an address, item 0 of them all.

    `numbers` are ITEM_SIZES numbers, `entries` those of a cache's map, of which there may be none;
    the others are as for `decode_items`. A row is counted once for items that follow one another.
    """
    table = address_of(numbers)
    found = places_of_items()
    spare = spare_group()
    limit = target + end * load_signed(table + 8 * ITEM_BYTES)
    store_signed(found + PLACE_BYTES * (PLACES + 1), np.int64(0))
    # As in `lookups.gather_compact`.
    for first in range(begin - 2 * BATCH, end, BATCH):
        second, third = first + BATCH, first + 2 * BATCH
        ask_places(table, entries, ids, max(begin, third), min(third + BATCH, end))
        find_items(table, entries, ids, max(begin, second), min(third, end), found)
        start, stop = max(begin, first), min(second, end)
        bad = decode_items(like, table, ids, start, stop, found, spare, target, limit, counts)
        if bad >= 0:
            return bad
    return np.int64(-1)
