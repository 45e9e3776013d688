"""Rows to bodies: quantised where there is a bound, equal rows found, the rest in few bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from ....dtypes import element_bytes, flat_bytes
from ...kernels.cpu.compiling import call
from ...kernels.cpu.loading import equal_rows
from ...kernels.cpu.threads import run_ranges
from ...kernels.format import ceil_div
from ...kernels.vector_format import (
    BYTE_SYMBOLS,
    KINDS,
    MOST_SYMBOLS,
    NO_CODE,
    BodyHeader,
    References,
    RowCoding,
    book_words,
    byte_words,
    field_words,
    raw_body_bytes,
    row_elements,
    step_of,
)
from .streams import Array, Book, count, packed_fields

_UNITS = {2: np.uint16, 4: np.uint32}


@dataclass(frozen=True)
class Equal:
    """Which rows equal an earlier one.

    Parameters
    ----------
    literals : numpy.ndarray
        int32 ``[distinct]``: the rows that do not.
    header : BodyHeader
        With the fields of the references.
    sections : list of numpy.ndarray
        The references, uint32.
    """

    literals: Array
    header: BodyHeader
    sections: list[Array]

    @property
    def words(self) -> int:
        """Words of the references."""
        return sum(map(len, self.sections))


def finite_range(t: torch.Tensor) -> tuple[float, float]:
    """Return the least and the largest finite value of a tensor on the CPU: inf, -inf of none.

    Parameters
    ----------
    t : torch.Tensor
        float32, float16 or bfloat16, of any shape.
    """
    x, kind = _bits(t), KINDS[t.dtype]
    kernel = equal_rows().finite_range

    def work(begin: int, end: int) -> Array:
        found = np.empty(2, np.float32)
        call(kernel, x, kind, found, begin, end)
        return found

    found = np.stack(run_ranges(work, len(x), x.itemsize))
    return float(found[:, 0].min()), float(found[:, 1].max())


def encode_body(
    t: torch.Tensor, bound: float, window: int | None, out: Array, *, references: bool = True
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
    """
    rows, row = row_elements(t.shape)
    data = flat_bytes(t)
    raw = raw_body_bytes(t.nbytes)
    found: tuple[BodyHeader, list[Array]] | None = None
    if rows and row:
        step = step_of(bound) if bound > 0 else 0.0
        if step:
            found = _bounded(t, bound, step, rows, row, window if references else -1)
        if found is None:
            found = _every_bit(t, data.numpy(), rows, window if references else -1)
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


def _bounded(
    t: torch.Tensor, bound: float, step: float, rows: int, row: int, window: int | None
) -> tuple[BodyHeader, list[Array]] | None:
    """Return header and sections of codes, None where too few elements have one."""
    x, kind = _bits(t), KINDS[t.dtype]
    codes = np.empty(len(x), np.int16)
    kernel = equal_rows().quantise
    given = (x, kind, np.float32(step), np.float32(1 / np.float32(step)), bound, codes)

    def work(begin: int, end: int) -> Array:
        found = np.zeros(3, np.int64)
        call(kernel, *given, found, begin, end)
        return found

    found = np.stack(run_ranges(work, len(x), x.itemsize))
    least, largest = int(found[:, 0].min()), int(found[:, 1].max())
    outliers = int(found[:, 2].sum())
    if least > largest or outliers * (4 + x.itemsize) >= t.nbytes:
        return None
    symbols = largest - least + 1
    by_row = codes.reshape(rows, row)
    marks = np.zeros(rows, np.uint8)
    if outliers:
        mark = equal_rows().rows_with_outliers
        run_ranges(lambda b, e: call(mark, by_row, marks, b, e), rows, codes.itemsize * row)
    # Two bits for each code: fewer are rare.
    equal = _find_equal(by_row, marks, window, 2 * row)
    kept = _rows_of(by_row, equal.literals).reshape(-1)
    sections: list[Array] = []
    if outliers:
        places = np.flatnonzero(kept == NO_CODE)
        bits = _rows_of(x.reshape(rows, row), equal.literals).reshape(-1)[places]
        sections = [places.astype(np.uint32), _words_of(bits)]
        kept = np.where(kept == NO_CODE, np.int16(least), kept)
    width = (symbols - 1).bit_length()
    fixed = field_words(len(kept), width)
    book = Book.of(count(kept, least, symbols)) if symbols <= MOST_SYMBOLS else None
    if book is not None and book.words(len(kept)) < fixed:
        sections += book.write(kept, least)
        coding, width = RowCoding.HUFFMAN, 0
    else:
        sections.append(packed_fields(kept, least, width))
        coding, symbols = RowCoding.FIXED, 0
    header = replace(
        equal.header,
        coding=coding,
        code_bits=width,
        outliers=outliers,
        step=step,
        least=least,
        symbols=symbols,
    )
    return header, [*equal.sections, *sections]


def _every_bit(
    t: torch.Tensor, data: Array, rows: int, window: int | None
) -> tuple[BodyHeader, list[Array]]:
    """Return header and sections of rows whose every bit is kept."""
    row_bytes = len(data) // rows
    unit = next(n for n in (8, 4, 1) if row_bytes % n == 0)
    # Memory that begins anywhere, such as a part of a larger tensor's.
    whole = data if data.ctypes.data % unit == 0 else data.copy()
    by_row = whole.view({8: np.uint64, 4: np.uint32, 1: np.uint8}[unit]).reshape(rows, -1)
    equal = _find_equal(by_row, np.zeros(rows, np.uint8), window, 4 * row_bytes)
    kept = _rows_of(by_row, equal.literals).reshape(-1).view(np.uint8)
    width = element_bytes(t.dtype)
    elements = kept.reshape(-1, width)
    last = elements[:, -1].astype(np.int16)
    book = Book.of(count(last, 0, BYTE_SYMBOLS))
    others = byte_words(len(last) * (width - 1))
    if book.words(len(last)) + others < byte_words(len(kept)):
        sections = [*book.write(last, 0), _words_of(np.ascontiguousarray(elements[:, :-1]))]
        header = replace(equal.header, coding=RowCoding.SPLIT)
    else:
        sections, header = [_words_of(kept)], equal.header
    return header, [*equal.sections, *sections]


def _rows_of(rows: Array, literals: Array) -> Array:
    return rows if len(literals) == len(rows) else rows[literals]


def _words_of(given: Array) -> Array:
    """Return an array's bytes as words, filled up with zeros."""
    flat = given.reshape(-1).view(np.uint8)
    out = np.zeros(4 * byte_words(len(flat)), np.uint8)
    out[: len(flat)] = flat
    return out.view(np.uint32)


def _find_equal(rows: Array, marks: Array, window: int | None, row_bits: int) -> Equal:
    """Find equal rows of units ``[rows, units]``.

    A `window` of -1: do not look. `row_bits` are what a row takes that is none, about.
    """
    n = len(rows)
    none = Equal(np.arange(n, dtype=np.int32), BodyHeader(distinct_rows=n), [])
    if n < 2 or window == -1:
        return none
    kernels = equal_rows()
    row_bytes = rows.shape[1] * rows.itemsize
    hashed, unit = rows, next(u for u in (8, 4, 2, 1) if row_bytes % u == 0)
    if unit > rows.itemsize and rows.ctypes.data % unit == 0:
        hashed = rows.reshape(-1).view({8: np.uint64, 4: np.uint32, 2: np.int16}[unit])
        hashed = hashed.reshape(n, -1)
    hashes = np.empty(n, np.uint64)
    hash_rows = kernels.hash_rows
    run_ranges(lambda b, e: call(hash_rows, hashed, hashes, b, e), n, row_bytes)
    slots = np.full(1 << (2 * n - 1).bit_length(), -1, np.int32)
    places, literals = np.empty(n, np.int32), np.empty(n, np.int32)
    given = (hashed, hashes, marks, window or 0, slots, places, literals)
    distinct = int(call(kernels.find_references, *given))
    if distinct == n:
        return none
    literals = literals[:distinct].copy()
    found = _write_references(places, literals, n, window)
    return found if 32 * found.words < (n - distinct) * row_bits else none


def _write_references(places: Array, literals: Array, n: int, window: int | None) -> Equal:
    """Return the shortest form of references."""
    distinct = len(literals)
    referring = np.ones(n, np.uint8)
    referring[literals] = 0
    fields = places[referring.view(bool)]
    bitmap = _words_of(np.packbits(referring, bitorder="little"))
    if window:
        width, least, kind = (window - 1).bit_length(), 1, References.WINDOW
    else:
        width, least, kind = (distinct - 1).bit_length(), 0, References.INDEX
    header = BodyHeader(references=kind, index_bits=width, distinct_rows=distinct)
    most = len(bitmap) + field_words(len(fields), width)
    # No code of less than a bit.
    if not window and distinct <= MOST_SYMBOLS and book_words(distinct) + ceil_div(n, 32) <= most:
        book = Book.of(count(places, 0, distinct))
        if book.words(n) < most:
            coded = replace(header, references=References.CODED, index_bits=0)
            return Equal(literals, coded, book.write(places, 0))
    return Equal(literals, header, [bitmap, packed_fields(fields, least, width)])
