"""Copying raw rows by id on a GPU: sizes of loads and stores, and the grid."""

from __future__ import annotations

from math import gcd

import numpy as np
import torch

from ...errors import ArgumentError
from ..format import LINE_BYTES, ceil_div
from .launch_ids import MAX_IDS
from .runner import Runner
from .source import COPY_PIECES, copy_variant

THREADS = 256  # of a block
TILE_UNITS = 4 * THREADS  # that a block takes at a time
#: Of a multiprocessor at once, as many as the registers allow; fewer where rows are taken in order:
#: the fewer are under way, the smaller is the part of a table whose addresses must be translated at
#: once.
BLOCKS, ORDERED_BLOCKS = 4, 2
MAX_ROW_BYTES = (1 << 31) - (1 << 14)  # bytes of a row and a tile are counted in 31 bits,
MAX_STRIDE_BYTES = (1 << 32) - 1  # and these, like positions in ids, in 32


def copy_rows(
    runner: Runner,
    rows: torch.Tensor,
    row_bytes: int,
    ids: torch.Tensor,
    out: torch.Tensor,
    *,
    first_bad: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    sm_budget: int | None = None,
    unit_bytes: int | None = None,
) -> None:
    """Copy raw rows chosen by id to the device, without waiting for the GPU.

    Parameters
    ----------
    runner : Runner
        Runs the kernel.
    rows : torch.Tensor
        uint8 ``[N, at least row_bytes]``, at any address and any distance from row to row, on the
        device or in page-locked host memory, read over the link. The kernel reads units of 4
        or 16 bytes: up to 15 bytes before and behind a row, never past the end of a page.
    row_bytes : int
        Bytes of a row that are copied.
    ids : torch.Tensor
        int32 or int64 ``[n]`` on the device; negative ones count from the end.
    out : torch.Tensor
        uint8 ``[n, row_bytes]``, contiguous, on the device, at any address.
    first_bad : torch.Tensor, optional
        int64 ``[1]`` on the device, what `check_ids` or `order_ids` found. When it is not -1, `out`
        is left untouched and the mailbox tells of the id. Without it the ids must be known to be
        good.
    order : torch.Tensor, optional
        int32 ``[n]`` on the device, read as unsigned: the sequence in which rows are taken.
    sm_budget : int, optional
        Multiprocessors that the kernel may use; all when left out.
    unit_bytes : int, optional
        Bytes that a thread loads at once, 4 or 16; chosen by size, alignment and memory of the rows
        when left out.

    Raises
    ------
    ArgumentError
        If rows are longer or further apart than the kernel can count, or ids too many.
    """
    n = out.shape[0]
    if n == 0 or row_bytes == 0:
        return
    stride_bytes = rows.stride(0) if rows.shape[0] > 1 else row_bytes
    for name, value, most in (
        ("row_bytes", row_bytes, MAX_ROW_BYTES),
        ("rows: bytes from row to row", stride_bytes, MAX_STRIDE_BYTES),
        ("ids: number of ids", n, MAX_IDS),
    ):
        if value > most:
            raise ArgumentError(f"{name}: {value}; a copy on a GPU takes at most {most}")
    address = rows.data_ptr()
    piece = piece_bytes(row_bytes | stride_bytes | address | out.data_ptr())
    on_host = rows.device.type == "cpu"
    if unit_bytes is None:
        unit_bytes = choose_unit(row_bytes, piece, on_host=on_host)
    piece = min(piece, max(COPY_PIECES[unit_bytes]))
    units = covering_units(row_bytes, stride_bytes, address, unit_bytes)
    lines_up = (row_bytes | stride_bytes | address) % LINE_BYTES == 0
    turned = on_host and row_bytes > LINE_BYTES and not lines_up
    tiles = ceil_div(n * units, TILE_UNITS)
    multiprocessors = runner.multiprocessors
    if sm_budget is not None:
        multiprocessors = max(1, min(sm_budget, multiprocessors))
    blocks = min(tiles, (BLOCKS if order is None else ORDERED_BLOCKS) * multiprocessors)
    multiplier, shift = division(units)
    step_rows, step_units = divmod(blocks * TILE_UNITS, units)
    runner.launch(
        copy_variant(unit_bytes, piece),
        "copy_rows",
        (blocks,),
        (THREADS,),
        (
            rows,
            np.uint32(stride_bytes),
            np.int64(rows.shape[0]),
            np.int32(row_bytes),
            ids,
            np.int32(ids.element_size()),
            order,
            np.int64(n),
            np.int32(units),
            np.uint32(multiplier),
            np.int32(shift),
            np.int32(turned),
            np.int64(step_rows),
            np.int32(step_units),
            out,
            first_bad,
            runner.mailbox,
        ),
    )


def piece_bytes(places: int) -> int:
    """Return the largest power of two up to 16 that divides sizes and addresses or-ed together."""
    return min(16, places & -places) if places else 16


def choose_unit(row_bytes: int, piece: int, *, on_host: bool) -> int:
    """Return how many bytes a thread loads at once.

    Over the link wide loads win: a warp asks for four lines at once, and a row's ends fall on two
    warps less often. On the device, 16 bytes that cannot be stored whole take several scattered
    stores, and 4-byte loads with whole stores are cheaper.
    """
    if on_host:
        return 16 if row_bytes >= 32 else 4
    return 16 if piece >= 8 else 4


def covering_units(row_bytes: int, stride_bytes: int, address: int, unit_bytes: int) -> int:
    """Return the most aligned units that any row may touch."""
    # Rows start at all multiples of `step` from the first row's offset, modulo the unit.
    step = gcd(stride_bytes, unit_bytes)
    last_offset = address % step + unit_bytes - step
    return ceil_div(last_offset + row_bytes, unit_bytes)


def division(divisor: int) -> tuple[int, int]:
    """Return multiplier and shift with ``n // divisor == n * multiplier >> 32 >> shift``.

    That holds for n below 2**31. The multiplier, ``2**(32 + shift) / divisor`` rounded up, fits 32
    bits; for divisor 1 it would not, and 0 stands for it.
    """
    if divisor == 1:
        return 0, 0
    shift = (divisor - 1).bit_length() - 1
    return ceil_div(1 << (32 + shift), divisor), shift
