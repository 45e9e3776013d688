"""What a GPU does with ids: checks them, orders them, and maps them to locations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ....errors import ArgumentError
from ..format import BUCKET_ENTRIES, NOT_CACHED, ceil_div
from .runner import Runner
from .source import IDS, MAP, ORDER_BINS

THREADS = 256  # of a block
#: Ids that every block of a gather can look at, all of them, in less time than a launch takes.
CHECKED_BY_ALL = 4096
ALL_GOOD = 1  # as the lowest good id: nothing is to be checked
CHECK_THREADS = 1024  # of the one block that checks up to
CHECKED_BY_ONE = 16384  # ids: it takes less time than setting `first_bad` for several blocks
IDS_PER_BLOCK = 4096  # at least, where a block counts bins of its own
BLOCKS_PER_MULTIPROCESSOR = 4  # where ids are ordered: as many as shared memory and use allow
MAX_IDS = (1 << 32) - 1  # positions are ordered as unsigned 32-bit numbers


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


def check_ids(
    runner: Runner,
    ids: torch.Tensor,
    n_rows: int,
    first_bad: torch.Tensor,
    lowest: int | None = None,
) -> None:
    """Find the first id out of range, without waiting for the GPU.

    Parameters
    ----------
    runner : Runner
        Runs the kernel.
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
    blocks, threads = 1, CHECK_THREADS
    if n > CHECKED_BY_ONE:
        first_bad.fill_(-1)
        blocks, threads = min(ceil_div(n, THREADS), 2 * runner.multiprocessors), THREADS
    runner.launch(
        IDS,
        "check_ids",
        (blocks,),
        (threads,),
        (
            ids,
            np.int32(ids.element_size()),
            np.int64(n),
            np.int64(-n_rows if lowest is None else lowest),
            np.int64(n_rows),
            first_bad,
        ),
    )


def order_ids(
    runner: Runner,
    ids: torch.Tensor,
    n_rows: int,
    scratch: IdScratch,
    lowest: int | None = None,
) -> torch.Tensor:
    """Check ids and order them by where in the table their rows lie.

    The table is cut into at most ORDER_BINS equal runs of rows; the order goes through the runs one
    after another and takes the rows of each in any sequence. Nothing waits for the GPU.

    Parameters
    ----------
    runner, ids, n_rows, lowest
        As in `check_ids`.
    scratch : IdScratch
        Overwritten; ``scratch.first_bad`` says afterwards whether an id was out of range, and then
        the order must not be used.

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
        raise ArgumentError(f"ids: {n}, but the scratch that they are ordered in takes {capacity}")
    order = scratch.order[:n]
    runner.launch(
        IDS,
        "reset_order",
        (ceil_div(2 * ORDER_BINS, THREADS),),
        (THREADS,),
        (scratch.bins, scratch.first_bad),
    )
    if n == 0:
        return order
    grid = (min(ceil_div(n, IDS_PER_BLOCK), BLOCKS_PER_MULTIPROCESSOR * runner.multiprocessors),)
    shift = bin_shift(n_rows)
    size, count = np.int32(ids.element_size()), np.int64(n)
    table = (np.int64(n_rows), np.int32(shift), scratch.bins, scratch.first_bad)
    good_from = np.int64(-n_rows if lowest is None else lowest)
    runner.launch(IDS, "count_ids", grid, (THREADS,), (ids, size, count, good_from, *table))
    runner.launch(IDS, "order_ids", grid, (THREADS,), (ids, size, count, *table, order))
    return order


def bin_shift(n_rows: int) -> int:
    """Return how far ids below `n_rows` are shifted right to fall into ORDER_BINS bins."""
    return max(0, (n_rows - 1).bit_length() - (ORDER_BINS - 1).bit_length())


def map_insert(
    runner: Runner, entries: torch.Tensor, ids: torch.Tensor, locations: torch.Tensor
) -> torch.Tensor:
    """Put ids and their locations into a map; see `kernels.cpu.map_insert`.

    Parameters
    ----------
    runner : Runner
        Runs the kernel.
    entries : torch.Tensor
        int64 ``[buckets * BUCKET_ENTRIES, 2]`` on the device, at a multiple of 16 bytes; `buckets`
        is a power of two up to 2**32, or 0.
    ids : torch.Tensor
        int32 or int64 ``[n]`` on the device. An id that is there gets the new location; of an id
        given twice either location is kept.
    locations : torch.Tensor
        int64 ``[n]`` on the device.

    Returns
    -------
    torch.Tensor
        int64 ``[1]`` on the device: how many ids found no free entry or were negative.
    """
    n = ids.shape[0]
    if n == 0 or entries.shape[0] == 0:
        return torch.full((1,), n, dtype=torch.int64, device=entries.device)
    failed = torch.zeros(1, dtype=torch.int64, device=entries.device)
    runner.launch(
        MAP,
        "insert_ids",
        (_map_blocks(runner, n),),
        (THREADS,),
        (
            entries,
            _bucket_mask(entries),
            ids,
            np.int32(ids.element_size()),
            locations,
            np.int64(n),
            failed,
        ),
    )
    return failed


def map_find(
    runner: Runner, entries: torch.Tensor, ids: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Look up ids in a map; see `kernels.cpu.map_find`.

    Parameters
    ----------
    runner, entries, ids
        As in `map_insert`; a negative id is not found.
    out : torch.Tensor, optional
        int64 ``[n]`` on the device; a new tensor when left out.

    Returns
    -------
    torch.Tensor
        `out`: the location of each id, NOT_CACHED where there is none.
    """
    n = ids.shape[0]
    if out is None:
        out = torch.empty(n, dtype=torch.int64, device=entries.device)
    if entries.shape[0] == 0:
        out.fill_(NOT_CACHED)
    elif n:
        runner.launch(
            MAP,
            "find_ids",
            (_map_blocks(runner, n),),
            (THREADS,),
            (
                entries,
                _bucket_mask(entries),
                ids,
                np.int32(ids.element_size()),
                np.int64(n),
                out,
            ),
        )
    return out


def _bucket_mask(entries: torch.Tensor) -> np.uint32:
    return np.uint32(entries.shape[0] // BUCKET_ENTRIES - 1)


def _map_blocks(runner: Runner, n: int) -> int:
    ids_per_block = THREADS // BUCKET_ENTRIES  # eight lanes for an id
    return min(ceil_div(n, ids_per_block), 8 * runner.multiprocessors)
