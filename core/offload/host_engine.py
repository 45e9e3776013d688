"""Units decoded on the CPU, when they are asked for, into memory that is used again and again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine.transfer.timing import HostClock
from .plans import UnitPlan
from .store import PackedWeights


class HostSlot:
    """A buffer that holds a unit's decoded tensors.

    Parameters
    ----------
    nbytes : int
        Its size.
    """

    def __init__(self, nbytes: int) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.unit: str | None = None
        self.users = 0
        self.views: dict[str, dict[str, torch.Tensor]] = {}


class HostEngine:
    """Brings units on the CPU; see `WeightStream`.

    Parameters
    ----------
    weights : PackedWeights
        Where they come from.
    plans : sequence of UnitPlan
        The units.
    """

    #: Slots that are there from the first unit on.
    slots = 1
    #: Nothing can be done meanwhile: the CPU that would decode computes.
    depth = 0

    def __init__(self, weights: PackedWeights, plans: Sequence[UnitPlan]) -> None:
        self._weights = weights
        # What is kept raw is used where it lies.
        self._slot_nbytes = max((_packed_end(plan) for plan in plans), default=0)
        self._clocks = {plan.name: HostClock() for plan in plans}

    @property
    def clocks(self) -> dict[str, HostClock]:
        """Times of the units."""
        return self._clocks

    def check(self) -> None:
        """Refuse what cannot be done now; a CPU can always."""

    def new_slot(self) -> HostSlot:
        """Make a slot for any unit."""
        return HostSlot(self._slot_nbytes)

    def load(self, slot: HostSlot, plan: UnitPlan) -> None:
        """Decode a unit into a slot."""
        clock = self._clocks[plan.name]
        clock.begin("decode")
        clock.begin("stall")
        for place in plan.places:
            packed = place.record.packed(self._weights.unit(place.home).image.tensor())
            if not place.record.raw and place.record.decoded_nbytes:
                codec = place.record.codec
                flat = slot.buffer[place.decoded : place.decoded + place.record.decoded_nbytes]
                out = flat.view(codec.dtype).view(place.record.n_rows, *codec.row_shape)
                codec.decode(packed, out=out)
        clock.end("decode")
        clock.end("stall")

    def ready(self, plan: UnitPlan) -> bool:
        """Tell whether a unit can be loaded without waiting."""
        return True

    def stage(self, plan: UnitPlan, window: Sequence[str]) -> None:
        """Bring a unit's bytes nearer; nothing is nearer than here."""

    def enter(self, slot: HostSlot, plan: UnitPlan, loaded: bool) -> dict[str, torch.Tensor]:
        """Return the decoded tensors in a slot."""
        clock = self._clocks[plan.name]
        if not loaded:
            clock.clear("decode", "stall")
        views = slot.views.get(plan.name)
        if views is None:
            views = slot.views[plan.name] = self._views(slot, plan)
        clock.begin("compute")
        return views

    def leave(self, slot: HostSlot, plan: UnitPlan) -> None:
        """Take note that a unit's tensors are not used any more."""
        self._clocks[plan.name].end("compute")

    def whole(self, name: str) -> torch.Tensor:
        """Decode one tensor to memory of its own."""
        return self._weights.read(name)

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Decode rows of a tensor."""
        return self._weights.rows(name, ids.cpu())

    def close(self) -> None:
        """Give the buffers up."""
        self._clocks.clear()

    def _views(self, slot: HostSlot, plan: UnitPlan) -> dict[str, torch.Tensor]:
        """View a unit's tensors: decoded ones in the slot, raw ones in the image."""
        views = {}
        for place in plan.places:
            record = place.record
            if record.raw:
                image = self._weights.unit(place.home).image.tensor()
                flat = image[record.offset : record.offset + record.nbytes]
            else:
                flat = slot.buffer[place.decoded : place.decoded + record.decoded_nbytes]
            views[place.name] = record.restored(flat)
        return views


def _packed_end(plan: UnitPlan) -> int:
    """Bytes of a slot up to the last tensor that is not raw."""
    ends = [p.decoded + p.record.decoded_nbytes for p in plan.places if not p.record.raw]
    return max(ends, default=0)
