"""Rows to bodies: quantised where there is a bound, equal rows found, the rest in few bits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ....dtypes import element_bytes, flat_bytes
from ...kernels.cpu.compiling import call
from ...kernels.cpu.loading import equal_rows, vector_bodies
from ...kernels.cpu.threads import run_ranges, threads_of
from ...kernels.vector_format import (
    BODY_HEADER_BYTES,
    BYTE_SYMBOLS,
    CODE_HEADER_BYTES,
    CODE_LIMIT_BITS,
    KINDS,
    MOST_SYMBOLS,
    BodyHeader,
    References,
    RowCoding,
    book_words,
    byte_words,
    field_words,
    pieces_of,
    raw_body_bytes,
    row_elements,
    step_of,
)
from .streams import Array, Book, count, packed_fields

#: By the bytes of an element: its bits as unsigned and signed integers.
_UNITS = {2: np.uint16, 4: np.uint32}
_SIGNED: dict[int, Any] = {2: np.int16, 4: np.int32}
#: Of a dtype, the bits of its exponent.
_EXPONENTS = {torch.float32: 0x7F800000, torch.float16: 0x7C00, torch.bfloat16: 0x7F80}


@dataclass(frozen=True)
class Equal:
    """Which rows equal an earlier one.

    Parameters
    ----------
    literals : numpy.ndarray
        int32: the rows that do not, as many as the header says.
    header : BodyHeader
        With the fields of the references.
    section : numpy.ndarray
        The references, uint32.
    """

    literals: Array
    header: BodyHeader
    section: Array


def finite_range(t: torch.Tensor) -> tuple[float, float]:
    """Return the least and the largest finite value of a tensor on the CPU: inf, -inf of none.

    Parameters
    ----------
    t : torch.Tensor
        float32, float16 or bfloat16, of any shape.
    """
    signed = _SIGNED[t.dtype.itemsize]
    x, highest = flat_bytes(t).numpy().view(signed), (1 << 8 * t.dtype.itemsize - 1) - 1
    given = (x, signed(_EXPONENTS[t.dtype]), signed(highest))
    kernel = equal_rows().finite_keys

    def work(begin: int, end: int) -> Array:
        found = np.empty(2, signed)
        call(kernel, *given, found, begin, end)
        return found

    parts = run_ranges(work, len(x), x.itemsize)
    keys = parts[0]
    if len(parts) > 1:
        keys = np.array([min(part[0] for part in parts), max(part[1] for part in parts)])
    least, largest = keys.tolist()
    if least > largest:
        return math.inf, -math.inf
    key_of = equal_rows().key_of
    bits = np.array([key_of(least, highest), key_of(largest, highest)], signed)
    if t.dtype == torch.bfloat16:
        bits = bits.astype(np.int32) << 16
    low, high = bits.view(np.float16 if t.dtype == torch.float16 else np.float32).tolist()
    return low, high


def encode_body(
    t: torch.Tensor,
    bound: float,
    window: int | None,
    out: Array,
    *,
    references: bool = True,
    huffman: bool = True,
) -> int:
    """Write the body of a tensor on the CPU; return its bytes.

    Parameters
    ----------
    t : torch.Tensor
        ``[N, ...]``, dense.
    bound : float
        How far a decoded finite element may be from the given one; 0: every bit is kept.
    window : int or None
        Rows that a reference may reach back; None: all.
    out : numpy.ndarray
        uint8, of `raw_body_bytes` or more.
    references : bool
        Whether equal rows are looked for.
    huffman : bool
        Whether what is left of them gets a Huffman code where that is shorter; else codes of values
        are fields of one width, and rows whose every bit is kept stand as they are.
    """
    rows, row = row_elements(t.shape)
    data = flat_bytes(t)
    raw = raw_body_bytes(t.nbytes)
    found: tuple[BodyHeader, list[Array]] | None = None
    if rows and row:
        step = step_of(bound) if bound > 0 else 0.0
        if step and huffman and threads_of(rows, row * t.element_size()) == 1:
            given = data.numpy().view(_UNITS[t.dtype.itemsize]), KINDS[t.dtype]
            used = _bounded_at_once(*given, bound, step, rows, window if references else -1, out)
            if used >= 0:
                return used
            if used == vector_bodies().NO_SHORTER:
                return _write(BodyHeader(distinct_rows=rows), [data.numpy()], out)
        elif step:
            found = _bounded(t, bound, step, rows, row, window if references else -1, huffman)
        if found is None:
            found = _every_bit(t, data.numpy(), rows, window if references else -1, huffman)
    if found is not None:
        header, sections = found
        used = header.nbytes + sum(section.nbytes for section in sections)
        if used < raw:
            return _write(header, sections, out)
    return _write(BodyHeader(distinct_rows=rows), [data.numpy()], out)


def _write(header: BodyHeader, sections: list[Array], out: Array) -> int:
    at = header.nbytes
    out[:at] = np.frombuffer(header.to_bytes(), np.uint8)
    for section in sections:
        given = section.reshape(-1).view(np.uint8)
        out[at : at + len(given)] = given
        at += len(given)
    return at


def _bits(t: torch.Tensor) -> Array:
    return flat_bytes(t).numpy().view(_UNITS[t.dtype.itemsize])


def _bounded_at_once(
    x: Array, kind: int, bound: float, step: float, rows: int, window: int | None, out: Array
) -> int:
    """Write the body of codes of values of a kind, their bits, by one kernel; return its bytes.

    NO_SHORTER or NO_CODES where that kernel returns it.
    """
    codes = np.empty(len(x), np.int16)
    units = _wide(codes, rows, 2 * len(x) // rows)
    facts = np.empty(8, np.int64)
    begin = BODY_HEADER_BYTES + CODE_HEADER_BYTES
    inverse = np.float32(1 / np.float32(step))
    given = (x, kind, np.float32(step), inverse, bound, codes, units, window or 0)
    used: int = call(vector_bodies().put_bounded, *given, facts, out[begin:])
    if used < 0:
        return used
    references, index_bits, distinct, coding, width, symbols, least, outliers = facts.tolist()
    header = BodyHeader(
        RowCoding(coding),
        References(references),
        width,
        index_bits,
        distinct,
        outliers,
        step,
        least,
        symbols,
    )
    out[:begin] = np.frombuffer(header.to_bytes(), np.uint8)
    return begin + used


def _bounded(
    t: torch.Tensor,
    bound: float,
    step: float,
    rows: int,
    row: int,
    window: int | None,
    huffman: bool,
) -> tuple[BodyHeader, list[Array]] | None:
    """Return header and sections of codes, None where too few elements have one."""
    x, kind = _bits(t), KINDS[t.dtype]
    kernels = vector_bodies()
    codes = np.empty(len(x), np.int16)
    by_row = codes.reshape(rows, row)
    units = _wide(codes, rows, 2 * row)
    hashes = np.empty(rows if _looks_for_equal(rows, window) else 0, np.uint64)
    given = (x, kind, np.float32(step), np.float32(1 / np.float32(step)), bound, codes, units)

    def work(begin: int, end: int) -> Array:
        found = np.zeros(3, np.int64)
        call(kernels.code_rows, *given, hashes, found, begin, end)
        return found

    parts = run_ranges(work, rows, x.itemsize * row)
    found = parts[0] if len(parts) == 1 else np.stack(parts)
    if len(parts) > 1:
        found = np.array([found[:, 0].min(), found[:, 1].max(), found[:, 2].sum()])
    least, largest, outliers = found.tolist()
    if least > largest or outliers * (4 + x.itemsize) >= t.nbytes:
        return None
    marks = np.zeros(rows, np.uint8)
    if outliers:
        call(kernels.mark_outliers, by_row, marks)
    # Two bits for each code: fewer are rare.
    equal = _find_equal(units, hashes, marks, window, 2 * row)
    kept = _rows_of(units, equal).view(np.int16)
    sections = [equal.section]
    if outliers:
        places, bits = np.empty(outliers, np.uint32), np.empty(outliers, x.dtype)
        values = _rows_of(x.reshape(rows, row), equal)
        call(kernels.put_outliers, kept, values, least, places, bits)
        sections += [places, _words_of(bits)]
    symbols = largest - least + 1
    if not huffman:
        coding, width, symbols, written = _fixed_codes(kept, least, symbols)
    elif threads_of(len(kept), kept.itemsize) > 1:
        coding, width, symbols, written = _codes_by_threads(kept, least, symbols)
    else:
        facts = np.empty(3, np.int64)
        out = np.empty(_most_words(len(kept)), np.uint32)
        used = call(kernels.put_codes, kept, least, symbols, facts, out)
        number, width, symbols = facts.tolist()
        coding, written = RowCoding(number), [out[:used]]
    header = replace(
        equal.header,
        coding=coding,
        code_bits=width,
        outliers=outliers,
        step=step,
        least=least,
        symbols=symbols,
    )
    return header, [*sections, *written]


def _codes_by_threads(
    kept: Array, least: int, symbols: int
) -> tuple[RowCoding, int, int, list[Array]]:
    """Do what `put_codes` does by several threads."""
    book = Book.of(count(kept, least, symbols)) if symbols <= MOST_SYMBOLS else None
    width = (symbols - 1).bit_length()
    if book is not None and book.words(len(kept)) < field_words(len(kept), width):
        return RowCoding.HUFFMAN, 0, symbols, book.write(kept, least)
    return _fixed_codes(kept, least, symbols)


def _fixed_codes(kept: Array, least: int, symbols: int) -> tuple[RowCoding, int, int, list[Array]]:
    width = (symbols - 1).bit_length()
    return RowCoding.FIXED, width, 0, [packed_fields(kept, least, width)]


def _every_bit(
    t: torch.Tensor, data: Array, rows: int, window: int | None, huffman: bool
) -> tuple[BodyHeader, list[Array]]:
    """Return header and sections of rows whose every bit is kept."""
    row_bytes = len(data) // rows
    units = _wide(data, rows, row_bytes)
    hashes = np.empty(rows if _looks_for_equal(rows, window) else 0, np.uint64)
    if len(hashes):
        hash_rows = equal_rows().hash_rows
        run_ranges(lambda b, e: call(hash_rows, units, hashes, b, e), rows, row_bytes)
    equal = _find_equal(units, hashes, np.zeros(rows, np.uint8), window, 4 * row_bytes)
    kept = _rows_of(units, equal).view(np.uint8)
    elements = kept.reshape(-1, element_bytes(t.dtype))
    n, width = elements.shape
    header = replace(equal.header, coding=RowCoding.SPLIT)
    if not huffman:
        pass
    elif threads_of(n, width) > 1:
        last = elements[:, -1].astype(np.int16)
        book = Book.of(count(last, 0, BYTE_SYMBOLS))
        if book.words(n) + byte_words(n * (width - 1)) < byte_words(len(kept)):
            others = _words_of(np.ascontiguousarray(elements[:, :-1]))
            return header, [equal.section, *book.write(last, 0), others]
    else:
        facts = np.empty(1, np.int64)
        out = np.empty(_most_words(n) + byte_words(n * (width - 1)), np.uint32)
        used = call(vector_bodies().put_bytes, elements, byte_words(len(kept)), facts, out)
        if used:
            return header, [equal.section, out[:used]]
    return equal.header, [equal.section, _words_of(kept)]


def _most_words(codes: int) -> int:
    """Return the words that codes take at most, book and sizes of pieces included."""
    widest = max(16, CODE_LIMIT_BITS)
    return book_words(MOST_SYMBOLS) + 2 * pieces_of(codes) + field_words(codes, widest)


def _wide(data: Array, rows: int, row_bytes: int) -> Array:
    """Return rows ``[rows, units]`` of the widest units that they have."""
    unit = next(n for n in (8, 4, 2, 1) if row_bytes % n == 0)
    # Memory that begins anywhere, such as a part of a larger tensor's.
    whole = data if data.ctypes.data % unit == 0 else data.copy()
    return whole.view(_WIDE[unit]).reshape(rows, -1)


_WIDE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def _looks_for_equal(rows: int, window: int | None) -> bool:
    return rows > 1 and window != -1


def _rows_of(rows: Array, equal: Equal) -> Array:
    """Return the distinct ones of rows ``[rows, units]``, one after the other."""
    distinct = equal.header.distinct_rows
    if distinct == len(rows):
        return rows.reshape(-1)
    kept: Array = call(vector_bodies().kept_rows, rows, equal.literals, distinct)
    return kept


def _words_of(given: Array) -> Array:
    """Return an array's bytes as words, filled up with zeros."""
    flat = given.reshape(-1).view(np.uint8)
    out = np.zeros(4 * byte_words(len(flat)), np.uint8)
    out[: len(flat)] = flat
    return out.view(np.uint32)


def _find_equal(
    units: Array, hashes: Array, marks: Array, window: int | None, row_bits: int
) -> Equal:
    """Find equal rows of units ``[rows, units]``.

    A `window` of -1: do not look. `row_bits` are what a row takes that is none, about.
    """
    n = len(units)
    nothing = np.empty(0, np.uint32)
    if not len(hashes):
        return Equal(np.empty(0, np.int32), BodyHeader(distinct_rows=n), nothing)
    literals, facts = np.empty(n, np.int32), np.empty(3, np.int64)
    out = np.empty(_most_words(2 * n), np.uint32)  # fields are of 32 bits at most
    given = (units, hashes, marks, window or 0, row_bits, literals, facts, out)
    used = call(vector_bodies().put_references, *given)
    kind, width, distinct = facts.tolist()
    header = BodyHeader(references=References(kind), index_bits=width, distinct_rows=distinct)
    return Equal(literals, header, out[:used] if used else nothing)
