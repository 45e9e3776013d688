"""What a join reads and writes: all tokens of a side of a K/V cache, packed ones and others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .format import RowLayout, TableStorage


@dataclass(frozen=True, eq=False)
class PackedRun:
    """Packed keys or values of consecutive tokens of a batch.

    Parameters
    ----------
    table : TableStorage
        Compact, of the device that joins.
    layout : RowLayout
        How its rows are packed, in one cluster.
    ids : torch.Tensor
        int32 ``[B * H * tokens / row_tokens]``: the rows by batch, head and time; good ones.
    first_token : int
        Position of the first token.
    tokens : int
        Tokens of a sequence.
    row_tokens : int
        Consecutive tokens of a head that a row is; divides `tokens`.
    """

    table: TableStorage
    layout: RowLayout
    ids: torch.Tensor
    first_token: int
    tokens: int
    row_tokens: int = 1


class SideTokens(NamedTuple):
    """The tokens of one side behind the packed ones, and where all go.

    Parameters
    ----------
    tail : torch.Tensor
        ``[B, H, t or more, D]`` of any strides.
    tail_tokens : int
        Of these the first ones count.
    new : torch.Tensor
        ``[B, H, n, D]`` of any strides, behind them.
    memory : torch.Tensor
        `tail`, or ``[B, H, t + n or more, D]``, contiguous, which gets those tokens too; and the
        new ones behind them.
    out : torch.Tensor
        ``[B, H, T, D]``, contiguous: gets all tokens, of which the last are those.
    """

    tail: torch.Tensor
    tail_tokens: int
    new: torch.Tensor
    memory: torch.Tensor
    out: torch.Tensor


#: The packed tokens of K, and of V, in order and without gaps.
Sides = tuple[Sequence[PackedRun], Sequence[PackedRun]]
