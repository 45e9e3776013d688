"""Numba loops of fields and streams of codes; see `vector_format`.

``codes`` are int16 ``[n]``, of which ``least`` is symbol 0. ``table`` has of each symbol, uint32,
its code with the first bit lowest, and from bit 16 on its length.
"""

from __future__ import annotations

import numpy as np

from ..vector_format import CODE_LIMIT_BITS, PIECE_CODES
from .jit import njit

LENGTH_AT = np.uint64(16)
CODE_MASK = np.uint64(0xFFFF)
WORD_MASK = np.uint64(0xFFFFFFFF)
WORD = np.uint64(32)
WINDOW_MASK = np.uint64((1 << CODE_LIMIT_BITS) - 1)
#: Of an entry to look codes up: bits of the length, below the symbol.
ENTRY_BITS = np.uint64(4)
ENTRY_MASK = np.uint64(15)


@njit(nogil=True, cache=True)
def count_codes(codes, least, counts, begin, end):
    """Add to ``counts``, int64, how often each symbol stands in begin..end."""
    for i in range(begin, end):
        counts[np.int64(codes[i]) - least] += 1


@njit(nogil=True, cache=True)
def begin_codes(lengths, codes):
    """Write of each length, int64 ``[16]``, the first canonical code; return whether there is one.

    ``lengths`` are uint8, none beyond CODE_LIMIT_BITS, 0 of symbols without a code.
    """
    counts = np.zeros(16, np.int64)
    for length in lengths:
        if length > CODE_LIMIT_BITS:
            return False
        counts[length] += 1
    code, room = np.int64(0), np.int64(0)
    for length in range(1, CODE_LIMIT_BITS + 1):
        codes[length] = code
        code = (code + counts[length]) << 1
        room += counts[length] << (CODE_LIMIT_BITS - length)
    return room <= 1 << CODE_LIMIT_BITS


@njit(nogil=True, cache=True)
def reversed_code(code, length):
    """Return a code with its first bit lowest."""
    found = np.int64(0)
    for _ in range(length):
        found = (found << 1) | (code & 1)
        code >>= 1
    return found


@njit(nogil=True, cache=True)
def fill_table(lengths, table):
    """Write ``table`` of canonical codes of these lengths; return whether they are a code."""
    codes = np.zeros(16, np.int64)
    if not begin_codes(lengths, codes):
        return False
    for symbol in range(len(lengths)):
        length = np.int64(lengths[symbol])
        table[symbol] = length << 16
        if length:
            table[symbol] |= np.uint32(reversed_code(codes[length], length))
            codes[length] += 1
    return True


@njit(nogil=True, cache=True)
def fill_lookup(lengths, lookup):
    """Write ``lookup`` of canonical codes of these lengths; return whether they are a code."""
    codes = np.zeros(16, np.int64)
    if not begin_codes(lengths, codes):
        return False
    lookup[:] = 0
    for symbol in range(len(lengths)):
        length = np.int64(lengths[symbol])
        if length:
            entry = np.uint16((symbol << np.int64(ENTRY_BITS)) | length)
            first = reversed_code(codes[length], length)
            for at in range(first, 1 << CODE_LIMIT_BITS, 1 << length):
                lookup[at] = entry
            codes[length] += 1
    return True


@njit(nogil=True, cache=True)
def measure_pieces(codes, least, table, words, begin, end):
    """Write the words of the pieces begin..end."""
    for piece in range(begin, end):
        bits = np.uint64(0)
        for i in range(piece * PIECE_CODES, min(len(codes), (piece + 1) * PIECE_CODES)):
            bits += np.uint64(table[np.int64(codes[i]) - least]) >> LENGTH_AT
        words[piece] = (bits + np.uint64(31)) >> np.uint64(5)


@njit(nogil=True, cache=True)
def write_pieces(codes, least, table, starts, out, begin, end):
    """Write the pieces begin..end to their words."""
    for piece in range(begin, end):
        at = starts[piece]
        held, bits = np.uint64(0), np.uint64(0)
        for i in range(piece * PIECE_CODES, min(len(codes), (piece + 1) * PIECE_CODES)):
            entry = np.uint64(table[np.int64(codes[i]) - least])
            held |= (entry & CODE_MASK) << bits
            bits += entry >> LENGTH_AT
            if bits >= WORD:
                out[at] = held & WORD_MASK
                at += 1
                held >>= WORD
                bits -= WORD
        if bits:
            out[at] = held & WORD_MASK


@njit(nogil=True, cache=True)
def read_pieces(stream, starts, lookup, symbols, begin, end):
    """Write the symbols of the pieces begin..end; return whether their codes end where they do.

    ``lookup`` has for each CODE_LIMIT_BITS bits, uint16, the symbol and the length of its code, 0
    where there is none.
    """
    sound = True
    for piece in range(begin, end):
        at, last = starts[piece], starts[piece + 1]
        room = np.int64(32) * (last - at)
        held, bits, used = np.uint64(0), np.uint64(0), np.int64(0)
        for i in range(piece * PIECE_CODES, min(len(symbols), (piece + 1) * PIECE_CODES)):
            if bits < WORD:
                if at < last:
                    held |= np.uint64(stream[at]) << bits
                    at += 1
                bits += WORD
            entry = np.uint64(lookup[held & WINDOW_MASK])
            length = entry & ENTRY_MASK
            if length == np.uint64(0):
                sound = False
                break
            symbols[i] = entry >> ENTRY_BITS
            held >>= length
            bits -= length
            used += np.int64(length)
        if used > room or room - used >= 32:
            sound = False
    return sound


@njit(nogil=True, cache=True)
def write_fields(values, least, width, out, begin, end):
    """Write the fields begin..end of ``width`` bits, begin a multiple of 32, to whole words."""
    at = begin * width >> 5
    held, bits = np.uint64(0), np.uint64(0)
    for i in range(begin, end):
        held |= np.uint64(np.int64(values[i]) - least) << bits
        bits += np.uint64(width)
        if bits >= WORD:
            out[at] = held & WORD_MASK
            at += 1
            held >>= WORD
            bits -= WORD
    if bits:
        out[at] = held & WORD_MASK


@njit(nogil=True, cache=True)
def read_fields(words, width, out, begin, end):
    """Read the fields begin..end of ``width`` bits, begin a multiple of 32."""
    at = begin * width >> 5
    held, bits = np.uint64(0), np.uint64(0)
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    for i in range(begin, end):
        if bits < np.uint64(width):
            held |= np.uint64(words[at]) << bits
            at += 1
            bits += WORD
        out[i] = held & mask
        held >>= np.uint64(width)
        bits -= np.uint64(width)


@njit(nogil=True, cache=True)
def values_of_symbols(symbols, values, out, begin, end):
    """Write the value of each of the symbols begin..end; return whether each has one."""
    most = np.int64(0)
    for i in range(begin, end):
        most = max(most, np.int64(symbols[i]))
    if most >= len(values):
        return False
    for i in range(begin, end):
        out[i] = values[symbols[i]]
    return True
