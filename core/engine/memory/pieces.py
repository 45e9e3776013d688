"""Pieces of the buffers of the arena: ranges that a taker has, as tensors or by their addresses."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import ArgumentError
from ..kernels.format import ceil_div
from .free_ranges import FreeRanges
from .host import HostBuffer, Pin

#: Pieces start at multiples of this: kernels that read rows over the link want 16 bytes.
ALIGN_BYTES = 256


class Event(Protocol):
    """What has passed when a GPU has done its work; torch.cuda.Event is one."""

    def query(self) -> bool:
        """Return whether it has passed."""


#: Returns events behind the work of GPUs that may still read or write some memory. It is called
#: once, with the arena locked.
Pending = Callable[[], Iterable[Event]]


@dataclass(frozen=True)
class Kind:
    """A kind of memory, as `HostBuffer.allocate` takes it."""

    pin: Pin
    private: bool


@dataclass(eq=False)
class Slab:
    """A buffer that is cut into pieces, and its free ranges."""

    buffer: HostBuffer
    kind: Kind
    free: FreeRanges

    def __post_init__(self) -> None:
        self.array: NDArray[np.uint8] = self.buffer.tensor.numpy()
        self.address = self.buffer.tensor.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.nbytes


class Taken(Protocol):
    """A range of a slab that is taken, aligned but for the end of the slab."""

    slab: Slab
    begin: int
    end: int
    pending: Pending | None


@dataclass(eq=False, slots=True)
class LeftRange:
    """The range that a reservation has left."""

    slab: Slab
    begin: int
    end: int
    pending: Pending | None = None


class Reservation:
    """Memory of an arena that a taker has to itself, and cuts tensors from.

    What is left goes back to the arena with this object. One thread at a time.

    Attributes
    ----------
    nbytes : int
        What is left.
    """

    def __init__(self, taken: LeftRange, nbytes: int, returned: deque[Taken]) -> None:
        self.nbytes = nbytes
        self._range = taken
        self._returned = returned
        weakref.finalize(self, returned.append, taken).atexit = False

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked in this process."""
        return self._range.slab.buffer.pinned

    def cut(
        self,
        nbytes: int,
        pending: Pending | None = None,
        when_returned: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Return the first bytes as a tensor.

        They go back to the arena when the last tensor over them is gone, this one and all views of
        it, so that no tensor ever shows the bytes of another owner; and when the work of GPUs has
        passed that `pending` tells of.

        Parameters
        ----------
        nbytes : int
            From 1 to all that is left. With them goes what aligns the next ones.
        pending : callable, optional
            Returns events, once the last tensor is gone, behind the work of GPUs that may still
            use the memory; none when left out.
        when_returned : callable, optional
            Called when the last tensor is gone, from any thread and inside the garbage collector:
            it must take no lock, and not fail.

        Returns
        -------
        torch.Tensor
            uint8 ``[nbytes]`` on the CPU, starting at a multiple of ALIGN_BYTES. New memory is
            zero, other memory is not.
        """
        if not 0 < nbytes <= self.nbytes:
            raise ArgumentError(f"nbytes: {nbytes}, accepted are 1 to {self.nbytes}")
        slab, begin = self._range.slab, self._range.begin
        array = slab.array[begin : begin + nbytes]
        # Written to later, perhaps outside the inference mode of a first pass.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                tensor = torch.from_numpy(array)  # whose storage holds the array
        else:
            tensor = torch.from_numpy(array)
        piece = _Piece(array, _give_back)
        piece.slab, piece.begin, piece.pending = slab, begin, pending
        piece.when_returned, piece.returned = when_returned, self._returned
        _pieces[id(piece)] = piece
        piece.end = piece.begin  # nothing, should this be interrupted
        piece.end = self._take(nbytes)
        return tensor

    def cut_piece(
        self,
        nbytes: int,
        pending: Pending | None = None,
        when_returned: Callable[[], object] | None = None,
    ) -> HostPiece:
        """Return the first bytes as `cut` does, without a tensor: for what is copied by address.

        They go back to the arena when the piece and all tensors over it are gone.
        """
        if not 0 < nbytes <= self.nbytes:
            raise ArgumentError(f"nbytes: {nbytes}, accepted are 1 to {self.nbytes}")
        left = self._range
        piece = HostPiece(left.slab, left.begin, nbytes, pending, when_returned, self._returned)
        piece.end = self._take(nbytes)
        return piece

    def _take(self, nbytes: int) -> int:
        """Take the first bytes; return where in the slab they end, with what aligns the next."""
        left = self._range
        size = -nbytes % ALIGN_BYTES + nbytes
        middle = left.begin + size if size < self.nbytes else left.end
        # First: an interruption between these lines must leave no bytes with two owners.
        left.begin = middle
        self.nbytes -= size if size < self.nbytes else self.nbytes
        return middle


class HostPiece:
    """Memory of an arena, known by its address; `Reservation.cut_piece` makes one.

    It goes back by itself: the arena gets this object when nobody else has it any more.

    Attributes
    ----------
    address : int
        A multiple of ALIGN_BYTES.
    nbytes : int
        Its bytes.
    """

    __slots__ = (
        "_returned",
        "_when_returned",
        "address",
        "begin",
        "end",
        "nbytes",
        "pending",
        "slab",
    )

    def __init__(
        self,
        slab: Slab,
        begin: int,
        nbytes: int,
        pending: Pending | None,
        when_returned: Callable[[], object] | None,
        returned: deque[Taken],
    ) -> None:
        # Of the slab: nothing as yet.
        self.slab, self.begin, self.end = slab, begin, begin
        self.address, self.nbytes = slab.address + begin, nbytes
        self.pending = pending
        self._when_returned, self._returned = when_returned, returned

    def data_ptr(self) -> int:
        """Return the address, as a tensor does."""
        return self.address

    def tensor(self) -> torch.Tensor:
        """Return a tensor uint8 ``[nbytes]`` over it, which holds this piece."""
        array = self.slab.array[self.begin : self.begin + self.nbytes].view(_Held)
        array.piece = self
        with torch.inference_mode(False):
            return torch.from_numpy(array)

    def __del__(self) -> None:
        # The garbage collector may call it while a thread holds any lock.
        self._returned.append(self)
        if self._when_returned is not None:
            self._when_returned()


class _Held(np.ndarray[Any, Any]):
    """An array that holds the piece that it is over."""

    piece: HostPiece


class _Piece(weakref.ref[Any]):
    """A range that sees its array go: at a third of the price of `weakref.finalize`."""

    __slots__ = ("begin", "end", "pending", "returned", "slab", "when_returned")

    slab: Slab
    begin: int
    end: int
    pending: Pending | None
    when_returned: Callable[[], object] | None
    #: Takes it when its array is gone.
    returned: deque[Taken]


#: Those whose arrays live.
_pieces: dict[int, _Piece] = {}


def _give_back(piece: _Piece, pieces: dict[int, _Piece] = _pieces) -> None:
    """Give memory back; the garbage collector may call it while a thread holds any lock."""
    del pieces[id(piece)]
    piece.returned.append(piece)
    if piece.when_returned is not None:
        piece.when_returned()


def aligned(nbytes: int) -> int:
    """Return bytes rounded up to where the next piece starts."""
    return ceil_div(nbytes, ALIGN_BYTES) * ALIGN_BYTES
