"""Where the rows of a batch lie in a cache, found by a GPU; see slots.cu."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..format import ceil_div
from .parameters import Address, Int32, Int64, Parameters
from .runner import Runner
from .source import SLOTS

THREADS = 256  # of a block
BLOCKS = 8  # of a multiprocessor


@dataclass(init=False)
class ClaimSlots(Parameters):
    """Parameters of `claim_slots`.

    int32 or int64 ids, int32 `slot_of` or None, int64 `wanted` and `claims`.
    """

    kernel = "claim_slots"

    ids: Address
    id_bytes: Int32
    n: Int64
    n_rows: Int64
    slot_of: Address
    wanted: Address
    claims: Address


@dataclass(init=False)
class GiveSlots(Parameters):
    """Parameters of `give_slots`.

    int32 or int64 ids, int32 `slot_of` or None and `seen`, the others int64; `uses` and
    `miss_count` may be None, the latter lies in host memory.
    """

    kernel = "give_slots"

    ids: Address
    id_bytes: Int32
    n: Int64
    n_rows: Int64
    slot_of: Address
    first: Int32
    slots: Address
    kept: Address
    seen: Address
    number: Int32
    uses: Address
    adds: Int32
    counts: Address
    miss_count: Address
    claims: Address
    mailbox: Address


class SlotKernels:
    """The kernels of slots.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def finder(
        self,
        n_rows: int,
        seen: torch.Tensor,
        claims: torch.Tensor,
        *,
        slot_of: torch.Tensor | None = None,
        adds: bool = False,
    ) -> SlotFinder:
        """Return what finds the slots of batches; see `SlotFinder`."""
        return SlotFinder(self._runner, n_rows, seen, claims, slot_of=slot_of, adds=adds)


class SlotFinder:
    """Finds the slots of batches: `claim`, then the fetch of rows, then `give`, on one stream.

    Parameters
    ----------
    runner : Runner
        Of the device.
    n_rows : int
        Rows of the table, N.
    seen : torch.Tensor
        int32 ``[n_slots]`` on the device, zeros at first: the last batch that had each slot.
    claims : torch.Tensor
        int64 ``[2]`` on the device, 0 and -1 at first.
    slot_of : torch.Tensor, optional
        int32 ``[N]`` on the device: the slot of each row, or -1; each row lies in the slot of its
        own number when left out.
    adds : bool
        Whether access counters of slots count the ids that were looked up there; else they hold the
        number of the last batch.
    """

    def __init__(
        self,
        runner: Runner,
        n_rows: int,
        seen: torch.Tensor,
        claims: torch.Tensor,
        *,
        slot_of: torch.Tensor | None = None,
        adds: bool = False,
    ) -> None:
        self._most_blocks = BLOCKS * runner.multiprocessors
        self._claim = runner.bind(
            SLOTS, ClaimSlots, THREADS, n_rows=n_rows, slot_of=slot_of, claims=claims
        )
        self._give = runner.bind(
            SLOTS,
            GiveSlots,
            THREADS,
            n_rows=n_rows,
            slot_of=slot_of,
            seen=seen,
            adds=adds,
            claims=claims,
            mailbox=runner.mailbox,
        )

    def claim(self, ids: torch.Tensor, wanted: torch.Tensor | None = None) -> None:
        """Find the rows of a batch that have no slot, and look for ids out of range.

        Parameters
        ----------
        ids : torch.Tensor
            int32 or int64 ``[n]``, contiguous, on the device; n is not 0.
        wanted : torch.Tensor, optional
            int64 on the device, with room for all different ids without a slot: gets them, from
            its begin on, in any order.
        """
        n = ids.shape[0]
        to = 0 if wanted is None else wanted.data_ptr()
        self._claim(self._blocks(n), ids.data_ptr(), ids.element_size(), n, to)

    def give(
        self,
        ids: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor,
        number: int,
        *,
        uses: torch.Tensor | None = None,
        first: int = 0,
        miss_count: int = 0,
    ) -> None:
        """Find the slots of the batch; an id out of range is reported in the mailbox.

        Parameters
        ----------
        ids : torch.Tensor
            As given to `claim`.
        slots : torch.Tensor
            int64 ``[2, n]`` on the device, overwritten, both rows alike.
        counts : torch.Tensor
            int64 ``[2]`` on the device, zeros: gets the numbers of different rows that had a slot
            (hits) and that had none (misses).
        number : int
            Of the batch, 1 to 2^31 - 1, another one than that of the batches before.
        uses : torch.Tensor, optional
            int64 ``[n_slots]`` on the device: the access counter of each slot, to be updated.
        first : int
            The slot of the first row that had none; the others follow.
        miss_count : int
            Address of an int64 in page-locked host memory that gets the number of misses, or 0.
        """
        n = ids.shape[0]
        to = slots.data_ptr()
        self._give(
            self._blocks(n),
            ids.data_ptr(),
            ids.element_size(),
            n,
            first,
            to,
            to + 8 * n,
            number,
            0 if uses is None else uses.data_ptr(),
            counts.data_ptr(),
            miss_count,
        )

    def _blocks(self, n: int) -> int:
        return min(ceil_div(n, THREADS), self._most_blocks)
