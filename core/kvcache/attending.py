"""Attention to the tokens of a layer as they are packed, by one pass of a kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .history import PackedHistory
from .reader import HistoryReader


def attend_packed(
    reader: HistoryReader,
    histories: Sequence[PackedHistory],
    query: torch.Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    first_valid: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return attention to all tokens of a layer; None where the kernels do not serve them.

    Parameters
    ----------
    reader : HistoryReader
        That of the histories.
    histories : sequence of PackedHistory
        Of K and V, ``[B, H, T, D]`` each.
    query : torch.Tensor
        ``[B, query heads, q, D]``, of the last q tokens.
    scaling, softcap, sinks
        As attention has them; sinks ``[query heads]`` are logits that take part in the sum only.
    first_valid : torch.Tensor, optional
        int32 ``[B]``: the first token of each sequence that is no padding.

    Returns
    -------
    torch.Tensor or None
        ``[B, q, query heads, D]`` of the query's dtype.
    """
    return None
