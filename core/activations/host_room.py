"""Host memory for copies: pieces of the engine's arena, in the order in which they are cut."""

from __future__ import annotations

import torch

from ..engine.memory import Reservation, host_arena
from ..errors import BitslabError

#: Host memory is reserved in pieces of this many bytes or more: page-locking costs by the call.
RESERVED_BYTES = 64 << 20


class HostMemoryError(BitslabError):
    """There is no host memory for a copy."""


class HostRoom:
    """Cuts host memory; one thread at a time.

    Parameters
    ----------
    on_gpu : bool
        Whether a GPU reads and writes it, so that it must be page-locked.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._reservation: Reservation | None = None

    def cut(self, nbytes: int, events: list[torch.cuda.Event]) -> torch.Tensor:
        """Return memory, which goes back when its last tensor is gone and the GPU is done with it.

        Parameters
        ----------
        nbytes : int
            How much.
        events : list of torch.cuda.Event
            Those in it when the last tensor goes are behind the work that uses the memory.

        Raises
        ------
        HostMemoryError
            When there is none, or the system refuses to page-lock it.
        """
        nbytes = max(nbytes, 1)
        if self._reservation is None or self._reservation.nbytes < nbytes:
            self._reservation = None
            try:
                made = host_arena().reserve(nbytes, max(nbytes, RESERVED_BYTES))
            except BitslabError:
                try:
                    made = host_arena().reserve(nbytes)
                except BitslabError as error:
                    raise HostMemoryError(str(error)) from error
            if self._on_gpu and not made.pinned:
                raise HostMemoryError("the system refused to page-lock host memory")
            self._reservation = made
        return self._reservation.cut(nbytes, lambda: events)

    def close(self) -> None:
        """Give back what is reserved and not cut."""
        self._reservation = None
