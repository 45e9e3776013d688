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
    # Equal codes follow each other, and would each wait for the sum of the one before.
    parts = np.zeros((4, len(counts)), np.int64)
    whole = begin + ((end - begin) & ~3)
    for i in range(begin, whole, 4):
        parts[0, np.int64(codes[i]) - least] += 1
        parts[1, np.int64(codes[i + 1]) - least] += 1
        parts[2, np.int64(codes[i + 2]) - least] += 1
        parts[3, np.int64(codes[i + 3]) - least] += 1
    for i in range(whole, end):
        parts[0, np.int64(codes[i]) - least] += 1
    for symbol in range(len(counts)):
        for part in range(4):
            counts[symbol] += parts[part, symbol]


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
def write_piece(codes, least, table, piece, out, at):
    """Write a piece to words from a place on; return the place behind it."""
    held, bits = np.uint64(0), np.uint64(0)
    i, end = piece * PIECE_CODES, min(len(codes), (piece + 1) * PIECE_CODES)
    # Whether a word is full no processor foresees: each is written anew until it is. More codes
    # follow these, so that it is one of the piece.
    while i + 2 < end:
        a = np.uint64(table[np.int64(codes[i]) - least])
        b = np.uint64(table[np.int64(codes[i + 1]) - least])
        length = a >> LENGTH_AT
        held |= ((a & CODE_MASK) | ((b & CODE_MASK) << length)) << bits
        bits += length + (b >> LENGTH_AT)
        out[at] = held & WORD_MASK
        full = bits >> np.uint64(5)  # 0 or 1: two codes have 24 bits at most
        at += np.int64(full)
        held >>= full << np.uint64(5)
        bits &= np.uint64(31)
        i += 2
    while i < end:
        entry = np.uint64(table[np.int64(codes[i]) - least])
        held |= (entry & CODE_MASK) << bits
        bits += entry >> LENGTH_AT
        if bits >= WORD:
            out[at] = held & WORD_MASK
            at += 1
            held >>= WORD
            bits -= WORD
        i += 1
    if bits:
        out[at] = held & WORD_MASK
        at += 1
    return at


@njit(nogil=True, cache=True)
def write_pieces(codes, least, table, starts, out, begin, end):
    """Write the pieces begin..end to their words."""
    for piece in range(begin, end):
        write_piece(codes, least, table, piece, out, starts[piece])


@njit(nogil=True, cache=True)
def write_stream(codes, least, table, sizes, out):
    """Write all pieces one after the other, their words to ``sizes``; return all words."""
    at = 0
    for piece in range((len(codes) + PIECE_CODES - 1) // PIECE_CODES):
        behind = write_piece(codes, least, table, piece, out, at)
        sizes[piece] = behind - at
        at = behind
    return at


@njit(nogil=True, cache=True)
def read_pieces(stream, starts, lookup, values, out, begin, end):
    """Write what the symbols of the pieces begin..end stand for; return whether all are sound.

    ``lookup`` has for each CODE_LIMIT_BITS bits, uint16, the symbol and the length of its code, 0
    where there is none; ``values`` has one of each symbol.
    """
    sound = True
    piece = begin
    # Where a code begins follows from the one before: two pieces at once hide that wait.
    while piece + 2 <= end and (piece + 2) * PIECE_CODES <= len(out):
        if not read_two(stream, starts, lookup, values, out, piece):
            sound = False
        piece += 2
    for last in range(piece, end):
        if not read_piece(stream, starts, lookup, values, out, last):
            sound = False
    return sound


@njit(nogil=True, cache=True)
def ends_in_last_word(first, at, last, bits):
    """Return whether codes read up to a place, with so many bits left, end in a piece's last."""
    room = np.int64(32) * (last - first)
    used = np.int64(32) * (at - first) - np.int64(bits)
    return used <= room and room - used < 32


@njit(nogil=True, cache=True)
def read_piece(stream, starts, lookup, values, out, piece):
    """Write what symbols of a piece stand for; return whether it is sound."""
    at, last = starts[piece], starts[piece + 1]
    held, bits = np.uint64(0), np.uint64(0)
    for i in range(piece * PIECE_CODES, min(len(out), (piece + 1) * PIECE_CODES)):
        if bits < WORD:
            if at < last:
                held |= np.uint64(stream[at]) << bits
            at += 1
            bits += WORD
        entry = np.uint64(lookup[held & WINDOW_MASK])
        length = entry & ENTRY_MASK
        if length == np.uint64(0):
            return False
        out[i] = values[entry >> ENTRY_BITS]
        held >>= length
        bits -= length
    return ends_in_last_word(starts[piece], at, last, bits)


@njit(nogil=True, cache=True)
def read_two(stream, starts, lookup, values, out, piece):
    """Write what symbols of two whole pieces stand for; return whether both are sound."""
    a_at, a_last = starts[piece], starts[piece + 1]
    b_at, b_last = starts[piece + 1], starts[piece + 2]
    of_a = out[piece * PIECE_CODES : (piece + 1) * PIECE_CODES]
    of_b = out[(piece + 1) * PIECE_CODES : (piece + 2) * PIECE_CODES]
    none = np.uint64(0)
    a, b, a_bits, b_bits = none, none, none, none
    for i in range(0, PIECE_CODES, 2):
        if a_bits < WORD:
            if a_at < a_last:
                a |= np.uint64(stream[a_at]) << a_bits
            a_at += 1
            a_bits += WORD
        if b_bits < WORD:
            if b_at < b_last:
                b |= np.uint64(stream[b_at]) << b_bits
            b_at += 1
            b_bits += WORD
        for j in range(i, i + 2):  # 32 bits are two codes and more
            a_entry = np.uint64(lookup[a & WINDOW_MASK])
            b_entry = np.uint64(lookup[b & WINDOW_MASK])
            of_a[j], of_b[j] = values[a_entry >> ENTRY_BITS], values[b_entry >> ENTRY_BITS]
            a_length, b_length = a_entry & ENTRY_MASK, b_entry & ENTRY_MASK
            if a_length == none or b_length == none:
                return False
            a >>= a_length
            b >>= b_length
            a_bits -= a_length
            b_bits -= b_length
    return ends_in_last_word(starts[piece], a_at, a_last, a_bits) and ends_in_last_word(
        starts[piece + 1], b_at, b_last, b_bits
    )


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
    most = symbols.dtype.type(0)
    for i in range(begin, end):
        most = symbols[i] if symbols[i] > most else most
    if most >= len(values):
        return False
    for i in range(begin, end):
        out[i] = values[symbols[i]]
    return True
