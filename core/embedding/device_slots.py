"""Slot table of a GPU: it finds rows, chooses those that leave, and exchanges them by itself.

While ids come on the GPU, it owns the cache: the map from rows to slots, what decides which row
leaves, and which rows have changed are kept there, and a lookup is a fixed number of launches. The
host's `SlotTable` is updated when it is asked for (`sync`).

Rows of a batch that is looked up keep their slots until its gradient has been applied. The host
knows no more than how many ids such batches have, so there are at least as many slots: where the
cache has fewer, the parameter has more rows than the cache for that (the miss buffer).
"""

from __future__ import annotations

from collections import deque
from dataclasses import fields, replace
from typing import Any, Protocol

import numpy as np
import torch

from ..engine.kernels.cuda import CudaKernels, kernels_on
from ..engine.kernels.cuda.slots import (
    BY_LAST_USE,
    BY_ORDER,
    BY_USES,
    CLAIMS,
    BagOffsets,
    SlotColumns,
    SlotFinder,
)
from ..engine.kernels.cuda.source import LEAVING_BINS
from ..engine.kernels.cuda.stream import stream_pointer
from ..engine.kernels.format import NO_ROW, NO_SLOT
from .eviction import EvictionStrategy
from .gradients import Array
from .slots import SlotTable

#: Which row leaves first, as kernels know it.
EVICT = {
    EvictionStrategy.LFU: BY_USES,
    EvictionStrategy.LRU: BY_LAST_USE,
    EvictionStrategy.DATASET: BY_ORDER,
}
#: Batches, or steps, that 32 bits can count.
MOST_BATCHES = (1 << 31) - 2
#: In `SlotColumns.changed`: the row is as on the host, but its optimizer state may not be.
STATE_ONLY = -1
#: Columns of `SlotColumns` with an entry for each slot.
BY_SLOT = ("keys", "seen", "changed", "row_in", "since", "pinned")


class Exchange(Protocol):
    """Moves rows of a batch between their slots and the host, on torch's current stream."""

    def exchange(
        self,
        slots: torch.Tensor,
        leaving: torch.Tensor,
        wanted: torch.Tensor,
        coming: torch.Tensor,
    ) -> None:
        """Write rows back from their slots, and fetch others there; see `ExchangeKernels`."""


class DeviceUses:
    """Uses of the rows of a table that is resident whole, each row in the slot of its own number.

    Parameters
    ----------
    slots : SlotTable
        The host's slots, to which `sync` adds uses.
    device : torch.device
        Where ids come.
    kernels : CudaKernels
        Of the device.
    """

    def __init__(self, slots: SlotTable, device: torch.device, kernels: CudaKernels) -> None:
        self.device = device
        self._slots = slots
        # Training may write to them later, so they are no inference tensors.
        with torch.inference_mode(False):
            self._keys = torch.zeros(slots.n_rows, dtype=torch.int64, device=device)
            self._seen = torch.zeros(slots.n_rows, dtype=torch.int32, device=device)
        self._keeper = kernels.slots.keeper(self._keys, self._seen)
        self._evict = EVICT[slots.evict]
        self._base, self._number = slots.stamp, 0
        self._order = _InOrder(device)
        # Whether the device knows anything that the host does not.
        self._fresh = False

    @property
    def nbytes(self) -> int:
        """Bytes on the device without the rows, which are the parameter."""
        return self._keys.nbytes + self._seen.nbytes

    def look_up(
        self,
        ids: torch.Tensor,
        slots: torch.Tensor,
        counts: int,
        *,
        uses: bool,
        bags: BagOffsets | None = None,
    ) -> None:
        """Find the slots of a batch, int64 ``[n]``; other arguments as for `DeviceSlots`."""
        self._order.follow()
        self._fresh = True
        self._number = self._slots.next_stamp() - self._base
        counting = self._evict if uses else BY_ORDER
        self._keeper.keep(ids, counts, self._number, slots, counting, bags)

    @property
    def is_used_up(self) -> bool:
        """Whether the numbers of batches have become too large for another one."""
        return self._number >= MOST_BATCHES

    def sync(self) -> None:
        """Add the uses to the host's table; waits for the GPU.

        Raises
        ------
        IndexRangeError
            When a lookup was given a bad id; nothing was added.
        """
        if not self._fresh:
            return
        wait_for_all(self.device)
        keys = self._keys.cpu().numpy()
        if self._slots.evict is EvictionStrategy.LFU:
            self._slots.keys += keys
        elif self._slots.evict is EvictionStrategy.LRU:
            used = keys > 0
            self._slots.keys[used] = keys[used] + self._base
        self._keys.zero_()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # before other streams write
        self._fresh = False


class _InOrder:
    """Makes batches on different streams follow one another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pointer = -1
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # Other streams may use what was made on this one.
            torch.cuda.current_stream(device).synchronize()

    def follow(self) -> bool:
        """Make the current stream wait for the last batch if that ran on another stream.

        Return whether it did.
        """
        if self._device.type != "cuda":
            return False
        pointer = stream_pointer(self._device)
        if pointer == self._pointer:
            return False
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._pointer, self._stream = pointer, stream
        return True


class DeviceSlots:
    """Columns of the slots on a device, and lookups by them.

    Parameters
    ----------
    slots : SlotTable
        The host's slots, of which some rows are not resident. Until `sync` they are older than the
        device's.
    device : torch.device
        Where ids come.
    kernels : CudaKernels
        Of the device.
    has_state : bool
        Whether rows that are resident have optimizer state that the host does not have.
    """

    def __init__(
        self,
        slots: SlotTable,
        device: torch.device,
        kernels: CudaKernels,
        *,
        has_state: bool = False,
    ) -> None:
        self.device = device
        self._slots = slots
        self._kernels = kernels
        self._evict = EVICT[slots.evict]
        # Training may write to them later, so they are no inference tensors.
        with torch.inference_mode(False):
            self._columns = _copied(slots, device, has_state)
            self._wanted, self._victims, self._leaving = (
                torch.empty(0, dtype=torch.int64, device=device) for _ in range(3)
            )
        self._pinned_rows = int(slots.pinned.sum())
        self._finder: SlotFinder | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # whatever reads rows in slots, on any stream
        self._order = _InOrder(device)
        # Whether the device knows anything that the host does not.
        self._fresh = False
        # Steps so far; a row that has changed holds the step of its last gradient, or 1 if the
        # host has changed it.
        self._step = 2
        # The host's number of the last batch before these, which are counted from 1.
        self._base = slots.stamp
        self._number = 0
        # The last batch that `_batches` no longer has.
        self._forgotten = 0
        #: Whether gradients wait for a step, and the first batch that has one.
        self.holding = False
        self.held_from: int | None = None
        # Of batches whose rows may have to remain: number and ids.
        self._batches: deque[tuple[int, int]] = deque()
        self._held_rows = 0  # ids of all of them
        # Slots int64 [n] that the next lookup is to mark as changed, and with which step.
        self._marked: torch.Tensor | None = None
        self._mark = 0

    @property
    def n_slots(self) -> int:
        """Slots, those of the miss buffer included."""
        return self._columns.seen.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes on the device without the rows, which are the parameter."""
        columns = (getattr(self._columns, field.name) for field in fields(SlotColumns))
        own = (self._wanted, self._victims, self._leaving)
        return sum(t.nbytes for t in (*columns, *own) if isinstance(t, torch.Tensor))

    # Room

    def slots_needed(self, n_ids: int, oldest: int | None) -> int:
        """Return how many slots a lookup needs so that rows of batches from `oldest` on remain."""
        while self._batches and (oldest is None or self._batches[0][0] < oldest):
            self._forgotten, forgotten_rows = self._batches.popleft()
            self._held_rows -= forgotten_rows
        # One remains empty: a gradient changed by hand is not zero there.
        return min(self._pinned_rows + self._held_rows + n_ids + 1, self._slots.n_rows)

    def widened(self, more: int) -> SlotColumns:
        """Return columns with `more` empty slots appended; see `install`."""
        wider: dict[str, Any] = {}
        for name in BY_SLOT:
            column = getattr(self._columns, name)
            if column is not None:
                empty = NO_ROW if name == "row_in" else 0
                wider[name] = torch.cat([column, column.new_full((more,), empty)])
        return replace(self._columns, **wider)

    @property
    def columns(self) -> SlotColumns:
        """The columns as they are now."""
        return self._columns

    def install(self, columns: SlotColumns) -> None:
        """Use other columns from now on, such as `widened` returns."""
        self._forget_claims()  # of the batches in turns the next finder begins with the first
        self._columns = columns

    # Lookups

    def follow(self) -> None:
        """Make the current stream wait for the last batch if that ran on another stream."""
        if self._order.follow():
            self._mark_now()

    @property
    def is_used_up(self) -> bool:
        """Whether the numbers of batches have become too large for another one."""
        return max(self._number, self._step) >= MOST_BATCHES

    def _next_number(self) -> int:
        self._number = self._slots.next_stamp() - self._base
        return self._number

    def look_up(
        self,
        ids: torch.Tensor,
        slots: torch.Tensor,
        counts: int,
        oldest: int | None,
        exchange: Exchange,
        *,
        uses: bool,
        kept: torch.Tensor | None = None,
        bags: BagOffsets | None = None,
    ) -> int:
        """Find the slots of a batch, after its rows that have none have come.

        Parameters
        ----------
        ids : torch.Tensor
            int32 or int64 ``[n]``, contiguous, on the device. There are `slots_needed`. An id out
            of range is reported in the mailbox.
        slots : torch.Tensor
            int64 ``[n]`` on the device, overwritten.
        counts : int
            Address of int64 ``[3]`` on the device, zeros: gets the numbers of different rows that
            had a slot (hits), that had none (misses), and that were written back.
        oldest : int or None
            Rows of batches from this number on remain; None for those of this one.
        exchange : Exchange
            Fetches rows and writes them back.
        uses : bool
            Whether the batch updates what decides which row leaves first.
        kept : torch.Tensor, optional
            As `slots`, and gets the same.
        bags : BagOffsets, optional
            Offsets to look at on the way; there are ids then.

        Returns
        -------
        int
            The number of the batch.
        """
        number = self._next_number()
        finder, n = self._finder, ids.shape[0]
        if not n:
            return number
        if finder is None:
            finder = self._finder = self._kernels.slots.finder(self._columns, self._evict)
        self._fresh = True
        if self._wanted.shape[0] < n:
            self._make_room_for(n)
        wanted, victims, leaving = self._wanted, self._victims, self._leaving
        self._held_rows += n
        self._batches.append((number, n))
        counting = self._evict if uses else BY_ORDER
        oldest = number if oldest is None else oldest
        try:
            finder.claim(ids, counts, number, wanted, self._marked, self._mark, bags)
            self._marked = None
            finder.choose(counts, number, oldest, wanted, victims, leaving)
            exchange.exchange(victims, leaving, wanted, finder.coming)
            batch = wanted, victims, leaving
            finder.give(ids, counts, number, slots, counting, *batch, kept, bags)
        except BaseException:
            self._repair()
            raise
        return number

    def _make_room_for(self, n: int) -> None:
        """Have an entry for each of `n` rows that come."""
        if self.device.type == "cuda":
            for t in (self._wanted, self._victims, self._leaving):
                t.record_stream(torch.cuda.current_stream(self.device))
        with torch.inference_mode(False):
            self._wanted, self._leaving = (
                torch.full((n,), NO_ROW, dtype=torch.int64, device=self.device) for _ in range(2)
            )
            self._victims = torch.zeros(n, dtype=torch.int64, device=self.device)

    def _forget_claims(self) -> None:
        """Reset what launches of a batch share."""
        self._columns.claims.copy_(_first_claims())
        self._columns.bins.zero_()
        self._finder = None

    def _repair(self) -> None:
        """Undo a lookup that failed: rows that it claimed are not resident.

        Those whose slots were taken are not either, once others have come there: they have been
        written back.
        """
        c = self._columns
        claimed = c.slot_of < NO_SLOT
        if self._finder is not None and bool(self._finder.coming[1]):
            lost = self._victims[self._wanted >= 0]
            gone = c.row_in[lost]
            c.slot_of[gone[gone >= 0]] = NO_SLOT
            c.row_in[lost] = NO_ROW
            c.changed[lost] = 0
        c.slot_of[claimed] = NO_SLOT
        self._wanted.fill_(NO_ROW)
        self._leaving.fill_(NO_ROW)
        self._forget_claims()

    # Gradients

    def changed(self, slots: torch.Tensor, number: int) -> None:
        """Record that a gradient of batch `number` waits for a step: of slots int64 ``[n]``."""
        self._fresh = True  # first: an interrupt may come in between
        if number <= self._forgotten:
            # A second backward pass of a lookup whose rows have not left.
            number = self._number
            self._held_rows += slots.shape[0]
            self._batches.append((number, slots.shape[0]))
            self._columns.seen.index_fill_(0, slots, number)
        self.holding = True
        first = self.held_from
        self.held_from = number if first is None else min(first, number)
        self._mark_now()  # several lookups: the next one marks the slots of the last
        self._marked, self._mark = slots, self._step

    def _mark_now(self) -> None:
        """Mark slots as changed that the next lookup would mark."""
        marked = self._marked
        if marked is None:
            return
        if self.device.type == "cuda":
            marked.record_stream(torch.cuda.current_stream(self.device))
        self._columns.changed.index_fill_(0, marked, self._mark)
        self._marked = None

    def held(self) -> torch.Tensor:
        """Return bool ``[n_slots]``: whether a gradient of a slot waits for a step."""
        if not self.holding:
            return torch.zeros_like(self._columns.changed, dtype=torch.bool)
        self._mark_now()
        return self._columns.changed == self._step

    def release(self) -> None:
        """Record that no gradient waits for a step."""
        if self.holding:
            self._step += 1
            self.holding, self.held_from = False, None

    def reused_from(self, number: int) -> Array:
        """Return the slots that batches from `number` on have got, int64; waits."""
        return np.flatnonzero(self._columns.since.cpu().numpy() >= number)

    def have_left(self, slots: torch.Tensor, number: int) -> bool:
        """Return whether a row of batch `number` has left its slot, of int64 ``[n]``; waits."""
        return bool((self._columns.since[slots] > number).any())

    # Synchronisation with the host

    def sync(self) -> None:
        """Update the host's table with rows that came, changed and were used; waits for the GPU.

        Raises
        ------
        IndexRangeError
            When a lookup was given a bad id; nothing was updated.
        """
        if not self._fresh:
            return
        wait_for_all(self.device)
        self._mark_now()
        c = self._columns
        changed = c.changed.cpu().numpy() > 0
        keys = c.keys.cpu().numpy()
        if self._evict == BY_LAST_USE:
            keys = keys + self._base  # a copy: the CPU may stand for the device
        self._slots.take(c.row_in.cpu().numpy(), keys, changed)
        self._fresh = False


def _first_claims() -> torch.Tensor:
    return torch.tensor([CLAIMS, CLAIMS], dtype=torch.int64)


def _copied(slots: SlotTable, device: torch.device, has_state: bool) -> SlotColumns:
    """Return columns with what the host's table has in them; see `DeviceSlots`."""
    n_slots = len(slots.id_of)
    changed = slots.dirty.astype(np.int32)
    if has_state:
        changed[(slots.id_of >= 0) & ~slots.dirty] = STATE_ONLY
    keys = slots.keys
    if slots.evict is EvictionStrategy.LRU:
        keys = keys - slots.stamp  # batches are counted from 1 again
    order = slots.order if slots.evict is EvictionStrategy.DATASET else None
    pinned = slots.pinned.astype(np.uint8) if slots.pinned.any() else None
    return SlotColumns(
        n_rows=slots.n_rows,
        slot_of=torch.tensor(slots.slot_of, device=device),
        row_in=torch.tensor(np.where(slots.id_of >= 0, slots.id_of, NO_ROW), device=device),
        keys=torch.tensor(keys, device=device),
        # A row that was not looked up since it was warmed up counts as seen by none.
        seen=torch.zeros(n_slots, dtype=torch.int32, device=device),
        since=torch.zeros(n_slots, dtype=torch.int32, device=device),
        changed=torch.tensor(changed, device=device),
        claims=_first_claims().to(device),
        bins=torch.zeros(2, LEAVING_BINS, dtype=torch.int32, device=device),
        pinned=None if pinned is None else torch.tensor(pinned, device=device),
        order=None if order is None else torch.tensor(order, device=device),
    )


def wait_for_all(device: torch.device) -> None:
    """Wait for all streams of a GPU, and raise the errors that its kernels have reported."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        kernels_on(device)
