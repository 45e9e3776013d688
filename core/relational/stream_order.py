"""Streams of a GPU that use what was made on others."""

from __future__ import annotations

import sys

import torch

from ..engine.kernels.cuda.stream import current_stream, stream_pointer


class StreamOrder:
    """Has streams wait for tables that others have made, and keeps the tables for them.

    ``with order:`` makes tables, in one thread at a time. When it goes, with the last user of the
    tables, the streams on which they were made wait for all that used them: torch gives their
    memory to what these queue next.

    Parameters
    ----------
    device : torch.device
        Of the tables; on a CPU nothing waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._depth = device, 0
        #: Behind what was made last; None before, and on a CPU.
        self._event: torch.cuda.Event | None = None
        #: Addresses of streams that are behind it.
        self._behind: set[int] = set()
        #: By address the streams that have made tables, and those that have used any.
        self._makers: dict[int, torch.cuda.Stream] = {}
        self._users: dict[int, torch.cuda.Stream] = {}

    def __enter__(self) -> None:
        self.wait()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.made()

    def made(self) -> None:
        """Have other streams wait, before they use tables, for what the current one has queued."""
        if self._device.type != "cuda":
            return
        pointer, stream = stream_pointer(self._device), current_stream(self._device)
        self._event = self._event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)
        self._makers[pointer] = self._users[pointer] = stream
        self._behind = {pointer}

    def wait(self) -> None:
        """Have torch's current stream wait for what was made on another one.

        Not in the capture of a CUDA graph, which may not wait for what was queued before it:
        `torch.cuda.graph` waits for the whole GPU when it begins.
        """
        if self._event is None:
            return
        behind, pointer = self._behind, stream_pointer(self._device)
        if pointer in behind or torch.cuda.is_current_stream_capturing():
            return
        stream = current_stream(self._device)
        stream.wait_event(self._event)
        self._users[pointer] = stream
        behind.add(pointer)

    def __del__(self) -> None:
        if len(self._users) < 2 or sys.is_finalizing():
            return
        for maker in self._makers.values():
            for user in self._users.values():
                if user is not maker and not (_is_captured(maker) or _is_captured(user)):
                    maker.wait_stream(user)


def _is_captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
