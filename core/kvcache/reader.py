"""HistoryReader: fetches and decodes histories ahead, on streams of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..engine.kernels.cuda.stream import current_stream
from ..errors import ArgumentError, ArgumentTypeError
from .arena import HostArena
from .fetching import FetchBuffers
from .gathering import RowGatherer
from .history import PackedHistory
from .learning import LearningQueue
from .link import Link
from .segment import Segment
from .words import DeviceWords, HostWords, Words

#: The histories of one layer are used while those of the next are fetched.
BUFFERS = 2
#: Sets of row numbers that are kept: layers grow one after the other.
KEPT_IDS = 3
#: Size of a host buffer, where that much is needed: the call that page-locks it costs as much as
#: 64 MiB take to cross the link.
SLAB_BYTES = 64 << 20


class HistoryReader:
    """Reads histories of one device, whose words are in its stores, and prefetches the next ones.

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
        self._buffers = (
            [] if streams is None else [FetchBuffers(self.device, streams) for _ in range(BUFFERS)]
        )
        self._turn = 0
        self.chosen = RowGatherer(self.link, self.sm_budget)
        self._ids: dict[tuple[int, ...], torch.Tensor] = {}  # of segments, by their key

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
        ids = sum(t.nbytes for t in self._ids.values())
        return ids + sum(buffers.nbytes for buffers in self._buffers)

    @property
    def stages(self) -> bool:
        """Whether packed words are copied to the device to be read there."""
        return self.offload and self.link.streams is not None

    def new_words(self) -> Words:
        """Return an empty store of words for a history."""
        if self.offload and self.link.streams is not None:
            return HostWords(self.arena, self.link)
        return DeviceWords(self.link, on_host=self.offload)

    def expect(self, histories: int) -> None:
        """Set the number of histories expected in all."""
        self.arena.histories = histories

    def host_bytes(self, histories: Iterable[PackedHistory]) -> int:
        """Return the bytes of host memory that all histories of this reader have reserved.

        On a GPU this includes memory made ahead; what histories no longer use is the arena's again.
        """
        if not self.offload:
            return 0
        if self.link.streams is not None:
            return self.arena.nbytes
        return sum(history.words.nbytes for history in histories)

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
        if self.link.streams is None:
            return [history.decode_packed() for history in histories]
        if not any(history.packed_tokens for history in histories):
            return [[] for _ in histories]
        buffers = self._used(histories, decoded=True)
        assert buffers.fetched is not None
        return [list(tokens) for tokens in buffers.fetched.tokens]

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
            for them; they hold until `done`.
        """
        if not self.stages:
            return [history.words.fetch() for history in histories]
        buffers = self._used(histories, decoded=False)
        assert buffers.fetched is not None
        return list(buffers.fetched.words)

    def prefetch(
        self, histories: Sequence[PackedHistory], *, decoded: bool = True, early: bool = False
    ) -> None:
        """Start to fetch histories that will be read next, unless they are in flight.

        Waits for nothing.

        Parameters
        ----------
        histories : sequence of PackedHistory
            Of this reader; the K and V of a layer.
        decoded : bool
            Whether `read` is to follow, or `stage`.
        early : bool
            Whether others are read before them: only into buffers that hold nothing for those.
        """
        if self.link.streams is None or not (decoded or self.offload):
            return
        if self._holding(histories, decoded) is not None:
            return
        if early and not any(buffers.free for buffers in self._buffers):
            return
        if any(history.packed_tokens for history in histories):
            self._fetch(histories, decoded)

    def done(self, histories: Sequence[PackedHistory]) -> None:
        """Release what `read` or `stage` returned, after work on the current stream."""
        for buffers in self._buffers:
            if buffers.holds(histories):
                buffers.release(current_stream(self.device))
                buffers.forget()

    # Inside

    def _holding(self, histories: Sequence[PackedHistory], decoded: bool) -> FetchBuffers | None:
        """Return the buffers whose last fetch was of these histories, unchanged since."""
        for buffers in self._buffers:
            if buffers.holds(histories, decoded=decoded):
                return buffers
        return None

    def _used(self, histories: Sequence[PackedHistory], *, decoded: bool) -> FetchBuffers:
        """Return buffers that hold histories, for which the current stream waits."""
        buffers = self._holding(histories, decoded)
        if buffers is None:
            buffers = self._fetch(histories, decoded)
        # The next fetch must use the other buffers.
        self._turn = (self._buffers.index(buffers) + 1) % BUFFERS
        buffers.use(current_stream(self.device))
        return buffers

    def _ids_of(self, segment: Segment) -> torch.Tensor:
        """Return the row numbers of a segment, shared with segments of the same key."""
        key = segment.key
        if key is None:
            return segment.ids()
        found = self._ids.pop(key, None)
        if found is None:
            found = segment.ids()
            if len(self._ids) == KEPT_IDS:
                del self._ids[next(iter(self._ids))]
        self._ids[key] = found  # the last used one last
        return found

    def _fetch(self, histories: Sequence[PackedHistory], decoded: bool) -> FetchBuffers:
        """Start to fetch histories into the next buffers."""
        in_turn = [*self._buffers[self._turn :], *self._buffers[: self._turn]]
        # Not those of a layer that attention has yet to read.
        buffers = next((each for each in in_turn if each.free), in_turn[0])
        self._turn = (self._buffers.index(buffers) + 1) % BUFFERS
        fetch = buffers.fetch(histories, self._ids_of, self.sm_budget, decoded=decoded)
        self.link.fetched_bytes += fetch.nbytes
        return buffers

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the buffers."""
        return {name: self.__dict__[name] for name in ("offload", "sm_budget", "link", "arena")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()


def check_sm_budget(sm_budget: object) -> None:
    """Raise unless `sm_budget` is None or a positive int."""
    if sm_budget is not None and (type(sm_budget) is not int or sm_budget < 1):
        raise ArgumentError(f"sm_budget: {sm_budget!r:.60}, accepted are None and integers from 1")
