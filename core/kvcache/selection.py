"""Selection of packed tokens to fetch: scores by token and head, and the choice by them.

The methods are those of InfiniGen (Lee et al., OSDI 2024) and H2O (Zhang et al., NeurIPS 2023).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import ArgumentError, ArgumentTypeError

#: Takes a tensor and a dimension, and reorders, repeats or chooses the sequences in it.
Take = Callable[[torch.Tensor, int], torch.Tensor]
#: A full buffer grows by 1 / GROWTH.
GROWTH = 4
#: Attention probabilities of a prompt are computed for as many queries at once as take this much.
PROBABILITY_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class Selection:
    """The packed tokens that a layer attends to, besides all unpacked ones.

    Parameters
    ----------
    groups : torch.Tensor
        int64 ``[B, H, n]``, ascending: groups of consecutive tokens, by sequence and K/V head.
    group_tokens : int
        Tokens of a group.
    packed : int
        Tokens among which they were chosen, a multiple of `group_tokens`.
    """

    groups: torch.Tensor
    group_tokens: int
    packed: int

    @property
    def tokens(self) -> int:
        """Chosen tokens of a head."""
        return self.groups.shape[2] * self.group_tokens

    def positions(self) -> torch.Tensor:
        """Return the positions of the chosen tokens, int64 ``[B, H, tokens]``, ascending."""
        return spread(self.groups, self.group_tokens)


def spread(groups: torch.Tensor, each: int) -> torch.Tensor:
    """Return the members of groups of `each`: int64 ``[B, H, n]`` to ``[B, H, n * each]``."""
    if each == 1:
        return groups
    within = torch.arange(each, device=groups.device)
    return (groups[..., None] * each + within).flatten(2)


def best_groups(
    scores: torch.Tensor, packed: int, group_tokens: int, n_groups: int
) -> Selection | None:
    """Choose the groups with the highest scores.

    Parameters
    ----------
    scores : torch.Tensor
        ``[B, H, packed / group_tokens]``, of each group.
    packed, group_tokens : int
        As in `Selection`.
    n_groups : int
        Groups that are chosen for each head of each sequence.

    Returns
    -------
    Selection or None
        None when that is all of them.
    """
    if n_groups >= scores.shape[2]:
        return None
    chosen = scores.topk(n_groups, dim=2, sorted=False).indices.sort(dim=2).values
    return Selection(chosen, group_tokens, packed)


class TokenScores(ABC):
    """Scores of the tokens of one layer of one cache, kept for a selector.

    Attributes
    ----------
    length : int
        Tokens that it has seen; fewer than the cache's if the model does not report them.
    """

    length = 0

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether `choose` has what it needs for the next query."""

    @abstractmethod
    def choose(self, packed: int, group_tokens: int) -> Selection | None:
        """Choose among the first `packed` tokens, by groups.

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
        n_groups = packed // group_tokens
        if isinstance(self._heavy, float):
            n_chosen = math.ceil(self._heavy * n_groups)
        else:
            n_chosen = -(-self._heavy // group_tokens)
        if n_chosen >= n_groups:
            return None
        scores = torch.unflatten(self.sums[:, :, :packed], 2, (n_groups, group_tokens)).sum(3)
        return best_groups(scores, packed, group_tokens, n_chosen)

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
        n_groups = packed // group_tokens
        most = math.ceil(self._budget * n_groups)
        grouped = (n_groups, group_tokens)
        if self._near is not None and n_groups:
            near = torch.unflatten(self._near[:, :, :packed], 2, grouped).any(3)
            most = max(1, min(most, math.ceil(float(near.sum(2).float().mean()))))
        ranks = torch.unflatten(self._ranks[:, :, :packed], 2, grouped).amax(3)
        return best_groups(ranks, packed, group_tokens, most)

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
