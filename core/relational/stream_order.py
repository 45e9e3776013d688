"""Streams of a GPU that use what was made on others."""

from __future__ import annotations

import torch

from ..engine.kernels.cuda.stream import current_stream, stream_pointer


class StreamOrder:
    """Has streams wait for the one on which tables were made last.

    Parameters
    ----------
    device : torch.device
        Of the tables; on a CPU nothing waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made_on: torch.cuda.Stream | None = None
        #: Addresses of streams that are behind all that was made.
        self._behind: set[int] = set()

    def made(self) -> None:
        """Take torch's current stream for the one on which tables were made, behind the others."""
        if self._device.type == "cuda":
            self._made_on = current_stream(self._device)
            self._behind = {stream_pointer(self._device)}

    def wait(self) -> None:
        """Have torch's current stream wait for what was made on another one.

        Not in the capture of a CUDA graph, before which torch waits for all streams.
        """
        if self._made_on is None:
            return
        behind, pointer = self._behind, stream_pointer(self._device)
        if pointer in behind or torch.cuda.is_current_stream_capturing():
            return
        current_stream(self._device).wait_stream(self._made_on)
        behind.add(pointer)
