"""Numba twins of zvc.cu: the readable definition of zero-value compression.

See `ZvcLayout`. ``x`` is the tensor as unsigned integers ``[units]``, ``words`` the bitmap as
uint32, ``starts`` uint32 ``[blocks]``, ``values`` the buffer from `values_at` on as integers of the
same width. `counts`, int64 ``[blocks]``, are the elements of a block that are not zero, or -1 for
a block of ones that are not stored, or -2 for a block whose bitmap is damaged.
"""

from __future__ import annotations

import numpy as np

from ..blob_format import ALIGN_BYTES, ZVC_ONES
from .jit import njit
from .zero_values import WORD, compress_word, count_ones, expand_word, word_of

ONES, DAMAGED = -1, -2
_ONES_BIT = np.uint32(ZVC_ONES)


@njit(nogil=True, cache=True)
def mark_values(x, block_units, words, counts, begin, end):
    """Write the bitmap of the blocks begin..end, and count their values."""
    for block in range(begin, end):
        first = block * block_units
        last = min(first + block_units, len(x))
        count = 0
        w = first // WORD
        for i in range(first, last - WORD + 1, WORD):
            word = word_of(x, i)
            words[w] = word
            count += count_ones(word)
            w += 1
        rest = first + (last - first) // WORD * WORD
        if rest < last:
            word = np.uint32(0)
            for j in range(last - rest):
                word |= np.uint32(x[rest + j] != 0) << np.uint32(j)
            words[w] = word
            count += count_ones(word)
        if x.itemsize == 1 and count:
            others = 0
            for i in range(first, last):
                others |= x[i] & 0xFE
            if others == 0:
                count = ONES
        counts[block] = count


@njit(nogil=True, cache=True)
def place_blocks(counts, unit_bytes, starts):
    """Write the starts of all blocks; return where the values end, in units of ALIGN_BYTES."""
    at = 0
    for block in range(len(counts)):
        count = counts[block]
        starts[block] = np.uint32(at)
        if count == ONES:
            starts[block] |= _ONES_BIT
            count = 0
        at += (count * unit_bytes + ALIGN_BYTES - 1) // ALIGN_BYTES
    return at


@njit(nogil=True, cache=True)
def check_starts(counts, unit_bytes, starts):
    """Return the first block whose start is not the one that `place_blocks` gives, or -1.

    The second number is where the values end. A start says whether ones are stored.
    """
    at = 0
    for block in range(len(counts)):
        count = counts[block]
        ones = unit_bytes == 1 and starts[block] & _ONES_BIT != 0
        expected = np.uint32(at) | _ONES_BIT if ones else np.uint32(at)
        if count == DAMAGED or starts[block] != expected:
            return block, at
        if not ones:
            at += (count * unit_bytes + ALIGN_BYTES - 1) // ALIGN_BYTES
    return -1, at


@njit(nogil=True, cache=True)
def pack_values(x, block_units, starts, values, begin, end):
    """Write the values of the blocks begin..end, each with the zeros that follow it."""
    # Written in whole words of 32: so not where another thread may write.
    kept = np.empty(block_units + WORD, values.dtype)
    align = ALIGN_BYTES // values.itemsize
    for block in range(begin, end):
        if starts[block] & _ONES_BIT:
            continue
        count = 0
        first = block * block_units
        last = min(first + block_units, len(x))
        rest = first + (last - first) // WORD * WORD
        for i in range(first, rest, WORD):
            count += compress_word(x, i, kept, count)
        for i in range(rest, last):
            kept[count] = x[i]
            count += np.int64(x[i] != 0)
        padded = (count + align - 1) // align * align
        kept[count:padded] = 0
        at = np.int64(starts[block]) * align
        values[at : at + padded] = kept[:padded]


@njit(nogil=True, cache=True)
def count_values(units, block_units, words, counts, begin, end):
    """Count the bits of the bitmap of each of the blocks begin..end."""
    for block in range(begin, end):
        first = block * block_units
        last = min(first + block_units, units)
        count = 0
        for w in range(first // WORD, (last + WORD - 1) // WORD):
            count += count_ones(words[w])
        rest = last % WORD
        if rest and words[last // WORD] >> np.uint32(rest):
            count = DAMAGED  # an element behind the last one
        counts[block] = count


@njit(nogil=True, cache=True)
def unpack_values(words, block_units, starts, values, out, begin, end):
    """Write the elements of the blocks begin..end, whose starts and bitmap were checked."""
    align = ALIGN_BYTES // values.itemsize
    for block in range(begin, end):
        first = block * block_units
        last = min(first + block_units, len(out))
        if starts[block] & _ONES_BIT:
            for i in range(first, last):
                out[i] = (words[i // WORD] >> np.uint32(i % WORD)) & np.uint32(1)
            continue
        at = np.int64(starts[block]) * align
        # A value is read before it is known whether it is needed: up to one behind the block's.
        ahead = at + block_units < len(values)
        for i in range(first, last, WORD):
            word = words[i // WORD]
            if ahead and i + WORD <= last:
                at += expand_word(word, values, at, out, i)
            else:
                for j in range(min(WORD, last - i)):
                    if (word >> np.uint32(j)) & np.uint32(1):
                        out[i + j] = values[at]
                        at += 1
                    else:
                        out[i + j] = 0
