"""Units on their way to a GPU: from a file to page-locked memory, and from there to staging."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine.memory.host import HostBuffer
from ..engine.tasks import ThreadTask
from ..engine.transfer.lanes import StreamLane, ThreadLane
from ..engine.transfer.staging import StagingBuffer, StagingRing
from ..engine.transfer.timing import DeviceClock
from .images import FileImage, HostImage
from .plans import UnitPlan
from .store import PackedWeights

THREAD_NAME = "bitslab-weights"


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
        self._memory = [HostBuffer.allocate(nbytes) for _ in range(count)]
        self._ring: StagingRing[str] = StagingRing(
            [StagingBuffer(memory.tensor) for memory in self._memory]
        )
        self._lane = ThreadLane(THREAD_NAME)

    def start(self, plan: UnitPlan, window: Sequence[str]) -> None:
        """Read a unit ahead, where a buffer is free."""
        if self._ring.find(plan.name) is None:
            buffer = self._ring.take(window, must=False)
            if buffer is not None:
                self._fill(buffer, plan)

    def ready(self, plan: UnitPlan) -> bool:
        """Return whether a unit has been read without an error."""
        buffer = self._ring.find(plan.name)
        if buffer is None or buffer.in_thread:
            return False
        return _reading(buffer).exception() is None

    def take(self, plan: UnitPlan) -> StagingBuffer[str]:
        """Return the buffer with a unit's bytes, waiting for them; to be released when they cross.

        Raises
        ------
        BitslabError
            When the file was removed or cannot be read.
        """
        buffer = self._ring.find(plan.name)
        if buffer is None:
            buffer = self._ring.take((), must=True)
            self._fill(buffer, plan)
        buffer.key = None
        _reading(buffer).result()
        return buffer

    def _fill(self, buffer: StagingBuffer[str], plan: UnitPlan) -> None:
        # The thread waits for what crosses from the buffer, so that the forward pass does not.
        buffer.fill(self._lane, self._read, buffer.data, plan)
        buffer.key = plan.name

    def _read(self, out: torch.Tensor, plan: UnitPlan) -> None:
        for piece in plan.pieces:
            image = self._weights.unit(piece.stored_in).image
            target = out[piece.staged :][: piece.end - piece.begin]
            if isinstance(image, FileImage):
                image.file.read(image.offset + piece.begin, target)
            else:
                target.copy_(image.tensor()[piece.begin : piece.end])

    def close(self) -> None:
        """End the thread and release the buffers."""
        self._lane.close(None)
        for memory in self._memory:
            memory.close()


def _reading(buffer: StagingBuffer[str]) -> ThreadTask[None]:
    assert isinstance(buffer.ready, ThreadTask)
    return buffer.ready


class StagedUnits:
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
        Units that are copied ahead.
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
        self.lane = StreamLane(device)
        nbytes = max((plan.staged_nbytes for plan in plans), default=0)
        # Two at least: one fills while the other is decoded.
        count = min(len(plans), max(2, depth) if depth else 1)
        self.ring: StagingRing[str] = StagingRing(
            [
                StagingBuffer(torch.empty(nbytes, dtype=torch.uint8, device=device))
                for _ in range(count)
            ]
        )
        self.lane.follow(torch.cuda.current_stream(device))
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
        if plan.name not in self._disk or self.ring.find(plan.name) is not None:
            return True
        return self._reader is not None and self._reader.ready(plan)

    def fetch(
        self, plan: UnitPlan, window: Sequence[str], *, must: bool
    ) -> StagingBuffer[str] | None:
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
        buffer = self.ring.find(plan.name)
        if buffer is not None:
            return buffer
        if not must and plan.name in self._disk:
            assert self._reader is not None
            self._reader.start(plan, window)
            if not self._reader.ready(plan):
                return None
        buffer = self.ring.take(window, must=must)
        if buffer is None:
            return None
        read = None
        if plan.name in self._disk:
            assert self._reader is not None
            read = self._reader.take(plan)
        buffer.fill(self.lane, self._copy, buffer.data, plan, read)
        if read is not None:
            read.release(self.lane.stream)
        buffer.key = plan.name
        return buffer

    def _copy(
        self, out: torch.Tensor, plan: UnitPlan, read: StagingBuffer[str] | None
    ) -> torch.cuda.Event:
        """Copy a unit's bytes, from where they were read or from its images, on the lane."""
        clock = self._clocks[plan.name]
        clock.mark("transfer", False, self.lane.stream)
        for piece in plan.pieces:
            target = out[piece.staged :][: piece.end - piece.begin]
            if read is None:
                image = self._weights.unit(piece.stored_in).image.tensor()
                target.copy_(image[piece.begin : piece.end], non_blocking=True)
            else:
                part = read.data[piece.staged :][: piece.end - piece.begin]
                target.copy_(part, non_blocking=True)
        return clock.mark("transfer", True, self.lane.stream)

    def close(self) -> None:
        """Release the buffers."""
        if self._reader is not None:
            self._reader.close()
        self.ring.clear()


def _pinned(image: object) -> bool:
    return isinstance(image, HostImage) and image.pinned
