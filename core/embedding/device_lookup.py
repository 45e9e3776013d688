"""Training lookups by ids on a GPU: the host neither reads the ids nor waits for the GPU.

Dirty bits and access counters of such a batch are kept on the GPU until the next sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..engine.kernels.cuda import kernels_on
from ..errors import BitslabError
from .device_counters import device_counters_of
from .gradients import NONE
from .miss_buffer import room_for

if TYPE_CHECKING:
    from .rows import CachedRows


def runs_on_gpu(rows: CachedRows, ids: torch.Tensor, *, fetches: bool) -> bool:
    """Return whether a lookup may run on the GPU alone.

    Parameters
    ----------
    rows : CachedRows
        The rows.
    ids : torch.Tensor
        int64 or int32.
    fetches : bool
        Whether the lookup may make rows resident.
    """
    if not ids.is_cuda or ids.device != rows.device:
        return False
    if rows.cache != "rows" or rows.table.row_bytes == 0:
        return False
    return rows.all_resident or fetches


def look_up_on_gpu(
    rows: CachedRows,
    ids: torch.Tensor,
    *,
    counts: bool,
    wants_grad: bool,
    padding_idx: int | None,
) -> tuple[torch.Tensor, torch.Tensor, int | None] | None:
    """Look rows up on the GPU without waiting for it.

    A bad id is raised by the next call on the GPU, by what writes the rows back, or by
    `bitslab.raise_pending_errors`. Until then it counts as the first or the last row, so that
    torch's kernels read within bounds: a step taken before that moves this row.

    Parameters
    ----------
    rows : CachedRows
        The rows.
    ids : torch.Tensor
        int64 or int32 on their GPU.
    counts : bool
        Whether the batch updates what decides which row leaves first.
    wants_grad : bool
        Whether a gradient is wanted.
    padding_idx : int, optional
        As for `CachedRows.lookup_padded`.

    Returns
    -------
    tuple or None
        As there; None where the host has to look them up, and nothing was done.

    Raises
    ------
    BitslabError
        When a CUDA graph is captured: its replays would not be counted on the host.
    """
    if rows.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise BitslabError(
            "a lookup in training cannot be captured by a CUDA graph: call eval() first, or leave "
            "the lookup out of the graph"
        )
    flat = ids.detach().reshape(-1).contiguous()
    first = 0
    if rows.all_resident:
        rows.training.retire_steps()
    else:
        found = room_for(rows, len(flat))
        if found is None:
            return None
        first = found
    kernels_on(rows.device)  # raises errors of earlier lookups
    counters = device_counters_of(rows)
    counters.in_order()
    n = flat.shape[0]
    hit_miss_counts = rows.statistics.record_on_device(n, rows.device)
    # Always new memory: ids may be written to before backward, and so may what is returned.
    slots = torch.empty(2, n, dtype=torch.int64, device=rows.device)
    padding = padding_idx
    if rows.miss_buffer is not None:
        if n:
            rows.miss_buffer.look_up(rows, flat, slots, hit_miss_counts, first, counts=counts)
        padding = None if padding_idx is None else rows.slot_table.slot_or_none(padding_idx)
    elif n:
        finder = counters.finder(len(rows))
        finder.claim(flat)
        number = rows.slot_table.next_stamp()
        finder.give(flat, slots, hit_miss_counts, number, uses=counters.begin(counts=counts))
    matrix: torch.Tensor = rows.parameter.data
    if wants_grad:
        matrix = rows.training.hold(matrix, NONE, NONE, whole=True, on_device=slots[0])
    return matrix, slots[1].view(ids.shape), padding
