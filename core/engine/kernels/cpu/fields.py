"""Decoding rows whose mask is the same at every position.

Most tensors of numbers are packed so: the mask is the exponent, or a part of it. Same packed row,
same bytes out as `rows.decode_row`, many times as fast: `groups.decode_group` works on 32 chunks at
once, and then the exceptions, which are few, are put in one by one. `constants.Field` says which
rows these are, and builds the arrays that are read here.
"""

from __future__ import annotations

import numpy as np

from .bits import GROUP, ONE, ZERO, bits_of, low_bits, lowest_bit, popcount
from .groups import decode_group
from .jit import njit
from .memory import copy_between, load_32, load_64, load_signed, or_chunk

# Numbers that describe a field, int64 each, by their place: see constants.Field.
PAYLOAD_BITS = 0
KIND = 1
FIXED = 2
FIELD_BITS = 3
FIRST_RUN = 4  # masks and shifts of the payload's runs that move, behind the last a mask of 0
MAX_RUNS = 8
FIRST_FIELD_RUN = FIRST_RUN + 2 * MAX_RUNS + 1  # the same for the field's, 0 where it has fewer
MAX_FIELD_RUNS = 3
NUMBERS = FIRST_FIELD_RUN + 2 * MAX_FIELD_RUNS

# A last group that is short is decoded in memory of its own: room for its payload, then for it.
SPARE_PAYLOAD_BYTES = 320
SPARE_BYTES = SPARE_PAYLOAD_BYTES + 8 * GROUP

WHOLE = np.uint64(64)


@njit(nogil=True, cache=True, forceinline=True)
def read_exception(like, bit):
    """Return what stands at `bit` of memory, the field's bits and more."""
    at = bit >> 3
    shift = np.uint64(bit & 7)
    x = load_64(at) >> shift
    if bits_of(like) == 64:
        # Two shifts, because one by 64 has no meaning.
        x |= (load_64(at + 8) << ONE) << (WHOLE - ONE - shift)
    return x


@njit(nogil=True, cache=True)
def count_words_of_codes(group_at, groups, code_bits, grouped):
    """Return the words of the codes that are stored, for group bits at an address."""
    stored = groups
    if grouped:
        for i in range((groups + 31) >> 5):
            bits = np.uint64(load_32(group_at + 4 * i))
            stored -= popcount(bits & low_bits(min(32, groups - 32 * i)))
    return stored * code_bits


@njit(nogil=True, cache=True, forceinline=True)
def decode_field_row(
    like, row, most, field, values, values_bytes, each, code_bits, grouped, chunks, spare, target
):
    """Rebuild a row that starts at an address and has `most` words at most.

    All but the first of these are addresses or numbers: `like` any number of the type of a chunk,
    `field` NUMBERS numbers, `values` what the codes stand for in the first group, those of the next
    one `values_bytes` behind, with `each` as in `decode_group`, `spare` SPARE_BYTES bytes to use,
    `target` where the row goes. OVER_READ_BYTES behind the words have to be readable.

    Returns the row's words, or -1 when its codes ask for more than `most`.
    """
    payload_bits = load_signed(field + 8 * PAYLOAD_BITS)
    kind = load_signed(field + 8 * KIND)
    fixed = load_signed(field + 8 * FIXED)
    field_bits = load_signed(field + 8 * FIELD_BITS)
    runs = field + 8 * FIRST_RUN
    places = field + 8 * FIRST_FIELD_RUN
    # By name and not in a loop, for which LLVM would set up vectors in every row.
    mask_1, shift_1 = load_64(places), load_64(places + 8)
    mask_2, shift_2 = load_64(places + 16), load_64(places + 24)
    mask_3, shift_3 = load_64(places + 32), load_64(places + 40)
    chunk_bytes = bits_of(like) >> 3
    groups = (chunks + 31) >> 5
    end = row + 4 * most
    group_at = row + 4 * ((payload_bits * chunks + 31) >> 5)
    codes_at = group_at
    if grouped:
        codes_at += 4 * ((groups + 31) >> 5)
        if codes_at > end:
            return np.int64(-1)
    exception_at = codes_at + 4 * count_words_of_codes(group_at, groups, code_bits, grouped)
    if exception_at > end:
        return np.int64(-1)
    exception = 8 * exception_at
    for group in range(groups):
        count = min(GROUP, chunks - GROUP * group)
        payload_at = row + 4 * payload_bits * group
        to = target
        if count < GROUP:
            # Reads and writes for the missing chunks are confined to these buffers.
            copy_between(spare, payload_at, (payload_bits * count + 7) >> 3)
            payload_at = spare
            to = spare + SPARE_PAYLOAD_BYTES
        bits = code_bits
        if grouped:
            word = np.uint64(load_32(group_at + 4 * (group >> 5)))
            if (word >> np.uint64(group & 31)) & ONE == ONE:
                bits = 0
        rest = decode_group(
            like,
            payload_at,
            kind,
            fixed,
            runs,
            field + 8 * PAYLOAD_BITS,
            codes_at,
            bits,
            values,
            each,
            to,
        )
        codes_at += 4 * bits
        rest &= low_bits(count)
        if exception + popcount(rest) * field_bits > 8 * end:
            return np.int64(-1)
        while rest != ZERO:
            x = read_exception(like, exception)
            placed = (x & mask_1) << shift_1
            placed |= ((x & mask_2) << shift_2) | ((x & mask_3) << shift_3)
            or_chunk(like, to + chunk_bytes * lowest_bit(rest), placed)
            exception += field_bits
            rest &= rest - ONE
        if count < GROUP:
            copy_between(target, to, count * chunk_bytes)
        target += GROUP * chunk_bytes
        values += values_bytes
    return (exception + 31 - 8 * row) >> 5
