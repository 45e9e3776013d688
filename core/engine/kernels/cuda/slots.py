"""Slots of a cache for the rows of a batch, found and chosen by a GPU; see slots.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..format import ceil_div
from .parameters import Address, Int32, Int64, Parameters, Value
from .runner import Runner
from .source import SLOTS

THREADS = 256  # of a block
BLOCKS = 8  # of a multiprocessor
#: Numbers that the launches of a batch share, at first, and the place of slots taken among them.
CLAIMS, TAKEN = (0, -1, -1, 0, 0, 0), 4
#: Blocks that are done with the offsets of a batch, and the first that is not sound, at first.
PROGRESS = (0, -1)
#: Which row leaves first: that of the highest rank, the least used, the one not used for longest.
#: Also how a batch changes the keys of its slots.
BY_ORDER, BY_USES, BY_LAST_USE = 0, 1, 2


@dataclass(init=False)
class KeepSlots(Parameters):
    """Parameters of `keep_slots`: int32 or int64 ids and offsets, int32 `seen`, others int64."""

    kernel = "keep_slots"

    ids: Address
    id_bytes: Int32
    n: Int64
    n_rows: Int64
    keys: Address
    seen: Address
    counting: Int32
    number: Int32
    slots: Address
    counts: Address
    offsets: Address
    offset_bytes: Int32
    entries: Int64
    last_is_end: Int32
    sound: Address
    progress: Address
    mailbox: Address


@dataclass(init=False)
class ClaimSlots(Parameters):
    """Parameters of `claim_slots`.

    int32 or int64 ids and offsets, int32 `slot_of`, `seen` and `changed`, int64 `wanted`, `counts`,
    `claims`, `marked` and `sound`.
    """

    kernel = "claim_slots"

    ids: Address
    id_bytes: Int32
    n: Int64
    n_rows: Int64
    slot_of: Address
    seen: Address
    number: Int32
    wanted: Address
    counts: Address
    claims: Address
    changed: Address
    marked: Address
    n_marked: Int64
    mark: Int32
    offsets: Address
    offset_bytes: Int32
    entries: Int64
    last_is_end: Int32
    sound: Address


@dataclass(init=False)
class CountSlots(Parameters):
    """Parameters of `count_slots`.

    int64 `row_in`, `keys` and `claims`, int32 `seen` and `bins`, uint8 `pinned` or None.
    """

    kernel = "count_slots"

    n_slots: Int64
    n_rows: Int64
    row_in: Address
    keys: Address
    seen: Address
    pinned: Address
    evict: Int32
    number: Int32
    oldest: Int32
    bins: Address
    claims: Address


@dataclass(init=False)
class ChooseSlots(Parameters):
    """Parameters of `choose_slots`.

    As for `count_slots`; int32 `since` and `changed`, int32 or int64 `order` or None, int64
    `wanted`, `victims`, `leaving` and `counts`.
    """

    kernel = "choose_slots"

    n_slots: Int64
    n_rows: Int64
    row_in: Address
    keys: Address
    seen: Address
    since: Address
    changed: Address
    pinned: Address
    order: Address
    order_bytes: Int32
    evict: Int32
    number: Int32
    oldest: Int32
    bins: Address
    wanted: Address
    victims: Address
    leaving: Address
    counts: Address
    claims: Address


@dataclass(init=False)
class GiveSlots(Parameters):
    """Parameters of `give_slots`: as for the others; int64 `slots`, and `kept` or None."""

    kernel = "give_slots"

    ids: Address
    id_bytes: Int32
    n: Int64
    n_rows: Int64
    slot_of: Address
    row_in: Address
    keys: Address
    changed: Address
    counting: Int32
    number: Int32
    wanted: Address
    victims: Address
    leaving: Address
    slots: Address
    kept: Address
    counts: Address
    claims: Address
    next_claims: Address
    next_bins: Address
    entries: Int64
    last_is_end: Int32
    sound: Address
    mailbox: Address


class BagOffsets(NamedTuple):
    """Offsets of the bags of a batch, which are looked at while its slots are found.

    Parameters
    ----------
    given : torch.Tensor
        int32 or int64 ``[B]``, contiguous, on the device.
    include_last : bool
        Whether the last one is the number of ids.
    sound : torch.Tensor
        int64 ``[B]`` on the device, overwritten by what kernels of torch can take: a copy, or where
        one offset is bad, which the mailbox then tells, zeros with the number of ids as the end.
    """

    given: torch.Tensor
    include_last: bool
    sound: torch.Tensor


def _looked_at(n_ids: int, bags: BagOffsets | None) -> tuple[int, tuple[int, int, int, int, int]]:
    """Return how many ids or offsets there are at most, and the arguments for the offsets."""
    if bags is None:
        return n_ids, (0, 8, 0, 0, 0)
    given, include_last, sound = bags
    entries = given.shape[0]
    offsets = given.data_ptr(), given.element_size(), entries, int(include_last), sound.data_ptr()
    return max(n_ids, entries), offsets


@dataclass(frozen=True, eq=False)
class SlotColumns:
    """What a device knows of the slots of a cache, and of the batch that it looks up.

    Parameters
    ----------
    n_rows : int
        Rows of the table, N.
    slot_of : torch.Tensor
        int32 ``[N]``: the slot of each row, or NO_SLOT.
    row_in : torch.Tensor
        int64 ``[S]``: the row in each slot, or NO_ROW.
    keys : torch.Tensor
        int64 ``[S]``: how much the row in a slot is worth; see `BY_ORDER`.
    seen : torch.Tensor
        int32 ``[S]``: the last batch that had the row.
    since : torch.Tensor
        int32 ``[S]``: the batch that fetched it.
    changed : torch.Tensor
        int32 ``[S]``: 0 where the row and its optimizer state are as on the host.
    claims : torch.Tensor
        int64 ``[2, 6]``, CLAIMS at first: of two batches in turns.
    bins : torch.Tensor
        int32 ``[2, LEAVING_BINS]``, zeros at first.
    pinned : torch.Tensor, optional
        uint8 ``[S]``: whether it never leaves; none is pinned when left out.
    order : torch.Tensor, optional
        int32 or int64 ``[N]``: rank of each row, 0 for the most used; that of the ids when left
        out.
    """

    n_rows: int
    slot_of: torch.Tensor
    row_in: torch.Tensor
    keys: torch.Tensor
    seen: torch.Tensor
    since: torch.Tensor
    changed: torch.Tensor
    claims: torch.Tensor
    bins: torch.Tensor
    pinned: torch.Tensor | None = None
    order: torch.Tensor | None = None


class SlotKernels:
    """The kernels of slots.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def finder(self, columns: SlotColumns, evict: int) -> SlotFinder:
        """Return what finds the slots of batches; see `SlotFinder`."""
        return SlotFinder(self._runner, columns, evict)

    def keeper(self, keys: torch.Tensor, seen: torch.Tensor) -> SlotKeeper:
        """Return what counts batches whose rows are all resident; see `SlotKeeper`."""
        return SlotKeeper(self._runner, keys, seen)


class SlotKeeper:
    """Counts the uses of rows that lie in the slots of their own numbers.

    Parameters
    ----------
    runner : Runner
        Of the device.
    keys, seen : torch.Tensor
        int64 and int32 ``[N]`` on the device; see `SlotColumns`.
    """

    def __init__(self, runner: Runner, keys: torch.Tensor, seen: torch.Tensor) -> None:
        self._most_blocks = BLOCKS * runner.multiprocessors
        self._launch = runner.bind(
            SLOTS,
            KeepSlots,
            THREADS,
            n_rows=keys.shape[0],
            keys=keys,
            seen=seen,
            progress=torch.tensor(PROGRESS, dtype=torch.int64, device=keys.device),
            mailbox=runner.mailbox,
        )

    def keep(
        self,
        ids: torch.Tensor,
        counts: int,
        number: int,
        slots: torch.Tensor,
        counting: int,
        bags: BagOffsets | None = None,
    ) -> None:
        """Find the slots of a batch; see `SlotFinder`. All batches are on one stream.

        Parameters
        ----------
        ids, counts, number, counting, bags
            As for its methods.
        slots : torch.Tensor
            int64 ``[n]`` on the device, overwritten.
        """
        n = ids.shape[0]
        most, offsets = _looked_at(n, bags)
        self._launch(
            min(ceil_div(most, THREADS), self._most_blocks),
            ids.data_ptr(),
            ids.element_size(),
            n,
            counting,
            number,
            slots.data_ptr(),
            counts,
            *offsets,
        )


class SlotFinder:
    """Finds the slots of batches: `claim`, `choose`, then the exchange of rows, then `give`.

    All on one stream, for one batch after another.

    Parameters
    ----------
    runner : Runner
        Of the device.
    columns : SlotColumns
        On the device.
    evict : int
        BY_ORDER, BY_USES or BY_LAST_USE: which row leaves first.
    """

    def __init__(self, runner: Runner, columns: SlotColumns, evict: int) -> None:
        most_blocks = BLOCKS * runner.multiprocessors
        self._most_blocks = most_blocks
        self._slot_blocks = min(ceil_div(columns.seen.shape[0], THREADS), most_blocks)
        n_rows, order = columns.n_rows, columns.order
        by_slot: dict[str, Value] = {"row_in": columns.row_in, "keys": columns.keys}
        leaving: dict[str, Value] = {**by_slot, "seen": columns.seen, "pinned": columns.pinned}
        leaving |= {"n_slots": columns.seen.shape[0], "n_rows": n_rows, "evict": evict}
        self._turns = []
        for turn in range(2):
            claims, next_claims = columns.claims[turn], columns.claims[1 - turn]
            bins, next_bins = columns.bins[turn], columns.bins[1 - turn]
            claim = runner.bind(
                SLOTS,
                ClaimSlots,
                THREADS,
                n_rows=n_rows,
                slot_of=columns.slot_of,
                seen=columns.seen,
                claims=claims,
                changed=columns.changed,
            )
            count = runner.bind(SLOTS, CountSlots, THREADS, **leaving, bins=bins, claims=claims)
            choose = runner.bind(
                SLOTS,
                ChooseSlots,
                THREADS,
                **leaving,
                since=columns.since,
                changed=columns.changed,
                order=order,
                order_bytes=0 if order is None else order.element_size(),
                bins=bins,
                claims=claims,
            )
            give = runner.bind(
                SLOTS,
                GiveSlots,
                THREADS,
                **by_slot,
                n_rows=n_rows,
                slot_of=columns.slot_of,
                changed=columns.changed,
                claims=claims,
                next_claims=next_claims,
                next_bins=next_bins,
                mailbox=runner.mailbox,
            )
            self._turns.append((claims[TAKEN:], claim, count, choose, give))
        self._turn = 0

    @property
    def coming(self) -> torch.Tensor:
        """int64 ``[2]`` on the device: what `ExchangeKernels.exchange` takes, after `choose`."""
        return self._turns[self._turn][0]

    def claim(
        self,
        ids: torch.Tensor,
        counts: int,
        number: int,
        wanted: torch.Tensor,
        marked: torch.Tensor | None = None,
        mark: int = 0,
        bags: BagOffsets | None = None,
    ) -> None:
        """Find the rows of a batch that have no slot, and look for ids out of range.

        Parameters
        ----------
        ids : torch.Tensor
            int32 or int64 ``[n]``, contiguous, on the device; n is not 0.
        counts : int
            Address of int64 ``[3]`` on the device, zeros: gets the numbers of different rows that
            had a slot (hits), that had none (misses), and that are to be written back.
        number : int
            Of the batch, 1 to 2^31 - 1, higher than those of the batches before.
        wanted : torch.Tensor
            int64 on the device, NO_ROW, with room for all different ids without a slot: gets them,
            from its begin on, in any order.
        marked : torch.Tensor, optional
            int64 on the device, contiguous: slots whose `SlotColumns.changed` becomes `mark` first.
        mark : int
            Of them; not 0.
        bags : BagOffsets, optional
            Of the batch; `give` gets the same.
        """
        n = ids.shape[0]
        most, offsets = _looked_at(n, bags)
        self._turns[self._turn][1](
            min(ceil_div(most, THREADS), self._most_blocks),
            ids.data_ptr(),
            ids.element_size(),
            n,
            number,
            wanted.data_ptr(),
            counts,
            0 if marked is None else marked.data_ptr(),
            0 if marked is None else marked.shape[0],
            mark,
            *offsets,
        )

    def choose(
        self,
        counts: int,
        number: int,
        oldest: int,
        wanted: torch.Tensor,
        victims: torch.Tensor,
        leaving: torch.Tensor,
    ) -> None:
        """Choose slots for these rows; the map remains as it is.

        There are to be enough, else `give` reports it.

        Parameters
        ----------
        counts, number, wanted
            As given to `claim`.
        oldest : int
            Rows of batches from this number on remain.
        victims, leaving : torch.Tensor
            int64 on the device, as long as `wanted`: get the slot of each row that is to come, and
            the row that is to be written back from there, or NO_ROW.
        """
        _, _, count, choose, _ = self._turns[self._turn]
        count(self._slot_blocks, number, oldest)
        choose(
            self._slot_blocks,
            number,
            oldest,
            wanted.data_ptr(),
            victims.data_ptr(),
            leaving.data_ptr(),
            counts,
        )

    def give(
        self,
        ids: torch.Tensor,
        counts: int,
        number: int,
        slots: torch.Tensor,
        counting: int,
        wanted: torch.Tensor,
        victims: torch.Tensor,
        leaving: torch.Tensor,
        kept: torch.Tensor | None = None,
        bags: BagOffsets | None = None,
    ) -> None:
        """Put the rows that have come into the map, and find the slots of the batch.

        An id out of range is reported in the mailbox.

        Parameters
        ----------
        ids, counts, number, wanted, victims, leaving, bags
            As given to `claim` and `choose`.
        slots, kept : torch.Tensor
            int64 ``[n]`` on the device, overwritten; the latter is a second copy, if wanted.
        counting : int
            BY_USES raises the key of a slot by one for each id there, BY_LAST_USE makes it the
            number of the batch, BY_ORDER leaves it.
        """
        n = ids.shape[0]
        self._turns[self._turn][4](
            min(ceil_div(n, THREADS), self._most_blocks),
            ids.data_ptr(),
            ids.element_size(),
            n,
            counting,
            number,
            wanted.data_ptr(),
            victims.data_ptr(),
            leaving.data_ptr(),
            slots.data_ptr(),
            0 if kept is None else kept.data_ptr(),
            counts,
            0 if bags is None else bags.given.shape[0],
            0 if bags is None else int(bags.include_last),
            0 if bags is None else bags.sound.data_ptr(),
        )
        self._turn = 1 - self._turn
