"""Buffers of a GPU for what is fetched: packed words as they cross, and decoded tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary, ref

import torch

from ..engine.kernels import kernels_for
from ..engine.kernels.format import PAD_WORDS, ceil_div
from ..engine.transfer.lanes import record_on
from ..engine.transfer.staging import copy_pieces
from .history import PackedHistory
from .link import Streams
from .packed_tokens import Revision
from .segment import Segment
from .words import DeviceWords, HostWords, grown

ALIGN_BYTES = 256  # of everything in the buffers

#: Returns the rows of a segment.
IdsOf = Callable[[Segment], torch.Tensor]


class WordBuffer:
    """Holds the packed words of the histories of one layer, as they cross to the device.

    Parameters
    ----------
    device : torch.device
        The GPU.
    streams : Streams
        Its streams.

    Attributes
    ----------
    content : Crossing or None
        What it holds, or is being filled with.
    in_use : bool
        Whether a stream reads it, from `use` to `release`.
    memory : torch.Tensor
        int32 ``[n]``; another tensor where more was needed.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._streams = streams
        self.memory = torch.empty(0, dtype=torch.int32, device=device)
        self._copied: list[torch.cuda.Event | None] = []  # of each history
        self.content: Crossing | None = None
        self.in_use = False
        self._crossings: WeakKeyDictionary[Revision, Crossing] = WeakKeyDictionary()
        self._readers: set[int] = set()  # streams that the allocator knows to read the memory
        self._released: torch.cuda.Event | None = None  # behind what read the words last

    def fetch(self, histories: Sequence[PackedHistory], *, each: bool) -> Crossing:
        """Start to copy the words of histories in host memory. Waits for nothing.

        Parameters
        ----------
        histories : sequence of PackedHistory
            The K and V of a layer, or one of them.
        each : bool
            Whether those of each are waited for by themselves, so that K is decoded while V
            crosses.
        """
        self.content, self.in_use = None, False
        crossing = self._crossings.get(histories[0].packed.revision)
        if crossing is None or not _same(crossing.revisions, histories):
            crossing = Crossing(histories, self._parts(histories))
            self._crossings[histories[0].packed.revision] = crossing
        copies, copied = self._streams.copies, self._copied
        while len(copied) < len(histories):
            copied.append(None)
        stream = copies.stream
        with copies.on():
            if self._released is not None:
                self._released.wait(stream)
            for i, pieces in enumerate(crossing.copies):
                copy_pieces(pieces)
                if each:
                    copied[i] = record_on(stream, copied[i])
            if not each:
                copied[0] = record_on(stream, copied[0])
        crossing.copied = copied[: len(histories) if each else 1]
        self.content = crossing
        return crossing

    def use(self, current: torch.cuda.Stream) -> None:
        """Make a stream wait for the words, which it reads."""
        assert self.content is not None
        self.in_use = True
        for copied in self.content.copied:
            if copied is not None:
                copied.wait(current)
        if current.cuda_stream not in self._readers:
            self.memory.record_stream(current)
            self._readers.add(current.cuda_stream)

    def release(self, current: torch.cuda.Stream) -> None:
        """Allow the words to be overwritten once a stream has reached this point."""
        self._released = record_on(current, self._released)
        self.content, self.in_use = None, False

    def _parts(self, histories: Sequence[PackedHistory]) -> list[torch.Tensor]:
        """Return room for the words of each history and PAD_WORDS behind them."""
        sizes = [history.words.n_words + PAD_WORDS for history in histories]
        self._grow(sum(_aligned(4 * size) // 4 for size in sizes))
        found, at = [], 0
        for size in sizes:
            found.append(self.memory[at : at + size])
            at += _aligned(4 * size) // 4
        return found

    def _grow(self, n_words: int) -> None:
        """Make room, on the stream that copies."""
        if self.memory.shape[0] < n_words:
            self._crossings.clear()
            self._readers.clear()
            with self._streams.copies.on():
                self.memory = self.memory.new_empty(0)  # before there is more
                self.memory = grown(self.memory, n_words, 0)
            self._streams.decodes.keep(self.memory)


class Crossing:
    """Copies of the words of histories to a device, valid as long as these do not change.

    Parameters
    ----------
    histories : sequence of PackedHistory
        The histories, in host memory.
    words : list of torch.Tensor
        For each int32, where its words go, and PAD_WORDS behind them.

    Attributes
    ----------
    revisions : list of references to Revision
        Of the histories.
    copied : sequence of torch.cuda.Event
        Passed when the words of each have crossed; or a single one.
    """

    def __init__(self, histories: Sequence[PackedHistory], words: list[torch.Tensor]) -> None:
        self.revisions = _revisions(histories)
        self.words = words
        self.copies: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for history, there in zip(histories, words, strict=True):
            assert isinstance(history.words, HostWords)
            self.copies.append(history.words.transfers(there))
        self.copied: Sequence[torch.cuda.Event | None] = ()
        #: Bytes that cross the link.
        self.nbytes = sum(source.nbytes for each in self.copies for _, source in each)


class TokenBuffer:
    """Holds the decoded tokens of the histories of one layer.

    Parameters
    ----------
    device : torch.device
        The GPU.
    streams : Streams
        Its streams.

    Attributes
    ----------
    content : Decoding or None
        What it holds, or is being filled with.
    """

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._streams = streams
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._ready: torch.cuda.Event | None = None
        self._released: torch.cuda.Event | None = None
        self.content: Decoding | None = None
        self._decodings: WeakKeyDictionary[Revision, dict[int, Decoding]] = WeakKeyDictionary()
        self._readers: set[int] = set()  # streams that the allocator knows to read the memory

    @property
    def nbytes(self) -> int:
        """Bytes on the device, with row numbers that only its plans have."""
        plans = [plan for each in self._decodings.values() for plan in each.values()]
        ids = {id(t): t.nbytes for plan in plans for t in plan.own_ids}
        return self._memory.nbytes + sum(ids.values())

    def forget_plans(self) -> None:
        """Forget what was planned: words lie elsewhere."""
        self._decodings.clear()

    def clear(self) -> None:
        """Give the memory back, behind what reads it; the next `fetch` takes it anew."""
        self.content = None
        self._decodings.clear()
        self._readers.clear()
        self._memory = self._memory.new_empty(0)

    def fetch(
        self,
        histories: Sequence[PackedHistory],
        crossed: WordBuffer | None,
        ids_of: IdsOf,
        sm_budget: int | None,
    ) -> None:
        """Start to decode histories. Waits for nothing.

        Parameters
        ----------
        histories : sequence of PackedHistory
            The K and V of a layer, or one of them.
        crossed : WordBuffer, optional
            What holds their words, which it releases; None where they are kept on the device.
        ids_of : callable
            Returns the rows of a segment, on the current stream.
        sm_budget : int or None
            Multiprocessors that decoding may use.
        """
        kernels_for(self._memory.device)  # raises errors of earlier decodes
        self.content = None
        plans = self._decodings.setdefault(histories[0].packed.revision, {})
        plan = plans.get(id(crossed))
        if plan is None or not _same(plan.revisions, histories):
            plan = self._plan(histories, crossed, ids_of, sm_budget)
            # Room for it may have dropped all plans.
            self._decodings.setdefault(histories[0].packed.revision, {})[id(crossed)] = plan
        decodes = self._streams.decodes
        stream = decodes.stream
        marks = () if crossed is None or crossed.content is None else crossed.content.copied
        with decodes.on():
            if self._released is not None:
                self._released.wait(stream)
            for i, each in enumerate(plan.decodes):
                if i < len(marks):
                    mark = marks[i]
                    assert mark is not None
                    mark.wait(stream)
                for decode in each:
                    decode()
            self._ready = record_on(stream, self._ready)
        if crossed is not None:
            crossed.release(stream)
        self.content = plan

    def use(self, current: torch.cuda.Stream) -> None:
        """Make a stream wait for the tokens, which it reads."""
        assert self._ready is not None
        self._ready.wait(current)
        if current.cuda_stream not in self._readers:
            self._memory.record_stream(current)
            self._readers.add(current.cuda_stream)

    def release(self, current: torch.cuda.Stream) -> None:
        """Allow the tokens to be overwritten once a stream has reached this point."""
        self._released = record_on(current, self._released)
        self.content = None

    def _plan(
        self,
        histories: Sequence[PackedHistory],
        crossed: WordBuffer | None,
        ids_of: IdsOf,
        sm_budget: int | None,
    ) -> Decoding:
        """Plan decoding, once the metadata that it reads on the device is written."""
        for history in histories:
            history.packed.mark_ready()
        words = self._words_of(histories, crossed)
        decode_lane = self._streams.decodes
        with decode_lane.on():
            sizes = [
                [segment.decoded_bytes for segment in history.segments] for history in histories
            ]
            self._grow(sum(_aligned(size) for each in sizes for size in each))
            own_ids = []
            tokens: list[list[torch.Tensor]] = []
            decodes: list[list[Callable[[], None]]] = []
            at = 0
            for history, there, each in zip(histories, words, sizes, strict=True):
                decode_lane.wait(history.packed.ready)
                tokens.append([])
                decodes.append([])
                for segment, size in zip(history.segments, each, strict=True):
                    out, ids = self._memory[at : at + size], ids_of(segment)
                    if segment.key is None:  # others are shared by all layers
                        own_ids.append(ids)
                    decodes[-1].append(segment.decoding(there, ids, out, sm_budget))
                    tokens[-1].append(segment.tokens_in(out))
                    at += _aligned(size)
        return Decoding(histories, tokens, decodes, own_ids)

    def _words_of(
        self, histories: Sequence[PackedHistory], crossed: WordBuffer | None
    ) -> list[torch.Tensor]:
        """Return the words of histories on the device."""
        if crossed is not None:
            assert crossed.content is not None
            return crossed.content.words
        found = []
        for history in histories:
            assert isinstance(history.words, DeviceWords)
            found.append(history.words.whole())
        self._streams.decodes.keep(*found)
        return found

    def _grow(self, nbytes: int) -> None:
        """Make room, on the stream that decodes."""
        if self._memory.shape[0] < nbytes:
            self._decodings.clear()
            self._readers.clear()
            self._memory = self._memory.new_empty(0)  # before there is more
            self._memory = grown(self._memory, nbytes, 0)


class Decoding:
    """Decodes of histories into a buffer, valid as long as these do not change.

    Parameters
    ----------
    histories : sequence of PackedHistory
        The histories.
    tokens : list of lists of torch.Tensor
        For each the decoded tokens of its segments.
    decodes : list of lists of callables
        For each what decodes its segments.
    own_ids : list of torch.Tensor
        Row numbers that no other plan shares.
    """

    def __init__(
        self,
        histories: Sequence[PackedHistory],
        tokens: list[list[torch.Tensor]],
        decodes: list[list[Callable[[], None]]],
        own_ids: Sequence[torch.Tensor],
    ) -> None:
        self.revisions = _revisions(histories)
        self.tokens = tokens
        self.decodes = decodes
        self.own_ids = own_ids


def _revisions(histories: Sequence[PackedHistory]) -> list[ref[Revision]]:
    return [ref(history.packed.revision) for history in histories]


def _same(revisions: Sequence[ref[Revision]], histories: Sequence[PackedHistory]) -> bool:
    """Return whether these are the revisions of histories now."""
    if len(revisions) != len(histories):
        return False
    for revision, history in zip(revisions, histories, strict=True):
        if revision() is not history.packed.revision:
            return False
    return True


Buffer = TypeVar("Buffer", WordBuffer, TokenBuffer)


def holding(buffers: Sequence[Buffer], histories: Sequence[PackedHistory]) -> Buffer | None:
    """Return the buffer that holds histories, or is being filled with them, unchanged since."""
    for buffer in buffers:
        content = buffer.content
        if content is None or len(content.revisions) != len(histories):
            continue
        for revision, history in zip(content.revisions, histories, strict=True):
            if revision() is not history.packed.revision:
                break
        else:
            return buffer
    return None


def next_free(buffers: Sequence[Buffer], turn: int) -> Buffer | None:
    """Return the next buffer that nobody is to read, if any.

    It was released, or its histories have changed, or are gone.
    """
    for i in range(turn, turn + len(buffers)):
        buffer = buffers[i % len(buffers)]
        if buffer.content is None or _stale(buffer.content):
            return buffer
    return None


def drop_stale(buffers: Sequence[Buffer]) -> None:
    """Make buffers forget histories that have changed, and the memory they were copied from."""
    for buffer in buffers:
        if buffer.content is not None and _stale(buffer.content):
            buffer.content = None


def _stale(content: Crossing | Decoding) -> bool:
    """Return whether any of the histories has changed, or is gone."""
    for revision in content.revisions:
        if revision() is None:
            return True
    return False


def _aligned(nbytes: int) -> int:
    return ceil_div(nbytes, ALIGN_BYTES) * ALIGN_BYTES
