"""The form of rows of which equal ones are kept once: constants, sizes and offsets of its parts.

A tensor ``[N, ...]`` is N rows. A row that equals an earlier one becomes a reference; the others,
the distinct rows, are kept in order. Equal means equal codes where a quantiser has made codes,
equal bits where none has.

Behind the header that `codecs.blob` describes, whose byte 24 has the elements of a row (int64), the
*body* begins: what a collective sends, which knows all that the header says. All words are
little-endian, 32 bits; bits are counted from the least significant.

===== ======== ==================================================================================
byte  type     content
===== ======== ==================================================================================
0     uint8    `RowCoding`: how distinct rows are written
1     uint8    `References`: how references are
2     uint8    bits of a code, of FIXED; else 0
3     uint8    bits of a reference, of INDEX and WINDOW; else 0
4     uint32   distinct rows
===== ======== ==================================================================================

and, of FIXED and HUFFMAN alone:

===== ======== ==================================================================================
8     uint32   outliers
12    float32  step: a code stands for ``code * step`` in float32, rounded to the dtype
16    int32    the least code, which symbol 0 stands for
20    uint32   symbols of the rows' code, of HUFFMAN; else 0
===== ======== ==================================================================================

The sections, in this order, each starting on a word and filled up with zeros:

1. References. INDEX and WINDOW: a bitmap with one bit a row, 1 for a reference; then for each
   reference a field: the number of the distinct row, or the distance back in rows less one. CODED:
   a book of as many symbols as there are distinct rows, and a stream of N symbols: for each row the
   number of its distinct row.
2. Outliers: elements of distinct rows that no code stands for within the bound. The place of each
   among the elements of the distinct rows, uint32, rising; then their bits. Their codes are the
   least one. A row that has one is never a reference, and none refers to it.
3. Distinct rows. RAW: their bytes. FIXED: a field for each code less the least one. HUFFMAN: a book
   and a stream of codes less the least one. SPLIT: a book of 256 symbols and a stream of the last
   byte of each element, which holds sign and exponent; then the other bytes of all elements.

A book is 4 bits for each symbol: the length of its canonical code (`codecs.huffman`), 0 for none,
`CODE_LIMIT_BITS` at most. A stream is cut into pieces of `PIECE_CODES` symbols that begin on words:
first the words of each piece, uint16, then the pieces. Codes stand in it with their first bit
lowest.

A tensor that does not shrink is RAW without references: its bytes follow at once.

On a GPU the same bytes come of kernels that know their places beforehand: a row's reference is the
least row (the nearest, of a window) with equal content, whatever the hash that found it; distinct
rows, outliers and fields are numbered by a prefix sum; pieces start on words, so that a warp writes
each without atomics once a scan over the sizes has placed them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from .format import ceil_div

#: Numbers of the forms, as the header has them: of every bit, and within a bound.
VLZ_FORM, VLZ_BOUNDED_FORM = 20, 21
#: Rows that a reference may reach back; None: all before it.
WINDOWS = (32, 64, 128, 255)

#: Bytes of a body's header, and those that follow where elements have codes.
BODY_HEADER_BYTES, CODE_HEADER_BYTES = 8, 16
#: Symbols of a stream that are decoded one after the other.
PIECE_CODES = 1024
#: Bits of the longest Huffman code, and of a length in a book.
CODE_LIMIT_BITS, LENGTH_BITS = 12, 4
#: Symbols of a Huffman code of quantised values, and of distinct rows in CODED references.
MOST_SYMBOLS = 1024
#: Symbols of a byte.
BYTE_SYMBOLS = 256
#: The largest code, and what stands for a value that has none.
MOST_CODE, NO_CODE = 32767, -32768
#: Share of the largest step that is used: what float32 rounds away is left for.
STEP_SHARE = 1 - 2.0**-12
#: The largest and the least step, which float32 has an inverse of.
MOST_STEP, LEAST_STEP = 2.0**126, 2.0**-125

#: Dtypes whose values a bound is kept of, by the numbers that `cpu.floats` gives them.
KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

_BODY, _CODES = struct.Struct("<BBBBI"), struct.Struct("<IfiI")


class RowCoding(IntEnum):
    """How distinct rows are written."""

    RAW = 0
    FIXED = 1
    HUFFMAN = 2
    SPLIT = 3


class References(IntEnum):
    """How references are written."""

    NONE = 0
    INDEX = 1
    WINDOW = 2
    CODED = 3


@dataclass(frozen=True)
class BodyHeader:
    """The first bytes of a body; see the module for each."""

    coding: RowCoding = RowCoding.RAW
    references: References = References.NONE
    code_bits: int = 0
    index_bits: int = 0
    distinct_rows: int = 0
    outliers: int = 0
    step: float = 0.0
    least: int = 0
    symbols: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the header."""
        return BODY_HEADER_BYTES + (CODE_HEADER_BYTES if self.coding in WITH_CODES else 0)

    def to_bytes(self) -> bytes:
        """Return its bytes."""
        head = (self.coding, self.references, self.code_bits, self.index_bits, self.distinct_rows)
        if self.coding not in WITH_CODES:
            return _BODY.pack(*head)
        return _BODY.pack(*head) + _CODES.pack(self.outliers, self.step, self.least, self.symbols)

    @classmethod
    def from_bytes(cls, data: bytes) -> BodyHeader | None:
        """Return what these bytes begin with, None where they are too few or nothing written."""
        if len(data) < BODY_HEADER_BYTES or data[0] not in _CODINGS or data[1] not in _REFERENCES:
            return None
        coding, references, *numbers = _BODY.unpack_from(data)
        if coding in WITH_CODES:
            if len(data) < BODY_HEADER_BYTES + CODE_HEADER_BYTES:
                return None
            numbers += _CODES.unpack_from(data, BODY_HEADER_BYTES)
        return cls(RowCoding(coding), References(references), *numbers)


#: Codings whose elements have codes.
WITH_CODES = (RowCoding.FIXED, RowCoding.HUFFMAN)
_CODINGS, _REFERENCES = set(RowCoding), set(References)


def row_elements(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows of a tensor and the elements of each; below two dimensions a row has one."""
    if len(shape) < 2:
        return math.prod(shape), 1
    return shape[0], math.prod(shape[1:])


def field_words(count: int, bits: int) -> int:
    """Return the words of so many fields of so many bits."""
    return ceil_div(count * bits, 32)


def book_words(symbols: int) -> int:
    """Return the words of a book."""
    return field_words(symbols, LENGTH_BITS)


def pieces_of(codes: int) -> int:
    """Return the pieces of a stream."""
    return ceil_div(codes, PIECE_CODES)


def size_words(codes: int) -> int:
    """Return the words before the pieces of a stream."""
    return ceil_div(pieces_of(codes), 2)


def stream_words(codes: int, bits: int) -> int:
    """Return the words of a stream, about: pieces end with a word."""
    return size_words(codes) + ceil_div(bits + 16 * pieces_of(codes), 32)


def byte_words(n_bytes: int) -> int:
    """Return the words of so many bytes."""
    return ceil_div(n_bytes, 4)


def raw_body_bytes(n_bytes: int) -> int:
    """Return the bytes of the body of a tensor that is kept raw; none has more."""
    return BODY_HEADER_BYTES + n_bytes


def step_of(bound: float) -> float:
    """Return the step of codes whose values are within a bound, 0 where float32 has none.

    Of float32; its inverse is one too.
    """
    wanted = 2 * bound * STEP_SHARE
    if not wanted <= MOST_STEP:
        return 0.0
    step = float(struct.unpack("<f", struct.pack("<f", wanted))[0])
    return step if step >= LEAST_STEP else 0.0
