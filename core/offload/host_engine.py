"""Units decoded on the CPU, when they are acquired, into buffers that are reused."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine.transfer.timing import HostClock
from .plans import UnitPlan, storage_of
from .products import PackedProduct
from .store import PackedWeights


class HostDecodeBuffer:
    """A buffer that holds a unit's decoded tensors.

    Parameters
    ----------
    nbytes : int
        Its size.
    """

    def __init__(self, nbytes: int) -> None:
        self.data = torch.empty(nbytes, dtype=torch.uint8)
        self.unit: str | None = None
        self.users = 0
        self.views: dict[str, dict[str, torch.Tensor]] = {}


class HostEngine:
    """Decodes units on the CPU; see `WeightStream`.

    Parameters
    ----------
    weights : PackedWeights
        The packed weights.
    plans : sequence of UnitPlan
        The units.
    """

    #: Buffers that are allocated with the first unit.
    n_buffers = 1
    #: Nothing is decoded ahead: the CPU that would decode computes.
    depth = 0

    def __init__(self, weights: PackedWeights, plans: Sequence[UnitPlan]) -> None:
        self._weights = weights
        # Tensors that are kept raw are used in the image.
        self._buffer_nbytes = max((_packed_end(plan) for plan in plans), default=0)
        self._clocks = {plan.name: HostClock() for plan in plans}
        #: Of units that were used packed: raw tensors in the image.
        self._in_place: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def clocks(self) -> dict[str, HostClock]:
        """Times of the units."""
        return self._clocks

    def check(self) -> None:
        """Refuse nothing: on the CPU units can always be acquired."""

    def new_buffer(self) -> HostDecodeBuffer:
        """Allocate a buffer that is large enough for each unit."""
        return HostDecodeBuffer(self._buffer_nbytes)

    def load(self, buffer: HostDecodeBuffer, plan: UnitPlan) -> None:
        """Decode a unit into a buffer."""
        clock = self._clocks[plan.name]
        clock.begin("decode", "stall")
        for planned in plan.tensors:
            packed = planned.record.packed(self._weights.unit(planned.stored_in).image.tensor())
            if not planned.record.raw and planned.record.decoded_nbytes:
                codec = planned.record.codec
                flat = buffer.data[
                    planned.decoded_offset : planned.decoded_offset + planned.record.decoded_nbytes
                ]
                out = flat.view(codec.dtype).view(planned.record.n_rows, *codec.row_shape)
                codec.decode(packed, out=out)
        clock.end("decode", "stall")

    def ready(self, plan: UnitPlan) -> bool:
        """Return True: no unit waits for a disk."""
        return True

    def stage(self, plan: UnitPlan, window: Sequence[str]) -> None:
        """Do nothing: there is no link to cross."""

    def enter(
        self, buffer: HostDecodeBuffer, plan: UnitPlan, loaded: bool
    ) -> dict[str, torch.Tensor]:
        """Return the decoded tensors in a buffer."""
        clock = self._clocks[plan.name]
        if not loaded:
            clock.clear("decode", "stall")
        views = buffer.views.get(plan.name)
        if views is None:
            views = buffer.views[plan.name] = self._views(buffer, plan)
        clock.begin("compute")
        return views

    def leave(self, buffer: HostDecodeBuffer, plan: UnitPlan) -> None:
        """End the time that a unit's module computes."""
        self._clocks[plan.name].end("compute")

    def products(self, plan: UnitPlan) -> dict[str, PackedProduct] | None:
        """Return products with all packed tensors of a unit; None where one is decoded first."""
        products = {}
        for planned in plan.tensors:
            if planned.record.raw:
                continue
            image = self._weights.unit(planned.stored_in).image
            if image.tier != "host":  # a file may be cut while it is read
                return None
            kernels = planned.record.codec.kernels(torch.device("cpu"))
            storage = storage_of(planned, image.tensor(), 0)
            product = PackedProduct.of(planned.record, storage, kernels)
            if product is None:
                return None
            products[planned.name] = product
        return products

    def enter_packed(self, plan: UnitPlan) -> dict[str, torch.Tensor]:
        """Return the tensors of a unit that its image holds raw; the others are left packed."""
        clock = self._clocks[plan.name]
        clock.clear("decode", "stall")
        views = self._in_place.get(plan.name)
        if views is None:
            views = self._in_place[plan.name] = plan.raw_views(self._weights)
        clock.begin("compute")
        return views

    def leave_packed(self, plan: UnitPlan) -> None:
        """End the time that a unit's module computes."""
        self._clocks[plan.name].end("compute")

    def whole(self, name: str) -> torch.Tensor:
        """Decode one tensor to new memory."""
        return self._weights.read(name)

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Decode rows of a tensor."""
        return self._weights.rows(name, ids.cpu())

    def close(self) -> None:
        """Release the clocks."""
        self._clocks.clear()
        self._in_place.clear()

    def _views(self, buffer: HostDecodeBuffer, plan: UnitPlan) -> dict[str, torch.Tensor]:
        """View a unit's tensors: decoded ones in the buffer, raw ones in the image."""
        views = plan.raw_views(self._weights)
        for planned in plan.tensors:
            record = planned.record
            if not record.raw:
                begin = planned.decoded_offset
                flat = buffer.data[begin : begin + record.decoded_nbytes]
                views[planned.name] = record.restored(flat)
        return views


def _packed_end(plan: UnitPlan) -> int:
    """Bytes of a buffer up to the last tensor that is not raw."""
    ends = [p.decoded_offset + p.record.decoded_nbytes for p in plan.tensors if not p.record.raw]
    return max(ends, default=0)
