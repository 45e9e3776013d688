"""Numba loops that read the sections of a body of rows in one call; see `vector_format`.

Sections are words one after the other, from the first of ``words`` on. A small message is one call:
what is read has the same checks as the loops of `vectors` and `code_streams`, which larger ones are
read by in several threads. What is returned behind a section is the place of the next one, or of
damage a number below 0, see `DAMAGES`.
"""

from __future__ import annotations

import numpy as np

from ..vector_format import (
    CODE_LIMIT_BITS,
    LENGTH_BITS,
    PIECE_CODES,
    References,
    RowCoding,
)
from .code_streams import fill_lookup, read_fields, read_pieces, values_of_symbols
from .jit import njit
from .vectors import follow_references, gather_rows, values_of_codes

NONE, WINDOW, CODED = (int(each) for each in (References.NONE, References.WINDOW, References.CODED))
HUFFMAN = int(RowCoding.HUFFMAN)

#: What is wrong with a body, by the number that is returned less one, negated.
DAMAGES = (
    "it ends too early",
    "a reference is out of range",
    "the place of an outlier is out of range",
    "code lengths: one is too long, or they are no prefix code",
    "a stream does not end where it should",
    "a code has no value",
    "bytes are left behind its sections",
)
SHORT, REFERENCE, PLACE, LENGTHS, STREAM, VALUE, LEFT = (-1 - i for i in range(len(DAMAGES)))


@njit(nogil=True, cache=True)
def words_of(bits):
    """Return the words of so many bits."""
    return (bits + 31) >> 5


@njit(nogil=True, cache=True)
def read_stream(words, at, end, symbols, values, out):
    """Write what the symbols of a book and a stream stand for; return the place behind it."""
    behind = at + words_of(symbols * LENGTH_BITS)
    pieces = (len(out) + PIECE_CODES - 1) // PIECE_CODES
    first = behind + (pieces + 1) // 2
    if behind > end:
        return SHORT
    lengths = np.zeros(symbols, np.uint8)
    read_fields(words[at:behind], LENGTH_BITS, lengths, 0, symbols)
    lookup = np.empty(1 << CODE_LIMIT_BITS, np.uint16)
    if not fill_lookup(lengths, lookup):
        return LENGTHS
    if first > end:
        return SHORT
    sizes = words[behind:first].view(np.uint16)
    starts = np.zeros(pieces + 1, np.int64)
    for piece in range(pieces):
        starts[piece + 1] = starts[piece] + np.int64(sizes[piece])
    last = first + starts[pieces]
    if last > end:
        return SHORT
    if not read_pieces(words[first:last], starts, lookup, values, out, 0, pieces):
        return STREAM
    return last


@njit(nogil=True, cache=True)
def read_places(words, end, references, bits, distinct, places):
    """Write of each row the number of its distinct row; return the place behind references."""
    rows = len(places)
    if references == CODED:
        symbols = np.arange(distinct).astype(np.int32)
        # A code that has a place has a symbol, of which there are as many as distinct rows.
        return read_stream(words, 0, end, distinct, symbols, places)
    map_words = words_of(rows)
    behind = map_words + words_of((rows - distinct) * bits)
    if behind > end:
        return SHORT
    fields = np.zeros(rows - distinct, np.uint32)
    if bits:
        read_fields(words[map_words:behind], bits, fields, 0, len(fields))
    if not follow_references(words[:map_words], fields, references == WINDOW, distinct, places):
        return REFERENCE
    return behind


@njit(nogil=True, cache=True)
def read_coded(
    words,
    n_bytes,
    references,
    bits,
    distinct,
    coding,
    width,
    outliers,
    symbols,
    least,
    step,
    kind,
    out,
):
    """Write rows whose elements have codes, ``[rows, row]``, bits of values; return 0.

    Of damage a number below 0, and nothing is written. ``words`` are the sections, of so many
    bytes, as whole words; ``bits`` those of a reference, ``width`` those of a code; the others are
    the numbers of the header, and ``kind`` the dtype's.
    """
    rows, row = out.shape
    end = n_bytes >> 2
    at = np.int64(0)
    places = np.empty(0 if references == NONE else rows, np.int32)
    if references != NONE:
        at = np.int64(read_places(words, end, references, bits, distinct, places))
        if at < 0:
            return at
    elements = distinct * row
    behind = at + outliers
    size = out.itemsize
    if behind > end or outliers * size > n_bytes - 4 * behind:
        return SHORT
    before = np.int64(-1)
    for i in range(at, behind):
        place = np.int64(words[i])
        if place <= before or place >= elements:
            return PLACE
        before = place
    next_at = behind + words_of(8 * size * outliers)
    kept = np.empty(elements, out.dtype)
    values = np.empty(symbols if coding == HUFFMAN else 1 << width, out.dtype)
    values_of_codes(least, step, kind, values)
    found = np.int64(next_at)
    if coding == HUFFMAN:
        found = np.int64(read_stream(words, next_at, end, len(values), values, kept))
        if found < 0:
            return found
    else:
        found = next_at + words_of(elements * width)
        if 4 * found > n_bytes:
            return SHORT
        fields = np.zeros(elements, np.uint16)
        if width:
            read_fields(words[next_at:found], width, fields, 0, elements)
        if not values_of_symbols(fields, values, kept, 0, elements):
            return VALUE
    if 4 * found < n_bytes or 4 * found >= n_bytes + 4:
        return LEFT
    if outliers:
        bits_of = words[behind:next_at].view(out.dtype)
        for i in range(outliers):
            kept[np.int64(words[at + i])] = bits_of[i]
    by_row = kept.reshape((distinct, row))
    if references == NONE:
        out[:] = by_row
    else:
        gather_rows(by_row, places, out, 0, rows)
    return 0
