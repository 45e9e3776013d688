"""Twin of join.cu: all tokens of a side of a K/V cache in one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..joins import PackedRun, SideTokens
from . import gather_rows


def join_rows(runs: Sequence[PackedRun], side: SideTokens) -> int:
    """Decode the packed tokens of K or V into place, and copy the others behind them.

    Parameters
    ----------
    runs : sequence of PackedRun
        The packed tokens.
    side : SideTokens
        The others, and where all go.

    Returns
    -------
    int
        -1, or the number of a damaged row; then what `out` holds is undefined, and `memory` is as
        it was.
    """
    tail, t, new, memory, out = side
    batch, heads, length, dim = out.shape
    for run in runs:
        rows = torch.empty((len(run.ids), run.layout.format.row_bytes), dtype=torch.uint8)
        bad = gather_rows(run.table, run.layout, run.ids, rows)
        if bad >= 0:
            return bad
        tokens = rows.view(out.dtype).view(batch, heads, run.tokens, dim)
        out[:, :, run.first_token : run.first_token + run.tokens] = tokens
    n = new.shape[2]
    out[:, :, length - n - t : length - n] = tail[:, :, :t]
    out[:, :, length - n :] = new
    if memory is not tail:
        memory[:, :, :t] = tail[:, :, :t]
    memory[:, :, t : t + n] = new
    return -1
