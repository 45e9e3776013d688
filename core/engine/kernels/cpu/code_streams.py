"""Numba loops of fields and streams of codes; see `vector_format`.

``codes`` are int16 ``[n]``, of which ``least`` is symbol 0. ``table`` has of each symbol, uint32,
its code with the first bit lowest, and from bit 16 on its length.

Words are taken from a stream by the same lines in each loop: as a function of their own, inlined or
not, reading took 1.3 to 1.8 times as long (1.7 to 8 bits a code).
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
#: Bits in which several codes are looked up at once, how many at the most, and the bits of one of
#: their symbols; then come their number and their bits.
JOINT_BITS, JOINT_CODES, SYMBOL_BITS = 10, 4, np.uint64(10)
JOINT_COUNT_AT, JOINT_LENGTH_AT = np.uint64(40), np.uint64(48)
JOINT_MASK, SYMBOL_MASK = np.uint64((1 << JOINT_BITS) - 1), np.uint64(1023)
COUNT_MASK, ONE_CODE = np.uint64(7), np.uint64(1 << 40)
#: Bits of a code up to which that is faster, on the average, and pieces from which its table pays.
SHORT_CODES, JOINT_PIECES = 4, 8


@njit(nogil=True, cache=True)
def count_codes(codes, least, counts, begin, end):
    """Add to ``counts``, int64, how often each symbol stands in begin..end."""
    # Equal codes follow each other, and would each wait for the sum of the one before.
    symbols, low = np.uint64(len(counts)), np.int64(least)
    two, three = symbols + symbols, symbols + symbols + symbols
    parts = np.zeros(4 * len(counts), np.int64)
    whole = begin + ((end - begin) & ~3)
    # Unsigned places: of signed ones Numba asks whether they count from the end.
    for i in range(begin, whole, 4):
        parts[np.uint64(np.int64(codes[i]) - low)] += 1
        parts[np.uint64(np.int64(codes[i + 1]) - low) + symbols] += 1
        parts[np.uint64(np.int64(codes[i + 2]) - low) + two] += 1
        parts[np.uint64(np.int64(codes[i + 3]) - low) + three] += 1
    for i in range(whole, end):
        parts[np.uint64(np.int64(codes[i]) - low)] += 1
    for symbol in range(len(counts)):
        for part in range(4):
            counts[symbol] += parts[part * len(counts) + symbol]


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
    low = np.int64(least)
    part = codes[piece * PIECE_CODES : min(len(codes), (piece + 1) * PIECE_CODES)]
    # Two codes have 24 bits at most: one look for both at whether a word is full.
    for i in range(0, len(part) & ~1, 2):
        a = np.uint64(table[np.uint64(np.int64(part[i]) - low)])
        b = np.uint64(table[np.uint64(np.int64(part[i + 1]) - low)])
        length = a >> LENGTH_AT
        held |= ((a & CODE_MASK) | ((b & CODE_MASK) << length)) << bits
        bits += length + (b >> LENGTH_AT)
        if bits >= WORD:
            out[at] = held & WORD_MASK
            at += 1
            held >>= WORD
            bits -= WORD
    if len(part) & 1:
        entry = np.uint64(table[np.uint64(np.int64(part[len(part) - 1]) - low)])
        held |= (entry & CODE_MASK) << bits
        bits += entry >> LENGTH_AT
        if bits >= WORD:
            out[at] = held & WORD_MASK
            at += 1
            held >>= WORD
            bits -= WORD
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
def fill_joint(lookup, joint):
    """Write what several codes together stand for to ``joint``, uint64 ``[1 << JOINT_BITS]``.

    Of each JOINT_BITS bits: from bit 0 on JOINT_CODES symbols of 10 bits, then how many codes are
    whole in them, then the bits of these. 0 codes: the first is longer, or there is none.
    """
    for window in range(1 << JOINT_BITS):
        bits, entry, codes = np.uint64(0), np.uint64(0), np.uint64(0)
        while codes < np.uint64(JOINT_CODES):
            one = np.uint64(lookup[np.uint64(window) >> bits])
            length = one & ENTRY_MASK
            if length == np.uint64(0) or bits + length > np.uint64(JOINT_BITS):
                break
            entry |= (one >> ENTRY_BITS) << (codes * SYMBOL_BITS)
            bits += length
            codes += np.uint64(1)
        joint[window] = entry | codes << JOINT_COUNT_AT | bits << JOINT_LENGTH_AT


@njit(nogil=True, cache=True)
def read_pieces(stream, starts, lookup, values, out, begin, end):
    """Write what the symbols of the pieces begin..end stand for; return whether all are sound.

    ``lookup`` has for each CODE_LIMIT_BITS bits, uint16, the symbol and the length of its code, 0
    where there is none; ``values`` has one of each symbol.
    """
    sound = True
    piece = begin
    # Where codes are short, several are looked up at once; that takes a table of its own.
    short = SHORT_CODES * (end - begin) * PIECE_CODES >= 32 * (starts[end] - starts[begin])
    joint = np.empty(1 << JOINT_BITS if short and end - begin >= JOINT_PIECES else 0, np.uint64)
    if len(joint):
        fill_joint(lookup, joint)
    # Where a code begins follows from the one before: two pieces at once hide that wait.
    while piece + 2 <= end and (piece + 2) * PIECE_CODES <= len(out):
        if len(joint):
            if not read_two_jointly(stream, starts, lookup, joint, values, out, piece):
                sound = False
        elif not read_two(stream, starts, lookup, values, out, piece):
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
    part = out[piece * PIECE_CODES : min(len(out), (piece + 1) * PIECE_CODES)]
    at, none = starts[piece], np.uint64(0)
    return read_rest(stream, at, at, starts[piece + 1], none, none, lookup, values, part, 0)


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
def read_two_jointly(stream, starts, lookup, joint, values, out, piece):
    """Do what `read_two` does, several codes at once; see `fill_joint`."""
    a_at, a_last = starts[piece], starts[piece + 1]
    b_at, b_last = starts[piece + 1], starts[piece + 2]
    of_a = out[piece * PIECE_CODES : (piece + 1) * PIECE_CODES]
    of_b = out[(piece + 1) * PIECE_CODES : (piece + 2) * PIECE_CODES]
    none = np.uint64(0)
    a, b, a_bits, b_bits = none, none, none, none
    i = j = np.uint64(0)
    # JOINT_CODES values are written, of which the next ones take the place of those that are none.
    most = np.uint64(PIECE_CODES - JOINT_CODES)
    while i <= most and j <= most:
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
        for _ in range(2):
            if i > most or j > most:
                break
            entry, other = joint[a & JOINT_MASK], joint[b & JOINT_MASK]
            if entry < ONE_CODE:
                entry = alone(lookup, a)
            if other < ONE_CODE:
                other = alone(lookup, b)
            if entry == none or other == none:
                return False
            for k in range(JOINT_CODES):
                at = np.uint64(k) * SYMBOL_BITS
                of_a[i + np.uint64(k)] = values[(entry >> at) & SYMBOL_MASK]
                of_b[j + np.uint64(k)] = values[(other >> at) & SYMBOL_MASK]
            i += (entry >> JOINT_COUNT_AT) & COUNT_MASK
            j += (other >> JOINT_COUNT_AT) & COUNT_MASK
            a >>= entry >> JOINT_LENGTH_AT
            b >>= other >> JOINT_LENGTH_AT
            a_bits -= entry >> JOINT_LENGTH_AT
            b_bits -= other >> JOINT_LENGTH_AT
    return read_rest(
        stream, starts[piece], a_at, a_last, a, a_bits, lookup, values, of_a, i
    ) and read_rest(stream, starts[piece + 1], b_at, b_last, b, b_bits, lookup, values, of_b, j)


@njit(nogil=True, cache=True)
def alone(lookup, held):
    """Return the next code as an entry of `fill_joint`; 0 where there is none."""
    entry = np.uint64(lookup[held & WINDOW_MASK])
    length = entry & ENTRY_MASK
    if length == np.uint64(0):
        return np.uint64(0)
    return entry >> ENTRY_BITS | ONE_CODE | length << JOINT_LENGTH_AT


@njit(nogil=True, cache=True)
def read_rest(stream, first, at, last, held, bits, lookup, values, out, done):
    """Write what symbols of a piece stand for behind those that are done; return as `read_piece`.

    ``at`` is the next word, ``held`` the bits before it, so many.
    """
    for i in range(done, len(out)):
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
    return ends_in_last_word(first, at, last, bits)


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
