"""Histories brought to their device: fetched and decoded ahead on streams of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ArgumentError, ArgumentTypeError, BitslabError
from ..kernels.format import PAD_WORDS, ceil_div
from .gathering import RowGatherer
from .words import DeviceWords, HostArena, HostWords, Words, grown

if TYPE_CHECKING:
    from .era import Era
    from .history import PackedHistory

ALIGN_BYTES = 256  # of everything in a slot's buffers
#: One history is used while the next one comes.
SLOTS = 2
#: Sets of row numbers that are kept: layers change theirs one after the other.
KEPT_IDS = 3
#: Least size of a page-locked buffer: the call that page-locks it costs as much as 64 MiB take to
#: cross the link.
GPU_SLAB_BYTES = 64 << 20
CPU_SLAB_BYTES = 1 << 20


class HistoryReader:
    """Reads histories of one device, and fetches the ones to come.

    On a GPU the packed words of a history in host memory cross by the copy engine on one stream and
    are decoded on another, into one of two buffers; events order the streams, the host waits for
    nothing. On the CPU a history is decoded when it is read.

    Parameters
    ----------
    device : torch.device
        Where K and V are used.
    offload : bool
        Whether packed words lie in host memory; else on the device.
    sm_budget : int or None
        Multiprocessors that decoding may use; all when None.

    Notes
    -----
    One thread at a time. Copies and pickles are made without buffers.
    """

    def __init__(self, device: torch.device, *, offload: bool, sm_budget: int | None) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ArgumentTypeError(f"device: {device}, accepted are cpu and cuda")
        check_sm_budget(sm_budget)
        self.device = device
        self.offload = offload
        self.sm_budget = sm_budget
        on_gpu = device.type == "cuda"
        slab_bytes = GPU_SLAB_BYTES if on_gpu else CPU_SLAB_BYTES
        self.arena = HostArena(pin=on_gpu, slab_bytes=slab_bytes)
        self._fetched_bytes = 0
        self._streams = _Streams(device) if on_gpu else None
        self._turn = 0
        self._staged = torch.empty(0, dtype=torch.int32)  # on the CPU
        self.chosen = RowGatherer(self)
        self._ids: dict[tuple[int, ...], torch.Tensor] = {}  # of eras, by their key

    @property
    def moved_to_device_bytes(self) -> int:
        """Bytes of packed words that were fetched; waits for a GPU that has gathered rows."""
        return self._fetched_bytes + self.chosen.moved_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes on the device of the buffers that histories come by."""
        slots = [] if self._streams is None else self._streams.slots
        return self._staged.nbytes + sum(s.staged.nbytes + s.out.nbytes for s in slots)

    def new_words(self, ahead_words: int) -> Words:
        """Return an empty store of words for a history."""
        if self.offload:
            return HostWords(self.arena, ahead_words)
        return DeviceWords(self.device, ahead_words)

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
        slot = next((s for s in self._streams.slots if s.holds(histories)), None)
        if slot is None:
            slot = self._fetch(self._streams, histories)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(slot.decoded)
        slot.out.record_stream(current)
        return slot.parts

    def prefetch(self, histories: Sequence[PackedHistory]) -> None:
        """Start to fetch and decode histories that will be read next. Waits for nothing."""
        if self._streams is not None and any(history.packed_tokens for history in histories):
            self._fetch(self._streams, histories)

    def done(self, histories: Sequence[PackedHistory]) -> None:
        """Say that the current stream has used what `read` returned last for these histories."""
        if self._streams is None:
            return
        for slot in self._streams.slots:
            if slot.holds(histories):
                slot.forget()
                slot.consumed.record(torch.cuda.current_stream(self.device))

    # Streams, for histories

    def side_streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream] | None:
        """Return the streams that copy and that decode; None on the CPU."""
        return None if self._streams is None else (self._streams.copies, self._streams.decodes)

    def keep(self, *tensors: torch.Tensor) -> None:
        """Tell the allocator that this reader's streams read tensors, whenever they are let go."""
        if self._streams is not None:
            for t in tensors:
                t.record_stream(self._streams.copies)
                t.record_stream(self._streams.decodes)

    def append(self, words: Words, new: torch.Tensor, made: torch.cuda.Event | None) -> None:
        """Append int32 words on the device to a history's, in the order of all copies.

        `made` is None where they are known to be there.
        """
        if self._streams is None or not self.offload:
            words.append(new)
            return
        with torch.cuda.stream(self._streams.copies):
            if made is not None:
                self._streams.copies.wait_event(made)
            words.append(new)
        new.record_stream(self._streams.copies)

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
        words = history.words.whole() if isinstance(history.words, DeviceWords) else None
        if isinstance(history.words, HostWords):
            words = history.words.whole()
            self._fetched_bytes += 4 * history.words.n_words
            if words is None:
                size = history.words.n_words + PAD_WORDS
                self._staged = grown(self._staged, size, 0)
                history.words.copy_to(self._staged)
                words = self._staged[:size]
        assert words is not None
        out = [torch.empty(e.decoded_bytes, dtype=torch.uint8) for e in history.eras]
        eras = zip(history.eras, out, strict=True)
        return [era.decode(words, self._ids_of(era), o, None) for era, o in eras]

    def _ids_of(self, era: Era) -> torch.Tensor:
        """Return the rows of an era, from another one where they are the same."""
        key = era.key
        if key is None:
            return era.ids()
        found = self._ids.pop(key, None)
        if found is None:
            found = era.ids()
            if len(self._ids) == KEPT_IDS:
                del self._ids[next(iter(self._ids))]
        self._ids[key] = found  # the last used one last
        return found

    def _fetch(self, streams: _Streams, histories: Sequence[PackedHistory]) -> _Slot:
        """Fetch and decode histories into the buffers whose turn it is."""
        slot = streams.slots[self._turn]
        self._turn = (self._turn + 1) % SLOTS
        slot.forget()
        for history in histories:
            history.mark_ready()
        words = self._stage(streams, slot, histories)
        with torch.cuda.stream(streams.decodes):
            sizes = [[era.decoded_bytes for era in history.eras] for history in histories]
            slot.grow_decoded(sum(_aligned(size) for each in sizes for size in each))
            streams.decodes.wait_event(slot.consumed)
            at = 0
            for i, (history, staged) in enumerate(zip(histories, words, strict=True)):
                streams.decodes.wait_event(slot.copied[i])
                if history.ready is not None:
                    streams.decodes.wait_event(history.ready)
                parts = []
                for era, size in zip(history.eras, sizes[i], strict=True):
                    out = slot.out[at : at + size]
                    parts.append(era.decode(staged, self._ids_of(era), out, self.sm_budget))
                    at += _aligned(size)
                slot.parts.append(parts)
            slot.decoded.record(streams.decodes)
        slot.key = [(history.identity, history.version) for history in histories]
        return slot

    def _stage(
        self, streams: _Streams, slot: _Slot, histories: Sequence[PackedHistory]
    ) -> list[torch.Tensor]:
        """Return the words of histories on the device, perhaps before they are there."""
        if not self.offload:
            on_device = [h.words.whole() for h in histories if isinstance(h.words, DeviceWords)]
            for words in on_device:
                words.record_stream(streams.decodes)
            return on_device
        found = []
        with torch.cuda.stream(streams.copies):
            sizes = [_aligned(4 * (h.words.n_words + PAD_WORDS)) // 4 for h in histories]
            slot.grow_staged(sum(sizes), streams.decodes)
            streams.copies.wait_event(slot.decoded)
            at = 0
            for history, size, copied in zip(histories, sizes, slot.copied, strict=False):
                assert isinstance(history.words, HostWords)
                staged = slot.staged[at : at + history.words.n_words + PAD_WORDS]
                history.words.copy_to(staged)
                copied.record(streams.copies)
                found.append(staged)
                at += size
                self._fetched_bytes += 4 * history.words.n_words
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Leave out streams, buffers and what they hold."""
        names = ("device", "offload", "sm_budget", "arena")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arena = state.pop("arena")
        self.__init__(**state)  # type: ignore[misc]
        self.arena = arena  # which the words of histories come from


class _Streams:
    """The streams and buffers of a GPU's reader."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise BitslabError(f"device: {device}, but torch sees no CUDA GPU")
        self.copies = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self.decodes = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self.slots = [_Slot(device) for _ in range(SLOTS)]


class _Slot:
    """Buffers for the histories of one layer, as they come and as they are decoded."""

    def __init__(self, device: torch.device) -> None:
        self.staged = torch.empty(0, dtype=torch.int32, device=device)
        self.out = torch.empty(0, dtype=torch.uint8, device=device)
        self.copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self.decoded = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.consumed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.key: list[tuple[object, int]] = []
        self.parts: list[list[torch.Tensor]] = []

    def holds(self, histories: Sequence[PackedHistory]) -> bool:
        """Tell whether it was fetched for these histories as they are now."""
        return len(self.key) == len(histories) and all(
            kept is history.identity and version == history.version
            for (kept, version), history in zip(self.key, histories, strict=True)
        )

    def forget(self) -> None:
        """Let go of what it was fetched for."""
        self.key, self.parts = [], []

    def grow_staged(self, n_words: int, reads: torch.cuda.Stream) -> None:
        """Make room for packed words, on the stream that they come by."""
        if self.staged.shape[0] < n_words:
            self.staged = grown(self.staged, n_words, 0)
            self.staged.record_stream(reads)

    def grow_decoded(self, nbytes: int) -> None:
        """Make room for decoded tokens, on the stream that decodes them."""
        self.out = grown(self.out, nbytes, 0)


def check_sm_budget(sm_budget: object) -> None:
    """Refuse what is no number of multiprocessors."""
    if sm_budget is not None and (type(sm_budget) is not int or sm_budget < 1):
        raise ArgumentError(f"sm_budget: {sm_budget!r:.60}, accepted are None and integers from 1")


def _aligned(nbytes: int) -> int:
    return ceil_div(nbytes, ALIGN_BYTES) * ALIGN_BYTES
