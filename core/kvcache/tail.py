"""Tail: the unpacked last tokens of a history, which grow in place."""

from __future__ import annotations

import torch

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
    """

    __slots__ = ("_room_end", "_tokens", "length", "memory")

    def __init__(self, tokens: torch.Tensor) -> None:
        self.memory = tokens
        self.length: int = tokens.shape[2]
        self._room_end = 0  # the tokens that the memory has room for, where it may be written to
        self._tokens: torch.Tensor | None = tokens

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
            self.length, self._room_end = end, 0
            return
        if end > self._room_end:
            self._grow(end + min(most_room, max(LEAST_ROOM, end)))
        self.memory.narrow(2, self.length, n).copy_(tokens)
        self.length, self._tokens = end, None

    def _grow(self, room_end: int) -> None:
        """Move to a tensor of so many tokens, which any mode of autograd may write to."""
        batch, heads, _, dim = self.memory.shape
        with torch.inference_mode(False):
            larger = self.memory.new_empty((batch, heads, room_end, dim))
        larger.narrow(2, 0, self.length).copy_(self.tokens)
        self.memory, self._room_end = larger, room_end
