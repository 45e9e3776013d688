"""Histories on their way to a GPU: buffers, and what a fetch does, worked out once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, ref

import torch

from ..engine.kernels import kernels_for
from ..engine.kernels.cuda.stream import on_stream
from ..engine.kernels.format import PAD_WORDS, ceil_div
from .era import Era
from .history import PackedHistory, Revision
from .link import Streams
from .words import DeviceWords, HostWords, grown

ALIGN_BYTES = 256  # of everything in a slot's buffers


class Slot:
    """Buffers for the histories of one layer, as they come and as they are decoded.

    Parameters
    ----------
    device : torch.device
        The GPU.
    streams : Streams
        What histories come by.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._streams = streams
        self.staged = torch.empty(0, dtype=torch.int32, device=device)
        self.out = torch.empty(0, dtype=torch.uint8, device=device)
        self.copied: list[torch.cuda.Event] = []  # of each history
        self.decoded = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.consumed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        #: What it holds, or is to hold when its events have passed.
        self.fetched: Fetch | None = None
        self._fetches: WeakKeyDictionary[Revision, Fetch] = WeakKeyDictionary()
        self._readers: set[int] = set()  # streams that the allocator knows to read `out`

    def holds(self, histories: Sequence[PackedHistory]) -> bool:
        """Tell whether it was fetched for these histories as they are now."""
        return self.fetched is not None and self.fetched.serves(histories)

    def forget(self) -> None:
        """Let go of what it was fetched for."""
        self.fetched = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device of its buffers, and of rows' numbers that fetches of its own have."""
        ids = {id(t): t.nbytes for fetch in self._fetches.values() for t in fetch.own_ids}
        return self.staged.nbytes + self.out.nbytes + sum(ids.values())

    def fetch(
        self, histories: Sequence[PackedHistory], ids_of: IdsOf, sm_budget: int | None
    ) -> Fetch:
        """Start to fetch and decode histories. Waits for nothing.

        Parameters
        ----------
        histories : sequence of PackedHistory
            The K and V of a layer, or one of them.
        ids_of : callable
            Returns the rows of an era, on the current stream.
        sm_budget : int or None
            Multiprocessors that decoding may use.
        """
        kernels_for(self.out.device)  # raises what an earlier decode has told of
        self.forget()
        while len(self.copied) < len(histories):
            self.copied.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        fetch = self._fetches.get(histories[0].revision)
        if fetch is None or not fetch.serves(histories):
            fetch = self._plan(histories, ids_of, sm_budget)
            self._fetches[histories[0].revision] = fetch
        fetch.start(self._streams, self)
        self.fetched = fetch
        return fetch

    def use(self, current: torch.cuda.Stream) -> None:
        """Let a stream read what was decoded, when it is there."""
        current.wait_event(self.decoded)
        if current.cuda_stream not in self._readers:
            self.out.record_stream(current)
            self._readers.add(current.cuda_stream)

    def _plan(
        self, histories: Sequence[PackedHistory], ids_of: IdsOf, sm_budget: int | None
    ) -> Fetch:
        """Work out a fetch, after what it needs on the device has been written."""
        for history in histories:
            history.mark_ready()
        words = self._place_words(histories)
        with on_stream(self._streams.decodes):
            sizes = [[era.decoded_bytes for era in history.eras] for history in histories]
            self._grow_out(sum(_aligned(size) for each in sizes for size in each))
            own_ids = []
            parts: list[list[torch.Tensor]] = []
            decodes: list[list[Callable[[], None]]] = []
            at = 0
            for history, there, each in zip(histories, words, sizes, strict=True):
                if history.ready is not None:
                    self._streams.decodes.wait_event(history.ready)
                parts.append([])
                decodes.append([])
                for era, size in zip(history.eras, each, strict=True):
                    out, ids = self.out[at : at + size], ids_of(era)
                    if era.key is None:  # the others' are shared by all layers
                        own_ids.append(ids)
                    decodes[-1].append(era.decoding(there, ids, out, sm_budget))
                    parts[-1].append(era.tokens_in(out))
                    at += _aligned(size)
        copies = [
            history.words.transfers(there) if isinstance(history.words, HostWords) else []
            for history, there in zip(histories, words, strict=True)
        ]
        return Fetch(histories, parts, copies, decodes, own_ids)

    def _place_words(self, histories: Sequence[PackedHistory]) -> list[torch.Tensor]:
        """Return where the words of histories are on the device, or come to."""
        found = []
        for history in histories:
            if isinstance(history.words, DeviceWords):
                there = history.words.whole()
                there.record_stream(self._streams.decodes)
                found.append(there)
        if found:
            return found
        sizes = [history.words.n_words + PAD_WORDS for history in histories]
        self._grow_staged(sum(_aligned(4 * size) // 4 for size in sizes))
        at = 0
        for size in sizes:
            found.append(self.staged[at : at + size])
            at += _aligned(4 * size) // 4
        return found

    def _grow_staged(self, n_words: int) -> None:
        """Make room for packed words, on the stream that they come by."""
        if self.staged.shape[0] < n_words:
            self._fetches.clear()
            with on_stream(self._streams.copies):
                self.staged = grown(self.staged, n_words, 0)
            self.staged.record_stream(self._streams.decodes)

    def _grow_out(self, nbytes: int) -> None:
        """Make room for decoded tokens, on the stream that decodes them."""
        if self.out.shape[0] < nbytes:
            self._fetches.clear()
            self._readers.clear()
            self.out = grown(self.out, nbytes, 0)


class Fetch:
    """What brings histories into the buffers of a slot, for as long as they stay as they are.

    Parameters
    ----------
    histories : sequence of PackedHistory
        The histories.
    parts : list of lists of torch.Tensor
        For each the tokens of its eras, in the slot's buffer.
    copies : list of lists of (torch.Tensor, torch.Tensor)
        For each the targets and sources of its words; none where they are on the device.
    decodes : list of lists of callables
        For each what decodes its eras.
    own_ids : list of torch.Tensor
        Numbers of rows that no other fetch has.
    """

    def __init__(
        self,
        histories: Sequence[PackedHistory],
        parts: list[list[torch.Tensor]],
        copies: list[list[tuple[torch.Tensor, torch.Tensor]]],
        decodes: list[list[Callable[[], None]]],
        own_ids: list[torch.Tensor],
    ) -> None:
        self._revisions = [ref(history.revision) for history in histories]
        self.parts = parts
        self._copies = copies
        self._decodes = decodes
        self.own_ids = own_ids
        #: Bytes that cross the link.
        self.nbytes = sum(source.nbytes for each in copies for _, source in each)

    def serves(self, histories: Sequence[PackedHistory]) -> bool:
        """Tell whether it is for these histories as they are now."""
        return len(self._revisions) == len(histories) and all(
            revision() is history.revision
            for revision, history in zip(self._revisions, histories, strict=True)
        )

    def start(self, streams: Streams, slot: Slot) -> None:
        """Start it: the K is decoded while the V crosses."""
        crosses = self.nbytes > 0
        if crosses:
            with on_stream(streams.copies):
                streams.copies.wait_event(slot.decoded)
                for each, copied in zip(self._copies, slot.copied, strict=False):
                    for target, source in each:
                        target.copy_(source, non_blocking=True)
                    copied.record(streams.copies)
        with on_stream(streams.decodes):
            streams.decodes.wait_event(slot.consumed)
            for each_decode, copied in zip(self._decodes, slot.copied, strict=False):
                if crosses:
                    streams.decodes.wait_event(copied)
                for decode in each_decode:
                    decode()
            slot.decoded.record(streams.decodes)


#: Returns the rows of an era.
IdsOf = Callable[[Era], torch.Tensor]


def _aligned(nbytes: int) -> int:
    return ceil_div(nbytes, ALIGN_BYTES) * ALIGN_BYTES
