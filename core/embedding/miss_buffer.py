"""Miss buffer: slots appended to the parameter, filled by the GPU with no host sync.

Which rows of a batch of ids on a GPU are resident is only known there. So the GPU has a copy of the
map from rows to slots, and fetches rows that miss into the miss buffer, with their optimizer state,
where they train. The host reads later which rows they are; then the most used of them move into the
cache.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..engine.kernels.format import NO_ROW, NO_SLOT, ceil_div
from ..engine.memory.host import HostBuffer
from .device_counters import device_counters_of, wait_for_all
from .gradients import Array
from .resident_cache import with_spare
from .sizes import resized

if TYPE_CHECKING:
    from .rows import CachedRows

#: The buffer has room for the misses of so many batches, which may be looked up before the GPU
#: reports the misses of the first; the room doubles each time that was not enough,
BATCHES = 2
#: up to this number of batches.
MOST_BATCHES = 16
#: Extra room, because batches differ a little in size.
MORE = 1.25
#: The buffer, with gradient and optimizer state, takes at most this share of the free GPU memory.
MEMORY_SHARE = 0.25
#: Lookups done by the host after an allocation failed, before the next attempt.
PAUSE_LOOKUPS = 1000
#: In-flight miss ranges, at most: lookups whose number of misses the GPU has not reported yet.
MAX_IN_FLIGHT = 64
#: How long the mailbox is polled before the host synchronises with the GPU; interval of the polls.
PATIENCE_S, LOOK_S = 2.0, 5e-5


@dataclass(slots=True)
class MissBufferSize:
    """Wanted size of a table's miss buffer; outlives the buffer."""

    #: Slots that would have been enough so far.
    slots: int = 0
    #: Lookups to be done by the host before the next attempt to allocate.
    pause: int = 0


class _BySlot(NamedTuple):
    """The tensors on the device that have an entry for each slot."""

    data: torch.Tensor
    grad: torch.Tensor | None
    ids: torch.Tensor
    counters: tuple[torch.Tensor | None, ...]
    #: Of each optimizer, by name.
    states: list[dict[str, torch.Tensor]]


@dataclass(slots=True)
class _MissRange:
    """In-flight miss range: slots that a lookup may fill.

    Parameters
    ----------
    first : int
        The first slot.
    room : int
        Slots of the range.
    entry : int
        Mailbox entry to which the GPU writes how many of them, from the first on, it has filled.
    """

    first: int
    room: int
    entry: int


class MissBuffer:
    """Slots behind those of the cache, and the GPU's map from all rows to slots.

    Parameters
    ----------
    rows : CachedRows
        The rows; no training step of theirs is under way.
    """

    def __init__(self, rows: CachedRows) -> None:
        self._first = rows.cache_rows
        self._device = device = rows.device
        # Training may write to them later, so they are no inference tensors.
        with torch.inference_mode(False):
            #: int32 [N]: the slot of each row, or -1.
            self._slot_of = torch.tensor(rows.slot_table.slot_of, device=device)
            #: int64 [n_slots]: the row in each slot of the buffer, NO_ROW for none.
            self._ids = torch.empty(0, dtype=torch.int64, device=device)
        # Page-locked; waits for the GPU before it is freed.
        self._mailbox_memory = HostBuffer.allocate(8 * MAX_IN_FLIGHT)
        #: int64 [MAX_IN_FLIGHT], the mailbox: misses of a lookup, -1 until the GPU reports them.
        self._mailbox = self._mailbox_memory.tensor.view(torch.int64).numpy()
        self._next_entry = 0
        self._in_flight: list[_MissRange] = []
        # Slots from here on are free, but for the ranges in flight.
        self._end = self._first
        # Whether the GPU has filled slots since the last sync.
        self._fresh = False
        # Lookups since rows were last promoted.
        self._lookups = 0
        self._mark_synced(rows)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams may write to them

    def _mark_synced(self, rows: CachedRows) -> None:
        """Record that the map on the GPU equals the host's."""
        slot_table = rows.slot_table
        self._made_of = slot_table.changes
        #: Rows that can miss at most: those not in the cache.
        self._away = len(rows) - int((slot_table.id_of[: self._first] >= 0).sum())
        filled = np.flatnonzero(slot_table.id_of[self._first :] >= 0)
        self._end = self._first + (int(filled[-1]) + 1 if len(filled) else 0)

    @property
    def n_slots(self) -> int:
        """Slots of the buffer."""
        return self._ids.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes on the device without the rows, which are part of the parameter."""
        return self._slot_of.nbytes + self._ids.nbytes

    # Allocation of slots

    def _first_free(self, room: int) -> int | None:
        """Return the first of `room` free slots; None if there are too few, as far as is known."""
        unreported = []
        for missed in self._in_flight:
            filled = int(self._mailbox[missed.entry])
            if filled < 0:
                unreported.append(missed)
            elif filled:
                self._end = max(self._end, missed.first + filled)
        self._in_flight = unreported
        if len(unreported) == MAX_IN_FLIGHT:
            return None
        first = max([self._end, *(missed.first + missed.room for missed in unreported)])
        return first if first + room <= self._first + self.n_slots else None

    def _may_be_enough(self, room: int) -> bool:
        """Return whether there would be room if no lookup in flight had missed."""
        return bool(self._in_flight) and self._end + room <= self._first + self.n_slots

    def make_room(self, rows: CachedRows, n_ids: int) -> int | None:
        """Reserve slots for the misses of a lookup of `n_ids` ids.

        Returns
        -------
        int or None
            A slot for `look_up`; None where the host has to look the ids up.
        """
        if self._made_of != rows.slot_table.changes:
            self.sync(rows)
            self._copy_host_map(rows)
        room, size = min(n_ids, self._away), rows.miss_buffer_size
        if self.n_slots < BATCHES * room:
            size.slots = max(size.slots, int(BATCHES * MORE * room))
        first = self._first_free(room)
        if first is None and self._may_be_enough(room):
            # The GPU is behind, but perhaps all rows hit.
            size.slots = max(size.slots, min(2 * self.n_slots, MOST_BATCHES * room))
        if size.slots > self.n_slots and not rows.training.in_use:
            self._widen(rows, size.slots)
            first = self._first_free(room)
        end = time.monotonic() + PATIENCE_S
        while first is None and self._may_be_enough(room) and time.monotonic() < end:
            time.sleep(LOOK_S)
            first = self._first_free(room)
        if first is None:
            self.sync(rows)
            self.promote(rows)
            first = self._first_free(room)
        if first is None:
            # Gradients hold what is there.
            size.slots = max(size.slots, min(2 * self.n_slots, MOST_BATCHES * room))
        return first

    def _widen(self, rows: CachedRows, n_slots: int) -> None:
        """Grow the buffer to `n_slots` slots."""
        if any(lookup.on_device is not None for lookup in rows.training.live):
            self.sync(rows)  # the shape of their gradients changes
        # The parameter must not have the shape of the whole table: state is recognised by it.
        n_slots += self._first + n_slots == len(rows)
        more = n_slots - self.n_slots
        before = self._by_slot(rows)
        with torch.inference_mode(False), torch.no_grad():
            # Allocate everything before anything changes.
            self._check_memory(more, before)
            after = self._widened(rows, more)
            try:
                self._install(rows, after)
                rows.slot_table.grow(np.full(more, -1))
                self._made_of = rows.slot_table.changes
            except BaseException:
                if len(rows.slot_table.id_of) < len(after.data):
                    self._install(rows, before)
                raise

    def _by_slot(self, rows: CachedRows) -> _BySlot:
        """Return the tensors with an entry for each slot."""
        states = [adapter.states() for adapter in rows.training.adapters]
        parameter = rows.parameter
        counters = device_counters_of(rows).by_slot()
        return _BySlot(parameter.data, parameter.grad, self._ids, counters, states)

    def _widened(self, rows: CachedRows, more: int) -> _BySlot:
        """Return copies of these tensors with `more` slots appended."""
        data, grad, ids = rows.parameter.data, rows.parameter.grad, self._ids
        grown = data.new_zeros(data.shape[0] + more, data.shape[1])
        grown[: data.shape[0]] = data
        return _BySlot(
            with_spare(grown),
            None if grad is None else resized(grad, grown.shape),
            torch.cat([ids, ids.new_full((more,), NO_ROW)]),
            device_counters_of(rows).widened(more),
            [adapter.widened(more) for adapter in rows.training.adapters],
        )

    def _install(self, rows: CachedRows, tensors: _BySlot) -> None:
        """Use other tensors from now on."""
        self._ids = tensors.ids
        device_counters_of(rows).write_to(tensors.counters)
        for adapter, states in zip(rows.training.adapters, tensors.states, strict=True):
            adapter.follow(states)
        before, rows.parameter.grad = rows.parameter.grad, None
        rows.watch.set_data(tensors.data)
        rows.parameter.grad = tensors.grad
        rows.training.gradients.follow(before, tensors.grad)

    def _check_memory(self, more: int, there: _BySlot) -> None:
        """Raise OutOfMemoryError if `more` rows would take too large a share of the free memory."""
        if self._device.type != "cuda":
            return
        states = [t for each in there.states for t in each.values()]
        of_rows = [there.data, there.data, *states]  # twice: the gradient is as large as the rows
        needed = more * sum(t.element_size() * t[:1].numel() for t in of_rows)
        free = torch.cuda.mem_get_info(self._device)[0]
        free += torch.cuda.memory_reserved(self._device)
        free -= torch.cuda.memory_allocated(self._device)
        if needed > MEMORY_SHARE * free:
            raise torch.OutOfMemoryError(f"{needed} bytes for the miss buffer, {free} are free")

    # Lookups

    def look_up(
        self,
        rows: CachedRows,
        ids: torch.Tensor,
        slots: torch.Tensor,
        hit_miss_counts: torch.Tensor,
        first: int,
        *,
        counts: bool,
    ) -> None:
        """Look rows up on the GPU; rows that miss are fetched to the slots from `first` on.

        Parameters
        ----------
        rows : CachedRows
            The rows.
        ids : torch.Tensor
            int32 or int64 ``[n]`` on the device; n is not 0.
        slots, hit_miss_counts
            As for `SlotFinder.give`.
        first : int
            The first slot, from `make_room`.
        counts : bool
            Whether the batch updates what decides which row leaves first.
        """
        counters, number = device_counters_of(rows), rows.slot_table.next_stamp()
        finder = counters.finder(len(rows), self._slot_of)
        missed = _MissRange(first, min(len(ids), self._away), self._free_entry())
        wanted = self._ids[first - self._first :][: missed.room]
        self._fresh = True
        self._lookups += 1
        self._in_flight.append(missed)
        try:
            finder.claim(ids, wanted)
            rows.table.gather_some_on_gpu(wanted, rows.parameter.data[first : first + missed.room])
            for adapter in rows.training.adapters:
                adapter.restore_on_gpu(wanted, first)
            finder.give(
                ids,
                slots,
                hit_miss_counts,
                number,
                uses=counters.begin(counts=counts),
                first=first,
                miss_count=int(self._mailbox.ctypes.data) + 8 * missed.entry,
            )
        except BaseException:
            self._repair(rows)
            raise

    def _repair(self, rows: CachedRows) -> None:
        """Undo a lookup that failed: rows that it claimed are not resident."""
        self._slot_of.clamp_(min=NO_SLOT)
        device_counters_of(rows).forget_claims()
        self.sync(rows)
        self._copy_host_map(rows)

    def _free_entry(self) -> int:
        """Return a free entry of the mailbox, set to -1."""
        taken = {missed.entry for missed in self._in_flight}
        while self._next_entry in taken:
            self._next_entry = (self._next_entry + 1) % MAX_IN_FLIGHT
        found = self._next_entry
        self._next_entry = (found + 1) % MAX_IN_FLIGHT
        self._mailbox[found] = -1
        return found

    # Synchronisation with the host

    def sync(self, rows: CachedRows) -> None:
        """Update the host's slot table with rows fetched, changed and used; waits for the GPU.

        Raises
        ------
        IndexRangeError
            When a lookup was given a bad id; nothing was updated.
        """
        if self._fresh:
            wait_for_all(self._device)
            ids = self._ids.cpu()
            slots = np.flatnonzero(ids.numpy() >= 0)
            there = ids[torch.from_numpy(slots)]
            slots += self._first
            # Without rows of a lookup that was interrupted.
            came = self._slot_of[there.to(self._device)].cpu().numpy() == slots
            rows.slot_table.record_fetched(slots[came], there.numpy()[came])
        device_counters_of(rows).take(rows)
        rows.training.sync_slots()
        if self._fresh:
            self._in_flight.clear()
            self._mark_synced(rows)
            self._fresh = False

    def promote(self, rows: CachedRows) -> None:
        """Move the most used rows of the buffer into the cache, and evict the others to the host.

        Rows whose gradient waits for a step, or may still be computed, are kept. Call `sync`
        before.
        """
        slot_table, training = rows.slot_table, rows.training
        if training.in_pass:
            return
        training.pin()
        filled = np.arange(self._first, len(slot_table.id_of))
        filled = filled[(slot_table.id_of[filled] >= 0) & ~slot_table.pinned[filled]]
        if not len(filled):
            return
        came, gone = slot_table.id_of[filled], self._exchange(rows, filled)
        slot_of = slot_table.slot_of
        for ids in (gone, came):
            there = torch.from_numpy(slot_of[ids]).to(self._device)
            self._slot_of[torch.from_numpy(ids).to(self._device)] = there
        self._ids[torch.from_numpy(filled - self._first).to(self._device)] = NO_ROW
        self._mark_synced(rows)

    def _exchange(self, rows: CachedRows, filled: Array) -> Array:
        """Exchange rows for `promote`, all but the GPU's map; return the ids that left the cache.

        Parameters
        ----------
        rows : CachedRows
            The rows.
        filled : numpy.ndarray
            int64 ``[n]``, slots of the buffer.
        """
        slot_table, training = rows.slot_table, rows.training
        filled = filled[np.argsort(-slot_table.keys[filled], kind="stable")]
        # The misses of one batch are promoted in any case, as they are in lookups by the host.
        of_a_batch = ceil_div(len(filled), max(1, self._lookups))
        came, lost = slot_table.id_of[filled], filled[:0]
        try:
            slots = slot_table.make_room_for(filled, of_a_batch)
            self._lookups = 0
            moving, unmoved = filled[: len(slots)], filled[len(slots) :]
            left = slots[slot_table.id_of[slots] >= 0]
            gone = slot_table.id_of[left]
            leaving = np.concatenate([left, unmoved])
            changed = leaving[slot_table.dirty[leaving]]
            rows.write_back(changed)
            rows.statistics.record_written_back(len(changed))
            training.save(leaving, slot_table.id_of[leaving])
            training.gradients.record_reuse(np.concatenate([left, filled]))
            lost = slots  # the rows in them are on the host by now
            at, to = (torch.from_numpy(each).to(self._device) for each in (moving, slots))
            rows.parameter.data[to] = rows.parameter.data[at]
            for adapter in training.adapters:
                adapter.move(at, to)
            slot_table.move(moving, slots)
            slot_table.drop(unmoved)
        except BaseException:
            slot_table.repair(lost[slot_table.id_of[lost] != came[: len(lost)]])
            raise
        return gone

    def _copy_host_map(self, rows: CachedRows) -> None:
        """Copy the host's map, which was changed elsewhere, to the GPU."""
        slot_table = rows.slot_table
        ids = slot_table.id_of[self._first :]
        self._slot_of.copy_(torch.from_numpy(slot_table.slot_of))
        self._ids.copy_(torch.from_numpy(np.where(ids >= 0, ids, NO_ROW)))
        self._in_flight.clear()
        self._mark_synced(rows)


def room_for(rows: CachedRows, n_ids: int) -> int | None:
    """Return the first slot for the misses of a lookup of `n_ids` ids on the GPU.

    Returns
    -------
    int or None
        A slot for `MissBuffer.look_up`; None where the host has to look the ids up.
    """
    training, miss_buffer, size = rows.training, rows.miss_buffer, rows.miss_buffer_size
    if size.pause:
        size.pause -= 1
        return None
    rows.slot_table.repair_if_interrupted()
    training.release_applied()
    if any(not adapter.follows_on_gpu() for adapter in training.adapters):
        return None
    try:
        if miss_buffer is None:
            training.retire_steps()
            # Gradients of lookups that bypassed the cache may grow the parameter.
            bypassing = any(lookup.bypassed for lookup in training.live)
            if not training.idle or training.in_use or bypassing:
                return None
            miss_buffer = rows.miss_buffer = MissBuffer(rows)
        first = miss_buffer.make_room(rows, n_ids)
    except torch.OutOfMemoryError:
        size.pause = PAUSE_LOOKUPS
        return None
    # Checked each time: a table that is packed again has other memory.
    return first if rows.table.readable_by_gpu() else None


def drain(rows: CachedRows) -> None:
    """Sync, promote and remove the miss buffer: afterwards the host's slot table is complete."""
    miss_buffer = rows.miss_buffer
    if miss_buffer is not None:
        miss_buffer.sync(rows)
        miss_buffer.promote(rows)
        rows.miss_buffer = rows.device_counters = None
