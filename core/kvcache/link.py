"""The link between host memory and a device: its streams, their order, and bytes fetched."""

from __future__ import annotations

from typing import Any

import torch

from ..engine.kernels.cuda.stream import current_stream, stream_pointer
from ..engine.transfer.lanes import StreamLane, pooled_lane
from ..errors import BitslabError
from .learning import LearningQueue
from .packing_queue import PackingQueue

#: Where there is no stream; torch's default one is 0.
NO_STREAM = -1


class Streams:
    """Streams of a GPU for copies and decodes: those of a link before that is gone, if any.

    Parameters
    ----------
    device : torch.device
        The GPU.
    owner : object
        What uses them; with it they go back.

    Attributes
    ----------
    copies : StreamLane
        Words cross on it, to the host and back.
    decodes : StreamLane
        Words are decoded on it.
    """

    def __init__(self, device: torch.device, owner: object) -> None:
        if not torch.cuda.is_available():
            raise BitslabError(f"device: {device}, but torch sees no CUDA GPU")
        self.copies: StreamLane = pooled_lane(owner, device, "K/V copies")
        self.decodes: StreamLane = pooled_lane(owner, device, "K/V decodes")

    def pending(self) -> list[torch.cuda.Event]:
        """Return events behind all work of the streams; none where they are idle."""
        return [lane.record() for lane in (self.copies, self.decodes) if not lane.idle()]


class Link:
    """Streams and counters that the word stores and readers of one device share.

    Parameters
    ----------
    device : torch.device
        Where K and V are used.
    sm_budget : int or None
        Multiprocessors that decoding may use; all when None.

    Attributes
    ----------
    streams : Streams or None
        None on the CPU, where everything is synchronous.
    packing : PackingQueue
        The histories whose prompts are being packed.
    learning : LearningQueue
        The layers whose codecs are to be learnt from a prompt.
    fetched_bytes : int
        Bytes of words fetched as a whole; on the CPU, those that a GPU would have fetched.
    several_streams : bool
        Whether `take_turn` has found another current stream than before, ever.

    Notes
    -----
    Copies and pickles have other streams. A stream of the caller's on which histories were
    used must live until they are used on another, or are gone; all that torch makes do.
    """

    def __init__(self, device: torch.device, sm_budget: int | None = None) -> None:
        self.device = device
        self.sm_budget = sm_budget
        self.streams = Streams(device, self) if device.type == "cuda" else None
        self.packing = PackingQueue()
        self.learning = LearningQueue(device)
        self.fetched_bytes = 0
        self.several_streams = False
        self._last: torch.cuda.Stream | None = None  # torch's current stream at the last turn
        self._turn = NO_STREAM

    def take_turn(self) -> int:
        """Order what comes next on torch's current stream behind what histories did on another.

        They read and write the same memory on whatever stream is current. Where it is another one
        than at the last turn, it waits for all that is queued on that one now; nothing else does.

        Returns
        -------
        int
            Which stream it is, as `stream_pointer` says; NO_STREAM on the CPU.
        """
        if self.streams is None:
            return NO_STREAM
        stream = stream_pointer(self.device)
        if stream != self._turn:
            current = current_stream(self.device)
            if self._last is not None:
                self.several_streams = True
                current.wait_stream(self._last)
            self._last, self._turn = current, stream
        return stream

    def keep(self, *tensors: torch.Tensor) -> None:
        """Keep the memory of tensors from reuse until the streams have read it."""
        if self.streams is not None:
            self.streams.copies.keep(*tensors)
            self.streams.decodes.keep(*tensors)

    def keep_for_turn(self, *tensors: torch.Tensor) -> None:
        """Keep the memory of tensors from reuse until torch's current stream has read it."""
        if self.streams is None:
            return
        current = current_stream(self.device)
        for t in tensors:
            t.record_stream(current)

    def quiesce(self) -> None:
        """Make the current stream wait for all fetches, so that it may write to what they read."""
        if self.streams is not None:
            current = torch.cuda.current_stream(self.device)
            self.streams.copies.precede(current)
            self.streams.decodes.precede(current)

    def wait_for_copies(self) -> None:
        """Wait until all words have crossed."""
        if self.streams is not None:
            self.streams.copies.synchronize()

    def wait(self) -> None:
        """Wait until all words have crossed and are decoded."""
        if self.streams is not None:
            self.streams.copies.synchronize()
            self.streams.decodes.synchronize()

    def __getstate__(self) -> dict[str, Any]:
        return {"device": self.device, "sm_budget": self.sm_budget}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
