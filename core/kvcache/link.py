"""How packed words cross to the device that decodes them, and what must not overtake what."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import BitslabError


class Streams:
    """The streams of a GPU beside the current one.

    Parameters
    ----------
    device : torch.device
        The GPU.

    Attributes
    ----------
    copies : torch.cuda.Stream
        Words cross on it, to the host and back.
    decodes : torch.cuda.Stream
        Words are decoded on it.
    """

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise BitslabError(f"device: {device}, but torch sees no CUDA GPU")
        self.copies = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self.decodes = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]


class Link:
    """What the stores of words, and the readers, of one device have in common.

    Parameters
    ----------
    device : torch.device
        Where K and V are used.

    Attributes
    ----------
    streams : Streams or None
        None on the CPU, where all is done at once.
    fetched_bytes : int
        Bytes of words that crossed to the device as a whole; on the CPU, that would have.

    Notes
    -----
    Copies and pickles have streams of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams = Streams(device) if device.type == "cuda" else None
        self.fetched_bytes = 0

    def keep(self, *tensors: torch.Tensor) -> None:
        """Let the allocator know that the streams read tensors, whenever these are freed."""
        if self.streams is not None:
            for t in tensors:
                t.record_stream(self.streams.copies)
                t.record_stream(self.streams.decodes)

    def quiesce(self) -> None:
        """Let the current stream wait for all fetches, so that it may write to what they read."""
        if self.streams is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.streams.copies)
            current.wait_stream(self.streams.decodes)

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
        return {"device": self.device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
