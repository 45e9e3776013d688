"""Accumulated attention probability, the score of H2O (Zhang et al., NeurIPS 2023)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..selection import Selection, Take, best_groups
from .base import TokenBuffer, TokenScores

#: Attention probabilities of a prompt are computed for as many queries at once as take this much.
PROBABILITY_BYTES = 64 << 20


class HeavyScores(TokenScores):
    """Accumulated attention probability of each token and K/V head (H2O).

    Parameters
    ----------
    heavy : int or float
        Packed tokens that are chosen: their number, rounded up to whole groups, or, as a float,
        their share of all packed tokens.
    """

    def __init__(self, heavy: int | float) -> None:
        self._heavy = heavy
        self._sums = TokenBuffer()

    @property
    def ready(self) -> bool:
        """Whether it has seen tokens."""
        return self.length > 0

    @property
    def sums(self) -> torch.Tensor:
        """Probabilities, summed over queries, float32 ``[B, H, length]``."""
        return self._sums.tokens

    def add(self, probabilities: torch.Tensor, chosen: Selection | None, new: int) -> None:
        """Add the probabilities of a forward pass, and its new tokens.

        Parameters
        ----------
        probabilities : torch.Tensor
            ``[B, H, n]``, summed over queries and the query heads of each K/V head: of the
            `chosen` tokens, and of all tokens behind those among which they were chosen.
        chosen : Selection or None
            None when all tokens were attended.
        new : int
            New tokens.
        """
        probabilities = probabilities.float()
        self._sums.append(probabilities.new_zeros((*probabilities.shape[:2], new)))
        self.length = self._sums.length
        if chosen is None:
            self.sums.add_(probabilities)
            return
        n = chosen.tokens
        self.sums.scatter_add_(2, chosen.positions(), probabilities[:, :, :n])
        self.sums[:, :, chosen.packed :].add_(probabilities[:, :, n:])

    def choose(self, packed: int, group_tokens: int) -> Selection | None:
        """Choose the groups with the largest sums."""
        first = self.first
        n_groups = (packed - first) // group_tokens
        if isinstance(self._heavy, float):
            n_chosen = math.ceil(self._heavy * n_groups)
        else:
            n_chosen = -(-self._heavy // group_tokens)
        if n_chosen >= n_groups:
            return None
        scores = torch.unflatten(self.sums[:, :, first:packed], 2, (n_groups, group_tokens)).sum(3)
        return best_groups(scores, packed, group_tokens, n_chosen, first)

    def tensors(self) -> list[torch.Tensor]:
        """Return the sums."""
        return [self.sums]

    def prepare_take(self, take: Take) -> Callable[[], None]:
        """Return a commit that reorders, repeats or chooses sequences."""
        return self._sums.prepare_take(take)

    def crop(self, length: int) -> None:
        """Keep the first tokens, with what later queries have added to their sums."""
        self._sums.crop(length)
        self.length = self._sums.length

    def reset(self) -> None:
        """Forget all tokens."""
        self._sums = TokenBuffer()
        self.length = 0


def probability_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    last_queries: int | None = None,
) -> torch.Tensor:
    """Return attention probabilities summed over queries and the query heads of each K/V head.

    Parameters
    ----------
    query : torch.Tensor
        ``[B, query heads, q, D]``.
    key : torch.Tensor
        ``[B, H, n, D]``; without a mask the last q are those of the queries.
    mask : torch.Tensor, optional
        bool (True: may attend) or added to the logits, broadcast to ``[B, query heads, q, n]``.
        Left out, queries attend to all keys up to their own.
    scaling, softcap, sinks
        As attention has them; sinks ``[query heads]`` are logits that take part in the sum only.
    last_queries : int, optional
        Queries that count, the last ones; all when left out.

    Returns
    -------
    torch.Tensor
        float32 ``[B, H, n]``.
    """
    batch, heads, n_queries, _ = query.shape
    kv_heads, n_keys = key.shape[1:3]
    grouped = torch.unflatten(query, 1, (kv_heads, -1))
    first = 0 if last_queries is None else max(0, n_queries - last_queries)
    step = max(1, PROBABILITY_BYTES // max(1, 4 * batch * heads * n_keys))
    places = torch.arange(n_keys, device=key.device)
    total = torch.zeros((batch, kv_heads, n_keys), dtype=torch.float32, device=key.device)
    for begin in range(first, n_queries, step):
        end = min(begin + step, n_queries)
        logits = (grouped[:, :, :, begin:end] @ key[:, :, None].mT).flatten(1, 2).float() * scaling
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if mask is None:
            own = places[n_keys - n_queries + begin : n_keys - n_queries + end]
            logits = logits.masked_fill(places > own[:, None], -math.inf)
        else:
            part = mask[:, :, begin:end]
            if part.dtype == torch.bool:
                logits = logits.masked_fill(~part, -math.inf)
            else:
                logits = logits + part
        if sinks is not None:
            sink = sinks.float().view(1, -1, 1, 1).expand(batch, -1, end - begin, 1)
            logits = torch.cat([logits, sink], dim=-1)
        # The queries of padding may attend nothing.
        found = logits.softmax(-1).nan_to_num(0.0)[..., :n_keys]
        total += torch.unflatten(found, 1, (kv_heads, -1)).sum((2, 3))
    return total
