"""Per-slot dirty bits and access counters on the GPU, until the next sync with the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..engine.kernels.cuda import kernels_on
from ..engine.kernels.cuda.slots import SlotFinder
from .eviction import EvictionStrategy

if TYPE_CHECKING:
    from .rows import CachedRows


#: Bits of a slot: its row may have changed; its gradient waits for a step.
DIRTY, HELD = 1, 2


class DeviceCounters:
    """Dirty bits and access counters of the slots, written by lookups on the device.

    Parameters
    ----------
    n_slots : int
        Slots.
    device : torch.device
        Where they are.
    evict : EvictionStrategy
        Which row leaves first: it decides what an access counter counts.
    """

    def __init__(self, n_slots: int, device: torch.device, evict: EvictionStrategy) -> None:
        self.device = device
        self._evict = evict
        #: int64 [n_slots], access counters: uses, or the last batch; None for DATASET.
        self._uses: torch.Tensor | None = None
        # Training may write to them later, so they are no inference tensors.
        with torch.inference_mode(False):
            self._flags = torch.zeros(n_slots, dtype=torch.uint8, device=device)
            self._seen = torch.zeros(n_slots, dtype=torch.int32, device=device)
            self._claims = torch.tensor([0, -1], device=device)
            if evict is not EvictionStrategy.DATASET:
                self._uses = torch.zeros(n_slots, dtype=torch.int64, device=device)
        if device.type == "cuda":
            # Other streams may write to them.
            torch.cuda.current_stream(device).synchronize()
        # Whether the device holds anything that the host has not read yet.
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
            self._finder = kernels.slots.finder(
                n_rows, self._seen, self._claims, slot_of=slot_of, adds=adds
            )
        assert slot_of is self._finds_in
        return self._finder

    def in_order(self) -> None:
        """Make the current stream wait for the last batch if that ran on another stream."""
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream

    def begin(self, *, counts: bool) -> torch.Tensor | None:
        """Return the access counters that the next batch updates; None if it does not count."""
        self._fresh |= counts
        return self._uses if counts else None

    def forget_claims(self) -> None:
        """Reset the claims after a batch whose slots were not all found."""
        self._claims[:1].zero_()
        self._claims[1:].fill_(-1)

    def changed(self, slots: torch.Tensor, *, held: bool) -> None:
        """Set the dirty bits of slots int64 ``[n]``; `held`: gradients wait for a step."""
        self._fresh = True  # first: an interrupt may come in between
        self.holding |= held
        self._flags.index_fill_(0, slots, DIRTY | HELD if held else DIRTY)

    def held(self) -> torch.Tensor:
        """Return bool ``[n_slots]``: whether a gradient of a slot waits for a step."""
        return (self._flags & HELD).bool()

    def release(self) -> None:
        """Clear the bits of gradients that wait for a step."""
        if self.holding:
            self._flags.bitwise_and_(DIRTY)
            self.holding = False

    def by_slot(self) -> tuple[torch.Tensor | None, ...]:
        """Return tensors ``[n_slots]``: flags, last batch that had the slot, access counters."""
        return self._flags, self._seen, self._uses

    def widened(self, more: int) -> tuple[torch.Tensor | None, ...]:
        """Return copies with `more` slots appended; see `write_to`."""
        return tuple(t if t is None else torch.cat([t, t.new_zeros(more)]) for t in self.by_slot())

    def write_to(self, by_slot: tuple[torch.Tensor | None, ...]) -> None:
        """Use other tensors from now on, such as `widened` returns."""
        flags, seen, uses = by_slot
        assert flags is not None and seen is not None
        self._finder = None
        self._flags, self._seen, self._uses = flags, seen, uses

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(t.nbytes for t in self.by_slot() if t is not None)

    def take(self, rows: CachedRows) -> None:
        """Add dirty bits and access counters to the host's slot table and clear them here.

        Waits for the GPU if lookups have written anything since the last sync.

        Raises
        ------
        IndexRangeError
            When a lookup was given a bad id; nothing was added.
        """
        if not self._fresh:
            return
        wait_for_all(self.device)
        slot_table = rows.slot_table
        flags = self._flags.cpu().numpy()
        slot_table.dirty |= flags & DIRTY != 0
        if rows.miss_buffer is not None:
            rows.training.sync_slots(np.flatnonzero(flags & HELD))
        if self._uses is not None:
            uses = self._uses.cpu().numpy()
            if self._evict is EvictionStrategy.LFU:
                slot_table.keys += uses
            else:
                np.maximum(slot_table.keys, uses, out=slot_table.keys)
            self._uses.zero_()
        # Cleared last: an interrupt leaves the bits here or in both copies, never in neither.
        self._flags.zero_()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # before other streams write
        self._fresh = self.holding = False


def wait_for_all(device: torch.device) -> None:
    """Wait for all streams of a GPU, and raise the errors that its kernels have reported."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        kernels_on(device)


def sync_from_device(rows: CachedRows) -> None:
    """Update the host's slot table with what lookups on a GPU have fetched, changed and used."""
    if rows.miss_buffer is not None:
        rows.miss_buffer.sync(rows)
    elif rows.device_counters is not None:
        rows.device_counters.take(rows)


def device_counters_of(rows: CachedRows) -> DeviceCounters:
    """Return the counters of the slots on the rows' device, made on first use."""
    if rows.device_counters is None or rows.device_counters.device != rows.device:
        if rows.device_counters is not None:
            rows.device_counters.take(rows)
        evict, n_slots = rows.slot_table.evict, len(rows.slot_table.id_of)
        if evict is EvictionStrategy.LRU and rows.all_resident:
            evict = EvictionStrategy.DATASET  # nothing leaves
        rows.device_counters = DeviceCounters(n_slots, rows.device, evict)
    return rows.device_counters
