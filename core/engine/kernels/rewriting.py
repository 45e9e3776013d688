"""Rows that are packed into a table where they are wanted: what kernels know of its overflow area.

See cuda/rewrite.cu, and `kernels.cpu.rewrite_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

#: Rows up to these bytes are put together in shared memory on a GPU; longer ones are not rewritten.
#: Every GPU has as much for a block that asks for it: 99 KiB at the least.
MAX_REWRITTEN_ROW_BYTES = 48 << 10

#: Words of `OverflowPlaces.state`: places in use or free again, how many of them are free, those
#: taken and freed by this launch, blocks of it that are done, launches, and rows rewritten so far.
USED, FREE, TAKEN, FREED, DONE, LAUNCHES, REWRITTEN = range(7)
STATE_WORDS = 8
#: Bits of the first word of `OverflowPlaces.report` that say how many places are used.
USED_BITS = 32


@dataclass(frozen=True, eq=False)
class OverflowPlaces:
    """Places of rows in an overflow area, as kernels take and free them.

    A place is used again by later launches, so an area has room for a launch when the places used
    before, and one for each row that it rewrites, are not more than it has.

    Parameters
    ----------
    free : torch.Tensor
        int32 ``[places of the area]`` on the device: the free ones first.
    state : torch.Tensor
        int64 ``[STATE_WORDS]`` there.
    report : torch.Tensor
        int64 ``[2]`` in memory that the host reads at any time: launches and places used, in one
        word, and rows rewritten.
    """

    free: torch.Tensor
    state: torch.Tensor
    report: torch.Tensor

    @classmethod
    def on(
        cls, device: torch.device, free: torch.Tensor, used: int, places: int, report: torch.Tensor
    ) -> OverflowPlaces:
        """Return the places of an area on a device.

        Parameters
        ----------
        device : torch.device
            Where rows are rewritten.
        free : torch.Tensor
            int32 ``[m]`` on the CPU: free places among those used before.
        used, places : int
            Places used before, and all that there are.
        report : torch.Tensor
            As above; what it says is overwritten.
        """
        listed = torch.zeros(max(1, places), dtype=torch.int32)
        listed[: len(free)] = free
        state = torch.zeros(STATE_WORDS, dtype=torch.int64)
        state[USED], state[FREE] = used, len(free)
        report.numpy()[:] = used, 0
        return cls(listed.to(device), state.to(device), report)


class LeavingRows(NamedTuple):
    """Rows that leave the slots of a cache.

    Parameters
    ----------
    rows : torch.Tensor
        ``[slots, ...]`` on the device, contiguous.
    slots, leaving : torch.Tensor
        int64 on the device, with at least as many entries as there are slots: each slot, and the
        number of the row in it, negative for none. No two are alike.
    coming : torch.Tensor
        int64 on the device; its first entry says how many slots there are.
    most : int
        The most that there can be.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    leaving: torch.Tensor
    coming: torch.Tensor
    most: int
