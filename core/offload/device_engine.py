"""Units decoded on a GPU: transfers, decoding and use run on streams of their own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..engine.kernels.cuda import CudaKernels, kernels_on
from ..engine.kernels.cuda.stream import on_stream
from ..engine.kernels.format import RowLayout, RowStorage
from ..engine.transfer.timing import DeviceClock
from ..errors import BitslabError
from .device_rows import DeviceRows
from .plans import Place, UnitPlan
from .staging import Stage, StagingRing, new_event
from .store import PackedWeights


class DeviceSlot:
    """A buffer on the GPU that holds a unit's decoded tensors.

    Parameters
    ----------
    nbytes : int
        Its size.
    device : torch.device
        The GPU.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.unit: str | None = None
        self.users = 0
        self.ready: torch.cuda.Event | None = None
        #: For each stream that used the tensors, by its address: where it had finished with them.
        self.released: dict[int, torch.cuda.Event] = {}
        self.views: dict[str, dict[str, torch.Tensor]] = {}
        self.work: dict[tuple[str, int], DecodeWork] = {}


class DecodeWork:
    """The launches that decode a unit from one buffer to another, ready to be started.

    Parameters
    ----------
    plan : UnitPlan
        The unit.
    sources : mapping of str to (torch.Tensor, int)
        For each place: the bytes that hold it, and what to add to the record's offsets there.
    decoded : torch.Tensor
        Buffer of decoded tensors.
    layouts : mapping of str to RowLayout
        The codecs' tables on the GPU, by the tensor's name.
    kernels : CudaKernels
        Of the GPU.
    sm_budget : int or None
        Multiprocessors that decoding may take.
    """

    def __init__(
        self,
        plan: UnitPlan,
        sources: Mapping[str, tuple[torch.Tensor, int]],
        decoded: torch.Tensor,
        layouts: Mapping[str, RowLayout],
        kernels: CudaKernels,
        sm_budget: int | None,
    ) -> None:
        self._decodes: list[Callable[[], None]] = []
        copies: list[list[Any]] = []  # [source tensor, source offset, decoded offset, bytes]
        for place in plan.places:
            record, (data, shift) = place.record, sources[place.name]
            if not record.decoded_nbytes:
                continue
            if record.raw:
                begin = record.offset + shift
                last = copies[-1] if copies else None
                gap = None if last is None else begin - last[1]
                if last is not None and last[0] is data and place.decoded - last[2] == gap:
                    last[3] = gap + record.nbytes  # what lies between is copied too
                else:
                    copies.append([data, begin, place.decoded, record.nbytes])
                continue
            layout = layouts[place.name]
            out = decoded[place.decoded : place.decoded + record.decoded_nbytes]
            storage = storage_of(place, data, shift)
            rows = out.view(record.n_rows, layout.format.row_bytes)
            self._decodes.append(
                kernels.prepare_decode(storage, layout, rows, record.facts, sm_budget)
            )
        self._copies = [(decoded[to : to + n], data[at : at + n]) for data, at, to, n in copies]

    def start(self) -> None:
        """Start the launches on the current stream."""
        for decode in self._decodes:
            decode()
        for target, source in self._copies:
            target.copy_(source, non_blocking=True)


class DeviceEngine:
    """Brings units to a GPU; see `WeightStream`.

    Parameters
    ----------
    weights : PackedWeights
        Where they come from.
    plans : sequence of UnitPlan
        The units.
    device : torch.device
        The GPU, with its index.
    depth : int
        Units whose packed bytes are fetched ahead.
    sm_budget : int or None
        Multiprocessors that decoding may take.
    """

    def __init__(
        self,
        weights: PackedWeights,
        plans: Sequence[UnitPlan],
        device: torch.device,
        depth: int,
        sm_budget: int | None,
    ) -> None:
        self._weights = weights
        self._device = device
        self._sm_budget = sm_budget
        self.depth = depth
        #: One that is used and one that is decoded meanwhile.
        self.slots = 1 if depth == 0 else 2
        self._clocks = {plan.name: DeviceClock(device) for plan in plans}
        self._slot_nbytes = max((plan.decoded_nbytes for plan in plans), default=0)
        self._resident = {plan.name for plan in plans if self._on_device(plan)}
        self._layouts: dict[str, RowLayout] = {}
        self._decoding = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        crossing = [plan for plan in plans if plan.name not in self._resident]
        self._ring = StagingRing(weights, crossing, device, depth, self._clocks)
        self._row_reader = DeviceRows(weights, device)
        # A model that is dropped may have units under way: buffers are given up after them.
        finished = weakref.finalize(self, _wait_for, self._decoding, self._ring.stream)
        finished.atexit = False

    @property
    def clocks(self) -> dict[str, DeviceClock]:
        """Times of the units."""
        return self._clocks

    def check(self) -> None:
        """Refuse a pass that is captured: a graph has no part in what the other streams do."""
        if torch.cuda.is_current_stream_capturing():
            raise BitslabError(
                "weights that stream cannot be used while a CUDA graph is captured; keep the units "
                "of the graph on the device with keep="
            )

    def new_slot(self) -> DeviceSlot:
        """Make a slot for any unit."""
        slot = DeviceSlot(self._slot_nbytes, self._device)
        # Work queued on the memory before it was given up comes first.
        self._decoding.wait_stream(torch.cuda.current_stream(self._device.index))
        return slot

    def ready(self, plan: UnitPlan) -> bool:
        """Tell whether a unit can be loaded without waiting for a disk."""
        return plan.name in self._resident or self._ring.ready(plan)

    def stage(self, plan: UnitPlan, window: Sequence[str]) -> None:
        """Start a unit's transfer, if it must cross and a buffer is free."""
        if plan.name not in self._resident:
            self._ring.bring(plan, window, must=False)

    def load(self, slot: DeviceSlot, plan: UnitPlan) -> None:
        """Decode a unit into a slot, when its bytes are there and the slot's users are done."""
        stage = None
        if plan.name not in self._resident:
            stage = self._ring.bring(plan, (), must=True)
        # Also where a decode that was damaged is told of.
        kernels = kernels_on(self._device)
        work = self._work(slot, plan, stage, kernels)
        clock = self._clocks[plan.name]
        with on_stream(self._decoding):
            if stage is not None and stage.arrived is not None:
                self._decoding.wait_event(stage.arrived)
            for event in slot.released.values():
                self._decoding.wait_event(event)
            clock.mark("decode", False, self._decoding)
            work.start()
            slot.ready = clock.mark("decode", True, self._decoding)
            if stage is not None:
                stage.consumed.record(self._decoding)
                stage.unit = None
            else:
                clock.clear("transfer")

    def enter(self, slot: DeviceSlot, plan: UnitPlan, loaded: bool) -> dict[str, torch.Tensor]:
        """Make the current stream wait for a slot and return its tensors."""
        current = torch.cuda.current_stream(self._device.index)
        clock = self._clocks[plan.name]
        clock.mark("stall", False, current)
        if slot.ready is not None:
            current.wait_event(slot.ready)
        clock.mark("stall", True, current)
        clock.mark("compute", False, current)
        views = slot.views.get(plan.name)
        if views is None:
            views = slot.views[plan.name] = plan.views(slot.buffer)
        return views

    def leave(self, slot: DeviceSlot, plan: UnitPlan) -> None:
        """Let a slot be overwritten when the current stream has come to this point."""
        current = torch.cuda.current_stream(self._device.index)
        self._clocks[plan.name].mark("compute", True, current)
        event = slot.released.get(current.cuda_stream)
        if event is None:
            event = slot.released[current.cuda_stream] = new_event()
            slot.buffer.record_stream(current)  # it may be given up while this one still reads it
        event.record(current)

    def whole(self, name: str) -> torch.Tensor:
        """Decode one tensor to memory of its own."""
        return self._weights.read(name, self._device)

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Decode rows of a tensor on the current stream."""
        return self._row_reader.rows(name, ids, self._sm_budget)

    def close(self) -> None:
        """Give the buffers up, when the GPU has finished with them."""
        torch.cuda.synchronize(self._device)
        self._ring.close()
        self._row_reader.close()
        self._layouts.clear()

    def _on_device(self, plan: UnitPlan) -> bool:
        homes = {piece.home for piece in plan.pieces}
        return all(self._weights.unit(home).image.tier == "device" for home in homes)

    def _work(
        self, slot: DeviceSlot, plan: UnitPlan, stage: Stage | None, kernels: CudaKernels
    ) -> DecodeWork:
        """Return the launches from a staging buffer, or a resident image, to a slot."""
        key = (plan.name, 0 if stage is None else id(stage))
        work = slot.work.get(key)
        if work is None:
            sources = {}
            for place in plan.places:
                if stage is None:
                    sources[place.name] = self._weights.unit(place.home).image.tensor(), 0
                else:
                    sources[place.name] = stage.buffer, place.shift
                if not place.record.raw and place.name not in self._layouts:
                    layout = place.record.codec.row_layout()  # type: ignore[attr-defined]
                    self._layouts[place.name] = layout.to(self._device)
                    self._decoding.wait_stream(torch.cuda.current_stream(self._device.index))
            work = DecodeWork(plan, sources, slot.buffer, self._layouts, kernels, self._sm_budget)
            slot.work[key] = work
        return work


def _wait_for(*streams: torch.cuda.Stream) -> None:
    for stream in streams:
        stream.synchronize()


def storage_of(place: Place, data: torch.Tensor, shift: int) -> RowStorage:
    """View the parts of packed rows in a buffer on the GPU."""
    parts = {
        name: data[part.offset + shift :][: part.nbytes].view(part.dtype).view(part.shape)
        for name, part in place.record.parts.items()
    }
    empty = torch.empty(0, dtype=torch.uint8, device=data.device)
    return RowStorage(
        parts["words"], parts["bases"], parts["lengths"], parts.get("row_clusters", empty)
    )
