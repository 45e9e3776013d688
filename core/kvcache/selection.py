"""Packed tokens chosen to be fetched: groups of them, by sequence and head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Takes a tensor and a dimension, and reorders, repeats or chooses the sequences in it.
Take = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Selection:
    """The packed tokens that a layer attends to, besides all unpacked ones.

    Parameters
    ----------
    groups : torch.Tensor
        int64 ``[B, H, n]``, ascending: groups of consecutive tokens, by sequence and K/V head,
        counted from the first packed token.
    group_tokens : int
        Tokens of a group.
    packed : int
        Where the tokens end among which they were chosen, a multiple of `group_tokens` behind
        `first`.
    first : int
        Unpacked tokens in front of them, which count as chosen.
    """

    groups: torch.Tensor
    group_tokens: int
    packed: int
    first: int = 0

    @property
    def tokens(self) -> int:
        """Chosen tokens of a head, the first ones among them."""
        return self.first + self.groups.shape[2] * self.group_tokens

    @property
    def n_groups(self) -> int:
        """Groups among which they were chosen."""
        return (self.packed - self.first) // self.group_tokens

    def positions(self) -> torch.Tensor:
        """Return the positions of the chosen tokens, int64 ``[B, H, tokens]``, ascending."""
        found = spread(self.groups, self.group_tokens)
        if not self.first:
            return found
        first = torch.arange(self.first, device=found.device).expand(*found.shape[:2], -1)
        return torch.cat([first, found + self.first], dim=2)


def spread(groups: torch.Tensor, each: int) -> torch.Tensor:
    """Return the members of groups of `each`: int64 ``[B, H, n]`` to ``[B, H, n * each]``."""
    if each == 1:
        return groups
    within = torch.arange(each, device=groups.device)
    return (groups[..., None] * each + within).flatten(2)


def best_groups(
    scores: torch.Tensor, packed: int, group_tokens: int, n_groups: int, first: int = 0
) -> Selection | None:
    """Choose the groups with the highest scores.

    Parameters
    ----------
    scores : torch.Tensor
        ``[B, H, (packed - first) / group_tokens]``, of each group.
    packed, group_tokens, first : int
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
    return Selection(chosen, group_tokens, packed, first)
