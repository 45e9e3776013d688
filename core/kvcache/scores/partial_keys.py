"""Speculated scores by partial skewed keys, those of InfiniGen (Lee et al., OSDI 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ...errors import ArgumentError
from ..selection import Selection, Take, best_groups
from .base import TokenBuffer, TokenScores


class PartialKeys(TokenScores):
    """Partial skewed keys, and ranks of tokens for the next query (InfiniGen).

    Parameters
    ----------
    skew : torch.Tensor
        float32 ``[H, D, D]``, orthogonal: of each K/V head, see `skew_of`.
    partial : float
        Share of the columns that are kept, of each head of each sequence.
    budget : float
        Share of the packed tokens that are chosen at most.
    alpha : float or None
        Tokens are chosen whose score, as a logit of attention, is above the highest less `alpha`;
        the mean number over heads and sequences for all of them. None for the whole budget always.

    Notes
    -----
    With `alpha`, `choose` waits for a GPU to know the number.
    """

    def __init__(
        self, skew: torch.Tensor, *, partial: float, budget: float, alpha: float | None
    ) -> None:
        self._skew = skew
        self._partial = partial
        self._budget = budget
        self._alpha = alpha
        self._keys = TokenBuffer()
        self._project: torch.Tensor | None = None  # [B, H, D, columns]
        self._ranks: torch.Tensor | None = None  # [B, H, length], logarithms of probabilities
        self._near: torch.Tensor | None = None  # [B, H, length], within alpha of the highest score

    @property
    def ready(self) -> bool:
        """Whether the next query was speculated."""
        return self._ranks is not None

    @property
    def columns(self) -> int:
        """Columns that are kept of D."""
        return max(1, math.ceil(self._partial * self._skew.shape[2]))

    @property
    def keys(self) -> torch.Tensor:
        """Kept columns of the skewed keys, of the keys' dtype, ``[B, H, length, columns]``."""
        return self._keys.tokens

    def see(self, query: torch.Tensor, new_keys: torch.Tensor) -> None:
        """Append the keys of a forward pass; the first ones decide on the columns.

        Parameters
        ----------
        query : torch.Tensor
            ``[B, query heads, q, D]``, after rotation.
        new_keys : torch.Tensor
            ``[B, H, q, D]``, after rotation.
        """
        self._ranks = None
        if self._project is None:
            self._project = self._choose_columns(query, new_keys)
        self._keys.append(new_keys @ self._project.to(new_keys.dtype))
        self.length = self._keys.length

    def speculate(
        self, query: torch.Tensor, scaling: float, allowed: torch.Tensor | None = None
    ) -> None:
        """Rank tokens by a guess of this layer's next query.

        Parameters
        ----------
        query : torch.Tensor
            ``[B, query heads, q, D]``, after rotation.
        scaling : float
            Factor of query times key in the logits.
        allowed : torch.Tensor, optional
            bool, broadcast to ``[B, query heads, q, length]``: tokens that each query may attend.
        """
        self._ranks = None
        if self._project is None:
            return
        heads = self.keys.shape[1]
        query = query.to(self.keys.device, self.keys.dtype) * scaling
        query = torch.unflatten(query, 1, (heads, -1))
        project = self._project.to(query.dtype)[:, :, None]
        scores = (query @ project) @ self.keys[:, :, None].mT  # [B, H, G, q, length]
        scores = scores.float()
        if allowed is not None:
            allowed = allowed.to(scores.device).expand(-1, query.shape[1] * query.shape[2], -1, -1)
            scores = scores.masked_fill(~torch.unflatten(allowed, 1, (heads, -1)), -math.inf)
        # Tokens that one query head attends to strongly rank before the best of a head that attends
        # to all tokens alike. Queries of padding, that may attend to nothing, have no highest
        # score.
        total = scores.logsumexp(-1, keepdim=True).nan_to_num(neginf=0.0)
        self._ranks = (scores - total).amax((2, 3))
        if self._alpha is not None:
            highest = scores.amax(-1, keepdim=True)
            self._near = (scores > highest - self._alpha).any(2).any(2)

    def choose(self, packed: int, group_tokens: int) -> Selection | None:
        """Choose the groups of the best tokens; all if no query was speculated."""
        if self._ranks is None:
            return None
        first = self.first
        n_groups = (packed - first) // group_tokens
        most = math.ceil(self._budget * n_groups)
        grouped = (n_groups, group_tokens)
        if self._near is not None and n_groups:
            near = torch.unflatten(self._near[:, :, first:packed], 2, grouped).any(3)
            most = max(1, min(most, math.ceil(float(near.sum(2).float().mean()))))
        ranks = torch.unflatten(self._ranks[:, :, first:packed], 2, grouped).amax(3)
        return best_groups(ranks, packed, group_tokens, most, first)

    def tensors(self) -> list[torch.Tensor]:
        """Return the kept columns of the keys, and their projection."""
        return [] if self._project is None else [self.keys, self._project]

    def prepare_take(self, take: Take) -> Callable[[], None]:
        """Return a commit that reorders, repeats or chooses sequences."""
        take_keys = self._keys.prepare_take(take)
        project = None if self._project is None else take(self._project, 0)

        def commit() -> None:
            take_keys()
            self._ranks, self._project = None, project

        return commit

    def crop(self, length: int) -> None:
        """Keep the first tokens."""
        self._ranks = None
        self._keys.crop(length)
        self.length = self._keys.length
        if not self.length:
            self._project = None

    def reset(self) -> None:
        """Forget all tokens and the choice of columns."""
        self._keys = TokenBuffer()
        self._ranks = self._near = self._project = None
        self.length = 0

    def _choose_columns(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        heads, dim = self._skew.shape[:2]
        if keys.shape[1] != heads or keys.shape[3] != dim:
            raise ArgumentError(
                f"select: fitted to {heads} K/V heads of {dim}, the model has {keys.shape[1]} of "
                f"{keys.shape[3]}"
            )
        skew = self._skew.to(keys.device)
        total = query.new_zeros((), dtype=torch.float32)
        for t in (torch.unflatten(query, 1, (heads, -1)).flatten(2, 3), keys):
            # By pieces: a long prompt in float32 takes more than the layer's K and V.
            for begin in range(0, t.shape[2], 1024):
                piece = t[:, :, begin : begin + 1024].float()
                total = total + (piece @ skew).abs().sum(2)  # [B, H, D]
        columns = total.topk(self.columns, dim=2).indices
        index = columns[:, :, None].expand(-1, -1, dim, -1)
        return skew.expand(keys.shape[0], -1, -1, -1).gather(3, index)


def skew_of(gram: torch.Tensor) -> torch.Tensor:
    """Return the rotation that concentrates queries in few columns.

    Products of queries and keys that are both multiplied by it are unchanged.

    Parameters
    ----------
    gram : torch.Tensor
        ``[H, D, D]``, ``Q.T @ Q`` of the rotated queries of each K/V head.

    Returns
    -------
    torch.Tensor
        float32 ``[H, D, D]``: the right singular vectors of Q in columns, the largest first.
    """
    vectors = torch.linalg.eigh(gram.double()).eigenvectors
    skew: torch.Tensor = vectors.flip(-1).float()
    return skew
