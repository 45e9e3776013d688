"""OwnFirst: the first tokens of sequences behind padding, as they came."""

from __future__ import annotations

import torch

from .selection import Take


class OwnFirst:
    """The first tokens of K or of V of sequences that begin behind padding on the left.

    A history that quantises keeps its first tokens as they came, which counts most where they are
    those that attention always looks at; behind padding these stand elsewhere in each sequence. Of
    what is packed a copy is kept here.

    Parameters
    ----------
    positions : torch.Tensor
        int32 ``[B]`` on the device: where each sequence begins.
    last : int
        The largest of them.
    count : int
        How many of each sequence are kept.

    Attributes
    ----------
    positions, last, count
        As given.
    tokens : torch.Tensor or None
        ``[B, H, count, D]``; of those that are not packed whatever it holds. None before any are.
    """

    __slots__ = ("count", "last", "positions", "tokens")

    def __init__(self, positions: torch.Tensor, last: int, count: int) -> None:
        self.positions, self.last, self.count = positions, last, count
        self.tokens: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that lies on the device."""
        return [self.positions] if self.tokens is None else [self.positions, self.tokens]

    def begin_later(self, positions: torch.Tensor, last: int, packed: int) -> None:
        """Follow sequences that had not begun within the first `packed` tokens.

        Parameters
        ----------
        positions, last
            As of this object, as they are known now.
        packed : int
            Before that position, tokens are packed.
        """
        if last != self.last and positions.shape == self.positions.shape:
            began = self.positions < packed
            self.positions = torch.where(began, self.positions, positions)
            self.last = last

    def take_over(self, tokens: torch.Tensor, first: int) -> None:
        """Keep those that are among tokens ``[B, H, n, D]`` from a position on.

        The host waits for nothing.
        """
        n = tokens.shape[2]
        if first >= self.last + self.count or not n:
            return
        place = self._positions() - first
        there = (place >= 0) & (place < n)
        found = tokens.gather(2, _index(place.clamp(0, n - 1), tokens))
        if self.tokens is None:
            self.tokens = found
        else:
            self.tokens = torch.where(there[:, None, :, None], found, self.tokens)

    def put_into(self, tokens: torch.Tensor, packed: int) -> None:
        """Put them into all tokens ``[B, H, n, D]`` of the sequences, in the place of coded ones.

        Parameters
        ----------
        tokens : torch.Tensor
            Changed in place.
        packed : int
            Before that position they are kept here, from it on unpacked.
        """
        packed = min(packed, tokens.shape[2])
        if not packed or self.tokens is None:
            return
        place = self._positions()
        there = place < packed
        # What is not kept writes what is there: at 0, which is kept of sequences without padding
        # alone, and there the same.
        index = _index(place.masked_fill(~there, 0), tokens)
        tokens.scatter_(
            2, index, torch.where(there[:, None, :, None], self.tokens, tokens.gather(2, index))
        )

    def taken(self, take: Take) -> OwnFirst:
        """Return those of other sequences."""
        found = OwnFirst(take(self.positions, 0), self.last, self.count)
        found.tokens = None if self.tokens is None else take(self.tokens, 0)
        return found

    def _positions(self) -> torch.Tensor:
        """Return where they stand, int64 ``[B, count]``."""
        each = torch.arange(self.count, device=self.positions.device)
        return self.positions.long()[:, None] + each


def _index(place: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return an index of tokens ``[B, H, n, D]`` as `gather` takes it, ``[B, H, count, D]``."""
    return place[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[3])
