"""Codecs that learn from tensors of a GPU, without waiting for it."""

from __future__ import annotations

import threading
from collections.abc import Hashable

import torch

from ..engine.codecs.blob import BlobCodec
from ..engine.kernels.cuda.stream import current_stream
from ..engine.kernels.uploads import in_stream_order
from ..engine.tasks import ThreadTask
from ..engine.transfer import StreamLane, ThreadLane, wait_on_host
from .samples import sample_of

#: Samples that are under way, which take page-locked memory; others wait for a later tensor.
MOST_BYTES = 64 << 20


class SampleFits:
    """Fits codecs in a thread, to samples that GPUs send to the host when they get there.

    Threads may share it. Its own thread lives while a fit is under way.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[Hashable, tuple[ThreadTask[BlobCodec], int]] = {}
        self._bytes = 0
        self._lane: ThreadLane | None = None

    @property
    def under_way(self) -> int:
        """Number of fits that were begun and not asked for since they were done."""
        return len(self._begun)

    def knows(self, key: Hashable) -> bool:
        """Return whether a fit is under way, or begins with a later tensor."""
        return key in self._begun or self._bytes >= MOST_BYTES

    def fit(self, key: Hashable, codec: type[BlobCodec], flat: torch.Tensor) -> BlobCodec | None:
        """Return a codec that was fitted; None while that is under way, or nothing more may be.

        Parameters
        ----------
        key : hashable
            What it is fitted for.
        codec : type of BlobCodec
            Its class.
        flat : torch.Tensor
            ``[n]`` on a GPU, of which a sample is taken where none was.

        Raises
        ------
        Exception
            That of ``codec.fit``, once.
        """
        with self._lock:
            found = self._begun.get(key)
            if found is None:
                if self._bytes < MOST_BYTES:
                    if self._lane is None:
                        self._lane = ThreadLane("bitslab-fit")
                    self._begun[key] = begun = self._begin(self._lane, codec, flat)
                    self._bytes += begun[1]
                return None
            task, nbytes = found
            if not task.done():
                return None
            del self._begun[key]
            self._bytes -= nbytes
            if not self._begun:
                self._end()
        return task.result()

    @staticmethod
    def _begin(
        lane: ThreadLane, codec: type[BlobCodec], flat: torch.Tensor
    ) -> tuple[ThreadTask[BlobCodec], int]:
        with torch.no_grad():
            sample = sample_of(flat)
            there = torch.empty(sample.shape, dtype=sample.dtype, pin_memory=True)
            there.copy_(sample, non_blocking=True)
        # The thread sleeps until it is there, instead of asking again and again.
        copied: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(current_stream(flat.device))
        return lane.run(_fitted, codec, there, flat.device, after=copied), there.nbytes

    def close(self) -> None:
        """Forget what is under way, and end the thread."""
        with self._lock:
            self._begun.clear()
            self._bytes = 0
            self._end()

    def _end(self) -> None:
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.close()


def _fitted(codec: type[BlobCodec], sample: torch.Tensor, device: torch.device) -> BlobCodec:
    """Return a codec with all that it needs on a device; only this thread waits for that."""
    fitted = codec.fit(sample)
    lane = StreamLane(device)
    with lane.on(), in_stream_order():
        fitted.prepare(device)
    wait_on_host(lane.record())
    return fitted
