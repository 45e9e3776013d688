"""Bodies to rows: checked as a whole before a byte of the tensor is written."""

from __future__ import annotations

import math

import numpy as np
import torch

from ....dtypes import element_bytes, flat_bytes
from ...kernels.cpu.compiling import call
from ...kernels.cpu.loading import code_streams, equal_rows, vector_reading
from ...kernels.cpu.threads import run_ranges, threads_of
from ...kernels.vector_format import (
    BODY_HEADER_BYTES,
    BYTE_SYMBOLS,
    CODE_HEADER_BYTES,
    KINDS,
    MOST_CODE,
    MOST_SYMBOLS,
    WITH_CODES,
    BodyHeader,
    References,
    RowCoding,
    raw_body_bytes,
    row_elements,
)
from .streams import Array, Reader, aligned_words, damaged

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def decode_body(body: Array, out: torch.Tensor, *, bounded: bool) -> None:
    """Write the tensor of a body to `out`.

    Parameters
    ----------
    body : numpy.ndarray
        uint8: all bytes of the body, and no more.
    out : torch.Tensor
        ``[N, ...]`` on the CPU, contiguous.
    bounded : bool
        Whether codes may stand for values.

    Raises
    ------
    CorruptedDataError
        When the body is damaged or of another shape or dtype; nothing is written.
    """
    header = BodyHeader.from_bytes(body[: BODY_HEADER_BYTES + CODE_HEADER_BYTES].tobytes())
    if header is None:
        raise damaged("its body has no header")
    rows, row = row_elements(out.shape)
    _check(header, out, rows, row, bounded)
    rest, target = body[header.nbytes :], flat_bytes(out).numpy()
    row_bytes = row * out.element_size()
    if len(body) == raw_body_bytes(out.nbytes):
        if header != BodyHeader(distinct_rows=header.distinct_rows):
            raise damaged("it is as long as the raw tensor, and not raw")
        target[:] = rest
        return
    if header.coding in WITH_CODES and len(target) and threads_of(rows, row_bytes) == 1:
        _decode_at_once(rest, header, target.view(_UNSIGNED[out.element_size()]), rows, out.dtype)
        return
    reader = Reader(rest)
    places = _places(reader, header, rows)
    elements = header.distinct_rows * row
    kept = _distinct(reader, header, out.dtype, elements)
    reader.end()
    if places is None:
        target[:] = kept.view(np.uint8)
        return
    unit = next(n for n in (8, 4, 2, 1) if row_bytes % n == 0 and target.ctypes.data % n == 0)
    source = kept.view(_UNSIGNED[unit]).reshape(header.distinct_rows, -1)
    to = target.view(_UNSIGNED[unit]).reshape(rows, -1)
    kernel = equal_rows().gather_rows
    run_ranges(lambda b, e: call(kernel, source, places, to, b, e), rows, row_bytes)


def _decode_at_once(
    rest: Array, header: BodyHeader, target: Array, rows: int, dtype: torch.dtype
) -> None:
    """Write the elements of sections of codes to `target`, unsigned ``[n]``, by one kernel."""
    n_bytes = len(rest)
    if n_bytes % 4:  # damaged, mostly
        rest = np.append(rest, np.zeros(-n_bytes % 4, np.uint8))
    kernels = vector_reading()
    found = call(
        kernels.read_coded,
        aligned_words(rest),
        n_bytes,
        int(header.references),
        header.index_bits,
        header.distinct_rows,
        int(header.coding),
        header.code_bits,
        header.outliers,
        header.symbols,
        header.least,
        np.float32(header.step),
        KINDS[dtype],
        target.reshape(rows, -1),
    )
    if found:
        raise damaged(kernels.DAMAGES[-1 - found])


def _check(header: BodyHeader, out: torch.Tensor, rows: int, row: int, bounded: bool) -> None:
    """Refuse a header whose numbers do not fit each other or the tensor."""
    coded = header.coding in WITH_CODES
    distinct = header.distinct_rows
    whole = header.references is References.NONE
    if coded and not (bounded and out.dtype in KINDS):
        raise damaged("it has codes of values, which its form or dtype has not")
    symbols = range(1, MOST_SYMBOLS + 1) if header.coding is RowCoding.HUFFMAN else (0,)
    sound = (
        (distinct == rows if whole else 0 < distinct < rows)
        and header.symbols in symbols
        and header.code_bits <= (16 if header.coding is RowCoding.FIXED else 0)
        and (
            header.index_bits <= 32 if header.references in _WITH_FIELDS else not header.index_bits
        )
        and (header.references is not References.CODED or distinct <= MOST_SYMBOLS)
        and (not coded or (0 < header.step < math.inf and abs(header.least) <= MOST_CODE))
        and header.outliers <= distinct * row
    )
    if not sound:
        raise damaged("the numbers in its body's header do not fit")


_WITH_FIELDS = (References.INDEX, References.WINDOW)


def _places(reader: Reader, header: BodyHeader, rows: int) -> Array | None:
    """Return of each row the number of its distinct row, int32; None where all are distinct."""
    distinct = header.distinct_rows
    if header.references is References.NONE:
        return None
    if header.references is References.CODED:
        places = reader.stream(rows, distinct).astype(np.int32)
        if int(places.max()) >= distinct:
            raise damaged("a reference is out of range")
        return places
    bitmap = reader.words(-(-rows // 32))
    fields = reader.fields(rows - distinct, header.index_bits, np.uint32)
    places = np.empty(rows, np.int32)
    windowed = header.references is References.WINDOW
    kernel = equal_rows().follow_references
    if not call(kernel, bitmap, fields, windowed, distinct, places):
        raise damaged("a reference is out of range")
    return places


def _distinct(reader: Reader, header: BodyHeader, dtype: torch.dtype, elements: int) -> Array:
    """Return the elements of the distinct rows, as unsigned integers or bytes."""
    size = dtype.itemsize
    if header.coding is RowCoding.RAW:
        return _aligned(reader.bytes(elements * size), size)
    if header.coding is RowCoding.SPLIT:
        width = element_bytes(dtype)
        numbers = elements * size // width
        parts = np.empty((numbers, width), np.uint8)
        parts[:, -1] = reader.stream(numbers, BYTE_SYMBOLS)
        parts[:, :-1] = reader.bytes(numbers * (width - 1)).reshape(numbers, -1)
        return parts.reshape(-1)
    unsigned = _UNSIGNED[size]
    places = reader.words(header.outliers)
    bits = _aligned(reader.bytes(header.outliers * size), size).view(unsigned)
    # Places rise, and none is behind the last element.
    if len(places) and (int(places[-1]) >= elements or (places[1:] <= places[:-1]).any()):
        raise damaged("the place of an outlier is out of range")
    if header.coding is RowCoding.HUFFMAN:
        values = values_of(header.least, header.symbols, header.step, dtype)
        kept = reader.stream(elements, header.symbols, values)
    else:
        fields = reader.fields(elements, header.code_bits)
        kept = np.empty(elements, unsigned)
        values = values_of(header.least, 1 << header.code_bits, header.step, dtype)
        kernel = code_streams().values_of_symbols
        given = (fields, values, kept)
        if not all(run_ranges(lambda b, e: call(kernel, *given, b, e), elements, size)):
            raise damaged("a code has no value")
    kept[places] = bits
    return kept


def values_of(least: int, count: int, step: float, dtype: torch.dtype) -> Array:
    """Return the bits of the values of `count` codes from the least one on."""
    values = np.empty(count, _UNSIGNED[dtype.itemsize])
    call(equal_rows().values_of_codes, least, np.float32(step), KINDS[dtype], values)
    return values


def _aligned(data: Array, size: int) -> Array:
    return data if data.ctypes.data % size == 0 else data.copy()
