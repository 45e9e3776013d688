"""Decoding rows whose mask is one short field, the same everywhere, and whose codes have 3 bits.

Most tensors of floats are packed so: the field is the exponent. Same packed row, same bytes out as
`rows.decode_row`, several times as fast: a row is worked on in a few loops over all of its chunks,
which LLVM turns into SIMD. For that the loops keep to the rules in bits.py. Where the field is the
exponent of float32 or bfloat16, the payload of a chunk is whole bytes, and shifts are constants.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from ...dtypes import EXPONENT_FIELDS
from .bits import ONE, TWO, WORD, ZERO, low_bits, lowest_bit, read_short, width_of
from .rows import count_stored_groups, is_all_first

BITS = 3  # of a code
THREE = np.uint64(3)
EIGHT = np.uint64(8)
ALL_FIRST = np.uint64(0o11111111)  # eight codes 1
# The steps that spread eight codes of 3 bits over eight bytes: of each run of codes the lower half
# stays, and the upper half moves up.
STAY_4, MOVE_4 = np.uint64(0x0000000000000FFF), np.uint64(0x00000FFF00000000)
STAY_2, MOVE_2 = np.uint64(0x0000003F0000003F), np.uint64(0x003F0000003F0000)
STAY_1, MOVE_1 = np.uint64(0x0007000700070007), np.uint64(0x0700070007000700)
# A byte of at most 7 plus this has its highest bit set, unless the byte is 0.
NOT_ZERO = np.uint64(0x7F7F7F7F7F7F7F7F)

# A chunk without its exponent has the fraction in its low bits, and above it the sign.
LOW_4 = np.uint64(EXPONENT_FIELDS[torch.float32][0])
LOW_2 = np.uint64(EXPONENT_FIELDS[torch.bfloat16][0])
FRACTION_4, SIGN_4 = (ONE << LOW_4) - ONE, ONE << LOW_4
FRACTION_2, SIGN_2 = (ONE << LOW_2) - ONE, ONE << LOW_2


@njit(nogil=True, inline="always")
def read_eights(words, at, group, eights):
    """Copy the 32 codes at word `at` to ``eights[4 * group:]``, eight in the low bits of each."""
    i = np.uint64(at)
    j = np.uint64(group) << TWO
    low = np.uint64(words[i]) | (np.uint64(words[i + ONE]) << WORD)
    high = np.uint64(words[i + TWO])
    # What stands above the 24 bits is dropped when they are spread.
    eights[j] = low
    eights[j + ONE] = low >> np.uint64(24)
    eights[j + TWO] = (low >> np.uint64(48)) | (high << np.uint64(16))
    eights[j + THREE] = high >> EIGHT


@njit(nogil=True, inline="always")
def spread_eights(eights, count):
    """Spread the codes in the low 24 bits of each word, one a byte."""
    for i in range(count):
        x = eights[np.uint64(i)]
        x = (x & STAY_4) | ((x << np.uint64(20)) & MOVE_4)
        x = (x & STAY_2) | ((x << np.uint64(10)) & MOVE_2)
        eights[np.uint64(i)] = (x & STAY_1) | ((x << np.uint64(5)) & MOVE_1)


@njit(nogil=True, inline="always")
def choose_values(codes, values, count):
    """Replace each code by its value, 0 for code 0; comparing is faster than looking up."""
    zero = np.uint8(0)
    of_1, of_2, of_3 = values[1], values[2], values[3]
    of_4, of_5, of_6, of_7 = values[4], values[5], values[6], values[7]
    for j in range(count):
        code = codes[np.uint64(j)]
        value = of_1 if code == 1 else zero
        value |= of_2 if code == 2 else zero
        value |= of_3 if code == 3 else zero
        value |= of_4 if code == 4 else zero
        value |= of_5 if code == 5 else zero
        value |= of_6 if code == 6 else zero
        value |= of_7 if code == 7 else zero
        codes[np.uint64(j)] = value


@njit(nogil=True, inline="always")
def read_threes(words, word_bytes, at, out):
    """Copy the payload of 3 bytes a chunk, which starts at word `at`, to the low bits of `out`."""
    fours = out.shape[0] >> 2  # of chunks, three words each
    for q in range(fours):
        i = np.uint64(at + 3 * q)
        j = np.uint64(4 * q)
        a = np.uint64(words[i])
        b = np.uint64(words[i + ONE])
        c = np.uint64(words[i + TWO])
        out[j] = a & np.uint64(0xFFFFFF)
        out[j + ONE] = (a >> np.uint64(24)) | ((b & np.uint64(0xFFFF)) << EIGHT)
        out[j + TWO] = (b >> np.uint64(16)) | ((c & np.uint64(0xFF)) << np.uint64(16))
        out[j + THREE] = c >> EIGHT
    for j in range(4 * fours, out.shape[0]):
        i = np.uint64(4 * at + 3 * j)
        x = np.uint64(word_bytes[i]) | (np.uint64(word_bytes[i + ONE]) << EIGHT)
        out[np.uint64(j)] = x | (np.uint64(word_bytes[i + TWO]) << np.uint64(16))


@njit(nogil=True, inline="always")
def join_bytes(words, word_bytes, at, values, out):
    """Do what `join_parts` does for the exponents of float32 and bfloat16."""
    chunks = out.shape[0]
    if width_of(out) == 32:
        read_threes(words, word_bytes, at, out)
        for j in range(chunks):
            x = np.uint64(out[np.uint64(j)])
            x = (x & FRACTION_4) | ((x & SIGN_4) << EIGHT)
            out[np.uint64(j)] = x | (np.uint64(values[np.uint64(j)]) << LOW_4)
    else:
        first = np.uint64(at) << TWO
        for j in range(chunks):
            x = np.uint64(word_bytes[first + np.uint64(j)])
            x = (x & FRACTION_2) | ((x & SIGN_2) << EIGHT)
            out[np.uint64(j)] = x | (np.uint64(values[np.uint64(j)]) << LOW_2)


@njit(nogil=True, inline="always")
def join_parts(words, at, values, low, width, out):
    """Write each chunk from its payload, which starts at word `at`, and the value of its field."""
    payload_bits = width_of(out) - width
    mask = low_bits(payload_bits)
    below = low_bits(low)
    to_field = np.uint64(low)
    over_field = np.uint64(width)
    for j in range(out.shape[0]):
        x = read_short(words, 32 * at + payload_bits * j) & mask
        x = (x & below) | ((x & ~below) << over_field)
        out[np.uint64(j)] = x | (np.uint64(values[np.uint64(j)]) << to_field)


@njit(nogil=True, cache=True)
def decode_field_row(
    words, word_bytes, at, most, values, low, width, grouped, eights, misses, codes, out
):
    """Rebuild a row that starts at word `at` and has `most` words at most.

    ``values`` are those of the field by code, in place of bit 0; the field's lowest bit is `low`.
    ``eights`` has 4 entries a group, `codes` is the same memory as bytes, ``misses`` has as many
    entries as ``eights``. `word_bytes` is the memory of `words` as bytes.

    Returns the row's words, or -1 when its codes ask for more than `most`.
    """
    chunks = out.shape[0]
    groups = (chunks + 31) >> 5
    group_at = at + (((width_of(out) - width) * chunks + 31) >> 5)
    code_at = group_at
    end = at + most
    stored = groups
    if grouped:
        code_at += (groups + 31) >> 5
        if code_at > end:
            return np.int64(-1)
        stored = count_stored_groups(words, group_at, groups)
    if code_at + stored * BITS > end:
        return np.int64(-1)
    for group in range(groups):
        if grouped and is_all_first(words, group_at, group):
            for j in range(4 * group, 4 * group + 4):
                eights[np.uint64(j)] = ALL_FIRST
        else:
            read_eights(words, code_at, group, eights)
            code_at += BITS
    count = 4 * groups
    spread_eights(eights, count)
    for i in range(count):
        misses[np.uint64(i)] = ~(eights[np.uint64(i)] + NOT_ZERO) & ~NOT_ZERO
    choose_values(codes, values, chunks)
    if (width_of(out) == 32 and low == LOW_4 and width == 8) or (
        width_of(out) == 16 and low == LOW_2 and width == 8
    ):
        join_bytes(words, word_bytes, at, codes, out)
    else:
        join_parts(words, at, codes, low, width, out)
    exception = 32 * code_at
    for i in range(count):
        rest = misses[np.uint64(i)]
        while rest != ZERO:
            j = 8 * i + (lowest_bit(rest) >> 3)
            rest &= rest - ONE
            if j >= chunks:
                break
            if exception > 32 * end - width:
                return np.int64(-1)
            x = read_short(words, exception) & low_bits(width)
            out[np.uint64(j)] = np.uint64(out[np.uint64(j)]) | (x << np.uint64(low))
            exception += width
    return ((exception + 31) >> 5) - at
