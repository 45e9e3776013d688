"""Rows that a GPU brings by itself: guests behind the cache, until the host takes note of them.

Which rows of a batch of ids on a GPU are resident is only known there. So that the host need not
wait for it, the parameter gets slots behind those of the cache, and the GPU a map of where rows
lie: rows that miss come to such slots, with the state of their optimizers, and train there. The
host learns later which they were; then the most used of them move into the cache.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..engine.kernels.format import NO_ROW, NO_SLOT, ceil_div
from ..engine.memory.host import HostBuffer
from .device_notes import notes_of, wait_for_all
from .gradients import Array
from .resident_cache import with_spare
from .sizes import resized

if TYPE_CHECKING:
    from .rows import CachedRows

#: Slots are for so many batches, as many as may be looked up before the GPU tells how many rows of
#: the first have come; twice as many each time that was not enough,
BATCHES = 2
#: up to this.
MOST_BATCHES = 16
#: Batches often differ in size a little.
MORE = 1.25
#: Slots, and the gradient and state of their rows, take at most this share of the free memory.
MEMORY_SHARE = 0.25
#: Lookups that are left to the host where that is too little, before the next attempt.
PAUSE_LOOKUPS = 1000
#: Lookups that the GPU has not told of yet, at most.
MOST_STAYS = 64
#: How long to wait for the GPU to tell before it is waited for altogether, and between looks.
PATIENCE_S, LOOK_S = 2.0, 5e-5


@dataclass(slots=True)
class GuestRoom:
    """What is known of the room that a table needs, also while it has none."""

    #: Slots that would have been enough.
    slots: int = 0
    #: Lookups that are left to the host.
    pause: int = 0


class _BySlot(NamedTuple):
    """What there is for each slot on the device."""

    data: torch.Tensor
    grad: torch.Tensor | None
    ids: torch.Tensor
    notes: tuple[torch.Tensor | None, ...]
    #: Of each optimizer.
    states: list[dict[str, torch.Tensor]]


@dataclass(slots=True)
class _Stay:
    """Slots that a lookup may have filled.

    Parameters
    ----------
    first : int
        Of them.
    room : int
        How many there are.
    told : int
        Where the GPU tells how many were filled, the first ones.
    """

    first: int
    room: int
    told: int


class Guests:
    """Slots behind the cache that a GPU fills, and its map of all rows.

    Parameters
    ----------
    rows : CachedRows
        The rows; no step of theirs is under way.
    """

    def __init__(self, rows: CachedRows) -> None:
        self._first = rows.cache_rows
        self._device = device = rows.device
        # Also where nothing else may be written to in training later.
        with torch.inference_mode(False):
            #: int32 [N]: the slot of each row, or -1.
            self._slot_of = torch.tensor(rows.residents.slot_of, device=device)
            #: int64: the rows in slots behind the cache, NO_ROW for none.
            self._ids = torch.empty(0, dtype=torch.int64, device=device)
        # Waits for the GPU before it goes.
        self._told_memory = HostBuffer.allocate(8 * MOST_STAYS)
        #: int64, of lookups: rows that have come, -1 until the GPU tells.
        self._told = self._told_memory.tensor.view(torch.int64).numpy()
        self._next_told = 0
        self._stays: list[_Stay] = []
        # From here on slots are free, but for what stays.
        self._end = self._first
        # Whether there is anything that the host does not know.
        self._fresh = False
        # Since rows last moved into the cache.
        self._lookups = 0
        self._is_like(rows)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams may write to them

    def _is_like(self, rows: CachedRows) -> None:
        """Note that the GPU's map is like the host's."""
        residents = rows.residents
        self._made_of = residents.changes
        #: Rows that may come at most.
        self._away = len(rows) - int((residents.id_of[: self._first] >= 0).sum())
        staying = np.flatnonzero(residents.id_of[self._first :] >= 0)
        self._end = self._first + (int(staying[-1]) + 1 if len(staying) else 0)

    @property
    def n_slots(self) -> int:
        """Slots behind the cache."""
        return self._ids.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes on the device, without the rows."""
        return self._slot_of.nbytes + self._ids.nbytes

    # Room

    def _place(self, room: int) -> int | None:
        """Return the first of so many free slots; None where there are too few, as far as known."""
        untold = []
        for stay in self._stays:
            filled = int(self._told[stay.told])
            if filled < 0:
                untold.append(stay)
            elif filled:
                self._end = max(self._end, stay.first + filled)
        self._stays = untold
        if len(untold) == MOST_STAYS:
            return None
        first = max([self._end, *(stay.first + stay.room for stay in untold)])
        return first if first + room <= self._first + self.n_slots else None

    def _may_be_enough(self, room: int) -> bool:
        """Tell whether there is room if no row has come with the lookups not told of yet."""
        return bool(self._stays) and self._end + room <= self._first + self.n_slots

    def make_room(self, rows: CachedRows, n_ids: int) -> int | None:
        """Return where rows that miss may come in a lookup of so many ids.

        Returns
        -------
        int or None
            A slot for `look_up`; None where the host has to look the ids up.
        """
        if self._made_of != rows.residents.changes:
            self.catch_up(rows)
            self._follow(rows)
        room, known = min(n_ids, self._away), rows.guest_room
        if self.n_slots < BATCHES * room:
            known.slots = max(known.slots, int(BATCHES * MORE * room))
        first = self._place(room)
        if first is None and self._may_be_enough(room):
            # The GPU is behind, but perhaps all rows were there.
            known.slots = max(known.slots, min(2 * self.n_slots, MOST_BATCHES * room))
        if known.slots > self.n_slots and not rows.training.in_use:
            self._widen(rows, known.slots)
            first = self._place(room)
        end = time.monotonic() + PATIENCE_S
        while first is None and self._may_be_enough(room) and time.monotonic() < end:
            time.sleep(LOOK_S)
            first = self._place(room)
        if first is None:
            self.catch_up(rows)
            self.admit(rows)
            first = self._place(room)
        if first is None:
            # Gradients hold what is there.
            known.slots = max(known.slots, min(2 * self.n_slots, MOST_BATCHES * room))
        return first

    def _widen(self, rows: CachedRows, n_slots: int) -> None:
        """Let there be so many slots behind the cache."""
        if any(use.on_device is not None for use in rows.training.live):
            self.catch_up(rows)  # their gradients will be of another number of slots
        # A number of rows that cannot be taken for that of the whole table.
        n_slots += self._first + n_slots == len(rows)
        more = n_slots - self.n_slots
        before = self._by_slot(rows)
        with torch.inference_mode(False), torch.no_grad():
            # All memory first.
            self._check_memory(more, before)
            after = self._widened(rows, more)
            try:
                self._let_be(rows, after)
                rows.residents.grow(np.full(more, -1))
                self._made_of = rows.residents.changes
            except BaseException:
                if len(rows.residents.id_of) < len(after.data):
                    self._let_be(rows, before)
                raise

    def _by_slot(self, rows: CachedRows) -> _BySlot:
        """Return what there is for each slot on the device."""
        states = [link.states() for link in rows.training.links]
        parameter = rows.parameter
        notes = notes_of(rows).by_slot()
        return _BySlot(parameter.data, parameter.grad, self._ids, notes, states)

    def _widened(self, rows: CachedRows, more: int) -> _BySlot:
        """Return the same for so many slots more."""
        data, grad, ids = rows.parameter.data, rows.parameter.grad, self._ids
        grown = data.new_zeros(data.shape[0] + more, data.shape[1])
        grown[: data.shape[0]] = data
        return _BySlot(
            with_spare(grown),
            None if grad is None else resized(grad, grown.shape),
            torch.cat([ids, ids.new_full((more,), NO_ROW)]),
            notes_of(rows).widened(more),
            [link.widened(more) for link in rows.training.links],
        )

    def _let_be(self, rows: CachedRows, those: _BySlot) -> None:
        """Let other tensors be what there is for each slot."""
        self._ids = those.ids
        notes_of(rows).write_to(those.notes)
        for link, states in zip(rows.training.links, those.states, strict=True):
            link.follow(states)
        before, rows.parameter.grad = rows.parameter.grad, None
        rows.watch.set_data(those.data)
        rows.parameter.grad = those.grad
        rows.training.gradients.follow(before, those.grad)

    def _check_memory(self, more: int, there: _BySlot) -> None:
        """Raise OutOfMemoryError where so many rows more would take too much of what is free."""
        if self._device.type != "cuda":
            return
        states = [t for each in there.states for t in each.values()]
        of_rows = [there.data, there.data, *states]  # the gradient is as large as the rows
        needed = more * sum(t.element_size() * t[:1].numel() for t in of_rows)
        free = torch.cuda.mem_get_info(self._device)[0]
        free += torch.cuda.memory_reserved(self._device)
        free -= torch.cuda.memory_allocated(self._device)
        if needed > MEMORY_SHARE * free:
            raise torch.OutOfMemoryError(f"{needed} bytes for rows to come, {free} are free")

    # Lookups

    def look_up(
        self,
        rows: CachedRows,
        ids: torch.Tensor,
        slots: torch.Tensor,
        tally: torch.Tensor,
        first: int,
        *,
        counts: bool,
    ) -> None:
        """Find the slots of rows, which come to slot `first` and behind where they are not there.

        Parameters
        ----------
        rows : CachedRows
            The rows.
        ids : torch.Tensor
            int32 or int64 ``[n]`` on the device; n is not 0.
        slots, tally
            As for `SlotFinder.give`.
        first : int
            What `make_room` has found.
        counts : bool
            Whether the batch counts for what leaves first.
        """
        notes, number = notes_of(rows), rows.residents.next_stamp()
        finder = notes.finder(len(rows), self._slot_of)
        stay = _Stay(first, min(len(ids), self._away), self._free_told())
        wanted = self._ids[first - self._first :][: stay.room]
        self._fresh = True
        self._lookups += 1
        self._stays.append(stay)
        try:
            finder.claim(ids, wanted)
            rows.table.gather_some_on_gpu(wanted, rows.parameter.data[first : first + stay.room])
            for link in rows.training.links:
                link.restore_on_gpu(wanted, first)
            finder.give(
                ids,
                slots,
                tally,
                number,
                uses=notes.begin(counts=counts),
                first=first,
                miss_count=int(self._told.ctypes.data) + 8 * stay.told,
            )
        except BaseException:
            self._mend(rows)
            raise

    def _mend(self, rows: CachedRows) -> None:
        """Let the rows go that a lookup which failed was to bring."""
        self._slot_of.clamp_(min=NO_SLOT)
        notes_of(rows).forget_claims()
        self.catch_up(rows)
        self._follow(rows)

    def _free_told(self) -> int:
        """Return where the GPU may tell of a lookup."""
        taken = {stay.told for stay in self._stays}
        while self._next_told in taken:
            self._next_told = (self._next_told + 1) % MOST_STAYS
        found = self._next_told
        self._next_told = (found + 1) % MOST_STAYS
        self._told[found] = -1
        return found

    # The host

    def catch_up(self, rows: CachedRows) -> None:
        """Let the host know which rows have come, changed and were used; waits for the GPU.

        Raises
        ------
        IndexRangeError
            When one of the lookups was given a bad id; nothing was handed over.
        """
        if self._fresh:
            wait_for_all(self._device)
            ids = self._ids.cpu()
            slots = np.flatnonzero(ids.numpy() >= 0)
            there = ids[torch.from_numpy(slots)]
            slots += self._first
            # Without those of a lookup that was interrupted.
            came = self._slot_of[there.to(self._device)].cpu().numpy() == slots
            rows.residents.take_in(slots[came], there.numpy()[came])
        notes_of(rows).take(rows)
        rows.training.know_slots()
        if self._fresh:
            self._stays.clear()
            self._is_like(rows)
            self._fresh = False

    def admit(self, rows: CachedRows) -> None:
        """Let the most used guests into the cache, and send the others back to the host.

        Those stay whose gradient waits for a step, or may come. The host must know of all.
        """
        residents, training = rows.residents, rows.training
        if training.in_pass:
            return
        training.pin()
        guests = np.arange(self._first, len(residents.id_of))
        guests = guests[(residents.id_of[guests] >= 0) & ~residents.pinned[guests]]
        if not len(guests):
            return
        came, gone = residents.id_of[guests], self._exchange(rows, guests)
        slot_of = residents.slot_of
        for ids in (gone, came):
            there = torch.from_numpy(slot_of[ids]).to(self._device)
            self._slot_of[torch.from_numpy(ids).to(self._device)] = there
        self._ids[torch.from_numpy(guests - self._first).to(self._device)] = NO_ROW
        self._is_like(rows)

    def _exchange(self, rows: CachedRows, guests: Array) -> Array:
        """Do what `admit` says on the host, and with the rows; return those that left for others.

        Parameters
        ----------
        rows : CachedRows
            The rows.
        guests : numpy.ndarray
            int64 ``[n]``, slots behind the cache.
        """
        residents, training = rows.residents, rows.training
        guests = guests[np.argsort(-residents.keys[guests], kind="stable")]
        # As many as a batch brings come in any case, as where the host looks them up.
        of_a_batch = ceil_div(len(guests), max(1, self._lookups))
        came, lost = residents.id_of[guests], guests[:0]
        try:
            slots = residents.make_room_for(guests, of_a_batch)
            self._lookups = 0
            moving, staying = guests[: len(slots)], guests[len(slots) :]
            left = slots[residents.id_of[slots] >= 0]
            gone = residents.id_of[left]
            leaving = np.concatenate([left, staying])
            changed = leaving[residents.dirty[leaving]]
            rows.write_back(changed)
            rows.statistics.note_written_back(len(changed))
            training.save(leaving, residents.id_of[leaving])
            training.gradients.note_reuse(np.concatenate([left, guests]))
            lost = slots  # what was in them is safe on the host
            at, to = (torch.from_numpy(each).to(self._device) for each in (moving, slots))
            rows.parameter.data[to] = rows.parameter.data[at]
            for link in training.links:
                link.move(at, to)
            residents.move(moving, slots)
            residents.drop(staying)
        except BaseException:
            residents.mend(lost[residents.id_of[lost] != came[: len(lost)]])
            raise
        return gone

    def _follow(self, rows: CachedRows) -> None:
        """Make the GPU's map like the host's, which somebody else has changed."""
        residents = rows.residents
        ids = residents.id_of[self._first :]
        self._slot_of.copy_(torch.from_numpy(residents.slot_of))
        self._ids.copy_(torch.from_numpy(np.where(ids >= 0, ids, NO_ROW)))
        self._stays.clear()
        self._is_like(rows)


def room_for(rows: CachedRows, n_ids: int) -> int | None:
    """Return where the rows that miss in a lookup of ids on the GPU may come.

    Returns
    -------
    int or None
        A slot for `Guests.look_up`; None where the host has to look the ids up.
    """
    training, guests, known = rows.training, rows.guests, rows.guest_room
    if known.pause:
        known.pause -= 1
        return None
    rows.residents.make_sound()
    training.release_taken()
    if any(not link.follows_on_gpu() for link in training.links):
        return None
    try:
        if guests is None:
            training.settle()
            # Rows that were looked up beside the parameter may make it grow.
            beside = any(use.beside for use in training.live)
            if not training.idle or training.in_use or beside:
                return None
            guests = rows.guests = Guests(rows)
        first = guests.make_room(rows, n_ids)
    except torch.OutOfMemoryError:
        known.pause = PAUSE_LOOKUPS
        return None
    # Asked each time: a table that was packed anew has other memory.
    return first if rows.table.readable_by_gpu() else None


def let_go(rows: CachedRows) -> None:
    """Give the rows over to the host, which knows all then and may do with them as it likes."""
    guests = rows.guests
    if guests is not None:
        guests.catch_up(rows)
        guests.admit(rows)
        rows.guests = rows.notes = None
