"""Tickets of the disk tier: bytes in memory or in extents, and what may still become of them."""

from __future__ import annotations

import os
import threading
import weakref
from enum import Enum

import torch

from ...engine.transfer import Mark
from ...errors import BitslabError
from .stripe import Extent


class State(Enum):
    """Of a piece: only one that waits can be cancelled."""

    WAITS = "waits"
    WRITING = "writing"
    WRITTEN = "written"
    CANCELLED = "cancelled"
    FAILED = "failed"


#: States of pieces that threads have still to do with.
PENDING = (State.WAITS, State.WRITING)


class Piece:
    """Bytes of a ticket that lie in one extent."""

    __slots__ = ("begin", "crc32", "end", "extent", "state")

    def __init__(self, extent: Extent, begin: int, end: int) -> None:
        self.extent = extent
        self.begin = begin
        self.end = end
        self.crc32 = 0
        self.state = State.WAITS

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.end - self.begin


class Stored:
    """What threads know of a ticket: its bytes while they are in memory, and where they lie."""

    __slots__ = ("after", "begun", "data", "dropped", "error", "lock", "nbytes", "pieces")

    def __init__(self, data: torch.Tensor, after: Mark | None) -> None:
        self.nbytes = data.shape[0]
        self.data: torch.Tensor | None = data
        self.after = after
        self.pieces: list[Piece] = []
        self.error: BaseException | None = None
        self.dropped = False
        #: Whether any piece may no longer wait; until then none is looked at.
        self.begun = False
        self.lock = threading.Lock()

    @property
    def pending(self) -> bool:
        """Whether any of it waits to be written, or is being written."""
        # The last one is written last, as a rule.
        return any(piece.state in PENDING for piece in reversed(self.pieces))

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait to be written, or are being written."""
        if not self.begun:
            return self.nbytes if self.pieces else 0
        return sum(piece.nbytes for piece in self.pieces if piece.state in PENDING)

    def drop(self) -> None:
        """Let threads pass over what waits. Takes no lock: the garbage collector may run it."""
        self.dropped = True


class Ticket:
    """Bytes that were given to a tier; when this object is gone, their place is free again.

    Attributes
    ----------
    nbytes : int
        How many.
    """

    def __init__(self, stored: Stored) -> None:
        self.nbytes = stored.nbytes
        self._stored: Stored | None = stored
        self._process = os.getpid()
        self._finalize = weakref.finalize(self, stored.drop)
        self._finalize.atexit = False

    @property
    def in_memory(self) -> bool:
        """Whether the tier still holds the memory that it was given: not all of it is written."""
        return self._stored is not None and self._stored.data is not None

    @property
    def pending(self) -> bool:
        """Whether any of it waits to be written, or is being written."""
        return self._stored is not None and self._stored.pending

    @property
    def error(self) -> BaseException | None:
        """Why they could not be written; they are kept in memory then."""
        return None if self._stored is None else self._stored.error

    def stored(self) -> Stored:
        """Return what threads know of it, for the tier.

        Raises
        ------
        BitslabError
            When it was forgotten, or is the parent's.
        """
        if os.getpid() != self._process:
            raise BitslabError(
                f"ticket: was given by process {self._process}, whose disk tier a forked child has "
                "not"
            )
        if self._stored is None:
            raise BitslabError("ticket: was forgotten")
        return self._stored

    def forget(self) -> None:
        """Give its place up."""
        self._finalize()
        self._stored = None
