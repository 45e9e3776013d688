"""Tail: the unpacked last tokens of a history, which grow in place."""

from __future__ import annotations

import torch

from ..errors import ArgumentError, ArgumentTypeError
from .link import NO_STREAM

#: Tokens of the least room ahead.
LEAST_ROOM = 16


class Tail:
    """Tokens ``[B, H, t, D]``, in a tensor with room behind them.

    Parameters
    ----------
    tokens : torch.Tensor
        The tokens, in memory that is not written to.

    Attributes
    ----------
    length : int
        How many of a sequence there are.
    memory : torch.Tensor
        ``[B, H, length and room, D]``, of which the first are the tokens.
    stream : int
        The last stream for whose reading the memory is kept, as `Link.take_turn` says; NO_STREAM
        for memory that is new.
    """

    __slots__ = ("_offered", "_room_end", "_tokens", "length", "memory", "stream")

    def __init__(self, tokens: torch.Tensor) -> None:
        self.memory = tokens
        self.length: int = tokens.shape[2]
        self._room_end = 0  # the tokens that the memory has room for, where it may be written to
        self._tokens: torch.Tensor | None = tokens
        self._offered: tuple[torch.Tensor, int] | None = None  # by `memory_for`, at which length
        self.stream = NO_STREAM

    @property
    def tokens(self) -> torch.Tensor:
        """The tokens; as a view, which is not to be used any more after the next change."""
        if self._tokens is None:
            self._tokens = self.memory.narrow(2, 0, self.length)
        return self._tokens

    def append(self, tokens: torch.Tensor, most_room: int) -> None:
        """Put ``[B, H, n, D]`` behind them.

        Parameters
        ----------
        tokens : torch.Tensor
            Of the same dtype and device, without a gradient.
        most_room : int
            Tokens for which memory is taken ahead at the most.
        """
        n: int = tokens.shape[2]
        end = self.length + n
        if not most_room:
            there = self.tokens if self._tokens is None else self._tokens
            self.memory = self._tokens = torch.cat([there, tokens], dim=2)
            self.length, self._room_end, self.stream = end, 0, NO_STREAM
            return
        if end > self._room_end:
            larger = self._larger(end, most_room)
            larger.narrow(2, 0, self.length).copy_(self.tokens)
            self.memory, self._room_end, self.stream = larger, larger.shape[2], NO_STREAM
        self.memory.narrow(2, self.length, n).copy_(tokens)
        self.length, self._tokens = end, None

    def memory_for(self, n: int, most_room: int) -> torch.Tensor:
        """Return memory that begins with the tokens, or is to, and has room for `n` behind them.

        What is written behind the tokens is not seen before `take`. Where there is no such memory,
        it is taken for up to `most_room` tokens ahead.
        """
        end = self.length + n
        memory = self.memory if end <= self._room_end else self._larger(end, most_room)
        self._offered = memory, self.length
        return memory

    def take(self, memory: torch.Tensor, n: int) -> bool:
        """Take memory of `memory_for`, to which the tokens and `n` behind them were written.

        Return False, and change nothing, where it was made for other tokens than these: some may
        have been packed since.
        """
        offered, self._offered = self._offered, None
        if offered is None or offered[0] is not memory or offered[1] != self.length:
            return False
        if memory is not self.memory:
            self.memory, self._room_end, self.stream = memory, memory.shape[2], NO_STREAM
        self.length += n
        self._tokens = None
        return True

    def has_room(self, n: int) -> bool:
        """Return whether `n` tokens can be written behind them where they lie."""
        return self.length + n <= self._room_end

    def move(self, room_end: int) -> None:
        """Move the tokens to new memory, contiguous, with room for so many in all."""
        batch, heads, _, dim = self.memory.shape
        with torch.inference_mode(False):
            larger = self.memory.new_empty((batch, heads, room_end, dim))
        larger.narrow(2, 0, self.length).copy_(self.tokens)
        self.memory, self._room_end, self.stream = larger, room_end, NO_STREAM
        self._tokens = self._offered = None

    def count(self, n: int) -> None:
        """Take note of `n` tokens that were written behind them; below 0, of fewer."""
        self.length += n
        self._tokens = None

    def _larger(self, end: int, most_room: int) -> torch.Tensor:
        """Return a tensor for so many tokens, with room ahead."""
        batch, heads, _, dim = self.memory.shape
        if not most_room:
            return self.memory.new_empty((batch, heads, end, dim))
        end += min(most_room, max(LEAST_ROOM, end))
        with torch.inference_mode(False):  # any mode of autograd may write to it
            return self.memory.new_empty((batch, heads, end, dim))


def check_like(
    tokens: torch.Tensor, there: torch.Tensor, kind: str, *, device: torch.device, length: int
) -> None:
    """Raise unless tokens are on a device and like those that are there, if any are.

    Parameters
    ----------
    tokens, there : torch.Tensor
        ``[B, H, any, D]``.
    kind : str
        For messages.
    device : torch.device
        Where they must be.
    length : int
        Tokens of a sequence that are there.
    """
    if tokens.dim() != 4:
        raise ArgumentError(f"{kind}: shape {list(tokens.shape)}, expected [B, H, tokens, D]")
    if tokens.device != device:
        raise ArgumentTypeError(f"{kind}: on {tokens.device}, this cache is on {device}")
    if length == 0:
        return
    if tokens.dtype != there.dtype:
        raise ArgumentTypeError(
            f"{kind}: dtype {tokens.dtype}, the cache holds {there.dtype}; a model "
            "cannot change its dtype while a cache is in use: reset it first"
        )
    batch, heads, _, dim = there.shape
    if (tokens.shape[0], tokens.shape[1], tokens.shape[3]) != (batch, heads, dim):
        raise ArgumentError(
            f"{kind}: shape {list(tokens.shape)}, the cache holds "
            f"[{batch}, {heads}, {length}, {dim}]: of another batch or another model"
        )
