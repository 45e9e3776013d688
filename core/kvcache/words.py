"""Word stores of a history: pieces of host memory, or one tensor on the device."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..engine.kernels.format import PAD_WORDS
from ..engine.memory.host import check_available
from ..errors import BitslabError
from .arena import GROWTH, MIN_PART_WORDS, MIN_PIECE_WORDS, HostArena, no_memory
from .link import Link


class Words(Protocol):
    """Words of one history, one after the other, appended to and cut off at the end.

    Attributes
    ----------
    link : Link
        The link to the device that decodes them.
    on_host : bool
        Whether they are in host memory.
    crosses : bool
        Whether they are copied to the device to be read: in host memory, for a GPU.
    n_words : int
        How many there are.
    """

    link: Link
    on_host: bool
    crosses: bool
    n_words: int

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that is taken."""
        ...

    def reserve(self, n_words: int) -> None:
        """Make the first `append` take memory for `n_words` words; the store is empty."""
        ...

    def expect(self, n_words: int, raw_words: int, *, tokens: int) -> None:
        """Make memory ready for a prompt that is being packed, of this and like histories.

        Parameters
        ----------
        n_words, raw_words : int
            Words that it will take, about, and that its tokens take unpacked.
        tokens : int
            Tokens of a sequence.
        """
        ...

    def append(
        self,
        words: torch.Tensor,
        *,
        made: torch.cuda.Event | None = None,
        tokens: int = 0,
        most: int | None = None,
    ) -> None:
        """Copy int32 ``[n]`` words of the device behind the last ones, in the order of all copies.

        BitslabError changes nothing.

        Parameters
        ----------
        words : torch.Tensor
            The words.
        made : torch.cuda.Event, optional
            Passed when they are written; None if they are.
        tokens : int
            Packed tokens that the history has with them.
        most : int, optional
            Words up to which memory ahead is taken; None for no bound.
        """
        ...

    def truncate(self, n_words: int) -> None:
        """Remove all but the first words; the memory is kept."""
        ...

    def trim(self) -> None:
        """Give back memory that lies behind the words and is a piece of its own."""
        ...

    def clear(self) -> None:
        """Remove all words and give the memory back."""
        ...

    def fetch(self) -> torch.Tensor:
        """Return all words and PAD_WORDS behind them, on the device, for the current stream."""
        ...

    def merged(self) -> torch.Tensor:
        """Return the words and PAD_WORDS behind them where they lie, after merging pieces.

        For readers of single rows, on the link's streams. A GPU is waited for where there are
        pieces to be merged.
        """
        ...


class HostWords:
    """Words in pieces of host memory.

    Parameters
    ----------
    arena : HostArena
        Where the pieces come from.
    link : Link
        How they cross.

    Notes
    -----
    On a GPU, `append` waits for nothing: words cross on the link's stream for copies. So must the
    copies of `transfers`.
    """

    on_host = True

    def __init__(self, arena: HostArena, link: Link) -> None:
        self._arena = arena
        self.link = link
        self.crosses = link.streams is not None
        self._pieces: list[torch.Tensor] = []
        self._ahead_words = 0
        self._allowed = 0
        self.n_words = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces."""
        return sum(piece.nbytes for piece in self._pieces)

    def reserve(self, n_words: int) -> None:
        """Make the first piece have room for `n_words` words."""
        if self.nbytes < 4 * n_words:
            self.clear()
            self._ahead_words = n_words

    def expect(self, n_words: int, raw_words: int, *, tokens: int) -> None:
        """Make memory ready while the device packs, in the arena's thread."""
        wanted = min(max(n_words + n_words // GROWTH, MIN_PIECE_WORDS), raw_words)
        # A history whose tokens were removed has kept its pieces, as the others have theirs.
        self._arena.expect(max(0, wanted - self.nbytes // 4), raw_words, tokens)

    def append(
        self,
        words: torch.Tensor,
        *,
        made: torch.cuda.Event | None = None,
        tokens: int = 0,
        most: int | None = None,
    ) -> None:
        """Copy int32 ``[n]`` words behind the last ones."""
        streams = self.link.streams
        if streams is None:
            self._append(words, tokens, most)
            return
        with streams.copies.on():
            streams.copies.wait(made)
            self._append(words, tokens, most)
        streams.copies.keep(words)

    def _append(self, words: torch.Tensor, tokens: int, most: int | None) -> None:
        n = words.shape[0]
        capacity = sum(piece.shape[0] for piece in self._pieces)
        others = self._arena.others(tokens)
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
            self._pieces.append(self._take(least, wanted, others))
            capacity += self._pieces[-1].shape[0]
            others = 0
        done = 0
        for piece, begin, end in self._ranges(self.n_words, self.n_words + n):
            piece[begin:end].copy_(words[done : done + end - begin], non_blocking=True)
            done += end - begin
        self.n_words += n
        self._arena.reach(tokens)

    def transfers(self, out: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return targets in int32 ``[>= n_words]`` and sources of copies that fetch all words."""
        found, done = [], 0
        for piece in self._pieces:
            n = min(piece.shape[0], self.n_words - done)
            if n <= 0:
                break
            found.append((out[done : done + n], piece[:n]))
            done += n
        return found

    def fetch(self) -> torch.Tensor:
        """Return all words and PAD_WORDS behind them, on the device, for the current stream."""
        self.link.fetched_bytes += 4 * self.n_words
        streams = self.link.streams
        if streams is None:
            return self.merged()
        current = torch.cuda.current_stream(self.link.device)
        streams.copies.precede(current)
        out = torch.empty(self.n_words + PAD_WORDS, dtype=torch.int32, device=self.link.device)
        self._copy_to(out)
        # The next words are written to the pieces on that stream.
        streams.copies.follow(current)
        return out

    def merged(self) -> torch.Tensor:
        """Return the words and PAD_WORDS behind them in one piece; BitslabError changes nothing.

        Words behind them are lost.
        """
        n = self.n_words + PAD_WORDS
        if not self._pieces or self._pieces[0].shape[0] < n:
            # Copies from and to the pieces must have ended.
            self.link.wait()
            piece = self._take(n, n + n // GROWTH)
            self._copy_to(piece)
            self._pieces = [piece]
        return self._pieces[0][:n]

    def truncate(self, n_words: int) -> None:
        """Remove all but the first words."""
        self.n_words = n_words

    def trim(self) -> None:
        """Give pieces behind the words back to the arena."""
        kept, start = 0, 0
        while start < self.n_words:
            start += self._pieces[kept].shape[0]
            kept += 1
        del self._pieces[kept:]

    def clear(self) -> None:
        """Give all pieces back to the arena."""
        if self._allowed:
            self._arena.allow(self._allowed, 0)
        self._pieces, self._ahead_words, self._allowed, self.n_words = [], 0, 0, 0

    def _take(self, least: int, wanted: int, others: int = 0) -> torch.Tensor:
        streams = self.link.streams
        # Not a method of the link, whose streams are the next one's while the arena has the piece.
        pending = None if streams is None else streams.pending
        return self._arena.take(least, wanted, others=others, pending=pending)

    def _copy_to(self, out: torch.Tensor) -> None:
        for target, source in self.transfers(out):
            target.copy_(source, non_blocking=True)

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
        self.link.wait_for_copies()
        words = torch.empty(self.n_words, dtype=torch.int32)
        self._copy_to(words)
        return {"arena": self._arena, "link": self.link, "words": words}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["arena"], state["link"])  # type: ignore[misc]
        self._append(state["words"], 0, None)


class DeviceWords:
    """Words in one tensor on the device that reads them; appending may reallocate it.

    Parameters
    ----------
    link : Link
        Whose device they lie on.
    on_host : bool
        Whether that is host memory: on the CPU.
    """

    crosses = False

    def __init__(self, link: Link, *, on_host: bool = False) -> None:
        self.link = link
        self.on_host = on_host
        self._words = torch.empty(0, dtype=torch.int32, device=link.device)
        self._ahead_words = 0
        #: Tokens of a prompt that is being packed, and the words that they take unpacked.
        self._prompt = (0, 0)
        self.n_words = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self._words.nbytes

    def reserve(self, n_words: int) -> None:
        """Make the next tensor have room for `n_words` words."""
        if self.nbytes < 4 * n_words:
            self._words, self._ahead_words = self._words.new_empty(0), n_words

    def expect(self, n_words: int, raw_words: int, *, tokens: int) -> None:
        """Make the first tensor have room for a prompt, whose words may come in many pieces.

        Else it would be made anew for nearly each of them. The number of words follows from those
        of the first piece: what was expected may be far more, and the tensor is kept.
        """
        self._prompt = tokens, raw_words

    def _room_for_prompt(self, n_words: int, tokens: int) -> int:
        """Return the words that a prompt will take whose first tokens take `n_words`."""
        (of_prompt, raw_words), self._prompt = self._prompt, (0, 0)
        if self.n_words or not 0 < tokens < of_prompt:
            return 0
        whole = n_words * of_prompt // tokens
        # With metadata no more than the raw tokens take.
        return whole + min(whole // GROWTH, max(0, raw_words - whole) // 2)

    def append(
        self,
        words: torch.Tensor,
        *,
        made: torch.cuda.Event | None = None,
        tokens: int = 0,
        most: int | None = None,
    ) -> None:
        """Copy int32 ``[n]`` words behind the last ones, on the current stream that made them."""
        if self.link.several_streams:
            self.link.keep_for_turn(self._words)
        end = self.n_words + words.shape[0]
        size, least = end + PAD_WORDS, self._ahead_words
        ahead = max(least, self._room_for_prompt(words.shape[0], tokens))
        try:
            self._words = grown(self._words, size, self.n_words, at_least=ahead, at_most=most)
        except BitslabError:
            # Without room ahead it may fit.
            try:
                self._words = grown(self._words, size, self.n_words, at_least=least, at_most=0)
            except BitslabError as error:
                raise no_memory(4 * max(size, least), self.nbytes, error) from error
        self._words[self.n_words : end].copy_(words)
        self.n_words = end

    def whole(self) -> torch.Tensor:
        """Return the words and PAD_WORDS behind them."""
        end = self.n_words + PAD_WORDS
        if self._words.shape[0] < end:  # nothing was appended
            self._words = self._words.new_zeros(end)
        elif self.link.several_streams:
            self.link.keep_for_turn(self._words)
        return self._words[:end]

    def fetch(self) -> torch.Tensor:
        """Return the words and PAD_WORDS behind them."""
        if self.on_host:
            self.link.fetched_bytes += 4 * self.n_words
        return self.whole()

    def merged(self) -> torch.Tensor:
        """Return the words and PAD_WORDS behind them, for the link's streams."""
        whole = self.whole()
        self.link.keep(whole)
        return whole

    def truncate(self, n_words: int) -> None:
        """Remove all but the first words."""
        self.n_words = n_words

    def trim(self) -> None:
        """Keep the tensor, which is one piece."""

    def clear(self) -> None:
        """Drop the tensor; streams that read it are known to torch's allocator.

        It takes no memory, of which there may be none.
        """
        self._words, self._ahead_words, self.n_words = self._words.new_empty(0), 0, 0
        self._prompt = (0, 0)

    def __getstate__(self) -> dict[str, Any]:
        """Take the words along, in memory of their exact size."""
        words = self._words[: self.n_words].clone()
        return {"link": self.link, "on_host": self.on_host, "words": words}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["link"], on_host=state["on_host"])  # type: ignore[misc]
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
