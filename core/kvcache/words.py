"""Where packed words of a history lie: pieces of host memory, or one tensor that readers have."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from ..errors import BitslabError
from ..kernels.format import PAD_WORDS, ceil_div
from ..memory.host import HostBuffer, check_available

#: Words of the smallest piece that a history takes from an arena.
MIN_PIECE_WORDS = 1 << 14
#: Pieces start at multiples of this: kernels that read rows over the link want 16 bytes.
ALIGN_WORDS = 64
#: Words of a part that is taken of a buffer whose rest is too small for all that is needed.
MIN_PART_WORDS = 1 << 10
#: Memory is taken ahead by this share of what is there, so that pieces stay few.
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
    """

    def __init__(self, *, pin: bool, slab_bytes: int) -> None:
        self._pin = pin
        self._slab_bytes = slab_bytes
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

    def allow(self, before: int, now: int, *, others: int = 0) -> None:
        """Take what the tokens of a history take unpacked, and took before.

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
            # It was only hoped for. What is needed is asked for again, and told of.
            self._ahead.clear()
            self._expected_words = 0
            return False
        made = future.result()
        if made.shape[0] < least:
            return False  # it serves others
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
            # Less may be had than would be good to have.
            try:
                words = _buffer(least_bytes, pin=self._pin)
            except BitslabError as error:
                raise _refusal(least_bytes, self.nbytes, error) from error
        self._made_bytes += words.nbytes
        return words

    def __getstate__(self) -> dict[str, Any]:
        """Leave the memory out: histories take their words along."""
        return {"pin": self._pin, "slab_bytes": self._slab_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _buffer(nbytes: int, *, pin: bool) -> torch.Tensor:
    """Return new host memory as int32 words."""
    buffer = HostBuffer.allocate(nbytes, pin=True if pin else "lazily", private=pin)
    # What lasts is written to later, perhaps outside the inference mode of a first pass.
    with torch.inference_mode(False):
        return buffer.tensor[: buffer.nbytes // 4 * 4].view(torch.int32)


def _made(nbytes: int, device: int | None) -> torch.Tensor:
    """Return host memory, page-locked where a GPU's number is given, from a thread.

    The current GPU of a thread is the first one until it is told another, and page-locking starts
    the current one.
    """
    if device is None:
        return _buffer(nbytes, pin=False)
    with torch.cuda.device(device):
        return _buffer(nbytes, pin=True)


class Words(Protocol):
    """Words one after the other, that are appended to and cut off at the end."""

    n_words: int

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is taken."""
        ...

    def append(self, words: torch.Tensor, *, most: int | None = None, others: int = 0) -> None:
        """Copy int32 ``[n]`` words behind the last ones; BitslabError changes nothing.

        Memory ahead is taken up to `most` words in all; as would be good to have when None.
        `others` is the number of histories that are expected to append as many next.
        """
        ...

    def truncate(self, n_words: int) -> None:
        """Forget all but the first words; the memory is kept."""
        ...


class HostWords:
    """Words in pieces of host memory.

    Parameters
    ----------
    arena : HostArena
        Where the pieces come from.
    ahead_words : int
        Words that the first piece has room for at the least.

    Notes
    -----
    On a GPU, `append` and `copy_to` run on the current stream and wait for nothing; callers use one
    stream for both, and read `to_tensor` when it has passed them.
    """

    def __init__(self, arena: HostArena, ahead_words: int = 0) -> None:
        self._arena = arena
        self._pieces: list[torch.Tensor] = []
        self._ahead_words = ahead_words
        self._allowed = 0
        self.n_words = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces."""
        return sum(piece.nbytes for piece in self._pieces)

    def append(self, words: torch.Tensor, *, most: int | None = None, others: int = 0) -> None:
        """Copy int32 ``[n]`` words of any device behind the last ones."""
        n = words.shape[0]
        capacity = sum(piece.shape[0] for piece in self._pieces)
        if most is not None:
            self._arena.allow(self._allowed, most, others=others)
            self._allowed = most
        while self.n_words + n > capacity:
            needed = self.n_words + n - capacity
            # Each piece is a transfer of its own.
            wanted = max(needed, self.nbytes // 4 // GROWTH, MIN_PIECE_WORDS)
            if not self._pieces:
                needed = max(needed, self._ahead_words) + PAD_WORDS
                wanted = max(wanted, needed, n + n // GROWTH)
            if most is not None:
                wanted = max(needed, min(wanted, most - capacity))
            # What is left of a buffer is used up, but for scraps.
            least = needed if self._ahead_words else min(needed, MIN_PART_WORDS)
            self._pieces.append(self._arena.take(least, wanted, others=others))
            capacity += self._pieces[-1].shape[0]
            others = 0
        done = 0
        for piece, begin, end in self._ranges(self.n_words, self.n_words + n):
            piece[begin:end].copy_(words[done : done + end - begin], non_blocking=True)
            done += end - begin
        self.n_words += n

    def copy_to(self, out: torch.Tensor) -> None:
        """Copy all words to int32 ``[>= n_words]`` on any device: a transfer for each piece."""
        for target, source in self.transfers(out):
            target.copy_(source, non_blocking=True)

    def transfers(self, out: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the targets and sources that `copy_to` copies."""
        found, done = [], 0
        for piece in self._pieces:
            n = min(piece.shape[0], self.n_words - done)
            if n <= 0:
                break
            found.append((out[done : done + n], piece[:n]))
            done += n
        return found

    def whole(self) -> torch.Tensor | None:
        """Return the words and PAD_WORDS behind them where they lie, if that is in one piece."""
        end = self.n_words + PAD_WORDS
        if self._pieces and self._pieces[0].shape[0] >= end:
            return self._pieces[0][:end]
        return None

    def merge(self) -> None:
        """Bring all words into one piece, for readers of single rows; the pieces before are lost.

        What reads and writes the pieces must have ended. BitslabError changes nothing.
        """
        n = self.n_words + PAD_WORDS
        piece = self._arena.take(n, n + n // GROWTH)
        self.copy_to(piece)
        self._pieces = [piece]

    def truncate(self, n_words: int) -> None:
        """Forget all but the first words."""
        self.n_words = n_words

    def _ranges(self, begin: int, end: int) -> list[tuple[torch.Tensor, int, int]]:
        found, start = [], 0
        for piece in self._pieces:
            stop = start + piece.shape[0]
            first, last = max(begin, start), min(end, stop)
            if first < last:
                found.append((piece, first - start, last - start))
            start = stop
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Take the words along, in memory of their exact size."""
        words = torch.empty(self.n_words, dtype=torch.int32)
        self.copy_to(words)
        return {"arena": self._arena, "words": words}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["arena"])  # type: ignore[misc]
        self.append(state["words"])


class DeviceWords:
    """Words in one tensor on the device that reads them; more of them move it.

    Parameters
    ----------
    device : torch.device
        Where they lie.
    ahead_words : int
        Words that are expected.
    """

    def __init__(self, device: torch.device, ahead_words: int = 0) -> None:
        self._words = torch.zeros(PAD_WORDS, dtype=torch.int32, device=device)
        self._ahead_words = ahead_words
        self.n_words = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self._words.nbytes

    def append(self, words: torch.Tensor, *, most: int | None = None, others: int = 0) -> None:
        """Copy int32 ``[n]`` words of the device behind the last ones, on the current stream."""
        end = self.n_words + words.shape[0]
        size, least = end + PAD_WORDS, self._ahead_words
        try:
            self._words = grown(self._words, size, self.n_words, at_least=least, at_most=most)
        except BitslabError:
            # Less may be had than would be good to have.
            try:
                self._words = grown(self._words, size, self.n_words, at_least=least, at_most=0)
            except BitslabError as error:
                raise _refusal(4 * max(size, least), self.nbytes, error) from error
        self._words[self.n_words : end].copy_(words)
        self.n_words = end

    def whole(self) -> torch.Tensor:
        """Return the words and PAD_WORDS behind them."""
        return self._words[: self.n_words + PAD_WORDS]

    def truncate(self, n_words: int) -> None:
        """Forget all but the first words."""
        self.n_words = n_words

    def __getstate__(self) -> dict[str, Any]:
        """Take the words along, in memory of their exact size."""
        return {"words": self._words[: self.n_words].clone()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["words"].device)  # type: ignore[misc]
        self.append(state["words"], most=0)


def _refusal(needed_bytes: int, used_bytes: int, error: BitslabError) -> BitslabError:
    return BitslabError(
        f"K/V history: {needed_bytes} bytes more of host memory are needed, beside {used_bytes} in "
        f"use ({error}); what is packed stays usable"
    )


def grown(
    t: torch.Tensor, size: int, used: int, *, at_least: int = 0, at_most: int | None = None
) -> torch.Tensor:
    """Return `t`, or a larger tensor with its first `used` entries.

    Parameters
    ----------
    t : torch.Tensor
        ``[n]`` of any dtype and device.
    size : int
        Entries that are needed.
    used : int
        Entries that are copied.
    at_least : int
        Entries that a new tensor has at the least.
    at_most : int, optional
        Entries that it has at the most, but where more are needed.

    Raises
    ------
    BitslabError
        When the CPU's memory does not have the room.
    """
    if size <= t.shape[0]:
        return t
    ahead = size + size // GROWTH
    if at_most is not None:
        ahead = max(size, min(ahead, at_most))
    n = max(ahead, at_least)
    if t.device.type == "cpu":
        check_available(n * t.itemsize)
    with torch.inference_mode(False):
        larger = torch.empty(n, dtype=t.dtype, device=t.device)
    larger[:used].copy_(t[:used])
    return larger
