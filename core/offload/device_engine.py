"""Units decoded on a GPU: transfers, decoding and use run on streams of their own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..engine.codecs import RowKernels
from ..engine.kernels.cuda import kernels_on
from ..engine.transfer.lanes import StreamLane, new_event
from ..engine.transfer.staging import StagingBuffer
from ..engine.transfer.timing import DeviceClock
from ..errors import BitslabError
from .device_rows import DeviceRows
from .plans import UnitPlan, storage_of
from .products import PackedProduct
from .staging import StagedUnits
from .store import PackedWeights


class DeviceDecodeBuffer:
    """A buffer on the GPU that holds a unit's decoded tensors.

    Parameters
    ----------
    nbytes : int
        Its size.
    device : torch.device
        The GPU.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)
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
        For each tensor: the bytes that hold it, and what to add to the record's offsets there.
    decoded : torch.Tensor
        Buffer of decoded tensors.
    kernels : mapping of str to RowKernels
        The codecs' on the GPU, by the tensor's name.
    sm_budget : int or None
        Multiprocessors that decoding may take.
    """

    def __init__(
        self,
        plan: UnitPlan,
        sources: Mapping[str, tuple[torch.Tensor, int]],
        decoded: torch.Tensor,
        kernels: Mapping[str, RowKernels],
        sm_budget: int | None,
    ) -> None:
        self._decodes: list[Callable[[], None]] = []
        copies: list[list[Any]] = []  # [source tensor, source offset, decoded offset, bytes]
        for planned in plan.tensors:
            record, (data, shift) = planned.record, sources[planned.name]
            if not record.decoded_nbytes:
                continue
            if record.raw:
                begin = record.offset + shift
                last = copies[-1] if copies else None
                gap = None if last is None else begin - last[1]
                if last is not None and last[0] is data and planned.decoded_offset - last[2] == gap:
                    last[3] = gap + record.nbytes  # what lies between is copied too
                else:
                    copies.append([data, begin, planned.decoded_offset, record.nbytes])
                continue
            packed = kernels[planned.name]
            out = decoded[planned.decoded_offset : planned.decoded_offset + record.decoded_nbytes]
            storage = storage_of(planned, data, shift)
            rows = out.view(record.n_rows, packed.row_bytes)
            self._decodes.append(packed.prepare_decode(storage, rows, record.facts, sm_budget))
        self._copies = [(decoded[to : to + n], data[at : at + n]) for data, at, to, n in copies]

    def start(self) -> None:
        """Start the launches on the current stream."""
        for decode in self._decodes:
            decode()
        for target, source in self._copies:
            target.copy_(source, non_blocking=True)


class DeviceEngine:
    """Transfers units to a GPU and decodes them there; see `WeightStream`.

    Parameters
    ----------
    weights : PackedWeights
        The packed weights.
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
        #: Buffers of decoded tensors: one in use, one that is decoded into meanwhile.
        self.n_buffers = 1 if depth == 0 else 2
        self._clocks = {plan.name: DeviceClock(device) for plan in plans}
        self._buffer_nbytes = max((plan.decoded_nbytes for plan in plans), default=0)
        self._in_device_memory = {plan.name for plan in plans if self._on_device(plan)}
        self._kernels: dict[str, RowKernels] = {}
        #: Of units that were used packed: raw tensors in the image, and the streams that used it.
        self._in_place: dict[str, tuple[dict[str, torch.Tensor], set[int]]] = {}
        self._decoding = StreamLane(device)
        crossing = [plan for plan in plans if plan.name not in self._in_device_memory]
        self._staged = StagedUnits(weights, crossing, device, depth, self._clocks)
        self._row_reader = DeviceRows(weights, device)
        # A model that is dropped may have units in flight: buffers are released after them.
        finished = weakref.finalize(self, _wait_for, self._decoding, self._staged.lane)
        finished.atexit = False

    @property
    def clocks(self) -> dict[str, DeviceClock]:
        """Times of the units."""
        return self._clocks

    def check(self) -> None:
        """Refuse a pass under CUDA-graph capture: a graph holds no work of the other streams."""
        if torch.cuda.is_current_stream_capturing():
            raise BitslabError(
                "weights that stream cannot be used while a CUDA graph is captured; keep the units "
                "of the graph on the device with keep="
            )

    def new_buffer(self) -> DeviceDecodeBuffer:
        """Allocate a buffer that is large enough for each unit."""
        buffer = DeviceDecodeBuffer(self._buffer_nbytes, self._device)
        # Work that was queued on the memory before it was released comes first.
        self._decoding.follow(torch.cuda.current_stream(self._device.index))
        return buffer

    def ready(self, plan: UnitPlan) -> bool:
        """Return whether a unit can be loaded without waiting for a disk."""
        return plan.name in self._in_device_memory or self._staged.ready(plan)

    def stage(self, plan: UnitPlan, window: Sequence[str]) -> None:
        """Start a unit's transfer, if it crosses the link and a buffer is free."""
        if plan.name not in self._in_device_memory:
            self._staged.fetch(plan, window, must=False)

    def load(self, buffer: DeviceDecodeBuffer, plan: UnitPlan) -> None:
        """Decode a unit into a buffer, after its transfer and after the buffer's last use."""
        stage = None
        if plan.name not in self._in_device_memory:
            stage = self._staged.fetch(plan, (), must=True)
        # Raises the error of an earlier decode that met damaged rows.
        kernels_on(self._device)
        work = self._work(buffer, plan, stage)
        clock = self._clocks[plan.name]
        stream = self._decoding.stream
        with self._decoding.on():
            if stage is not None:
                self._decoding.wait(stage.ready)
            for event in buffer.released.values():
                stream.wait_event(event)
            clock.mark("decode", False, stream)
            work.start()
            buffer.ready = clock.mark("decode", True, stream)
            if stage is not None:
                stage.release(stream)
                stage.key = None
            else:
                clock.clear("transfer")

    def enter(
        self, buffer: DeviceDecodeBuffer, plan: UnitPlan, loaded: bool
    ) -> dict[str, torch.Tensor]:
        """Make the current stream wait for a buffer and return its tensors."""
        current = torch.cuda.current_stream(self._device.index)
        clock = self._clocks[plan.name]
        clock.mark("stall", False, current)
        if buffer.ready is not None:
            current.wait_event(buffer.ready)
        clock.mark("stall", True, current)
        clock.mark("compute", False, current)
        views = buffer.views.get(plan.name)
        if views is None:
            views = buffer.views[plan.name] = plan.views(buffer.data)
        return views

    def leave(self, buffer: DeviceDecodeBuffer, plan: UnitPlan) -> None:
        """Allow a buffer to be overwritten once the current stream has reached this point."""
        current = torch.cuda.current_stream(self._device.index)
        self._clocks[plan.name].mark("compute", True, current)
        event = buffer.released.get(current.cuda_stream)
        if event is None:
            event = buffer.released[current.cuda_stream] = new_event()
            buffer.data.record_stream(current)  # it may be freed while this stream still reads it
        event.record(current)

    def products(self, plan: UnitPlan) -> dict[str, PackedProduct] | None:
        """Return products with all packed tensors of a unit; None where one is decoded first."""
        if plan.name not in self._in_device_memory:
            return None
        products = {}
        for planned in plan.tensors:
            if planned.record.raw:
                continue
            image = self._weights.unit(planned.stored_in).image.tensor()
            kernels = planned.record.codec.kernels(self._device)
            storage = storage_of(planned, image, 0)
            product = PackedProduct.of(planned.record, storage, kernels, self._sm_budget)
            if product is None:
                return None
            products[planned.name] = product
        # What the codecs have uploaded is there for all streams from here on.
        torch.cuda.current_stream(self._device.index).synchronize()
        return products

    def enter_packed(self, plan: UnitPlan) -> dict[str, torch.Tensor]:
        """Return the tensors of a unit that its image holds raw; the others are left packed."""
        # Raises the error of an earlier product that met damaged rows.
        kernels_on(self._device)
        current = torch.cuda.current_stream(self._device.index)
        held = self._in_place.get(plan.name)
        if held is None:
            held = self._in_place[plan.name] = plan.raw_views(self._weights), set()
        views, streams = held
        if current.cuda_stream not in streams:
            streams.add(current.cuda_stream)
            for stored_in in {planned.stored_in for planned in plan.tensors}:
                self._weights.unit(stored_in).image.tensor().record_stream(current)
        clock = self._clocks[plan.name]
        clock.clear("transfer", "decode", "stall")
        clock.mark("compute", False, current)
        return views

    def leave_packed(self, plan: UnitPlan) -> None:
        """End the time that a unit's module computes."""
        current = torch.cuda.current_stream(self._device.index)
        self._clocks[plan.name].mark("compute", True, current)

    def whole(self, name: str) -> torch.Tensor:
        """Decode one tensor to new memory."""
        return self._weights.read(name, self._device)

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Decode rows of a tensor on the current stream."""
        return self._row_reader.rows(name, ids, self._sm_budget)

    def close(self) -> None:
        """Release the buffers, after the GPU has finished with them."""
        torch.cuda.synchronize(self._device)
        self._staged.close()
        self._row_reader.close()
        self._kernels.clear()
        self._in_place.clear()

    def _on_device(self, plan: UnitPlan) -> bool:
        by_unit = {piece.stored_in for piece in plan.pieces}
        return all(self._weights.unit(stored_in).image.tier == "device" for stored_in in by_unit)

    def _work(
        self, buffer: DeviceDecodeBuffer, plan: UnitPlan, stage: StagingBuffer[str] | None
    ) -> DecodeWork:
        """Return the launches from a staging buffer, or an image in device memory, to a buffer."""
        key = (plan.name, 0 if stage is None else id(stage))
        work = buffer.work.get(key)
        if work is None:
            sources = {}
            for planned in plan.tensors:
                if stage is None:
                    sources[planned.name] = self._weights.unit(planned.stored_in).image.tensor(), 0
                else:
                    sources[planned.name] = stage.data, planned.shift
                if not planned.record.raw and planned.name not in self._kernels:
                    self._kernels[planned.name] = planned.record.codec.kernels(self._device)
                    self._decoding.follow(torch.cuda.current_stream(self._device.index))
            work = DecodeWork(plan, sources, buffer.data, self._kernels, self._sm_budget)
            buffer.work[key] = work
        return work


def _wait_for(*lanes: StreamLane) -> None:
    for lane in lanes:
        lane.close()
