"""Books, fields and streams of symbols, as `vector_format` says: written, measured and read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ....errors import CorruptedDataError
from ...kernels.cpu.compiling import call
from ...kernels.cpu.loading import code_streams
from ...kernels.cpu.threads import run_ranges
from ...kernels.vector_format import (
    CODE_LIMIT_BITS,
    LENGTH_BITS,
    PIECE_CODES,
    book_words,
    field_words,
    pieces_of,
    size_words,
    stream_words,
)
from ..huffman import code_lengths, expected_bits

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Book:
    """A Huffman code of symbols.

    Parameters
    ----------
    lengths : numpy.ndarray
        uint8 ``[symbols]``, 0 for those without a code.
    bits : int
        What the codes of all that was counted take.
    """

    lengths: Array
    bits: int

    @classmethod
    def of(cls, counts: Array) -> Book:
        """Return the best one for symbols that occur so often, int64 ``[symbols]``."""
        lengths = code_lengths(counts, CODE_LIMIT_BITS)
        return cls(lengths, int(expected_bits(counts, lengths)))

    def words(self, codes: int) -> int:
        """Return the words that the book and a stream of so many codes take, about."""
        return book_words(len(self.lengths)) + stream_words(codes, self.bits)

    def write(self, codes: Array, least: int) -> list[Array]:
        """Return book and stream of int16 or int32 codes ``[n]``, uint32 each."""
        kernels = code_streams()
        table = np.empty(len(self.lengths), np.uint32)
        call(kernels.fill_table, self.lengths, table)
        pieces = pieces_of(len(codes))
        sizes = np.zeros(pieces, np.uint32)
        given = (codes, least, table)
        bytes_a_piece = PIECE_CODES * codes.itemsize
        measure = kernels.measure_pieces
        run_ranges(lambda b, e: call(measure, *given, sizes, b, e), pieces, bytes_a_piece)
        starts = np.zeros(pieces + 1, np.int64)
        np.cumsum(sizes, out=starts[1:])
        out = np.empty(starts[-1], np.uint32)
        write = kernels.write_pieces
        run_ranges(lambda b, e: call(write, *given, starts, out, b, e), pieces, bytes_a_piece)
        stored = np.zeros(2 * size_words(len(codes)), np.uint16)
        stored[:pieces] = sizes
        return [packed_fields(self.lengths, 0, LENGTH_BITS), stored.view(np.uint32), out]


def count(codes: Array, least: int, symbols: int) -> Array:
    """Return how often each symbol stands in codes ``[n]``, int64 ``[symbols]``."""
    kernel = code_streams().count_codes

    def work(begin: int, end: int) -> Array:
        counts = np.zeros(symbols, np.int64)
        call(kernel, codes, least, counts, begin, end)
        return counts

    parts = run_ranges(work, len(codes), codes.itemsize)
    return parts[0] if len(parts) == 1 else np.add.reduce(parts)


def packed_fields(values: Array, least: int, width: int) -> Array:
    """Return integers ``[n]`` less the least one as fields of `width` bits, uint32."""
    out = np.zeros(field_words(len(values), width), np.uint32)
    kernel = code_streams().write_fields
    if width:
        run_ranges(
            lambda b, e: call(kernel, values, least, width, out, b, e), len(values), values.itemsize
        )
    return out


def unpacked_fields(data: Array, count: int, width: int, dtype: Any = np.uint32) -> Array:
    """Return the fields ``[count]`` of `width` bits, at most 32, that bytes consist of."""
    words = aligned_words(data)
    out = np.zeros(count, dtype)
    kernel = code_streams().read_fields
    if width:
        run_ranges(lambda b, e: call(kernel, words, width, out, b, e), count, out.itemsize)
    return out


def aligned_words(data: Array) -> Array:
    """Return bytes as words; a body begins anywhere in a message."""
    return (data if data.ctypes.data % 4 == 0 else data.copy()).view(np.uint32)


class Reader:
    """Sections of a body, one after the other.

    Parameters
    ----------
    data : numpy.ndarray
        uint8: the sections.
    """

    def __init__(self, data: Array) -> None:
        self._data = data
        self._at = 0

    def words(self, count: int) -> Array:
        """Return the next words, uint32.

        Raises
        ------
        CorruptedDataError
            When there are fewer; so do all that follow.
        """
        return aligned_words(self.bytes(4 * count))

    def bytes(self, count: int) -> Array:
        """Return the next bytes, uint8, and leave out those up to the next word."""
        if not 0 <= count <= len(self._data) - self._at:
            raise damaged("it ends too early")
        found = self._data[self._at : self._at + count]
        self._at += -(-count // 4) * 4
        return found

    def end(self) -> None:
        """Refuse what is left."""
        if not len(self._data) <= self._at < len(self._data) + 4:
            raise damaged("bytes are left behind its sections")

    def fields(self, count: int, width: int, dtype: Any = np.uint16) -> Array:
        """Return the next fields ``[count]`` of `width` bits."""
        return unpacked_fields(self.bytes(4 * field_words(count, width)), count, width, dtype)

    def stream(self, count: int, symbols: int, values: Array | None = None) -> Array:
        """Return what the symbols of a book and a stream stand for ``[count]``.

        Parameters
        ----------
        count, symbols : int
            Codes of the stream, and symbols of the book.
        values : numpy.ndarray, optional
            ``[symbols]``: of each symbol; left out: the symbols themselves, uint16.
        """
        lengths = self.fields(symbols, LENGTH_BITS, np.uint8)
        lookup = np.empty(1 << CODE_LIMIT_BITS, np.uint16)
        if not call(code_streams().fill_lookup, lengths, lookup):
            raise damaged("code lengths: one is too long, or they are no prefix code")
        pieces = pieces_of(count)
        sizes = self.words(size_words(count)).view(np.uint16)
        starts = np.zeros(pieces + 1, np.int64)
        np.cumsum(sizes[:pieces], out=starts[1:])
        words = self.words(int(starts[-1]))
        of_symbols = np.arange(symbols, dtype=np.uint16) if values is None else values
        out = np.empty(count, of_symbols.dtype)
        kernel = code_streams().read_pieces
        given = (words, starts, lookup, of_symbols, out)
        sound = run_ranges(lambda b, e: call(kernel, *given, b, e), pieces, 2 * PIECE_CODES)
        if not all(sound):
            raise damaged("a stream does not end where it should")
        return out


def damaged(why: str) -> CorruptedDataError:
    """Return the error of a body that is damaged."""
    return CorruptedDataError(f"blob: {why}")
