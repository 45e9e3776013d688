"""Host memory for copies: pieces of the engine's arena, in order, and how much blobs need."""

from __future__ import annotations

import torch

from ..engine.codecs.blob import BlobCodec, FlatCodec
from ..engine.memory import HostPiece, Reservation, host_arena
from ..engine.transfer import Event
from ..errors import BitslabError
from .limits import bytes_to_reserve
from .tiers import HostLimit

#: After so many pieces of a GPU up to twice as many that went back are freed: a reservation may be
#: thousands of them, each with an event, and one that is used again costs a tenth of a new one.
CUTS_A_COLLECTION = 64


#: Bytes on the host, uint8; both say ``nbytes`` and ``data_ptr()``.
HostMemory = torch.Tensor | HostPiece


class HostMemoryError(BitslabError):
    """There is no host memory for a copy."""


#: Codecs for a size that are kept.
MOST_SWAPS = 4096
#: Room for a blob over the largest of late, for what differs from step to step.
MARGIN = 1.125
SPARE_BYTES = 4096
#: The same on the device, of what comes back before its size is known, in a pass with a plan.
FETCHED_MARGIN = 1.02
#: Of how much less a blob needs than that, this share is forgotten.
FORGET = 1 / 8


class LearntSizes:
    """How much room blobs need: what those of their sites needed of late, and a margin.

    What is learnt is a share of the bytes before packing: batches and sequences change their size.
    """

    def __init__(self) -> None:
        self._most: dict[tuple[str, str], float] = {}

    def room(
        self, site: str, codec_name: str, nbytes: int, bound: int, margin: float = MARGIN
    ) -> int:
        """Return the bytes to reserve for the blob of a tensor of `nbytes`.

        `bound` where nothing is known of its site. A blob may need more, up to `bound`.
        """
        share = self._most.get((site, codec_name))
        return bound if share is None else min(bound, int(share * nbytes * margin) + SPARE_BYTES)

    def expected(self, site: str, codec_name: str, nbytes: int) -> int:
        """Return what the blob of a tensor of `nbytes` is likely to need; 0 where nothing is known.

        It may need more.
        """
        return int(self._most.get((site, codec_name), 0.0) * nbytes)

    def add(self, site: str, codec_name: str, nbytes: int, needed_bytes: int) -> None:
        """Take note of what the blob of a tensor of `nbytes` needed."""
        share, most = needed_bytes / nbytes, self._most.get((site, codec_name), 0.0)
        self._most[site, codec_name] = max(share, most - (most - share) * FORGET)


class Swaps:
    """What encodes and decodes tensors of one device, by codec and size: found once for each.

    Parameters
    ----------
    device : torch.device
        The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: They hold their codec, so that no other one gets its number.
        self._known: dict[tuple[int, int, torch.dtype], FlatCodec] = {}

    def of(self, codec: BlobCodec, elements: int, dtype: torch.dtype) -> FlatCodec:
        """Return a codec for tensors of so many elements."""
        key = id(codec), elements, dtype
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MOST_SWAPS:
                self._known.clear()
            found = self._known[key] = codec.for_flat(elements, dtype, self._device)
        return found


class HostRoom:
    """Cuts host memory; one thread at a time.

    Parameters
    ----------
    on_gpu : bool
        Whether a GPU reads and writes it, so that it must be page-locked.
    limit : HostLimit, optional
        Counts what is cut.
    """

    def __init__(self, on_gpu: bool, limit: HostLimit | None = None) -> None:
        self._on_gpu, self._limit = on_gpu, limit
        self._reservation: Reservation | None = None
        self._pieces = 0

    def cut(self, nbytes: int, events: list[Event]) -> torch.Tensor:
        """Return memory, which goes back when its last tensor is gone and the GPU is done with it.

        Parameters
        ----------
        nbytes : int
            How much.
        events : list of events
            Those in it when the last tensor goes are behind the work that uses the memory.

        Raises
        ------
        HostMemoryError
            When there is none, or the system refuses to page-lock it.
        """
        nbytes = max(nbytes, 1)
        reservation = self._reservation
        if reservation is None or reservation.nbytes < nbytes:
            reservation = self._reserve(nbytes)
        returned = None if self._limit is None else self._limit.take(nbytes)
        return reservation.cut(nbytes, events.copy, returned)

    def cut_piece(self, nbytes: int, events: list[Event]) -> HostPiece:
        """Return memory as `cut` does, for what a GPU copies by address: a tensor takes longer."""
        nbytes = max(nbytes, 1)
        self._pieces += 1
        if not self._pieces % CUTS_A_COLLECTION:
            host_arena().collect(2 * CUTS_A_COLLECTION)
        reservation = self._reservation
        if reservation is None or reservation.nbytes < nbytes:
            reservation = self._reserve(nbytes)
        returned = None if self._limit is None else self._limit.take(nbytes)
        return reservation.cut_piece(nbytes, events.copy, returned)

    def _reserve(self, nbytes: int) -> Reservation:
        self._reservation = None
        try:
            made = host_arena().reserve(nbytes, bytes_to_reserve(nbytes))
        except BitslabError as error:
            raise HostMemoryError(str(error)) from error
        if self._on_gpu and not made.pinned:
            raise HostMemoryError("the system refused to page-lock host memory")
        self._reservation = made
        return made

    def close(self) -> None:
        """Give back what is reserved and not cut."""
        self._reservation = None
