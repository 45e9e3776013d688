"""TokenScores: what a method that scores tokens implements; and what methods share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from ...errors import ArgumentError, ArgumentTypeError
from ..selection import Selection, Take

#: A full buffer grows by 1 / GROWTH.
GROWTH = 4


class TokenScores(ABC):
    """Scores of the tokens of one layer of one cache, kept for a selector.

    Attributes
    ----------
    length : int
        Tokens that it has seen; fewer than the cache's if the model does not report them.
    first : int
        Unpacked tokens in front of the packed ones, as the cache has them: see `Selection`.
    """

    length = 0
    first = 0

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether `choose` has what it needs for the next query."""

    @abstractmethod
    def choose(self, packed: int, group_tokens: int) -> Selection | None:
        """Choose among the tokens from `first` up to `packed`, by groups.

        Returns
        -------
        Selection or None
            None for all of them.
        """

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that it holds on the device."""

    @property
    def nbytes(self) -> int:
        """Bytes of these tensors, with room ahead."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors())

    def take(self, take: Take) -> None:
        """Reorder, repeat or choose sequences."""
        self.prepare_take(take)()

    @abstractmethod
    def prepare_take(self, take: Take) -> Callable[[], None]:
        """Return a commit that reorders, repeats or chooses sequences.

        Nothing changes before it is called.
        """

    @abstractmethod
    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, where there are more."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all tokens."""


class TokenBuffer:
    """A tensor ``[B, H, length, ...]`` that grows by tokens, with room ahead."""

    def __init__(self) -> None:
        self.length = 0
        self._buffer: torch.Tensor | None = None

    @property
    def tokens(self) -> torch.Tensor:
        """The tokens, a view."""
        if self._buffer is None:
            return torch.empty((0, 0, 0))
        return self._buffer[:, :, : self.length]

    def append(self, new: torch.Tensor) -> None:
        """Put ``[B, H, n, ...]`` behind the last ones."""
        end = self.length + new.shape[2]
        if self._buffer is None or self._buffer.shape[2] < end:
            shape = list(new.shape)
            shape[2] = end + end // GROWTH
            # Written to later, perhaps outside the inference mode of a first pass.
            with torch.inference_mode(False):
                larger = new.new_empty(shape)
            if self._buffer is not None:
                larger[:, :, : self.length].copy_(self.tokens)
            self._buffer = larger
        self._buffer[:, :, self.length : end].copy_(new)
        self.length = end

    def prepare_take(self, take: Take) -> Callable[[], None]:
        """Return a commit that reorders, repeats or chooses sequences."""
        buffer = None if self._buffer is None else take(self._buffer, 0)

        def commit() -> None:
            self._buffer = buffer

        return commit

    def crop(self, length: int) -> None:
        """Keep the first tokens, where there are more."""
        self.length = min(self.length, length)
        if not self.length:
            self._buffer = None


def check_share(name: str, value: object) -> float:
    """Return a share as a float.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        For what is no number, or not above 0 and up to 1.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(f"{name}: expected a number, got {value!r:.60}")
    if not 0 < value <= 1:
        raise ArgumentError(f"{name}: {value}, accepted are shares above 0 and up to 1")
    return float(value)
