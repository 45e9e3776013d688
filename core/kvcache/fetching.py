"""Fetches of histories to a GPU: their buffers, and their copies and decodes, planned once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, ref

import torch

from ..engine.kernels import kernels_for
from ..engine.kernels.format import PAD_WORDS, ceil_div
from ..engine.transfer.lanes import record_on
from ..engine.transfer.staging import StagingBuffer, copy_pieces
from .history import PackedHistory
from .link import Streams
from .packed_tokens import Revision
from .segment import Segment
from .words import DeviceWords, HostWords, grown

ALIGN_BYTES = 256  # of everything in the buffers


class FetchBuffers:
    """Buffers for the histories of one layer: packed words as they cross, and decoded tokens.

    Parameters
    ----------
    device : torch.device
        The GPU.
    streams : Streams
        Streams for copies and decodes.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._streams = streams
        #: Packed words of all histories; each part is ready by itself, and released by its decode.
        self.words: StagingBuffer[Revision] = StagingBuffer(
            torch.empty(0, dtype=torch.int32, device=device)
        )
        self.copied: list[torch.cuda.Event | None] = []  # of each history
        #: Decoded tokens.
        self.out: StagingBuffer[Revision] = StagingBuffer(
            torch.empty(0, dtype=torch.uint8, device=device)
        )
        #: The fetch whose tokens it holds, once its events have passed.
        self.fetched: Fetch | None = None
        self._fetches: WeakKeyDictionary[Revision, Fetch] = WeakKeyDictionary()
        self._readers: set[int] = set()  # streams that the allocator knows to read `out`
        self._word_readers: set[int] = set()  # and `words`
        self._words_read: torch.cuda.Event | None = None  # behind attention to packed words

    def holds(self, histories: Sequence[PackedHistory], *, decoded: bool | None = None) -> bool:
        """Return whether the last fetch was of these histories, unchanged since.

        And, where that is asked, whether it decodes them or is of words alone.
        """
        fetched = self.fetched
        if fetched is None or decoded not in (None, fetched.decoded):
            return False
        return fetched.serves(histories)

    @property
    def free(self) -> bool:
        """Whether nobody is to read the last fetch: it was released, or histories have changed."""
        return self.fetched is None or self.fetched.stale

    def forget(self) -> None:
        """Forget the last fetch."""
        self.fetched = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device of the buffers and of row numbers that only its fetches have."""
        ids = {id(t): t.nbytes for fetch in self._fetches.values() for t in fetch.own_ids}
        return self.words.data.nbytes + self.out.data.nbytes + sum(ids.values())

    def fetch(
        self,
        histories: Sequence[PackedHistory],
        ids_of: IdsOf,
        sm_budget: int | None,
        *,
        decoded: bool = True,
    ) -> Fetch:
        """Start to fetch histories, and to decode them. Waits for nothing.

        Parameters
        ----------
        histories : sequence of PackedHistory
            The K and V of a layer, or one of them.
        ids_of : callable
            Returns the rows of a segment, on the current stream.
        sm_budget : int or None
            Multiprocessors that decoding may use.
        decoded : bool
            Whether to decode; else their words are fetched alone.
        """
        kernels_for(self.out.data.device)  # raises errors of earlier decodes
        self.forget()
        while len(self.copied) < len(histories):
            self.copied.append(None)
        fetch = self._fetches.get(histories[0].revision)
        if fetch is None or fetch.decoded != decoded or not fetch.serves(histories):
            if decoded:
                fetch = self._plan(histories, ids_of, sm_budget)
            else:
                words = self._words_on_device(histories)
                fetch = Fetch(histories, words, _copies(histories, words))
            self._fetches[histories[0].revision] = fetch
        fetch.start(self._streams, self)
        self.fetched = fetch
        return fetch

    def use(self, current: torch.cuda.Stream) -> None:
        """Make a stream wait for the decoded tokens, or for words alone, which it reads."""
        assert self.fetched is not None
        if not self.fetched.decoded:
            self.words.use(current)
            if current.cuda_stream not in self._word_readers:
                self.words.data.record_stream(current)
                self._word_readers.add(current.cuda_stream)
            return
        self.out.use(current)
        if current.cuda_stream not in self._readers:
            self.out.data.record_stream(current)
            self._readers.add(current.cuda_stream)

    def release(self, current: torch.cuda.Stream) -> None:
        """Allow what was fetched to be overwritten once a stream has reached this point."""
        if self.fetched is not None and not self.fetched.decoded:
            self.words.released = self._words_read = record_on(current, self._words_read)
        else:
            self.out.release(current)

    def _plan(
        self, histories: Sequence[PackedHistory], ids_of: IdsOf, sm_budget: int | None
    ) -> Fetch:
        """Plan a fetch, once the metadata that it reads on the device is written."""
        for history in histories:
            history.packed.mark_ready()
        words = self._words_on_device(histories)
        decode_lane = self._streams.decodes
        with decode_lane.on():
            sizes = [
                [segment.decoded_bytes for segment in history.segments] for history in histories
            ]
            self._grow_out(sum(_aligned(size) for each in sizes for size in each))
            own_ids = []
            tokens: list[list[torch.Tensor]] = []
            decodes: list[list[Callable[[], None]]] = []
            at = 0
            for history, there, each in zip(histories, words, sizes, strict=True):
                decode_lane.wait(history.packed.ready)
                tokens.append([])
                decodes.append([])
                for segment, size in zip(history.segments, each, strict=True):
                    out, ids = self.out.data[at : at + size], ids_of(segment)
                    if segment.key is None:  # others are shared by all layers
                        own_ids.append(ids)
                    decodes[-1].append(segment.decoding(there, ids, out, sm_budget))
                    tokens[-1].append(segment.tokens_in(out))
                    at += _aligned(size)
        return Fetch(histories, words, _copies(histories, words), tokens, decodes, own_ids)

    def _words_on_device(self, histories: Sequence[PackedHistory]) -> list[torch.Tensor]:
        """Return where the words of histories are on the device, or are copied to."""
        found = []
        for history in histories:
            if isinstance(history.words, DeviceWords):
                there = history.words.whole()
                self._streams.decodes.keep(there)
                found.append(there)
        if found:
            return found
        sizes = [history.words.n_words + PAD_WORDS for history in histories]
        self._grow_staged(sum(_aligned(4 * size) // 4 for size in sizes))
        at = 0
        for size in sizes:
            found.append(self.words.data[at : at + size])
            at += _aligned(4 * size) // 4
        return found

    def _grow_staged(self, n_words: int) -> None:
        """Make room for packed words, on the stream that copies them."""
        if self.words.data.shape[0] < n_words:
            self._fetches.clear()
            self._word_readers.clear()
            with self._streams.copies.on():
                self.words.memory = grown(self.words.data, n_words, 0)
            self._streams.decodes.keep(self.words.memory)

    def _grow_out(self, nbytes: int) -> None:
        """Make room for decoded tokens, on the stream that decodes them."""
        if self.out.data.shape[0] < nbytes:
            self._fetches.clear()
            self._readers.clear()
            self.out.memory = grown(self.out.data, nbytes, 0)


class Fetch:
    """Copies and decodes that fetch histories, valid as long as these do not change.

    Parameters
    ----------
    histories : sequence of PackedHistory
        The histories.
    words : list of torch.Tensor
        For each its words on the device, and PAD_WORDS behind them.
    copies : list of lists of (torch.Tensor, torch.Tensor)
        For each the targets and sources of its words; none where they are on the device.
    tokens : list of lists of torch.Tensor, optional
        For each the decoded tokens of its segments, in `FetchBuffers.out`. Left out, words are
        fetched alone.
    decodes : list of lists of callables
        For each what decodes its segments.
    own_ids : list of torch.Tensor
        Row numbers that no other fetch shares.
    """

    def __init__(
        self,
        histories: Sequence[PackedHistory],
        words: list[torch.Tensor],
        copies: list[list[tuple[torch.Tensor, torch.Tensor]]],
        tokens: list[list[torch.Tensor]] | None = None,
        decodes: Sequence[list[Callable[[], None]]] = (),
        own_ids: Sequence[torch.Tensor] = (),
    ) -> None:
        self._revisions = [ref(history.revision) for history in histories]
        self.decoded = tokens is not None
        self.words = words
        self.tokens = tokens or []
        self._copies = copies
        self._decodes = decodes
        self.own_ids = own_ids
        #: Bytes that cross the link.
        self.nbytes = sum(source.nbytes for each in copies for _, source in each)

    @property
    def stale(self) -> bool:
        """Whether its histories have changed, or are gone."""
        return any(revision() is None for revision in self._revisions)

    def serves(self, histories: Sequence[PackedHistory]) -> bool:
        """Return whether it is of these histories, unchanged since."""
        if len(self._revisions) != len(histories):
            return False
        for revision, history in zip(self._revisions, histories, strict=True):
            if revision() is not history.revision:
                return False
        return True

    def start(self, streams: Streams, buffers: FetchBuffers) -> None:
        """Start the copies and decodes: K is decoded while V crosses.

        Words that cross alone are released by `FetchBuffers.release`.
        """
        crosses = self.nbytes > 0
        copies, decodes, copied = streams.copies, streams.decodes, buffers.copied
        if crosses:
            with copies.on():
                copies.wait(buffers.words.released)
                for i, each in enumerate(self._copies):
                    copy_pieces(each)
                    if self.decoded:
                        copied[i] = copies.record(copied[i])
                if not self.decoded:
                    copied[0] = copies.record(copied[0])
        if not self.decoded:
            buffers.words.ready = copied[0] if crosses else None
            return
        with decodes.on():
            decodes.wait(buffers.out.released)
            for i, each_decode in enumerate(self._decodes):
                if crosses:
                    decodes.wait(copied[i])
                for decode in each_decode:
                    decode()
            # Decoding is also the last use of the packed words.
            buffers.out.ready = buffers.words.released = decodes.record(buffers.out.ready)


def _copies(
    histories: Sequence[PackedHistory], words: Sequence[torch.Tensor]
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the copies that bring the words of histories to where they are to be."""
    return [
        history.words.transfers(there) if isinstance(history.words, HostWords) else []
        for history, there in zip(histories, words, strict=True)
    ]


#: Returns the rows of a segment.
IdsOf = Callable[[Segment], torch.Tensor]


def _aligned(nbytes: int) -> int:
    return ceil_div(nbytes, ALIGN_BYTES) * ALIGN_BYTES
