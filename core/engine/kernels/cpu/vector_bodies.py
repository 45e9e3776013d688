"""Numba loops that write the sections of a body of rows; see `vector_format`.

Sections are words one after the other, from the first of ``out`` on. What is written depends on
what is smaller, so that one call decides and writes: a small message is a few calls.
"""

from __future__ import annotations

import numpy as np

from ..vector_format import (
    BODY_HEADER_BYTES,
    BYTE_SYMBOLS,
    CODE_HEADER_BYTES,
    CODE_LIMIT_BITS,
    LENGTH_BITS,
    MOST_SYMBOLS,
    NO_CODE,
    PIECE_CODES,
    References,
    RowCoding,
)
from .code_streams import count_codes, fill_table, write_fields, write_stream
from .jit import njit
from .package_merge import lengths_of_code
from .vectors import find_references, hash_rows, quantise

INDEX, WINDOW, CODED = (
    int(each) for each in (References.INDEX, References.WINDOW, References.CODED)
)
FIXED, HUFFMAN = int(RowCoding.FIXED), int(RowCoding.HUFFMAN)
RAW, SPLIT = int(RowCoding.RAW), int(RowCoding.SPLIT)
#: What `put_bounded` returns in place of bytes.
NO_SHORTER, NO_CODES = -1, -2


@njit(nogil=True, cache=True)
def words_of_bits(bits):
    """Return the words of so many bits."""
    return (bits + 31) >> 5


@njit(nogil=True, cache=True)
def bits_of(numbers):
    """Return the bits of a field that has so many numbers, from 0."""
    bits = 0
    while (1 << bits) < numbers:
        bits += 1
    return bits


@njit(nogil=True, cache=True)
def words_of_stream(codes, symbols, bits):
    """Return the words of book and stream, about: as `vector_format.stream_words` does."""
    pieces = (codes + PIECE_CODES - 1) // PIECE_CODES
    book = words_of_bits(symbols * LENGTH_BITS)
    return book + (pieces + 1) // 2 + words_of_bits(bits + 16 * pieces)


@njit(nogil=True, cache=True)
def most_words(codes):
    """Return the words that a book and a stream, or fields, of so many codes take at most."""
    pieces = codes // PIECE_CODES + 1
    widest = max(16, CODE_LIMIT_BITS)
    return words_of_bits(MOST_SYMBOLS * LENGTH_BITS) + 2 * pieces + words_of_bits(codes * widest)


@njit(nogil=True, cache=True)
def bits_of_codes(counts, lengths):
    """Return the bits of all codes that were counted."""
    bits = np.int64(0)
    for symbol in range(len(counts)):
        bits += counts[symbol] * np.int64(lengths[symbol])
    return bits


@njit(nogil=True, cache=True)
def least_bits_of_codes(counts):
    """Return bits that no code takes fewer than for what was counted: the entropy, and no more."""
    total, bits = np.int64(0), 0.0
    for count in counts:
        total += count
        if count > 1:
            bits -= count * np.log2(np.float64(count))
    if total == 0:
        return np.int64(0)
    return max(np.int64(0), np.int64(bits + total * np.log2(np.float64(total))) - np.int64(1))


@njit(nogil=True, cache=True)
def write_book(lengths, out):
    """Write lengths of codes; return the words."""
    words = words_of_bits(len(lengths) * LENGTH_BITS)
    out[:words] = 0
    write_fields(lengths, 0, LENGTH_BITS, out, 0, len(lengths))
    return words


@njit(nogil=True, cache=True)
def write_coded(codes, least, lengths, out):
    """Write book and stream of codes ``[n]``; return the words."""
    table = np.empty(len(lengths), np.uint32)
    fill_table(lengths, table)
    at = write_book(lengths, out)
    pieces = (len(codes) + PIECE_CODES - 1) // PIECE_CODES
    sizes = np.zeros((pieces + 1) // 2, np.uint32)
    stream = out[at + len(sizes) :]
    words = write_stream(codes, least, table, sizes.view(np.uint16), stream)
    out[at : at + len(sizes)] = sizes
    return at + len(sizes) + words


@njit(nogil=True, cache=True)
def code_rows(x, kind, step, inverse, bound, codes, units, hashes, found, begin, end):
    """Write the codes of the rows begin..end and their hashes; see `quantise` for ``found``.

    ``units`` are the codes as rows of wider units, ``[rows, units]``; ``hashes`` is empty where
    none are asked for.
    """
    row = len(codes) // units.shape[0]
    quantise(x, kind, step, inverse, bound, codes, found, begin * row, end * row)
    if len(hashes):
        hash_rows(units, hashes, begin, end)


@njit(nogil=True, cache=True)
def put_references(units, hashes, marks, window, row_bits, literals, facts, out):
    """Find equal rows and write references to them; return the words, 0 where there are none.

    Parameters: ``units``, ``hashes`` and ``marks`` as for `find_references`, ``window`` too.
    ``row_bits``: what a row takes that is no reference, about. ``literals`` gets the distinct rows.
    ``facts``, int64, gets the kind of references, the bits of a field and the distinct rows.
    """
    n = units.shape[0]
    facts[0], facts[1], facts[2] = 0, 0, n
    room = 1
    while room < 2 * n:
        room *= 2
    slots = np.full(room, -1, np.int32)
    places = np.empty(n, np.int32)
    distinct = find_references(units, hashes, marks, window, slots, places, literals)
    if distinct == n:
        return 0
    kind, least = (WINDOW, 1) if window > 0 else (INDEX, 0)
    width = bits_of(window if window > 0 else distinct)
    map_words = words_of_bits(n)
    most = map_words + words_of_bits((n - distinct) * width)
    used = -1
    # No code of less than a bit.
    book_words = words_of_bits(distinct * LENGTH_BITS)
    if window == 0 and distinct <= MOST_SYMBOLS and book_words + map_words <= most:
        counts = np.zeros(distinct, np.int64)
        count_codes(places, 0, counts, 0, n)
        # The best code takes long to find, and mostly is no shorter than fields.
        if words_of_stream(n, distinct, least_bits_of_codes(counts)) < most:
            lengths = lengths_of_code(counts, CODE_LIMIT_BITS)
            if words_of_stream(n, distinct, bits_of_codes(counts, lengths)) < most:
                kind, width = CODED, 0
                used = write_coded(places, 0, lengths, out)
    if used < 0:
        out[:most] = 0
        fields = np.empty(n - distinct, np.int32)
        at = literal = 0
        for i in range(n):
            if literal < distinct and literals[literal] == i:
                literal += 1
            else:
                out[i >> 5] |= np.uint32(1) << np.uint32(i & 31)
                fields[at] = places[i]
                at += 1
        if width:
            write_fields(fields, least, width, out[map_words:], 0, len(fields))
        used = most
    if 32 * used >= (n - distinct) * row_bits:
        return 0
    facts[0], facts[1], facts[2] = kind, width, distinct
    return used


@njit(nogil=True, cache=True)
def mark_outliers(codes, marks):
    """Mark the rows of codes ``[rows, row]`` that have a NO_CODE."""
    for i in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            if codes[i, j] == NO_CODE:
                marks[i] = 1
                break


@njit(nogil=True, cache=True)
def kept_rows(rows, literals, distinct):
    """Return the first `distinct` of literals of rows ``[rows, units]``, one after the other."""
    units = rows.shape[1]
    kept = np.empty(distinct * units, rows.dtype)
    for i in range(distinct):
        kept[i * units : (i + 1) * units] = rows[literals[i]]
    return kept


@njit(nogil=True, cache=True)
def put_outliers(kept, values, least, places, bits):
    """Write places and bits of codes that are NO_CODE, and the least code in place of these."""
    at = 0
    for i in range(len(kept)):
        if kept[i] == NO_CODE:
            places[at] = i
            bits[at] = values[i]
            kept[i] = least
            at += 1
    return at


@njit(nogil=True, cache=True)
def put_codes(kept, least, symbols, facts, out):
    """Write codes ``[n]`` of so many symbols from the least on; return the words.

    ``facts``, int64, gets the coding, the bits of a field and the symbols of a code.
    """
    width = bits_of(symbols)
    fixed = words_of_bits(len(kept) * width)
    if symbols <= MOST_SYMBOLS:
        counts = np.zeros(symbols, np.int64)
        count_codes(kept, least, counts, 0, len(kept))
        lengths = lengths_of_code(counts, CODE_LIMIT_BITS)
        if words_of_stream(len(kept), symbols, bits_of_codes(counts, lengths)) < fixed:
            facts[0], facts[1], facts[2] = HUFFMAN, 0, symbols
            return write_coded(kept, least, lengths, out)
    facts[0], facts[1], facts[2] = FIXED, width, 0
    out[:fixed] = 0
    if width:
        write_fields(kept, least, width, out, 0, len(kept))
    return fixed


@njit(nogil=True, cache=True)
def put_bytes(elements, raw_words, facts, out):
    """Write elements, uint8 ``[n, bytes]``, in two parts where that is shorter; return the words.

    0: it is no shorter than so many words. ``facts`` gets the coding.
    """
    n, width = elements.shape
    last = np.empty(n, np.int16)
    for i in range(n):
        last[i] = elements[i, width - 1]
    counts = np.zeros(BYTE_SYMBOLS, np.int64)
    count_codes(last, 0, counts, 0, n)
    lengths = lengths_of_code(counts, CODE_LIMIT_BITS)
    others = words_of_bits(8 * n * (width - 1))
    facts[0] = RAW
    if words_of_stream(n, BYTE_SYMBOLS, bits_of_codes(counts, lengths)) + others >= raw_words:
        return 0
    facts[0] = SPLIT
    used = write_coded(last, 0, lengths, out)
    out[used : used + others] = 0
    rest = out[used : used + others].view(np.uint8)
    at = 0
    for i in range(n):
        for j in range(width - 1):
            rest[at] = elements[i, j]
            at += 1
    return used + others


@njit(nogil=True, cache=True)
def put_bounded(x, kind, step, inverse, bound, codes, units, window, facts, out):
    """Write the sections of rows whose elements become codes; return the bytes.

    NO_CODES: too few elements have one. NO_SHORTER: than the rows. Parameters: as for `code_rows`;
    ``window`` 0 for all rows before, -1 to look for none; ``out`` uint8, as many as the rows have.
    ``facts``, int64, gets the kind of references, the bits of their fields, the distinct rows, the
    coding, the bits of a field and the symbols of a code, the least code and the outliers.
    """
    rows = units.shape[0]
    row = len(codes) // rows
    hashes = np.empty(rows if rows > 1 and window >= 0 else 0, np.uint64)
    found = np.zeros(3, np.int64)
    code_rows(x, kind, step, inverse, bound, codes, units, hashes, found, 0, rows)
    least, outliers = found[0], found[2]
    facts[0], facts[1], facts[2] = 0, 0, rows
    facts[6], facts[7] = least, outliers
    if least > found[1] or outliers * (4 + x.itemsize) >= x.nbytes:
        return NO_CODES
    by_row = codes.reshape((rows, row))
    of_outliers = outliers + words_of_bits(8 * x.itemsize * outliers)
    words = np.empty(most_words(2 * rows) + of_outliers + most_words(len(codes)), np.uint32)
    literals = np.empty(rows, np.int32)
    used = np.int64(0)
    if len(hashes):
        marks = np.zeros(rows, np.uint8)
        if outliers:
            mark_outliers(by_row, marks)
        # Two bits for each code: fewer are rare.
        used = np.int64(
            put_references(units, hashes, marks, window, 2 * row, literals, facts, words)
        )
    distinct = facts[2]
    kept = codes if distinct == rows else kept_rows(units, literals, distinct).view(np.int16)
    if outliers:
        values = x if distinct == rows else kept_rows(x.reshape((rows, row)), literals, distinct)
        section = words[used : used + of_outliers]
        section[:] = 0
        put_outliers(kept, values, least, section, section[outliers:].view(x.dtype))
        used += of_outliers
    used += put_codes(kept, least, found[1] - least + 1, facts[3:], words[used:])
    n_bytes = 4 * used
    # Headers of codes are longer than those of rows as they are.
    if n_bytes + BODY_HEADER_BYTES + CODE_HEADER_BYTES >= BODY_HEADER_BYTES + x.nbytes:
        return NO_SHORTER
    out[:n_bytes] = words[:used].view(np.uint8)
    return n_bytes
