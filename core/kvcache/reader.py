"""HistoryReader: fetches and decodes histories ahead, on streams of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch

from ..engine.kernels.cuda.stream import current_stream
from ..errors import ArgumentError, ArgumentTypeError
from .arena import HostArena
from .fetching import Crossing, TokenBuffer, WordBuffer, drop_stale, holding, next_free
from .gathering import RowGatherer
from .history import PackedHistory
from .learning import LearningQueue
from .link import Link
from .segment import Segment
from .words import DeviceWords, HostWords, Words

#: Buffers for packed words: those of one layer are read while those of the next cross. And for
#: decoded tokens, of which the second takes memory only where other tokens are read meanwhile: the
#: caches copy what they have read at once, before the next layer is decoded.
BUFFERS = 2
#: Sets of row numbers that are kept: layers grow one after the other.
KEPT_IDS = 3
#: Size of a host buffer, where that much is needed: the call that page-locks it costs as much as
#: 64 MiB take to cross the link.
SLAB_BYTES = 64 << 20


class HistoryReader:
    """Reads histories of one device, whose words are in its stores, and prefetches the next ones.

    On a GPU the packed words of a history in host memory cross by the copy engine on one stream,
    into one of two buffers, and are decoded on another, into another buffer, or by a `TokenJoin` on
    the current one; events order the streams, the host waits for nothing. On the CPU a history is
    decoded when it is read, from words in one tensor.

    Parameters
    ----------
    device : torch.device
        Where K and V are used.
    offload : bool
        Whether `new_words` places packed words in host memory by default; else on the device.
    sm_budget : int or None
        Multiprocessors that decoding may use; all when None.
    histories : int
        Number of histories expected in all, for which page-locked memory is made ahead.

    Notes
    -----
    One thread at a time. Copies and pickles are made without buffers.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        offload: bool,
        sm_budget: int | None,
        histories: int = 1,
    ) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ArgumentTypeError(f"device: {device}, accepted are cpu and cuda")
        check_sm_budget(sm_budget)
        self.offload = offload
        self.sm_budget = sm_budget
        self.link = Link(device, sm_budget)
        on_gpu = device.type == "cuda"
        self.arena = HostArena(pin=on_gpu, slab_bytes=SLAB_BYTES, histories=histories)
        self._start()

    def _start(self) -> None:
        streams = self.link.streams
        n = 0 if streams is None else BUFFERS
        self._words = [WordBuffer(self.device, streams) for _ in range(n) if streams is not None]
        self._tokens = [TokenBuffer(self.device, streams) for _ in range(n) if streams is not None]
        self._word_turn = self._token_turn = 0
        # Of each layer, K or what is read alone, where its tokens were decoded last.
        self._decoded: WeakSet[PackedHistory] = WeakSet()
        self.chosen = RowGatherer(self.link, self.sm_budget)
        # Of segments, by their key: those that the stream for decoding reads, and the current one.
        self._ids: dict[tuple[int, ...], torch.Tensor] = {}
        self._current_ids: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Where K and V are used."""
        return self.link.device

    @property
    def moved_to_device_bytes(self) -> int:
        """Bytes of packed words that were fetched; waits for a GPU that has gathered rows."""
        return self.link.fetched_bytes + self.chosen.moved_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes on the device of the fetch buffers; 0 on the CPU."""
        ids = sum(t.nbytes for kept in (self._ids, self._current_ids) for t in kept.values())
        words = sum(buffer.memory.nbytes for buffer in self._words)
        return ids + words + sum(buffer.nbytes for buffer in self._tokens)

    def new_words(self, *, on_host: bool | None = None) -> Words:
        """Return an empty store of words for a history.

        Parameters
        ----------
        on_host : bool, optional
            Whether they lie in host memory; left out, as the reader's `offload` says.
        """
        on_host = self.offload if on_host is None else on_host
        if on_host and self.link.streams is not None:
            return HostWords(self.arena, self.link)
        return DeviceWords(self.link, on_host=on_host)

    def expect(self, histories: int) -> None:
        """Set the number of histories expected in all."""
        self.arena.histories = histories

    def host_bytes(self, histories: Iterable[PackedHistory]) -> int:
        """Return the bytes of host memory that all histories of this reader have reserved.

        On a GPU this includes memory made ahead; what histories no longer use is the arena's again.
        """
        if self.link.streams is not None:
            return self.arena.nbytes
        return sum(history.words.nbytes for history in histories if history.words.on_host)

    def finish_packing(self) -> None:
        """Pack what has left the windows of all histories; waits for the device.

        Raises
        ------
        BitslabError
            When host memory runs out; it names the history, whose tokens are there, unpacked.
        """
        self.link.packing.finish()

    @property
    def learning(self) -> LearningQueue:
        """The layers whose codecs are to be learnt from a prompt."""
        return self.link.learning

    # Reading

    def take_turn(self, histories: Sequence[PackedHistory]) -> int:
        """Let torch's current stream use histories, behind the one that did last.

        Returns
        -------
        int
            Which stream that is, as `Link.take_turn` says.
        """
        stream = self.link.take_turn()
        if self.link.several_streams:
            for history in histories:
                history.unpacked.keep_for(stream)
        return stream

    def read(self, histories: Sequence[PackedHistory]) -> list[list[torch.Tensor]]:
        """Return the packed tokens of histories, decoded.

        Parameters
        ----------
        histories : sequence of PackedHistory
            Of this reader; the K and V of a layer.

        Returns
        -------
        list of lists of torch.Tensor
            For each history its segments, oldest first: ``[B, H, tokens, D]``, contiguous. On a GPU
            the current stream waits for them; they hold until `done`.
        """
        link = self.link
        if link.streams is None:
            return [history.decode_packed() for history in histories]
        if not _packed(histories):
            return [[] for _ in histories]
        buffer = holding(self._tokens, histories) or self._decode(histories)
        # Until `done`, others must use the other buffer.
        self._token_turn = (self._tokens.index(buffer) + 1) % BUFFERS
        buffer.use(current_stream(link.device))
        assert buffer.content is not None
        return [list(tokens) for tokens in buffer.content.tokens]

    def stage(self, histories: Sequence[PackedHistory]) -> list[torch.Tensor]:
        """Return the packed words of histories where kernels of their device read them.

        Parameters
        ----------
        histories : sequence of PackedHistory
            Of this reader; the K and V of a layer.

        Returns
        -------
        list of torch.Tensor
            For each int32, its words and PAD_WORDS behind them. On a GPU the current stream waits
            for them; they hold until `done_words`.
        """
        if histories[0].packed.words.crosses:
            return self.stage_crossing(histories).words
        return [history.words.fetch() for history in histories]

    def stage_crossing(self, histories: Sequence[PackedHistory]) -> Crossing:
        """Return where the words of histories that cross are staged; see `stage`.

        Parameters
        ----------
        histories : sequence of PackedHistory
            Of this reader, with words in host memory that cross.

        Returns
        -------
        Crossing
            The same one each time, until the histories change or their words go elsewhere, and
            nobody else keeps it: a weak key for what is derived from where the words lie.
        """
        buffer = holding(self._words, histories) or self._copy(histories, each=False)
        self._word_turn = (self._words.index(buffer) + 1) % BUFFERS
        buffer.use(current_stream(self.link.device))
        assert buffer.content is not None
        return buffer.content

    def prefetch(self, histories: Sequence[PackedHistory]) -> None:
        """Start to fetch and decode histories that `read` returns next, unless that is under way.

        Waits for nothing.

        Parameters
        ----------
        histories : sequence of PackedHistory
            Of this reader; the K and V of a layer.
        """
        if self.link.streams is None or not _packed(histories):
            return
        if holding(self._tokens, histories) is None:
            self._decode(histories)

    def prefetch_words(
        self, histories: Sequence[PackedHistory], *, decoded: bool, early: bool = False
    ) -> None:
        """Start to copy packed words of histories that are read soon, unless that is under way.

        Waits for nothing, and does nothing where they do not cross.

        Parameters
        ----------
        histories : sequence of PackedHistory
            Of this reader; the K and V of a layer.
        decoded : bool
            Whether `read` is to follow, or `stage`.
        early : bool
            Whether others are read before them: only into a buffer that holds nothing for those.
        """
        if not histories[0].packed.words.crosses or not _packed(histories):
            return
        if early and next_free(self._words, 0) is None:
            return
        if holding(self._words, histories) is not None:
            return
        if not decoded or holding(self._tokens, histories) is None:
            self._copy(histories, each=decoded)

    def done(self, histories: Sequence[PackedHistory]) -> None:
        """Release what `read` returned, after work on the current stream.

        Raises
        ------
        ArgumentError
            When `stage` returned the words of these histories, which `done_words` releases.
        """
        buffer = holding(self._tokens, histories)
        if buffer is not None:
            buffer.release(current_stream(self.link.device))
            return
        words = holding(self._words, histories)
        if words is not None and words.in_use:
            raise ArgumentError(
                "histories: `stage` has returned their words, which `done_words` releases; "
                "accepted are histories that were read"
            )

    def stop_decoding(self, histories: Sequence[PackedHistory]) -> None:
        """Note that histories which `read` has returned are read as they are packed from now on.

        Once all are, the buffers of decoded tokens are given back: those of a long prompt hold
        one layer's K and V each.

        Parameters
        ----------
        histories : sequence of PackedHistory
            Of this reader; the K and V of a layer.
        """
        self._decoded.discard(histories[0])
        if not self._decoded:
            for buffer in self._tokens:
                buffer.clear()

    def row_numbers(self, segment: Segment) -> torch.Tensor:
        """Return the row numbers of a segment, `Segment.ids`, for the current stream."""
        return _shared_ids(self._current_ids, segment)

    def done_words(self, histories: Sequence[PackedHistory]) -> None:
        """Release what `stage` returned, after work on the current stream."""
        buffer = holding(self._words, histories)
        if buffer is not None:
            buffer.release(current_stream(self.link.device))

    def drop_stale(self) -> None:
        """Forget what was fetched of histories that have changed since, with its host memory."""
        drop_stale(self._words)
        drop_stale(self._tokens)

    # Inside

    def _ids_of(self, segment: Segment) -> torch.Tensor:
        """Return the row numbers of a segment, for the stream that decodes."""
        return _shared_ids(self._ids, segment)

    def _decode(self, histories: Sequence[PackedHistory]) -> TokenBuffer:
        """Start to decode histories into the next buffer."""
        words = None
        if histories[0].packed.words.crosses:
            words = holding(self._words, histories) or self._copy(histories, each=True)
            self._word_turn = (self._words.index(words) + 1) % BUFFERS
        # Not that of a layer that has yet to be read, as long as there is another.
        buffer = next_free(self._tokens, 0) or self._tokens[self._token_turn]
        self._decoded.add(histories[0])
        buffer.fetch(histories, words, self._ids_of, self.sm_budget)
        return buffer

    def _copy(self, histories: Sequence[PackedHistory], *, each: bool) -> WordBuffer:
        """Start to copy the words of histories into the next buffer."""
        buffer = next_free(self._words, self._word_turn) or self._words[self._word_turn]
        self._word_turn = (self._words.index(buffer) + 1) % BUFFERS
        before = buffer.memory
        self.link.fetched_bytes += buffer.fetch(histories, each=each).nbytes
        if buffer.memory is not before:
            for tokens in self._tokens:
                tokens.forget_plans()
        return buffer

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the buffers."""
        return {name: self.__dict__[name] for name in ("offload", "sm_budget", "link", "arena")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()


def _shared_ids(kept: dict[tuple[int, ...], torch.Tensor], segment: Segment) -> torch.Tensor:
    """Return the row numbers of a segment, shared with segments of the same key."""
    key = segment.key
    if key is None:
        return segment.ids()
    found = kept.pop(key, None)
    if found is None:
        found = segment.ids()
        if len(kept) == KEPT_IDS:
            del kept[next(iter(kept))]
    kept[key] = found  # the last used one last
    return found


def _packed(histories: Sequence[PackedHistory]) -> bool:
    """Return whether any has packed tokens."""
    for history in histories:
        if history.packed.length:
            return True
    return False


def check_sm_budget(sm_budget: object) -> None:
    """Raise unless `sm_budget` is None or a positive int."""
    if sm_budget is not None and (type(sm_budget) is not int or sm_budget < 1):
        raise ArgumentError(f"sm_budget: {sm_budget!r:.60}, accepted are None and integers from 1")
