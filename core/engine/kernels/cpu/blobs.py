"""Forms of whole tensors on the CPU, twins of zvc.cu; see `bitslab.engine.kernels.blob_format`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ....errors import CorruptedDataError
from ..blob_format import (
    ALIGN_BYTES,
    HEADER_BYTES,
    VALUE_BYTES_AT,
    ZVC_BLOCK_BYTES,
    ZVC_FORM,
    ZVC_ONES,
    ZvcLayout,
    aligned,
)
from ..format import ceil_div
from .compiling import call
from .constants import UNSIGNED
from .loading import zero_values
from .threads import run_ranges

Array = np.ndarray[Any, Any]


def write_header(
    data: torch.Tensor,
    used_bytes: int,
    elements: int,
    element_bytes: int,
    form: int,
    value_bytes: int = 0,
) -> None:
    """Write the header of a buffer on the CPU; see `codecs.blob`."""
    header = data.numpy()[:HEADER_BYTES]
    header[:16].view(np.int64)[:] = used_bytes, elements
    header[16:24].view(np.int32)[:] = form, element_bytes
    header[VALUE_BYTES_AT:].view(np.int64)[:] = value_bytes


def check_header(
    data: torch.Tensor, elements: int, element_bytes: int, form: int, least_bytes: int
) -> int:
    """Return the used bytes that the header of a buffer on the CPU says.

    Raises
    ------
    CorruptedDataError
        When it is the header of another form or tensor, or `data` has other sizes than from
        `least_bytes` to what is used.
    """
    header = data.numpy()[:HEADER_BYTES]
    used, found_elements = (int(n) for n in header[:16].view(np.int64))
    found_form, found_bytes = (int(n) for n in header[16:24].view(np.int32))
    if (found_form, found_elements, found_bytes) != (form, elements, element_bytes):
        raise CorruptedDataError(
            f"blob: its header says form {found_form} and {found_elements} elements of "
            f"{found_bytes} bytes, expected form {form} and {elements} of {element_bytes}"
        )
    if not least_bytes <= used <= data.shape[0]:
        raise CorruptedDataError(
            f"blob: its header says {used} bytes, there are {data.shape[0]}, and such a tensor "
            f"takes {least_bytes} or more"
        )
    return used


def encode_zvc(
    x: torch.Tensor,
    layout: ZvcLayout,
    form: int,
    data: torch.Tensor,
    sm_budget: int | None = None,
    values: torch.Tensor | None = None,
    fill_bytes: int = ALIGN_BYTES,
) -> None:
    """Write a tensor in zero-value compression.

    Parameters
    ----------
    x : torch.Tensor
        uint8 ``[elements * element_bytes]``, contiguous.
    layout : ZvcLayout
        Of the tensor.
    form : int
        For the header.
    data : torch.Tensor
        uint8 ``[max_bytes]`` or more, contiguous, at a multiple of ALIGN_BYTES, to write to.
    sm_budget
        For the launch on a GPU; not needed here.
    values : torch.Tensor, optional
        uint8 ``[max_value_bytes]``, rounded up to a multiple of `fill_bytes`, or more, contiguous,
        at a multiple of ALIGN_BYTES: where the values go, instead of to `data`. The header then
        says what `data` would use with them.
    fill_bytes : int
        Zeros go behind the values up to a multiple of it, itself one of ALIGN_BYTES.
    """
    numba, n = zero_values(), layout.block_units
    elements = x.numpy().view(UNSIGNED[layout.unit_bytes])
    starts, words, target = _parts(data, layout, values)
    counts = np.empty(layout.blocks, np.int64)
    _over_blocks(layout, numba.mark_values, elements, n, words, counts)
    pieces = int(call(numba.place_blocks, counts, layout.unit_bytes, starts))
    _over_blocks(layout, numba.pack_values, elements, n, starts, target)
    end = ALIGN_BYTES * pieces // layout.unit_bytes
    fill = fill_bytes // layout.unit_bytes
    target[end : ceil_div(end, fill) * fill] = 0
    raw = data.numpy()
    for at, words_there in (
        (layout.starts_at, layout.blocks),
        (layout.bitmap_at, layout.bitmap_words),
    ):
        raw[at + 4 * words_there : at + aligned(4 * words_there)] = 0
    value_bytes = ALIGN_BYTES * pieces
    used = layout.values_at + value_bytes if value_bytes else layout.least_bytes
    write_header(data, used, layout.elements, layout.element_bytes, form, value_bytes)


def decode_zvc(
    data: torch.Tensor,
    layout: ZvcLayout,
    form: int,
    out: torch.Tensor,
    sm_budget: int | None = None,
    values: torch.Tensor | None = None,
) -> None:
    """Write the tensor that `encode_zvc` was given.

    Parameters
    ----------
    data : torch.Tensor
        uint8 ``[n]``, contiguous, at a multiple of ALIGN_BYTES; may hold anything, but
        `ZvcLayout.least_bytes` bytes or more.
    layout, form
        As for `encode_zvc`. Of a layout with `bits_first`, buffers that earlier versions wrote
        without it are read too.
    out : torch.Tensor
        uint8 ``[elements * element_bytes]``, contiguous.
    sm_budget
        For the launch on a GPU; not needed here.
    values : torch.Tensor, optional
        Where the values are, when they are not in `data`: of `max_value_bytes` or more.

    Raises
    ------
    CorruptedDataError
        When header, starts and bitmap do not fit together; nothing was written.
    """
    if layout.bits_first and _form_of(data) == ZVC_FORM:
        layout, form = replace(layout, bits_first=False), ZVC_FORM
    bare = layout.bits_first and value_bytes_of(data) == 0
    least = layout.least_bytes if bare else layout.values_at
    used = check_header(data, layout.elements, layout.element_bytes, form, least_bytes=least)
    numba, n = zero_values(), layout.block_units
    own = values is None
    starts, words, source = _parts(data[:used], layout, values)
    if bare:
        starts = np.full(layout.blocks, ZVC_ONES, np.uint32)
    counts = np.empty(layout.blocks, np.int64)
    _over_blocks(layout, numba.count_values, layout.units, n, words, counts)
    bad, pieces = call(numba.check_starts, counts, layout.unit_bytes, starts)
    if bad >= 0:
        raise CorruptedDataError(f"blob: block {bad} is damaged; nothing was decoded")
    value_bytes, taken = value_bytes_of(data), ALIGN_BYTES * int(pieces)
    if value_bytes != taken or (own and used != least + taken):
        raise CorruptedDataError(
            f"blob: its header says {used} bytes and {value_bytes} of values, its blocks have "
            f"{taken}"
        )
    elements = out.numpy().view(UNSIGNED[layout.unit_bytes])
    _over_blocks(layout, numba.unpack_values, words, n, starts, source, elements)


def _form_of(data: torch.Tensor) -> int:
    return int(data.numpy()[16:20].view(np.int32)[0])


def value_bytes_of(data: torch.Tensor) -> int:
    """Return the bytes of the values that the header of a buffer on the CPU says."""
    return int(data.numpy()[VALUE_BYTES_AT:HEADER_BYTES].view(np.uint64)[0])


def _parts(
    data: torch.Tensor, layout: ZvcLayout, values: torch.Tensor | None
) -> tuple[Array, Array, Array]:
    """Return starts, bitmap and values of a buffer, or values that lie elsewhere."""
    raw = data.numpy()
    starts = raw[layout.starts_at :][: 4 * layout.blocks].view(np.uint32)
    words = raw[layout.bitmap_at :][: 4 * layout.bitmap_words].view(np.uint32)
    found = raw[layout.values_at :] if values is None else values.numpy()
    found = found[: len(found) // ALIGN_BYTES * ALIGN_BYTES].view(UNSIGNED[layout.unit_bytes])
    return starts, words, found


def _over_blocks(layout: ZvcLayout, kernel: Any, *arguments: Any) -> None:
    run_ranges(
        lambda begin, end: call(kernel, *arguments, begin, end), layout.blocks, ZVC_BLOCK_BYTES
    )
