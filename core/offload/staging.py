"""A ring of staging buffers on the GPU, filled with packed units by the copy engine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..engine.kernels.cuda.stream import on_stream
from ..engine.memory.host import HostBuffer
from ..engine.transfer.timing import DeviceClock
from .images import FileImage, HostImage
from .plans import UnitPlan
from .store import PackedWeights

THREAD_NAME = "bitslab-weights"


def new_event() -> torch.cuda.Event:
    """Return an event that records no time."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class Stage:
    """A staging buffer on the GPU.

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
        self.copied: torch.cuda.Event | None = None
        self.consumed = new_event()
        self.turn = 0  # number of the transfer that filled it last


class FileReader:
    """Reads units from a file to page-locked memory, one after the other, in a thread.

    Parameters
    ----------
    weights : PackedWeights
        Weights in a file.
    nbytes : int
        Bytes of the largest unit.
    count : int
        Units that are read ahead.
    """

    def __init__(self, weights: PackedWeights, nbytes: int, count: int) -> None:
        self._weights = weights
        self._buffers = [HostBuffer.allocate(nbytes) for _ in range(count)]
        self._crossed = [new_event() for _ in range(count)]
        self._reads: dict[str, tuple[int, Future[None]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME)

    def start(self, plan: UnitPlan, window: Sequence[str]) -> None:
        """Read a unit ahead, where a buffer is free."""
        if plan.name in self._reads:
            return
        for unit in [unit for unit in self._reads if unit not in window]:
            _, reading = self._reads[unit]
            if reading.done():
                del self._reads[unit]  # was expected but not used
        taken = {index for index, _ in self._reads.values()}
        free = [index for index in range(len(self._buffers)) if index not in taken]
        if free:
            reading = self._thread.submit(self._read, free[0], plan)
            self._reads[plan.name] = free[0], reading

    def ready(self, plan: UnitPlan) -> bool:
        """Return whether a unit has been read without an error."""
        found = self._reads.get(plan.name)
        return found is not None and found[1].done() and found[1].exception() is None

    def take(self, plan: UnitPlan) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Return a unit's bytes, waiting for them, and the event to record when they crossed.

        Raises
        ------
        BitslabError
            When the file was removed or cannot be read.
        """
        if plan.name not in self._reads:
            self.start(plan, ())
        if plan.name not in self._reads:  # all buffers are read into for others: drop the oldest
            _, reading = self._reads.pop(next(iter(self._reads)))
            reading.exception()
            self.start(plan, ())
        index, reading = self._reads.pop(plan.name)
        reading.result()
        return self._buffers[index].tensor, self._crossed[index]

    def _read(self, index: int, plan: UnitPlan) -> None:
        # This thread waits here, so that the forward pass does not.
        self._crossed[index].synchronize()
        for piece in plan.pieces:
            image = self._weights.unit(piece.stored_in).image
            target = self._buffers[index].tensor[piece.staged :][: piece.end - piece.begin]
            if isinstance(image, FileImage):
                image.file.read(image.offset + piece.begin, target)
            else:
                target.copy_(image.tensor()[piece.begin : piece.end])

    def close(self) -> None:
        """End the thread and release the buffers."""
        self._thread.shutdown(wait=True)
        for buffer in self._buffers:
            buffer.close()


class StagingRing:
    """Copies packed units to the GPU ahead of their use.

    Parameters
    ----------
    weights : PackedWeights
        The weights.
    plans : sequence of UnitPlan
        The units that may be staged.
    device : torch.device
        The GPU.
    depth : int
        Number of buffers.
    clocks : mapping of str to DeviceClock
        Where the times of transfers are kept.
    """

    def __init__(
        self,
        weights: PackedWeights,
        plans: Sequence[UnitPlan],
        device: torch.device,
        depth: int,
        clocks: dict[str, DeviceClock],
    ) -> None:
        self._weights = weights
        self._clocks = clocks
        self.stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        nbytes = max((plan.staged_nbytes for plan in plans), default=0)
        # Two at least: one fills while the other is decoded.
        count = min(len(plans), max(2, depth) if depth else 1)
        self._stages = [Stage(nbytes, device) for _ in range(count)]
        self._turn = 0
        self.stream.wait_stream(torch.cuda.current_stream(device))
        on_disk = [plan for plan in plans if not self._is_pinned(plan)]
        self._disk = {plan.name for plan in on_disk}
        self._reader: FileReader | None = None
        if on_disk:
            most = max(plan.staged_nbytes for plan in on_disk)
            self._reader = FileReader(weights, most, max(1, depth) + 1)

    def _is_pinned(self, plan: UnitPlan) -> bool:
        images = [self._weights.unit(piece.stored_in).image for piece in plan.pieces]
        return all(image.tier == "device" or _pinned(image) for image in images)

    def ready(self, plan: UnitPlan) -> bool:
        """Return whether a unit can be copied without waiting for a disk."""
        if self.find(plan) is not None or plan.name not in self._disk:
            return True
        return self._reader is not None and self._reader.ready(plan)

    def find(self, plan: UnitPlan) -> Stage | None:
        """Return the buffer that holds a unit, or is being filled with it."""
        return next((stage for stage in self._stages if stage.unit == plan.name), None)

    def fetch(self, plan: UnitPlan, window: Sequence[str], *, must: bool) -> Stage | None:
        """Start a unit's transfer, unless it was started already.

        Parameters
        ----------
        plan : UnitPlan
            The unit.
        window : sequence of str
            Units that are expected; their buffers are kept unless this one must come now.
        must : bool
            Wait for a disk, and take a buffer from an expected unit if need be.
        """
        stage = self.find(plan)
        if stage is not None:
            return stage
        if not must and plan.name in self._disk:
            assert self._reader is not None
            self._reader.start(plan, window)
            if not self._reader.ready(plan):
                return None
        free = [s for s in self._stages if s.unit is None or s.unit not in window]
        if not free and not must:
            return None
        # The one filled longest ago: the others' last units may still be in flight, and a copy
        # into their buffers would wait for these to be decoded.
        stage = min(free or self._stages, key=lambda s: (s.unit is not None, s.turn))
        stage.unit = None
        self._turn += 1
        stage.turn = self._turn
        self._copy(stage, plan)
        stage.unit = plan.name
        return stage

    def _copy(self, stage: Stage, plan: UnitPlan) -> None:
        """Copy a unit's bytes to a buffer, once its last content is decoded."""
        clock = self._clocks[plan.name]
        source, crossed = None, None
        if plan.name in self._disk:
            assert self._reader is not None
            source, crossed = self._reader.take(plan)
        with on_stream(self.stream):
            self.stream.wait_event(stage.consumed)
            clock.mark("transfer", False, self.stream)
            for piece in plan.pieces:
                target = stage.buffer[piece.staged :][: piece.end - piece.begin]
                if source is None:
                    image = self._weights.unit(piece.stored_in).image.tensor()
                    target.copy_(image[piece.begin : piece.end], non_blocking=True)
                else:
                    part = source[piece.staged :][: piece.end - piece.begin]
                    target.copy_(part, non_blocking=True)
            stage.copied = clock.mark("transfer", True, self.stream)
            if crossed is not None:
                crossed.record(self.stream)

    def close(self) -> None:
        """Release the buffers."""
        if self._reader is not None:
            self._reader.close()
        self._stages.clear()


def _pinned(image: object) -> bool:
    return isinstance(image, HostImage) and image.pinned
