"""Host memory that histories take pieces of for their packed words."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ..engine.kernels.format import ceil_div
from ..engine.memory.host import HostBuffer
from ..errors import BitslabError

#: Pieces start at multiples of this: kernels that read rows over the link want 16 bytes.
ALIGN_WORDS = 64
#: Words of a part that is taken of a buffer whose rest is too small for all that is needed.
MIN_PART_WORDS = 1 << 10
#: Memory is taken ahead by this share of what is there, so that pieces are few.
GROWTH = 8
#: Buffers that are made ahead at once: what is expected may not come.
AHEAD = 2
THREAD_NAME = "bitslab-history"


class HostArena:
    """Host memory that histories take pieces of; it only grows.

    A piece is never moved, so that growing copies nothing and waits for nothing but the system.
    Few large buffers serve many histories: page-locking costs by the call, and each buffer takes a
    file descriptor. Memory that is expected to be taken soon is made ready in a thread.

    Histories say by `allow` what their tokens take unpacked. Buffers are no larger in all than that
    and what is expected to be taken, but where more is needed: memory that is taken ahead is memory
    that packing has saved.

    Parameters
    ----------
    pin : bool
        Whether to page-lock the memory for GPUs.
    slab_bytes : int
        Size of a buffer up to which memory is taken ahead, or an eighth of what is there.
    histories : int
        Histories that are expected to take memory in all.
    """

    def __init__(self, *, pin: bool, slab_bytes: int, histories: int = 1) -> None:
        self._pin = pin
        self._slab_bytes = slab_bytes
        self.histories = histories
        self._furthest = 0  # tokens of the history that has most
        self._slab = torch.empty(0, dtype=torch.int32)  # what is left of the last buffer
        # Buffers that are being made, and their bytes.
        self._ahead: deque[tuple[Future[torch.Tensor], int]] = deque()
        self._expected_words = 0  # to be taken
        self._allowed_words: int | None = None  # None: as much as would be good to have
        self._allowed_soon_words = 0  # when all histories have as many tokens as the longest one
        self._thread: ThreadPoolExecutor | None = None
        self._made_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, and of those that are being made."""
        return self._made_bytes + self._ahead_bytes

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

    def take(self, least: int, wanted: int, *, others: int = 0) -> torch.Tensor:
        """Return a piece of memory.

        Parameters
        ----------
        least, wanted : int
            Words that are needed, and words that would be good to have.
        others : int
            Pieces of this size that are expected to be taken next.

        Returns
        -------
        torch.Tensor
            int32 ``[n]`` on the CPU, least <= n <= wanted, starting at a multiple of 256 bytes.

        Raises
        ------
        BitslabError
            When there is no memory for `least` words; the message says how much that is.
        """
        size = ceil_div(wanted, ALIGN_WORDS) * ALIGN_WORDS
        if self._slab.shape[0] < least and not self._next_slab(least):
            self._slab = self._allocate(4 * least, 4 * wanted, 4 * others * size)
        piece, self._slab = self._slab[:wanted], self._slab[size:]
        self._expected_words = max(0, self._expected_words - piece.shape[0]) + others * size
        self._make_ahead()
        return piece

    def _next_slab(self, least: int) -> bool:
        """Go on with a buffer that was made ahead; False when there is none for `least` words."""
        if not self._ahead:
            return False
        future, _ = self._ahead[0]
        if future.exception() is not None:
            # It was speculative. What is needed is asked for again, and its error is raised.
            self._ahead.clear()
            self._expected_words = 0
            return False
        made = future.result()
        if made.shape[0] < least:
            return False  # other histories may use it
        self._ahead.popleft()
        self._slab = made
        self._made_bytes += made.nbytes
        return True

    def _make_ahead(self) -> None:
        """Start to make the buffers that are expected to be needed."""
        slab_bytes = max(self._slab_bytes, self._made_bytes // GROWTH)
        missing = 4 * (self._expected_words - self._slab.shape[0]) - self._ahead_bytes
        if self._allowed_words is not None:
            missing = min(missing, self._room_bytes(self._allowed_soon_words))
        while missing > 0 and len(self._ahead) < AHEAD:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME)
            device = torch.cuda.current_device() if self._pin else None
            nbytes = min(slab_bytes, max(missing, 4 * MIN_PART_WORDS))
            self._ahead.append((self._thread.submit(_made, nbytes, device), nbytes))
            missing -= nbytes

    def _allocate(self, least_bytes: int, wanted_bytes: int, others_bytes: int) -> torch.Tensor:
        ahead = max(self._slab_bytes, self._made_bytes // GROWTH)
        if self._allowed_words is not None:
            soon = self._room_bytes(max(self._allowed_words, self._allowed_soon_words))
            ahead = max(
                min(ahead, wanted_bytes + others_bytes, soon),
                min(self._made_bytes // GROWTH, self._room_bytes(self._allowed_words)),
            )
        ahead = max(ahead, wanted_bytes)
        try:
            words = _buffer(ahead, pin=self._pin)
        except BitslabError:
            # Without memory ahead it may fit.
            try:
                words = _buffer(least_bytes, pin=self._pin)
            except BitslabError as error:
                raise no_memory(least_bytes, self.nbytes, error) from error
        self._made_bytes += words.nbytes
        return words

    def __getstate__(self) -> dict[str, Any]:
        """Leave the memory out: histories take their words along."""
        return {"pin": self._pin, "slab_bytes": self._slab_bytes, "histories": self.histories}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _buffer(nbytes: int, *, pin: bool) -> torch.Tensor:
    """Return new host memory as int32 words."""
    buffer = HostBuffer.allocate(nbytes, pin=True if pin else "lazily", private=pin)
    # Written to later, perhaps outside the inference mode of a first pass.
    with torch.inference_mode(False):
        return buffer.tensor[: buffer.nbytes // 4 * 4].view(torch.int32)


def _made(nbytes: int, device: int | None) -> torch.Tensor:
    """Return host memory, page-locked where a GPU's number is given, from a thread.

    The current GPU of a new thread is the first one, and page-locking makes a context on the
    current one.
    """
    if device is None:
        return _buffer(nbytes, pin=False)
    with torch.cuda.device(device):
        return _buffer(nbytes, pin=True)


def no_memory(needed_bytes: int, used_bytes: int, error: BitslabError) -> BitslabError:
    """Return the error of a history that has no memory for more words."""
    return BitslabError(
        f"K/V history: {needed_bytes} bytes more of host memory are needed, with {used_bytes} in "
        f"use ({error}); what is packed remains usable"
    )
