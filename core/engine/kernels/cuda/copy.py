"""Copying raw rows by id on a GPU: sizes of loads and stores, and the grid."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

from ....errors import ArgumentError
from ..format import LINE_BYTES, ceil_div
from .ids import ALL_GOOD, MAX_IDS
from .parameters import Address, Int32, Int64, Parameters, UInt32
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


@dataclass(init=False)
class CopyRows(Parameters):
    """Parameters of `copy_rows`: rows of bytes, int32 or int64 ids, an order of unsigned int32.

    Any row may touch `units` aligned units; ``multiplier`` and ``shift`` divide by that number, see
    `division`. From tile to tile of a block, rows and units advance by `step_rows` and
    `step_units`. `order` and `first_bad` may be None.
    """

    kernel = "copy_rows"

    rows: Address
    stride_bytes: UInt32
    n_rows: Int64
    row_bytes: Int32
    ids: Address
    id_bytes: Int32
    order: Address
    n: Int64
    units: Int32
    multiplier: UInt32
    shift: Int32
    turned: Int32
    step_rows: Int64
    step_units: Int32
    out: Address
    first_bad: Address
    lowest: Int64
    mailbox: Address


class CopyKernels:
    """The kernel of copy.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        #: What copies of rows of one size have in common.
        self.plans: dict[tuple[object, ...], CopyPlan] = {}

    def copy_rows(
        self,
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
    ) -> None:
        """Copy raw rows chosen by id to the device, without waiting for the GPU.

        Parameters
        ----------
        rows : torch.Tensor
            uint8 ``[N, at least row_bytes]``, at any address and any distance from row to row, on
            the device or in page-locked host memory, read over the link. The kernel reads units of
            4 or 16 bytes: up to 15 bytes before and behind a row, never past the end of a page.
        row_bytes : int
            Bytes of a row that are copied.
        ids : torch.Tensor
            int32 or int64 ``[n]`` on the device; negative ones count from the end. Among int64 that
            are known to be good, NO_ROW leaves a row of `out` as it is.
        out : torch.Tensor
            ``[n, ...]`` of any dtype, rows of row_bytes bytes, contiguous, on the device, at any
            address.
        first_bad : torch.Tensor, optional
            int64 ``[1]`` on the device, what `IdKernels.check` or `IdKernels.order` found. When it
            is not -1, `out` is left untouched and the id is reported in the mailbox.
        lowest : int
            Without `first_bad`: the lowest good id, 0 or ``-N``. Every block then looks at all ids,
            which for up to CHECKED_BY_ALL takes less than a launch for that. ALL_GOOD where they
            are known to be good.
        order : torch.Tensor, optional
            int32 ``[n]`` on the device, read as unsigned: the sequence in which rows are taken.
        sm_budget : int, optional
            Multiprocessors that the kernel may use; all when left out.
        unit_bytes : int, optional
            Bytes that a thread loads at once, 4 or 16; chosen by size, alignment and memory of the
            rows when left out.

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
        plan = self.plans.get(key)
        if plan is None:
            plan = CopyPlan(self._runner, *key)
            if len(self.plans) >= MAX_PLANS:
                self.plans.clear()
            self.plans[key] = plan
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
        As for `CopyKernels.copy_rows`.

    Attributes
    ----------
    units : int
        That any row may touch.
    blocks : int
        The most of a launch.
    launch : Launch
        Takes `rows`, `n_rows`, `ids`, `id_bytes`, `order`, `n`, `step_rows`, `step_units`, `out`,
        `first_bad` and `lowest` of `CopyRows`.
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
        self.launch = runner.bind(
            copy_variant(unit_bytes, piece),
            CopyRows,
            THREADS,
            stride_bytes=stride_bytes,
            row_bytes=row_bytes,
            units=self.units,
            multiplier=multiplier,
            shift=shift,
            turned=turned,
            mailbox=runner.mailbox,
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
