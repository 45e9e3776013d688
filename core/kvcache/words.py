"""Where the packed words of a history lie: pieces of host memory, or one tensor on a device."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..errors import BitslabError
from ..kernels.format import PAD_WORDS, ceil_div
from ..memory.host import HostBuffer, Pin

#: Words of the smallest piece that a history takes from an arena.
MIN_PIECE_WORDS = 1 << 14
#: Pieces start at multiples of this: kernels that read rows over the link want 16 bytes.
ALIGN_WORDS = 64
#: Memory is taken ahead by this share of what is there, so that pieces stay few.
GROWTH = 4


class HostArena:
    """Host memory that histories take pieces of; it only grows.

    A piece is never moved, so that growing copies nothing and waits for nothing but the system.
    Few large buffers serve many histories: page-locking costs by the call, and each buffer takes a
    file descriptor.

    Parameters
    ----------
    pin : bool
        Whether to page-lock the memory for GPUs.
    slab_bytes : int
        Least size of a buffer.
    """

    def __init__(self, *, pin: bool, slab_bytes: int) -> None:
        self._pin = pin
        self._slab_bytes = slab_bytes
        self._slab = torch.empty(0, dtype=torch.int32)  # what is left of the last buffer
        self.nbytes = 0  # of all buffers

    def take(self, least: int, wanted: int) -> torch.Tensor:
        """Return a piece of memory.

        Parameters
        ----------
        least, wanted : int
            Words that are needed, and words that would be good to have.

        Returns
        -------
        torch.Tensor
            int32 ``[n]`` on the CPU, least <= n <= wanted, starting at a multiple of 256 bytes.

        Raises
        ------
        BitslabError
            When there is no memory for `least` words; the message says how much that is.
        """
        if self._slab.shape[0] < least:
            self._slab = self._allocate(4 * least, 4 * wanted)
        end = ceil_div(wanted, ALIGN_WORDS) * ALIGN_WORDS
        piece, self._slab = self._slab[:wanted], self._slab[end:]
        return piece

    def _allocate(self, least_bytes: int, wanted_bytes: int) -> torch.Tensor:
        ahead = max(wanted_bytes, self._slab_bytes, self.nbytes // GROWTH)
        pin: Pin = True if self._pin else "lazily"
        try:
            buffer = HostBuffer.allocate(ahead, pin=pin)
        except BitslabError:
            # Less may be had than would be good to have.
            try:
                buffer = HostBuffer.allocate(least_bytes, pin=pin)
            except BitslabError as error:
                raise BitslabError(
                    f"K/V history: {least_bytes} bytes more of host memory are needed, beside "
                    f"{self.nbytes} in use ({error}); what is packed stays usable"
                ) from error
        self.nbytes += buffer.nbytes
        # What lasts is written to later, perhaps outside the inference mode of a first pass.
        with torch.inference_mode(False):
            return buffer.tensor[: buffer.nbytes // 4 * 4].view(torch.int32)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the memory out: histories take their words along."""
        return {"pin": self._pin, "slab_bytes": self._slab_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class Words(Protocol):
    """Words one after the other, that are appended to and cut off at the end."""

    n_words: int

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is taken."""
        ...

    def append(self, words: torch.Tensor) -> None:
        """Copy int32 ``[n]`` words behind the last ones; BitslabError changes nothing."""
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
        self.n_words = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces."""
        return sum(piece.nbytes for piece in self._pieces)

    def append(self, words: torch.Tensor) -> None:
        """Copy int32 ``[n]`` words of any device behind the last ones."""
        n = words.shape[0]
        room = sum(piece.shape[0] for piece in self._pieces) - self.n_words
        if n > room:
            least = n - room
            # Each piece is a transfer of its own.
            wanted = max(least, self.nbytes // 4 // 2, MIN_PIECE_WORDS)
            if not self._pieces:
                least = max(least, self._ahead_words) + PAD_WORDS
                wanted = max(wanted, least, n + n // GROWTH)
            self._pieces.append(self._arena.take(least, wanted))
        done = 0
        for piece, begin, end in self._ranges(self.n_words, self.n_words + n):
            piece[begin:end].copy_(words[done : done + end - begin], non_blocking=True)
            done += end - begin
        self.n_words += n

    def copy_to(self, out: torch.Tensor) -> None:
        """Copy all words to int32 ``[>= n_words]`` on any device: a transfer for each piece."""
        done = 0
        for piece in self._pieces:
            n = min(piece.shape[0], self.n_words - done)
            if n <= 0:
                break
            source = piece if n == piece.shape[0] else piece[:n]
            out[done : done + n].copy_(source, non_blocking=True)
            done += n

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
    """Words in one tensor on a device.

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

    def append(self, words: torch.Tensor) -> None:
        """Copy int32 ``[n]`` words of the device behind the last ones, on the current stream."""
        end = self.n_words + words.shape[0]
        self._words = grown(self._words, end + PAD_WORDS, self.n_words, at_least=self._ahead_words)
        self._words[self.n_words : end].copy_(words)
        self.n_words = end

    def whole(self) -> torch.Tensor:
        """Return the words and PAD_WORDS behind them."""
        return self._words[: self.n_words + PAD_WORDS]

    def truncate(self, n_words: int) -> None:
        """Forget all but the first words."""
        self.n_words = n_words


def grown(t: torch.Tensor, size: int, used: int, *, at_least: int = 0) -> torch.Tensor:
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
    """
    if size <= t.shape[0]:
        return t
    with torch.inference_mode(False):
        larger = torch.empty(max(size + size // GROWTH, at_least), dtype=t.dtype, device=t.device)
    larger[:used].copy_(t[:used])
    return larger
