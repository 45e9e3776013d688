"""Where packed words of a history lie: pieces of host memory, or one tensor that readers have."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..engine.kernels.format import PAD_WORDS
from ..engine.memory.host import check_available
from ..errors import BitslabError
from .arena import GROWTH, MIN_PART_WORDS, HostArena, no_memory

#: Words of the smallest piece that a history takes from an arena.
MIN_PIECE_WORDS = 1 << 14


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
                raise no_memory(4 * max(size, least), self.nbytes, error) from error
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
