"""Host memory of the histories of one cache: how much is taken of the arena, and when."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import torch

from ..engine.kernels.format import ceil_div
from ..engine.memory.arena import Arena, host_arena
from ..engine.memory.host import Pin
from ..engine.memory.pieces import ALIGN_BYTES, Pending, Reservation
from ..engine.tasks import ThreadTask
from ..errors import BitslabError

#: Words of a part that is taken of a reservation whose rest is too small for all that is needed.
MIN_PART_WORDS = 1 << 10
#: Words of the smallest piece that a history takes, and of the smallest reservation that is made
#: ahead: page-locking costs by the call.
MIN_PIECE_WORDS = 1 << 14
#: Memory is taken ahead by this share of what is there, so that pieces are few.
GROWTH = 8
#: What is wanted comes in up to about so many parts where free memory lies in pieces.
PARTS = 4
#: Reservations that are made ahead at once: what is expected may not come. And their bytes at most,
#: where histories have less than GROWTH times as much: they take 10 to 80 ms.
AHEAD, MOST_AHEAD_BYTES = 2, 512 << 20


class HostArena:
    """Takes memory of the process's arena for histories of one cache, some of it ahead.

    A piece is never moved, so that growing copies nothing and waits for nothing but the system.
    Large reservations serve many histories: page-locking costs by the call. Memory that is
    expected to be taken soon is made ready in the arena's thread. What histories no longer use goes
    back to the arena, for any cache.

    Histories say by `allow` what their tokens take unpacked. The cache has no more memory in all
    than that and what is expected to be taken, but where more is needed: memory that is taken ahead
    is memory that packing has saved.

    Parameters
    ----------
    pin : bool
        Whether to page-lock the memory for GPUs.
    slab_bytes : int
        Size of a reservation up to which memory is taken ahead, or an eighth of what is there, or
        of what is expected, up to MOST_AHEAD_BYTES.
    histories : int
        Histories that are expected to take memory in all.
    """

    def __init__(self, *, pin: bool, slab_bytes: int, histories: int = 1) -> None:
        self._pin = pin
        self._slab_bytes = slab_bytes
        self.histories = histories
        self._furthest = 0  # tokens of the history that has most
        self._expected_words = 0  # to be taken
        self._allowed_words: int | None = None  # None: as much as would be good to have
        self._allowed_soon_words = 0  # when all histories have as many tokens as the longest one
        self._begin()

    def _begin(self) -> None:
        """Begin with no memory."""
        self._arena: Arena | None = None  # that the memory is of
        self._rest: Reservation | None = None  # what is left of the last one
        # Reservations that are being made, and their bytes.
        self._ahead: deque[tuple[ThreadTask[Reservation], int]] = deque()
        self._taken_bytes = 0  # by histories
        #: Bytes that histories have given back since `_taken_bytes` was last looked at.
        self._returned_bytes: deque[int] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes that histories have, what is left for them, and what is being made."""
        return self._held_bytes + self._ahead_bytes

    @property
    def _held_bytes(self) -> int:
        while self._returned_bytes:
            self._taken_bytes -= self._returned_bytes.popleft()
        return self._taken_bytes + self._rest_bytes

    @property
    def _rest_bytes(self) -> int:
        return 0 if self._rest is None else self._rest.nbytes

    @property
    def _ahead_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._ahead)

    def others(self, tokens: int) -> int:
        """Return the histories that are expected to have so many tokens next.

        All others follow the first one that comes so far.
        """
        return self.histories - 1 if tokens > self._furthest else 0

    def reach(self, tokens: int) -> None:
        """Record the tokens that a history has."""
        self._furthest = max(self._furthest, tokens)

    def expect(self, words: int, raw_words: int, tokens: int) -> None:
        """Begin to make memory that a history and all others will take soon.

        Parameters
        ----------
        words, raw_words : int
            Words that it is expected to take beside those that it has, and that its tokens take
            unpacked. What was expected before is not expected any more.
        tokens : int
            That it will have. Nothing is begun where others have as many.
        """
        if tokens <= self._furthest:
            return
        self._furthest = tokens
        arena = self._current_arena()
        self._expected_words = self.histories * words
        self._allowed_soon_words = self.histories * raw_words
        self._make_ahead(arena)

    def allow(self, before: int, now: int, *, others: int = 0) -> None:
        """Update the words that the tokens of a history take unpacked: a bound for memory ahead.

        Parameters
        ----------
        before, now : int
            Words.
        others : int
            Histories whose tokens are expected to take as much.
        """
        self._allowed_words = now - before + (self._allowed_words or 0)
        if others:
            self._allowed_soon_words = (others + 1) * now

    def _room_bytes(self, words: int) -> int:
        return 4 * words - self.nbytes

    def take(
        self, least: int, wanted: int, *, others: int = 0, pending: Pending | None = None
    ) -> torch.Tensor:
        """Return a piece of memory.

        It goes back to the arena when the last tensor over it is gone.

        Parameters
        ----------
        least, wanted : int
            Words that are needed, and words that would be good to have.
        others : int
            Pieces of this size that are expected to be taken next.
        pending : callable, optional
            Returns events behind the work of GPUs that may still use the piece when it is gone.

        Returns
        -------
        torch.Tensor
            int32 ``[n]`` on the CPU, least <= n <= wanted, starting at a multiple of 256 bytes.

        Raises
        ------
        BitslabError
            When there is no memory for `least` words; the message says how much that is.
        """
        arena = self._current_arena()
        size_bytes = ceil_div(4 * wanted, ALIGN_BYTES) * ALIGN_BYTES
        rest = self._rest
        if rest is None or rest.nbytes < 4 * least:
            # Free memory is taken in up to PARTS, too: histories of many pieces take long to copy.
            least_bytes = max(4 * least, 4 * wanted // PARTS)
            rest = self._made_ahead(least_bytes)
            if rest is None:
                rest = self._reserve(4 * least, 4 * wanted, others * size_bytes)
            self._rest = rest
        nbytes = min(rest.nbytes, 4 * wanted)
        taken = min(rest.nbytes, size_bytes)  # with what aligns the next piece
        back = partial(self._returned_bytes.append, taken)
        piece = rest.cut(nbytes, pending, back).view(torch.int32)
        self._taken_bytes += taken
        self._expected_words = max(0, self._expected_words - nbytes // 4) + others * size_bytes // 4
        self._make_ahead(arena)
        return piece

    def _current_arena(self) -> Arena:
        """Return the process's arena; in a forked child that has none of the parent's memory."""
        arena = host_arena()
        if self._arena is not arena:
            self._begin()
            self._arena = arena
        return arena

    def _made_ahead(self, least_bytes: int) -> Reservation | None:
        """Return what was made ahead next; None when it has less, which goes back to the arena."""
        if not self._ahead:
            return None
        future, _ = self._ahead[0]
        if future.exception() is not None:
            # It was speculative. What is needed is asked for again, and its error is raised.
            self._ahead.clear()
            self._expected_words = 0
            return None
        self._ahead.popleft()
        made = future.result()
        return made if made.nbytes >= least_bytes else None

    def _make_ahead(self, arena: Arena) -> None:
        """Start to reserve what is expected to be needed."""
        missing = 4 * self._expected_words - self._rest_bytes - self._ahead_bytes
        if self._allowed_words is not None:
            missing = min(missing, self._room_bytes(self._allowed_soon_words))
        if missing > 0:
            # What another cache has left is taken as it is needed, in pieces of any size: ranges as
            # large as a reservation that is made ahead may be none. Were it reserved here, by as
            # little as is missing beside it, as little would be missing again. And it is enough
            # where only the room ahead is missing that `expect` is given with the words.
            free = arena.free_bytes(pin=self._pin_kind, private=self._pin)
            missing = 0 if free >= missing - missing // (GROWTH + 1) else missing - free
        # Few large ones; but who waits for the first launches nothing meanwhile.
        slab_bytes = min(missing // GROWTH, MOST_AHEAD_BYTES)
        slab_bytes = max(self._slab_bytes, self._held_bytes // GROWTH, slab_bytes)
        while missing > 0 and len(self._ahead) < AHEAD:
            nbytes = _whole_words(min(slab_bytes, max(missing, 4 * MIN_PIECE_WORDS)))
            made = arena.reserve_soon(nbytes, pin=self._pin_kind, private=self._pin)
            self._ahead.append((made, nbytes))
            missing -= nbytes

    def _reserve(self, least_bytes: int, wanted_bytes: int, others_bytes: int) -> Reservation:
        """Return memory of the arena to go on with; what was left of the last goes back."""
        self._rest = None
        held_bytes = self._held_bytes
        ahead = max(self._slab_bytes, held_bytes // GROWTH)
        if self._allowed_words is not None:
            soon = self._room_bytes(max(self._allowed_words, self._allowed_soon_words))
            ahead = max(
                min(ahead, wanted_bytes + others_bytes, soon),
                min(held_bytes // GROWTH, self._room_bytes(self._allowed_words)),
            )
        ahead = _whole_words(max(ahead, wanted_bytes))
        arena = host_arena()
        least = max(least_bytes, wanted_bytes // PARTS)
        try:
            return arena.reserve(least, ahead, pin=self._pin_kind, private=self._pin)
        except BitslabError:
            # In more parts it may fit.
            try:
                return arena.reserve(least_bytes, pin=self._pin_kind, private=self._pin)
            except BitslabError as error:
                raise no_memory(least_bytes, self.nbytes, error) from error

    @property
    def _pin_kind(self) -> Pin:
        return True if self._pin else "lazily"

    def __getstate__(self) -> dict[str, Any]:
        """Leave the memory out: histories take their words along."""
        return {"pin": self._pin, "slab_bytes": self._slab_bytes, "histories": self.histories}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _whole_words(nbytes: int) -> int:
    return nbytes // 4 * 4


def no_memory(needed_bytes: int, used_bytes: int, error: BitslabError) -> BitslabError:
    """Return the error of a history that has no memory for more words."""
    return BitslabError(
        f"K/V history: {needed_bytes} bytes more of host memory are needed, with {used_bytes} in "
        f"use ({error}); what is packed remains usable"
    )
