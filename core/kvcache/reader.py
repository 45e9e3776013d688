"""Histories brought to their device: fetched and decoded ahead on streams of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import ArgumentError, ArgumentTypeError
from .arena import HostArena
from .era import Era
from .fetching import Slot
from .gathering import RowGatherer
from .history import PackedHistory
from .link import Link
from .words import DeviceWords, HostWords, Words

#: One history is used while the next one comes.
SLOTS = 2
#: Sets of row numbers that are kept: layers change theirs one after the other.
KEPT_IDS = 3
#: Size of a host buffer, where that much is needed: the call that page-locks it costs as much as
#: 64 MiB take to cross the link.
SLAB_BYTES = 64 << 20


class HistoryReader:
    """Reads histories of one device, whose words are in its stores, and fetches the ones to come.

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
        self.offload = offload
        self.sm_budget = sm_budget
        self.link = Link(device)
        on_gpu = device.type == "cuda"
        self.arena = HostArena(pin=on_gpu, slab_bytes=SLAB_BYTES, histories=histories)
        self._start()

    def _start(self) -> None:
        streams = self.link.streams
        self._slots = [] if streams is None else [Slot(self.device, streams) for _ in range(SLOTS)]
        self._turn = 0
        self.chosen = RowGatherer(self.link, self.sm_budget)
        self._ids: dict[tuple[int, ...], torch.Tensor] = {}  # of eras, by their key

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
        """Bytes on the device of the buffers that histories come by; none on the CPU."""
        ids = sum(t.nbytes for t in self._ids.values())
        return ids + sum(slot.nbytes for slot in self._slots)

    def new_words(self) -> Words:
        """Return an empty store of words for a history."""
        if self.offload and self.link.streams is not None:
            return HostWords(self.arena, self.link)
        return DeviceWords(self.link, on_host=self.offload)

    def expect(self, histories: int) -> None:
        """Take note of how many histories there will be in all."""
        self.arena.histories = histories

    def host_bytes(self, histories: Iterable[PackedHistory]) -> int:
        """Return the bytes of host memory that all histories of this reader have reserved.

        With those, on a GPU, that are made ahead, or that histories have given up.
        """
        if not self.offload:
            return 0
        if self.link.streams is not None:
            return self.arena.nbytes
        return sum(history.words.nbytes for history in histories)

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
        if self.link.streams is None:
            return [history.decode_packed() for history in histories]
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
        if self.link.streams is None or any(slot.holds(histories) for slot in self._slots):
            return
        if any(history.packed_tokens for history in histories):
            self._fetch(histories)

    def done(self, histories: Sequence[PackedHistory]) -> None:
        """Say that the current stream has used what `read` returned last for these histories."""
        for slot in self._slots:
            if slot.holds(histories):
                slot.forget()
                slot.consumed.record(torch.cuda.current_stream(self.device.index))

    # Inside

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

    def _fetch(self, histories: Sequence[PackedHistory]) -> Slot:
        """Start to fetch and decode histories into the buffers whose turn it is."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % SLOTS
        fetch = slot.fetch(histories, self._ids_of, self.sm_budget)
        self.link.fetched_bytes += fetch.nbytes
        return slot

    def __getstate__(self) -> dict[str, Any]:
        """Leave out buffers and what they hold."""
        return {name: self.__dict__[name] for name in ("offload", "sm_budget", "link", "arena")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()


def check_sm_budget(sm_budget: object) -> None:
    """Refuse what is no number of multiprocessors."""
    if sm_budget is not None and (type(sm_budget) is not int or sm_budget < 1):
        raise ArgumentError(f"sm_budget: {sm_budget!r:.60}, accepted are None and integers from 1")
