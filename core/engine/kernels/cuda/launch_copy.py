"""Copying raw rows by id on a GPU: sizes of loads and stores, and the grid."""

from __future__ import annotations

from math import gcd

import numpy as np
import torch

from ....errors import ArgumentError
from ..format import LINE_BYTES, ceil_div
from .launch_ids import ALL_GOOD, MAX_IDS
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
MAX_PLANS = 256  # that are kept
#: What changes between copies of a plan, as arguments of the kernel; see `CopyPlan.launch`.
CHANGING = (
    "rows",
    "n_rows",
    "ids",
    "id_bytes",
    "order",
    "n",
    "step_rows",
    "step_units",
    "out",
    "first_bad",
    "lowest",
)


def copy_rows(
    runner: Runner,
    rows: torch.Tensor,
    row_bytes: int,
    ids: torch.Tensor,
    out: torch.Tensor,
    *,
    first_bad: torch.Tensor | None = None,
    lowest: int = ALL_GOOD,
    order: torch.Tensor | None = None,
    sm_budget: int | None = None,
    unit_bytes: int | None = None,
    plans: dict[tuple[object, ...], CopyPlan] | None = None,
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
        int32 or int64 ``[n]`` on the device; negative ones count from the end. Among int64 that are
        known to be good, NO_ROW leaves a row of `out` as it is.
    out : torch.Tensor
        ``[n, ...]`` of any dtype, rows of row_bytes bytes, contiguous, on the device, at any
        address.
    first_bad : torch.Tensor, optional
        int64 ``[1]`` on the device, what `check_ids` or `order_ids` found. When it is not -1, `out`
        is left untouched and the id is reported in the mailbox.
    lowest : int
        Without `first_bad`: the lowest good id, 0 or ``-N``. Every block then looks at all ids,
        which for up to CHECKED_BY_ALL takes less than a launch for that. ALL_GOOD where they are
        known to be good.
    order : torch.Tensor, optional
        int32 ``[n]`` on the device, read as unsigned: the sequence in which rows are taken.
    sm_budget : int, optional
        Multiprocessors that the kernel may use; all when left out.
    unit_bytes : int, optional
        Bytes that a thread loads at once, 4 or 16; chosen by size, alignment and memory of the rows
        when left out.
    plans : dict, optional
        Where what is worked out is kept for the next time.

    Raises
    ------
    ArgumentError
        If rows are longer or further apart than the kernel can count, or ids too many.
    """
    n = out.shape[0]
    if n == 0 or row_bytes == 0:
        return
    if n > MAX_IDS:
        raise ArgumentError(f"ids: number of ids: {n}; a copy on a GPU takes at most {MAX_IDS}")
    n_rows = rows.shape[0]
    stride_bytes = rows.stride(0) if n_rows > 1 else row_bytes
    address, to = rows.data_ptr(), out.data_ptr()
    on_host = rows.device.type == "cpu"
    ordered = order is not None
    key = (
        row_bytes,
        stride_bytes,
        address % LINE_BYTES,
        to % 16,
        on_host,
        ordered,
        sm_budget,
        unit_bytes,
    )
    plan = None if plans is None else plans.get(key)
    if plan is None:
        plan = CopyPlan(runner, *key)
        if plans is not None:
            if len(plans) >= MAX_PLANS:
                plans.clear()
            plans[key] = plan
    blocks = min(ceil_div(n * plan.units, TILE_UNITS), plan.blocks)
    step_rows, step_units = divmod(blocks * TILE_UNITS, plan.units)
    plan.launch(
        blocks,
        address,
        n_rows,
        ids.data_ptr(),
        ids.element_size(),
        0 if order is None else order.data_ptr(),
        n,
        step_rows,
        step_units,
        to,
        0 if first_bad is None else first_bad.data_ptr(),
        lowest,
    )


class CopyPlan:
    """What copies of rows of one size have in common, worked out once.

    Parameters
    ----------
    runner : Runner
        Runs the kernel.
    row_bytes, stride_bytes : int
        Bytes of a row that are copied, and from row to row.
    address, to : int
        Of the first row, modulo a line, and of the output, modulo 16.
    on_host : bool
        Whether the rows lie in host memory.
    ordered : bool
        Whether they are taken in order.
    sm_budget, unit_bytes : int or None
        As for `copy_rows`.

    Attributes
    ----------
    units : int
        That any row may touch.
    blocks : int
        The most of a launch.
    launch : Prepared
        Takes the address of the rows, N, the address of the ids, bytes of an id, the address of the
        order, n, rows and units from tile to tile, the address of the output, that of `first_bad`,
        and `lowest`.
    """

    def __init__(
        self,
        runner: Runner,
        row_bytes: int,
        stride_bytes: int,
        address: int,
        to: int,
        on_host: bool,
        ordered: bool,
        sm_budget: int | None,
        unit_bytes: int | None,
    ) -> None:
        for name, value, most in (
            ("row_bytes", row_bytes, MAX_ROW_BYTES),
            ("rows: bytes from row to row", stride_bytes, MAX_STRIDE_BYTES),
        ):
            if value > most:
                raise ArgumentError(f"{name}: {value}; a copy on a GPU takes at most {most}")
        piece = piece_bytes(row_bytes | stride_bytes | address | to)
        if unit_bytes is None:
            unit_bytes = choose_unit(row_bytes, piece, on_host=on_host)
        piece = min(piece, max(COPY_PIECES[unit_bytes]))
        self.units = covering_units(row_bytes, stride_bytes, address, unit_bytes)
        lines_up = (row_bytes | stride_bytes | address) % LINE_BYTES == 0
        turned = on_host and row_bytes > LINE_BYTES and not lines_up
        multiprocessors = runner.multiprocessors
        if sm_budget is not None:
            multiprocessors = max(1, min(sm_budget, multiprocessors))
        self.blocks = (ORDERED_BLOCKS if ordered else BLOCKS) * multiprocessors
        multiplier, shift = division(self.units)
        args = {
            "rows": None,
            "stride_bytes": np.uint32(stride_bytes),
            "n_rows": np.int64(0),
            "row_bytes": np.int32(row_bytes),
            "ids": None,
            "id_bytes": np.int32(0),
            "order": None,
            "n": np.int64(0),
            "units": np.int32(self.units),
            "multiplier": np.uint32(multiplier),
            "shift": np.int32(shift),
            "turned": np.int32(turned),
            "step_rows": np.int64(0),
            "step_units": np.int32(0),
            "out": None,
            "first_bad": None,
            "lowest": np.int64(0),
            "mailbox": runner.mailbox,
        }
        names = list(args)
        self.launch = runner.prepare(
            copy_variant(unit_bytes, piece),
            "copy_rows",
            THREADS,
            list(args.values()),
            [names.index(name) for name in CHANGING],
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
