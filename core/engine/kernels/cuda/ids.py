"""What a GPU does with ids before a gather: checks them, orders them, finds their rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ....errors import ArgumentError
from ..format import ceil_div
from .parameters import Address, Int32, Int64, Parameters
from .runner import Launch, Runner
from .source import IDS, ORDER_BINS

THREADS = 256  # of a block
#: Ids that every block of a gather can look at, all of them, in less time than a launch takes.
CHECKED_BY_ALL = 4096
ALL_GOOD = 1  # as the lowest good id: nothing is to be checked
CHECK_THREADS = 1024  # of the one block that checks up to
CHECKED_BY_ONE = 16384  # ids: it takes less time than setting `first_bad` for several blocks
IDS_PER_BLOCK = 4096  # at least, where a block counts bins of its own
BLOCKS_PER_MULTIPROCESSOR = 4  # where ids are ordered: as many as shared memory and use allow
MAX_IDS = (1 << 32) - 1  # positions are ordered as unsigned 32-bit numbers


@dataclass(init=False)
class CheckIds(Parameters):
    """Parameters of `check_ids`: int32 or int64 ids, `first_bad` int64, good ones from `lowest`."""

    kernel = "check_ids"

    ids: Address
    id_bytes: Int32
    n: Int64
    lowest: Int64
    n_rows: Int64
    first_bad: Address


@dataclass(init=False)
class ResetOrder(Parameters):
    """Parameters of `reset_order`: the memory of an `IdScratch`."""

    kernel = "reset_order"

    bins: Address
    first_bad: Address


@dataclass(init=False)
class CountIds(Parameters):
    """Parameters of `count_ids`: as of `CheckIds`; ids are shifted right to give their bins."""

    kernel = "count_ids"

    ids: Address
    id_bytes: Int32
    n: Int64
    lowest: Int64
    n_rows: Int64
    shift: Int32
    bins: Address
    first_bad: Address


@dataclass(init=False)
class OrderIds(Parameters):
    """Parameters of `order_ids`: as of `CountIds`; `order` gets unsigned int32."""

    kernel = "order_ids"

    ids: Address
    id_bytes: Int32
    n: Int64
    n_rows: Int64
    shift: Int32
    bins: Address
    first_bad: Address
    order: Address


@dataclass(init=False)
class RowsOfKeys(Parameters):
    """Parameters of `rows_of_keys`: int32 or int64 ids, int64 `keys` ``[3, n_keys]`` and `rows`."""

    kernel = "rows_of_keys"

    ids: Address
    id_bytes: Int32
    n: Int64
    keys: Address
    n_keys: Int32
    rows: Address
    mailbox: Address


@dataclass(frozen=True, eq=False)
class IdScratch:
    """What ordering ids writes, kept from call to call on the device that gathers.

    Its contents hold until the next call that uses it, so calls on streams that may run at the same
    time need scratches of their own.

    Parameters
    ----------
    first_bad : torch.Tensor
        int64 ``[1]``: the first position of an id out of range, or -1.
    bins : torch.Tensor
        int32 ``[2 * ORDER_BINS]``.
    order : torch.Tensor
        int32 ``[capacity]``, read as unsigned.
    """

    first_bad: torch.Tensor
    bins: torch.Tensor
    order: torch.Tensor

    @classmethod
    def allocate(cls, device: torch.device | str, capacity: int) -> IdScratch:
        """Return a scratch for up to `capacity` ids; for checks alone 0 will do."""
        return cls(
            torch.empty(1, dtype=torch.int64, device=device),
            torch.empty(2 * ORDER_BINS, dtype=torch.int32, device=device),
            torch.empty(capacity, dtype=torch.int32, device=device),
        )


def check_ids_count(n: int) -> None:
    """Refuse more ids than a gather on a GPU counts."""
    if n > MAX_IDS:
        raise ArgumentError(f"ids: {n}, a gather on a GPU takes at most {MAX_IDS}")


class IdKernels:
    """The kernels of ids.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._most_blocks = BLOCKS_PER_MULTIPROCESSOR * runner.multiprocessors

    def check(
        self,
        ids: torch.Tensor,
        n_rows: int,
        first_bad: torch.Tensor,
        lowest: int | None = None,
    ) -> None:
        """Find the first id out of range, without waiting for the GPU.

        Parameters
        ----------
        ids : torch.Tensor
            int32 or int64 ``[n]`` on the device; good from `lowest` to ``n_rows - 1``.
        n_rows : int
            Rows of the table.
        first_bad : torch.Tensor
            int64 ``[1]`` on the device, overwritten by the first bad position, or -1.
        lowest : int, optional
            0, or ``-n_rows`` where negative ids count from the end, as they do when left out.
        """
        n = ids.shape[0]
        blocks, check = 1, self._check_by_one
        if n > CHECKED_BY_ONE:
            first_bad.fill_(-1)
            blocks = min(ceil_div(n, THREADS), 2 * self._runner.multiprocessors)
            check = self._check_by_many
        check(
            blocks,
            ids.data_ptr(),
            ids.element_size(),
            n,
            -n_rows if lowest is None else lowest,
            n_rows,
            first_bad.data_ptr(),
        )

    def order(
        self,
        ids: torch.Tensor,
        n_rows: int,
        scratch: IdScratch,
        lowest: int | None = None,
    ) -> torch.Tensor:
        """Check ids and order them by where in the table their rows lie.

        The table is cut into at most ORDER_BINS equal runs of rows; the order goes through the runs
        one after another and takes the rows of each in any sequence. Nothing waits for the GPU.

        Parameters
        ----------
        ids, n_rows, lowest
            As in `check`.
        scratch : IdScratch
            Overwritten; ``scratch.first_bad`` says afterwards whether an id was out of range, and
            then the order must not be used.

        Returns
        -------
        torch.Tensor
            int32 ``[n]``, a view of ``scratch.order``, read as unsigned: positions in `ids`.

        Raises
        ------
        ArgumentError
            If there are more ids than the scratch has room for.
        """
        n, capacity = ids.shape[0], min(scratch.order.shape[0], MAX_IDS)
        if n > capacity:
            raise ArgumentError(
                f"ids: {n}, but the scratch that they are ordered in takes {capacity}"
            )
        order = scratch.order[:n]
        bins, first_bad = scratch.bins.data_ptr(), scratch.first_bad.data_ptr()
        self._reset(ceil_div(2 * ORDER_BINS, THREADS), bins, first_bad)
        if n == 0:
            return order
        blocks = min(ceil_div(n, IDS_PER_BLOCK), self._most_blocks)
        of_ids = (ids.data_ptr(), ids.element_size(), n)
        shift = bin_shift(n_rows)
        lowest = -n_rows if lowest is None else lowest
        self._count(blocks, *of_ids, lowest, n_rows, shift, bins, first_bad)
        self._order(blocks, *of_ids, n_rows, shift, bins, first_bad, order.data_ptr())
        return order

    def rows_of_keys(self, ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the rows that ids name in tables whose rows lie back to back.

        Parameters
        ----------
        ids : torch.Tensor
            int32 or int64 ``[n]`` on the device, contiguous: those of one key after those of
            another, each from 0 on in its table. One out of range is reported in the mailbox, and
            stands for the first or the last row of the table.
        keys : torch.Tensor
            int64 ``[3, K]`` on the device, contiguous: the position behind the last id of each key,
            which ascends to n, the first row of its table, and the rows of that.

        Returns
        -------
        torch.Tensor
            int64 ``[n]`` on the device.
        """
        n = ids.shape[0]
        rows = torch.empty(n, dtype=torch.int64, device=ids.device)
        if n:
            self._rows_of_keys(
                min(ceil_div(n, THREADS), self._most_blocks),
                ids.data_ptr(),
                ids.element_size(),
                n,
                keys.data_ptr(),
                keys.shape[1],
                rows.data_ptr(),
            )
        return rows

    @cached_property
    def _rows_of_keys(self) -> Launch:
        return self._runner.bind(IDS, RowsOfKeys, THREADS, mailbox=self._runner.mailbox)

    @cached_property
    def _check_by_one(self) -> Launch:
        return self._runner.bind(IDS, CheckIds, CHECK_THREADS)

    @cached_property
    def _check_by_many(self) -> Launch:
        return self._runner.bind(IDS, CheckIds, THREADS)

    @cached_property
    def _reset(self) -> Launch:
        return self._runner.bind(IDS, ResetOrder, THREADS)

    @cached_property
    def _count(self) -> Launch:
        return self._runner.bind(IDS, CountIds, THREADS)

    @cached_property
    def _order(self) -> Launch:
        return self._runner.bind(IDS, OrderIds, THREADS)


def bin_shift(n_rows: int) -> int:
    """Return how far ids below `n_rows` are shifted right to fall into ORDER_BINS bins."""
    return max(0, (n_rows - 1).bit_length() - (ORDER_BINS - 1).bit_length())
