"""Slot table: which row each cache slot holds, the slot of each row, and which rows leave first."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.kernels.cpu.compiling import call, prepare
from ..errors import BitslabError, load_optional
from .eviction import EvictionStrategy

Array = np.ndarray[Any, Any]
#: Arrays with an entry for each slot, besides `id_of`.
EACH_SLOT = ("keys", "stamps", "pinned", "dirty", "_rank")


@functools.cache
def _jitted() -> Any:
    """Load the Numba functions on first use, so that importing bitslab does not load Numba."""
    load_optional("numba", extra=None, purpose="looking up rows on the CPU")
    from ..engine.kernels.cpu import slot_table

    return slot_table


@functools.cache
def _find_bags() -> Any:
    """Load `find_bags`, compiled for the types that it is always called with.

    Small batches notice what it costs to look at the arguments of every call.
    """
    kernel = _jitted().find_bags
    numbers = np.zeros(1, np.int64)
    prepare(kernel, numbers, numbers, False, np.zeros(1, np.int32), numbers)
    return kernel


@dataclass(frozen=True, eq=False)
class Batch:
    """Slots and missing rows of the ids of one lookup.

    Parameters
    ----------
    slots : numpy.ndarray
        int64 ``[n]``: the slot of each id, or ``-(k + 2)`` for row ``missing[k]``.
    touched : numpy.ndarray
        int64, the different slots among them.
    missing : numpy.ndarray
        int64, the different rows that have no slot.
    missing_counts : numpy.ndarray
        int64, how often each of those is looked up.
    """

    slots: Array
    touched: Array
    missing: Array
    missing_counts: Array


class SlotTable:
    """Slots of a cache and the rows in them. Not thread-safe: the owner holds a lock.

    Parameters
    ----------
    n_rows : int
        Rows of the table.
    capacity_rows : int
        Slots.
    evict : EvictionStrategy
        Which row leaves first.
    """

    def __init__(self, n_rows: int, capacity_rows: int, evict: EvictionStrategy) -> None:
        self.n_rows = n_rows
        self.capacity_rows = capacity_rows
        self.evict = evict
        self._order: Array | None = None
        self.slot_of = np.full(n_rows, -1, np.int32)
        self.id_of = np.full(capacity_rows, -1, np.int64)
        self.keys = np.zeros(capacity_rows, np.int64)
        self.stamps = np.full(capacity_rows, -1, np.int64)
        self.pinned = np.zeros(capacity_rows, bool)
        #: Slots whose row differs from the host's.
        self.dirty = np.zeros(capacity_rows, bool)
        self._rank = np.zeros(capacity_rows, np.int64)
        self._heap = np.zeros(capacity_rows, np.int32)
        self._heap_keys = np.zeros(capacity_rows, np.int64)
        self._heap_size = 0
        self._free = np.arange(capacity_rows)[::-1].copy()  # slots with no row, the last one first
        self._stamp = 0
        # Whether the missing rows of the last batch were neither admitted nor rejected yet.
        self._open = False
        # Whether `repair` was interrupted.
        self._inconsistent = False
        #: Counts changes of which rows are resident.
        self.changes = 0

    @property
    def order(self) -> Array | None:
        """Order of rows for DATASET, 0 the most used; None for that of the ids."""
        return self._order

    @order.setter
    def order(self, order: Array | None) -> None:
        # A rank is less than the number of rows, and there is one for each of them.
        short = self.n_rows <= 1 << 31
        self._order = None if order is None else order.astype(np.int32 if short else np.int64)

    @property
    def map_bytes(self) -> int:
        """Bytes of what is kept for each row of the table."""
        return self.slot_of.nbytes + (0 if self._order is None else self._order.nbytes)

    def among(self, begin: int, end: int) -> tuple[Array, Array]:
        """Return which of the rows begin..end are resident, counted from `begin`, and their slots.

        Both are int64.
        """
        slots = self.slot_of[begin:end]
        at = np.flatnonzero(slots >= 0)
        return at, slots[at].astype(np.int64)

    @property
    def free_rows(self) -> int:
        """Slots that hold no row."""
        return len(self._free)

    @property
    def extra_rows(self) -> int:
        """Rows beyond the capacity; see `grow`."""
        return len(self.id_of) - self.capacity_rows

    def resident(self) -> Array:
        """Return the slots that hold a row, int64."""
        return np.flatnonzero(self.id_of >= 0)

    def find(self, ids: Array) -> tuple[Array, int]:
        """Return the slots of rows int64 ``[n]``, -1 for none, and how many have none."""
        slots = np.empty(len(ids), np.int64)
        _, missing = call(_jitted().find_slots, ids, self.slot_of, slots)
        return slots, missing

    def find_bags(self, ids: Array, offsets: Array, include_last: bool) -> tuple[Array, int]:
        """Return the slots of rows int64 ``[n]``, and how many have none; -1 for bad arguments."""
        slots = np.empty(ids.shape[0], np.int64)
        return slots, _find_bags()(ids, offsets, include_last, self.slot_of, slots)

    def slot_or_none(self, row: int) -> int | None:
        """Return the slot of a row, None where it has none."""
        slot = int(self.slot_of[row])
        return slot if slot >= 0 else None

    def first_outside(self, ids: Array) -> int:
        """Return the first position of an id out of range, or -1."""
        return int(call(_jitted().find_outside, ids, self.n_rows))

    def look_up(self, ids: Array, *, count: bool = True) -> Batch:
        """Find the slots of a batch and update their keys; `admit` or `reject` must follow.

        Parameters
        ----------
        ids : numpy.ndarray
            int64 ``[n]``, in range.
        count : bool
            Whether the batch updates what decides which row leaves first.
        """
        self.repair_if_interrupted()
        self._stamp += 1
        kernels = _jitted()
        how = kernels.KEEP
        if count and self.evict is EvictionStrategy.LFU:
            how = kernels.COUNT_UP
        elif count and self.evict is EvictionStrategy.LRU:
            how = kernels.LAST_USE
        n = len(ids)
        slots, missing, counts = (np.empty(n, np.int64) for _ in range(3))
        touched = np.empty(min(n, len(self.id_of)), np.int64)
        self._open = True
        n_touched, n_missing = call(
            kernels.look_up,
            ids,
            self.slot_of,
            self.keys,
            self.stamps,
            self._stamp,
            how,
            slots,
            touched,
            self._rank,
            missing,
            counts,
        )
        self._open = n_missing > 0
        return Batch(slots, touched[:n_touched], missing[:n_missing], counts[:n_missing])

    def reject(self, batch: Batch) -> None:
        """End a lookup without admitting its missing rows."""
        call(_jitted().unmark, self.slot_of, batch.missing)
        self._open = False

    def make_room(self, batch: Batch) -> Array | None:
        """Choose slots for the missing rows of a batch: int64, or None when there are too few.

        The rows in them are not evicted yet; `put_back` undoes the choice.
        """
        if self._inconsistent:
            self.repair()
        wanted = len(batch.missing)
        from_free = min(wanted, len(self._free))
        chosen = self._free[len(self._free) - from_free :][::-1].copy()
        if from_free < wanted:
            used = int((batch.touched < self.capacity_rows).sum())
            if wanted - from_free > self._heap_size - used:
                return None
            taken = np.empty(wanted - from_free, np.int64)
            held = np.empty(self._heap_size, np.int64)
            found, size = call(
                _jitted().take_least,
                self._heap,
                self._heap_keys,
                self._heap_size,
                self.keys,
                self.stamps,
                self._stamp,
                self.pinned,
                wanted - from_free,
                taken,
                held,
            )
            self._heap_size = size
            if found < wanted - from_free:
                return None
            chosen = np.concatenate([chosen, taken])
        self._free = self._free[: len(self._free) - from_free]
        return chosen

    def put_back(self, slots: Array) -> None:
        """Undo `make_room`."""
        held = self.id_of[slots] >= 0
        self._push(slots[held])
        self._free = np.concatenate([self._free, slots[~held][::-1]])

    def admit(self, ids: Array, slots: Array, counts: Array) -> None:
        """Put rows into slots that `make_room` chose; the rows in those leave.

        Parameters
        ----------
        ids, slots : numpy.ndarray
            int64 ``[n]``.
        counts : numpy.ndarray
            int64 ``[n]``, how often the rows were looked up so far; used by LFU.
        """
        self.changes += 1
        gone = self.id_of[slots]
        self.slot_of[gone[gone >= 0]] = -1
        self.slot_of[ids] = slots
        self.id_of[slots] = ids
        self.dirty[slots] = False
        self.stamps[slots] = self._stamp
        first = counts if self.evict is EvictionStrategy.LFU else self._stamp
        self.keys[slots] = self._first_keys(ids, first)
        self._push(slots)
        self._open = False

    def _first_keys(self, ids: Array, first: Array | int) -> Array | int:
        """Return the keys of rows that are admitted: their rank for DATASET, else `first`."""
        if self.evict is not EvictionStrategy.DATASET:
            return first
        return -(ids if self.order is None else self.order[ids])

    def resolved(self, batch: Batch, slots: Array) -> Array:
        """Return the slots of a batch, ``slots[k]`` for its k-th missing row."""
        call(_jitted().resolve, batch.slots, slots)
        return batch.slots

    def numbered(self, batch: Batch) -> Array:
        """Return int64 ``[n]``: a number for each id, from 0 for missing rows, then for touched."""
        call(_jitted().compress_slots, batch.slots, self._rank, len(batch.missing))
        return batch.slots

    def evict_slots(self, slots: Array) -> None:
        """Evict the rows of slots below the capacity; int64 ``[n]``."""
        self.repair(slots)

    def repair(self, lost: Array | None = None) -> None:
        """Rebuild all other arrays from `id_of`, such as after an exchange that failed midway.

        Parameters
        ----------
        lost : numpy.ndarray, optional
            int64, slots whose rows are gone.
        """
        self._inconsistent = True
        self.changes += 1
        if lost is not None:
            self.id_of[lost] = -1
            self.dirty[lost] = False
        self.dirty[self.id_of < 0] = False
        slots = self.resident()
        self.slot_of[:] = -1
        self.slot_of[self.id_of[slots]] = slots
        self._free = np.flatnonzero(self.id_of[: self.capacity_rows] < 0)[::-1].copy()
        self._heap_size = 0
        self._push(slots[slots < self.capacity_rows])
        self._open = self._inconsistent = False

    def repair_if_interrupted(self) -> None:
        """Call `repair` if the last batch, or a repair, was interrupted."""
        if self._open or self._inconsistent:
            self.repair()

    def clear(self) -> None:
        """Empty all slots."""
        order, changes = self._order, self.changes
        self.__init__(self.n_rows, self.capacity_rows, self.evict)  # type: ignore[misc]
        self._order, self.changes = order, changes + 1

    def grow(self, ids: Array) -> Array:
        """Append slots beyond the capacity for rows that have none; return the slots, int64.

        Parameters
        ----------
        ids : numpy.ndarray
            int64 ``[n]``, -1 for a slot that holds no row.
        """
        self.changes += 1
        slots = np.arange(len(self.id_of), len(self.id_of) + len(ids))
        grown = {"id_of": np.concatenate([self.id_of, ids])}
        for name in EACH_SLOT:
            old = getattr(self, name)
            grown[name] = np.concatenate([old, np.zeros(len(ids), old.dtype)])
        # One statement, so that Ctrl-C cannot leave arrays of different lengths.
        self.__dict__.update(grown)
        self.slot_of[ids[ids >= 0]] = slots[ids >= 0]
        return slots

    # Slots that a GPU fills

    @property
    def stamp(self) -> int:
        """The number of the last batch."""
        return self._stamp

    def next_stamp(self) -> int:
        """Return the number of a batch that the host does not look up."""
        self._stamp += 1
        return self._stamp

    def take(self, id_of: Array, keys: Array, dirty: Array) -> None:
        """Take over what a GPU has changed: the row in each slot, keys and dirty bits.

        Parameters
        ----------
        id_of : numpy.ndarray
            int64 ``[S]``, negative for slots that hold no row.
        keys : numpy.ndarray
            int64 ``[S]``.
        dirty : numpy.ndarray
            bool ``[S]``.
        """
        self._inconsistent = True  # until `repair` has run
        self.keys[:], self.dirty[:] = keys, dirty
        np.maximum(id_of, -1, out=self.id_of)
        self.repair()

    def make_room_for(self, candidates: Array) -> Array:
        """Choose slots below the capacity for the most used rows beyond it.

        A row moves only if its key is at least that of the row whose slot it would take.

        Parameters
        ----------
        candidates : numpy.ndarray
            int64 ``[n]``, slots beyond the capacity, the most used first.

        Returns
        -------
        numpy.ndarray
            int64, at most n slots, for the first candidates. The rows in them are not evicted yet.
        """
        self._stamp += 1
        below = slice(0, self.capacity_rows)
        leaves = (self.id_of[below] >= 0) & ~self.pinned[below]
        wanted = min(len(candidates), len(self._free) + int(leaves.sum()))
        none = candidates[:0]
        slots = self.make_room(Batch(none, none, candidates[:wanted], none))
        if slots is None:
            raise BitslabError("cache: fewer slots than counted; this is a bug of bitslab")
        worth = self.keys[candidates[:wanted]] >= self.keys[slots]
        worth |= self.id_of[slots] < 0
        # Keys of rows that leave ascend, those of candidates descend.
        n = wanted if worth.all() else int(np.argmin(worth))
        self.put_back(slots[n:])
        return slots[:n]

    def move(self, slots: Array, to: Array) -> None:
        """Move rows from slots beyond the capacity to others, whose rows leave; int64 ``[n]``."""
        self.changes += 1
        for name in ("keys", "stamps", "dirty"):
            values = getattr(self, name)
            values[to] = values[slots]
        gone, ids = self.id_of[to], self.id_of[slots]
        id_of = self.id_of.copy()
        id_of[to], id_of[slots] = ids, -1
        # One assignment, so that Ctrl-C leaves each row in one slot; `repair` does the rest.
        self.id_of = id_of
        self.slot_of[gone[gone >= 0]] = -1
        self.slot_of[ids] = to
        self._clear(slots)
        self._push(to)

    def drop(self, slots: Array) -> None:
        """Empty slots beyond the capacity; the slots are kept."""
        self.changes += 1
        self.slot_of[self.id_of[slots]] = -1
        self.id_of[slots] = -1
        self._clear(slots)

    def _clear(self, slots: Array) -> None:
        self.keys[slots] = 0
        self.dirty[slots] = False

    def shrink(self) -> None:
        """Remove the slots beyond the capacity."""
        self.changes += 1
        capacity = self.capacity_rows
        ids = self.id_of[capacity:]
        there = self.slot_of[ids] == np.arange(capacity, len(self.id_of))
        self.slot_of[ids[there]] = -1
        kept = {name: getattr(self, name)[:capacity].copy() for name in ("id_of", *EACH_SLOT)}
        self.__dict__.update(kept)

    def _push(self, slots: Array) -> None:
        if self._heap_size + len(slots) > self.capacity_rows:
            raise BitslabError("cache: a slot is to be emptied twice; this is a bug of bitslab")
        self._heap_size = call(
            _jitted().push, self._heap, self._heap_keys, self._heap_size, slots, self.keys
        )
