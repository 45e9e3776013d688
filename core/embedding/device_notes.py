"""What lookups by ids on a GPU note there, of each slot, until the host asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..engine.kernels.cuda import kernels_on
from ..engine.kernels.cuda.launch_slots import SlotFinder
from .eviction import EvictionStrategy

if TYPE_CHECKING:
    from .rows import CachedRows


#: Of a slot: its row may have changed; a gradient of it waits for a step.
DIRTY, HELD = 1, 2


class DeviceNotes:
    """What lookups have noted of each slot, on the device.

    Parameters
    ----------
    n_slots : int
        Slots.
    device : torch.device
        Where they are.
    evict : EvictionStrategy
        What leaves first, which says what of their use is noted.
    """

    def __init__(self, n_slots: int, device: torch.device, evict: EvictionStrategy) -> None:
        self.device = device
        self._evict = evict
        #: int64 [n_slots]: how often each was used, or when last; None where that does not matter.
        self._uses: torch.Tensor | None = None
        # Also where nothing else may be written to in training later.
        with torch.inference_mode(False):
            self._flags = torch.zeros(n_slots, dtype=torch.uint8, device=device)
            self._seen = torch.zeros(n_slots, dtype=torch.int32, device=device)
            self._claims = torch.tensor([0, -1], device=device)
            if evict is not EvictionStrategy.DATASET:
                self._uses = torch.zeros(n_slots, dtype=torch.int64, device=device)
        if device.type == "cuda":
            # Other streams may write to them.
            torch.cuda.current_stream(device).synchronize()
        # Whether there is anything that the host does not know.
        self._fresh = False
        #: Whether gradients wait for a step.
        self.holding = False
        self._finder: SlotFinder | None = None
        self._finds_in: torch.Tensor | None = None
        # Of the last batch: what is between two launches of it must not be seen by another one.
        self._stream: torch.cuda.Stream | None = None

    def finder(self, n_rows: int, slot_of: torch.Tensor | None = None) -> SlotFinder:
        """Return what finds the slots of batches; asked for each, since slots may be added.

        Parameters
        ----------
        n_rows : int
            Rows of the table.
        slot_of : torch.Tensor, optional
            As for `SlotFinder`.
        """
        if self._finder is None:
            kernels = kernels_on(self.device, tell=False)
            adds = self._evict is EvictionStrategy.LFU
            self._finds_in = slot_of
            self._finder = kernels.slot_finder(
                n_rows, self._seen, self._claims, slot_of=slot_of, adds=adds
            )
        assert slot_of is self._finds_in
        return self._finder

    def in_order(self) -> None:
        """Let what comes on the current stream wait for the last batch, if that was on another."""
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def begin(self, *, counts: bool) -> torch.Tensor | None:
        """Return where the next batch is to note its use, if it does."""
        self._fresh |= counts
        return self._uses if counts else None

    def forget_claims(self) -> None:
        """Begin anew after a batch whose slots were not all found."""
        self._claims[:1].zero_()
        self._claims[1:].fill_(-1)

    def changed(self, slots: torch.Tensor, *, held: bool) -> None:
        """Note that rows in slots int64 ``[n]`` may change, and whether they wait for a step."""
        self._fresh = True  # first: an interrupt may come in between
        self.holding |= held
        self._flags.index_fill_(0, slots, DIRTY | HELD if held else DIRTY)

    def held(self) -> torch.Tensor:
        """Return bool ``[n_slots]``: whether a gradient of a slot waits for a step."""
        return (self._flags & HELD).bool()

    def release(self) -> None:
        """Note that no gradient waits any more."""
        if self.holding:
            self._flags.bitwise_and_(DIRTY)
            self.holding = False

    def by_slot(self) -> tuple[torch.Tensor | None, ...]:
        """Return what the notes are written to."""
        return self._flags, self._seen, self._uses

    def widened(self, more: int) -> tuple[torch.Tensor | None, ...]:
        """Return the same for so many slots more; see `write_to`."""
        return tuple(t if t is None else torch.cat([t, t.new_zeros(more)]) for t in self.by_slot())

    def write_to(self, notes: tuple[torch.Tensor | None, ...]) -> None:
        """Write notes to other tensors, such as `widened` has returned."""
        flags, seen, uses = notes
        assert flags is not None and seen is not None
        self._finder = None
        self._flags, self._seen, self._uses = flags, seen, uses

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(t.nbytes for t in self.by_slot() if t is not None)

    def take(self, rows: CachedRows) -> None:
        """Hand over to the host what it does not know; waits for the GPU if there is anything.

        Raises
        ------
        IndexRangeError
            When one of the lookups was given a bad id; nothing was handed over.
        """
        if not self._fresh:
            return
        wait_for_all(self.device)
        residents = rows.residents
        flags = self._flags.cpu().numpy()
        residents.dirty |= flags & DIRTY != 0
        if rows.guests is not None:
            rows.training.know_slots(np.flatnonzero(flags & HELD))
        if self._uses is not None:
            uses = self._uses.cpu().numpy()
            if self._evict is EvictionStrategy.LFU:
                residents.keys += uses
            else:
                np.maximum(residents.keys, uses, out=residents.keys)
            self._uses.zero_()
        # After all has been taken, so that an interrupt leaves it here or in both places.
        self._flags.zero_()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # before others note again
        self._fresh = self.holding = False


def wait_for_all(device: torch.device) -> None:
    """Wait for a GPU, whatever the streams it works on, and raise what it has told of."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        kernels_on(device)


def take_notes(rows: CachedRows) -> None:
    """Let the host know what lookups by ids on a GPU have brought, changed and used."""
    if rows.guests is not None:
        rows.guests.catch_up(rows)
    elif rows.notes is not None:
        rows.notes.take(rows)


def notes_of(rows: CachedRows) -> DeviceNotes:
    """Return what is noted of the slots on the device."""
    if rows.notes is None or rows.notes.device != rows.device:
        if rows.notes is not None:
            rows.notes.take(rows)
        evict, n_slots = rows.residents.evict, len(rows.residents.id_of)
        if evict is EvictionStrategy.LRU and rows.all_resident:
            evict = EvictionStrategy.DATASET  # nothing leaves
        rows.notes = DeviceNotes(n_slots, rows.device, evict)
    return rows.notes
