"""Whole tensors on the CPU of which some units are kept; see `bitslab.engine.kernels.kept_format`.

The functions take a tensor's bytes, uint8 ``[n]``, and a buffer, uint8, whose header says what it
holds; bytes behind the used ones are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..blob_format import HEADER_BYTES
from ..kept_format import (
    COLUMN_BYTES,
    COUNT_BYTES,
    CSR_FORM,
    RAW,
    RLE_FORM,
    ROW_UNITS,
    ZFP_FORM,
    KeptLayout,
)
from ..zfp_format import FLOAT_KINDS, plane_codes, plane_runs, zfp_layout
from .compiling import call
from .constants import UNSIGNED
from .loading import keeping, run_lengths, sparse_rows, zfp_blocks
from .threads import run_ranges

Array = np.ndarray[Any, Any]


def count_zeros(data: torch.Tensor, unit_bytes: int) -> torch.Tensor:
    """Count the units of a tensor that are zero: whose bits are all 0.

    Parameters
    ----------
    data : torch.Tensor
        uint8 ``[n]``, contiguous: the tensor's bytes.
    unit_bytes : int
        Bytes of a unit: 1, 2, 4 or 8; divides n.

    Returns
    -------
    torch.Tensor
        int64 ``[]`` on the same device, which nobody waits for.
    """
    x = data.numpy().view(UNSIGNED[unit_bytes])
    kernel = keeping().count_zeros
    parts = run_ranges(lambda begin, end: int(call(kernel, x, begin, end)), x.shape[0], unit_bytes)
    return torch.tensor(sum(parts), dtype=torch.int64)


def encode_csr(
    x: torch.Tensor, element_bytes: int, out: torch.Tensor, sm_budget: int | None = None
) -> None:
    """Write a tensor as compressed sparse rows: the units that are not zero, and their columns.

    Parameters
    ----------
    x : torch.Tensor
        uint8 ``[n]``, contiguous, at a multiple of the unit's bytes.
    element_bytes : int
        Bytes of an element: 1, 2, 4, 8 or 16.
    out : torch.Tensor
        uint8, at a multiple of ALIGN_BYTES, of `KeptLayout.max_bytes` or more.
    sm_budget
        For the launch on a GPU; not needed here.
    """
    layout = KeptLayout(x.shape[0] // element_bytes, element_bytes, COLUMN_BYTES)
    units, starts = _units(x, layout), np.zeros(layout.rows + 1, np.int64)
    functions = sparse_rows()
    _over_rows(functions.count_csr, layout, units, starts[1:])
    parts = _write_header(layout, CSR_FORM, units, starts, out)
    if parts is not None:
        _over_rows(functions.pack_csr, layout, units, parts.starts, parts.values, parts.places)


def decode_csr(
    data: torch.Tensor, element_bytes: int, out: torch.Tensor, sm_budget: int | None = None
) -> bool:
    """Read a tensor out of compressed sparse rows, whatever they hold.

    Parameters
    ----------
    data : torch.Tensor
        The buffer that `encode_csr` wrote, or its used bytes.
    element_bytes : int
        As for `encode_csr`.
    out : torch.Tensor
        uint8 ``[n]``, contiguous, at a multiple of the unit's bytes.

    Returns
    -------
    bool
        Whether the buffer is sound. If not, nothing was written.
    """
    layout = KeptLayout(out.shape[0] // element_bytes, element_bytes, COLUMN_BYTES)
    units = _units(out, layout)
    parts = _read_header(layout, CSR_FORM, units, data)
    if parts is None or not _sound_columns(layout, parts):
        return False
    if not parts.raw:
        _over_rows(sparse_rows().clear_rows, layout, units)
        _over_rows(keeping().put_units, layout, parts.starts, parts.values, parts.places, units)
    return True


def encode_rle(
    x: torch.Tensor, element_bytes: int, out: torch.Tensor, sm_budget: int | None = None
) -> None:
    """Write a tensor as runs of equal units: the value and the count of each; see `encode_csr`."""
    layout = KeptLayout(x.shape[0] // element_bytes, element_bytes, COUNT_BYTES)
    units, starts = _units(x, layout), np.zeros(layout.rows + 1, np.int64)
    functions = run_lengths()
    _over_rows(functions.count_rle, layout, units, starts[1:])
    parts = _write_header(layout, RLE_FORM, units, starts, out)
    if parts is not None:
        _over_rows(functions.pack_rle, layout, units, parts.starts, parts.values, parts.places)


def decode_rle(
    data: torch.Tensor, element_bytes: int, out: torch.Tensor, sm_budget: int | None = None
) -> bool:
    """Read a tensor out of runs of equal units, whatever they hold; see `decode_csr`."""
    layout = KeptLayout(out.shape[0] // element_bytes, element_bytes, COUNT_BYTES)
    units = _units(out, layout)
    parts = _read_header(layout, RLE_FORM, units, data)
    if parts is None or parts.raw:
        return parts is not None
    functions = run_lengths()
    bad = _over_rows(functions.check_runs, layout, parts.starts, parts.places, layout.units)
    if max(bad, default=-1) >= 0:
        return False
    _over_rows(functions.decode_rle, layout, parts.starts, parts.values, parts.places, units)
    return True


def encode_zfp(
    x: torch.Tensor,
    dtype: torch.dtype,
    block_bits: int,
    out: torch.Tensor,
    sm_budget: int | None = None,
) -> None:
    """Write a tensor as a stream of zfp's blocks, followed by what is not finite.

    Parameters
    ----------
    x : torch.Tensor
        uint8 ``[n]``, contiguous, at a multiple of a value's bytes.
    dtype : torch.dtype
        Of the values, one of `zfp_format.FLOAT_KINDS`.
    block_bits : int
        Bits of a block of four.
    out : torch.Tensor
        As for `encode_csr`.
    """
    kind = FLOAT_KINDS[dtype]
    layout = zfp_layout(x.shape[0] // dtype.itemsize, dtype, block_bits)
    units, starts = _units(x, layout), np.zeros(layout.rows + 1, np.int64)
    functions = zfp_blocks()
    if layout.before_bytes < layout.raw_bytes:
        stream = out.numpy()[HEADER_BYTES : layout.before_bytes].view(np.uint64)
        sizes = (kind.fraction_bits, kind.exponent_bits, kind.integer_bits, block_bits)
        encode, codes = functions.encode_zfp, plane_codes()
        _over_rows(encode, layout, units, *sizes, codes, stream, starts[1:])
    parts = _write_header(layout, ZFP_FORM, units, starts, out)
    if parts is not None:
        widths = (kind.fraction_bits, kind.exponent_bits)
        to = (parts.starts, parts.values, parts.places)
        _over_rows(functions.pack_zfp, layout, units, *widths, *to)


def decode_zfp(
    data: torch.Tensor,
    dtype: torch.dtype,
    block_bits: int,
    out: torch.Tensor,
    sm_budget: int | None = None,
) -> bool:
    """Read a tensor out of a stream of zfp's blocks, whatever it holds; see `decode_csr`."""
    kind = FLOAT_KINDS[dtype]
    layout = zfp_layout(out.shape[0] // dtype.itemsize, dtype, block_bits)
    units = _units(out, layout)
    parts = _read_header(layout, ZFP_FORM, units, data)
    if parts is None or not _sound_columns(layout, parts):
        return False
    if parts.raw:
        return True
    stream = data.numpy()[HEADER_BYTES : layout.before_bytes].view(np.uint64)
    sizes = (kind.fraction_bits, kind.exponent_bits, block_bits)
    _over_rows(zfp_blocks().decode_zfp, layout, stream, *sizes, plane_runs(), units)
    _over_rows(keeping().put_units, layout, parts.starts, parts.values, parts.places, units)
    return True


@dataclass(frozen=True)
class _Parts:
    """The parts of a buffer.

    Parameters
    ----------
    starts, values, places : numpy.ndarray
        As in `KeptLayout`; of no unit when none is kept.
    raw : bool
        Whether the tensor was kept raw, and has been copied.
    """

    starts: Array
    values: Array
    places: Array
    raw: bool = False


_NO_PARTS = np.empty(0, np.int64)


def _units(x: torch.Tensor, layout: KeptLayout) -> Array:
    """View a tensor's bytes as units."""
    found: Array = x.numpy().view(UNSIGNED[layout.unit_bytes])
    return found


def _over_rows(kernel: Callable[..., Any], layout: KeptLayout, *arguments: Any) -> list[int]:
    """Call a function for ranges of rows; return the numbers that it returns."""

    def work(begin: int, end: int) -> int:
        found = call(kernel, *arguments, begin, end)
        return -1 if found is None else int(found)

    if not layout.rows:
        return []
    return run_ranges(work, layout.rows, ROW_UNITS * layout.unit_bytes)


def _write_header(
    layout: KeptLayout, form: int, units: Array, starts: Array, out: torch.Tensor
) -> _Parts | None:
    """Write header, starts and what is between the parts; a tensor that is to be raw as a whole.

    `starts` are the numbers of each row behind a 0, which are summed. Returns the parts that are
    still to be written, None when there are none.
    """
    np.cumsum(starts, out=starts)
    data, kept = out.numpy(), int(starts[-1])
    used = layout.used_bytes(kept)
    raw = used >= layout.raw_bytes
    data[:HEADER_BYTES].view(np.int64)[:] = (
        layout.raw_bytes if raw else used,
        layout.elements,
        form | layout.element_bytes << 32,
        RAW if raw else kept,
    )
    if raw:
        data[HEADER_BYTES : layout.raw_bytes] = units.view(np.uint8)
        return None
    if not kept:
        return None
    data[layout.before_bytes : layout.values_at] = 0
    end_of_values = layout.values_at + kept * layout.unit_bytes
    data[end_of_values : layout.places_at(kept)] = 0
    parts = _parts(layout, kept, data)
    parts.starts[:] = starts
    return parts


def _read_header(
    layout: KeptLayout, form: int, units: Array, buffer: torch.Tensor
) -> _Parts | None:
    """Return the parts that a buffer has, None when it is damaged; a raw tensor is copied."""
    data = buffer.numpy()
    used, elements, forms, kept = map(int, data[:HEADER_BYTES].view(np.int64))
    if elements != layout.elements or forms != form | layout.element_bytes << 32:
        return None
    if used > data.shape[0] or not RAW <= kept <= layout.units:
        return None
    if used != (layout.raw_bytes if kept == RAW else layout.used_bytes(kept)):
        return None
    if kept == RAW:
        units.view(np.uint8)[:] = data[HEADER_BYTES : layout.raw_bytes]
        return _Parts(_NO_PARTS, _NO_PARTS, _NO_PARTS, raw=True)
    parts = _parts(layout, kept, data)
    if kept:
        counts = np.diff(parts.starts)
        ends = (int(parts.starts[0]), int(parts.starts[-1]))
        # No sum of differences that are too large comes around to a right end.
        if ends != (0, kept) or counts.min() < 0 or counts.max() > ROW_UNITS:
            return None
    return parts


def _parts(layout: KeptLayout, kept: int, data: Array) -> _Parts:
    places = UNSIGNED[layout.place_bytes]
    if not kept:
        values = np.empty(0, UNSIGNED[layout.unit_bytes])
        return _Parts(np.zeros(layout.rows + 1, np.int64), values, np.empty(0, places))
    starts = data[layout.starts_at :][: 8 * (layout.rows + 1)].view(np.int64)
    values = data[layout.values_at :][: kept * layout.unit_bytes]
    columns = data[layout.places_at(kept) :][: kept * layout.place_bytes]
    return _Parts(starts, values.view(UNSIGNED[layout.unit_bytes]), columns.view(places))


def _sound_columns(layout: KeptLayout, parts: _Parts) -> bool:
    """Return whether the columns of each row rise, and end in it."""
    if not len(parts.places):
        return True
    given = (parts.starts, parts.places, layout.units)
    return max(_over_rows(keeping().check_columns, layout, *given), default=-1) < 0
