"""Histories brought to their device: fetched and decoded ahead on streams of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..engine.kernels.cuda.stream import on_stream
from ..errors import ArgumentError, ArgumentTypeError
from .arena import HostArena
from .fetching import Slot, Streams
from .gathering import RowGatherer
from .words import DeviceWords, HostWords, Words

if TYPE_CHECKING:
    from .era import Era
    from .history import PackedHistory

#: One history is used while the next one comes.
SLOTS = 2
#: Sets of row numbers that are kept: layers change theirs one after the other.
KEPT_IDS = 3
#: Size of a host buffer, where that much is needed: the call that page-locks it costs as much as
#: 64 MiB take to cross the link.
SLAB_BYTES = 64 << 20


class HistoryReader:
    """Reads histories of one device, and fetches the ones to come.

    On a GPU the packed words of a history in host memory cross by the copy engine on one stream and
    are decoded on another, into one of two buffers; events order the streams, the host waits for
    nothing. On the CPU a history is decoded when it is read, from words in one tensor.

    Parameters
    ----------
    device : torch.device
        Where K and V are used.
    offload : bool
        Whether packed words lie in host memory; else on the device.
    sm_budget : int or None
        Multiprocessors that decoding may use; all when None.
    histories : int
        Histories that it is expected to have in all, for which page-locked memory is made ahead.

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
        self.device = device
        self.offload = offload
        self.sm_budget = sm_budget
        on_gpu = device.type == "cuda"
        self.arena = HostArena(pin=on_gpu, slab_bytes=SLAB_BYTES)
        self.histories = histories
        self._furthest = 0  # packed tokens of the history that has most
        self._fetched_bytes = 0
        self._streams = Streams(device) if on_gpu else None
        self._slots: list[Slot] = []
        if self._streams is not None:
            self._slots = [Slot(device, self._streams) for _ in range(SLOTS)]
        self._turn = 0
        self.chosen = RowGatherer(self)
        self._ids: dict[tuple[int, ...], torch.Tensor] = {}  # of eras, by their key

    @property
    def moved_to_device_bytes(self) -> int:
        """Bytes of packed words that were fetched; waits for a GPU that has gathered rows."""
        return self._fetched_bytes + self.chosen.moved_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes on the device of the buffers that histories come by; none on the CPU."""
        ids = sum(t.nbytes for t in self._ids.values())
        return ids + sum(slot.nbytes for slot in self._slots)

    def new_words(self, ahead_words: int) -> Words:
        """Return an empty store of words for a history."""
        if self.offload and self._streams is not None:
            return HostWords(self.arena, ahead_words)
        return DeviceWords(self.device, ahead_words)

    def host_bytes(self, histories: Iterable[PackedHistory]) -> int:
        """Return the bytes of host memory that all histories of this reader have reserved.

        With those, on a GPU, that are made ahead, or that histories have given up.
        """
        if not self.offload:
            return 0
        if self._streams is not None:
            return self.arena.nbytes
        return sum(history.words.nbytes for history in histories)

    def whole_words(self, history: PackedHistory) -> torch.Tensor:
        """Return the words of a history, and PAD_WORDS behind them, where they lie in one piece.

        Pieces of host memory are merged first: a GPU is waited for then.
        """
        words = history.words
        if isinstance(words, DeviceWords):
            self.keep(words.whole())
            return words.whole()
        assert isinstance(words, HostWords)
        if words.whole() is None:
            # What reads and writes the pieces must have ended.
            for stream in self.side_streams() or ():
                stream.synchronize()
            words.merge()
        whole = words.whole()
        assert whole is not None
        return whole

    # Reading

    def read(self, histories: Sequence[PackedHistory]) -> list[list[torch.Tensor]]:
        """Return the packed tokens of histories, decoded.

        Parameters
        ----------
        histories : sequence of PackedHistory
            Of this reader; the K and V of a layer.

        Returns
        -------
        list of lists of torch.Tensor
            For each history its eras, oldest first: ``[B, H, tokens, D]``, contiguous. On a GPU
            the current stream waits for them; they hold until `done`.
        """
        if self._streams is None:
            return [self._decode_now(history) for history in histories]
        if not any(history.packed_tokens for history in histories):
            return [[] for _ in histories]
        slot = next((s for s in self._slots if s.holds(histories)), None)
        if slot is None:
            slot = self._fetch(histories)
        # What comes next must come into the other one.
        self._turn = (self._slots.index(slot) + 1) % SLOTS
        slot.use(torch.cuda.current_stream(self.device.index))
        assert slot.fetched is not None
        return [list(parts) for parts in slot.fetched.parts]

    def prefetch(self, histories: Sequence[PackedHistory]) -> None:
        """Start to fetch and decode histories that will be read next, unless they are on their way.

        Waits for nothing.
        """
        if self._streams is None or any(slot.holds(histories) for slot in self._slots):
            return
        if any(history.packed_tokens for history in histories):
            self._fetch(histories)

    def done(self, histories: Sequence[PackedHistory]) -> None:
        """Say that the current stream has used what `read` returned last for these histories."""
        for slot in self._slots:
            if slot.holds(histories):
                slot.forget()
                slot.consumed.record(torch.cuda.current_stream(self.device.index))

    # For histories

    def side_streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream] | None:
        """Return the streams that copy and that decode; None on the CPU."""
        return None if self._streams is None else (self._streams.copies, self._streams.decodes)

    def keep(self, *tensors: torch.Tensor) -> None:
        """Tell the allocator that this reader's streams read tensors, whenever they are let go."""
        if self._streams is not None:
            for t in tensors:
                t.record_stream(self._streams.copies)
                t.record_stream(self._streams.decodes)

    def append(
        self,
        words: Words,
        new: torch.Tensor,
        made: torch.cuda.Event | None,
        tokens: int,
        most_words: int,
    ) -> None:
        """Append int32 words on the device to a history's, in the order of all copies.

        `made` is None where they are known to be there. With them the history has `tokens` packed,
        for which memory of `most_words` in all may be taken ahead.
        """
        # The first one to come so far: the others will follow.
        others = self.histories - 1 if tokens > self._furthest else 0
        if self._streams is None or not self.offload:
            words.append(new, most=most_words, others=others)
        else:
            with on_stream(self._streams.copies):
                if made is not None:
                    self._streams.copies.wait_event(made)
                words.append(new, most=most_words, others=others)
            new.record_stream(self._streams.copies)
        self._furthest = max(self._furthest, tokens)

    def quiesce(self) -> None:
        """Let the current stream wait for all fetches, so that it may write to what they read."""
        if self._streams is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._streams.copies)
            current.wait_stream(self._streams.decodes)

    def wait_for_copies(self) -> None:
        """Wait until all words have arrived in host memory."""
        if self._streams is not None:
            self._streams.copies.synchronize()

    # Inside

    def _decode_now(self, history: PackedHistory) -> list[torch.Tensor]:
        if not history.packed_tokens:
            return []
        words = self.whole_words(history)
        if self.offload:
            self._fetched_bytes += 4 * history.words.n_words
        out = [torch.empty(e.decoded_bytes, dtype=torch.uint8) for e in history.eras]
        eras = zip(history.eras, out, strict=True)
        return [era.decode(words, self._ids_of(era), o, None) for era, o in eras]

    def _ids_of(self, era: Era) -> torch.Tensor:
        """Return the rows of an era, from another one where they are the same."""
        key = era.key
        if key is None or self._streams is None:
            return era.ids()
        found = self._ids.pop(key, None)
        if found is None:
            found = era.ids()
            if len(self._ids) == KEPT_IDS:
                del self._ids[next(iter(self._ids))]
        self._ids[key] = found  # the last used one last
        return found

    def _fetch(self, histories: Sequence[PackedHistory]) -> Slot:
        """Start to fetch and decode histories into the buffers whose turn it is."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % SLOTS
        self._fetched_bytes += slot.fetch(histories, self._ids_of, self.sm_budget).nbytes
        return slot

    def __getstate__(self) -> dict[str, Any]:
        """Leave out streams, buffers and what they hold."""
        names = ("device", "offload", "sm_budget", "histories", "arena")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arena = state.pop("arena")
        self.__init__(**state)  # type: ignore[misc]
        self.arena = arena  # which the words of histories come from


def check_sm_budget(sm_budget: object) -> None:
    """Refuse what is no number of multiprocessors."""
    if sm_budget is not None and (type(sm_budget) is not int or sm_budget < 1):
        raise ArgumentError(f"sm_budget: {sm_budget!r:.60}, accepted are None and integers from 1")
