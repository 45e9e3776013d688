"""Lookups by ids on a GPU in training: the host neither reads them nor waits for anything.

What the host would note of such a batch is noted on the GPU, until the host asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..engine.kernels.cuda import kernels_on
from ..errors import BitslabError
from .device_notes import notes_of
from .gradients import NONE
from .guests import room_for

if TYPE_CHECKING:
    from .rows import CachedRows


def stays_on_gpu(rows: CachedRows, ids: torch.Tensor, *, brings: bool) -> bool:
    """Tell whether a lookup may need nothing that the host knows.

    Parameters
    ----------
    rows : CachedRows
        The rows.
    ids : torch.Tensor
        int64 or int32.
    brings : bool
        Whether rows may come.
    """
    if not ids.is_cuda or ids.device != rows.device:
        return False
    if rows.cache != "rows" or rows.table.row_bytes == 0:
        return False
    return rows.all_resident or brings


def look_up_on_gpu(
    rows: CachedRows,
    ids: torch.Tensor,
    *,
    counts: bool,
    wants_grad: bool,
    padding_idx: int | None,
) -> tuple[torch.Tensor, torch.Tensor, int | None] | None:
    """Look rows up; nothing waits for the GPU where all are resident, or few of the others come.

    A bad id is told by the next call on the GPU, by what writes the rows back, or by
    `bitslab.raise_pending_errors`. Until then it stands for the first or the last row, as what a
    kernel of torch can take: a step that is made before moves that one.

    Parameters
    ----------
    rows : CachedRows
        The rows.
    ids : torch.Tensor
        int64 or int32 on their GPU.
    counts : bool
        Whether the batch counts for what leaves first.
    wants_grad : bool
        Whether a gradient may come.
    padding_idx : int, optional
        As for `CachedRows.lookup_padded`.

    Returns
    -------
    tuple or None
        As there; None where the host has to look them up, and nothing was done.

    Raises
    ------
    BitslabError
        When a CUDA graph is captured: its replays would note nothing on the host.
    """
    if rows.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise BitslabError(
            "a lookup in training cannot be captured by a CUDA graph: call eval() first, or leave "
            "the lookup out of the graph"
        )
    flat = ids.detach().reshape(-1).contiguous()
    first = 0
    if rows.all_resident:
        rows.training.settle()
    else:
        found = room_for(rows, len(flat))
        if found is None:
            return None
        first = found
    kernels_on(rows.device)  # raises what is known of lookups before
    notes = notes_of(rows)
    notes.in_order()
    n = flat.shape[0]
    tally = rows.statistics.note_on_device(n, rows.device)
    # Always new memory: ids may be written to before backward, and so may what is returned.
    slots = torch.empty(2, n, dtype=torch.int64, device=rows.device)
    padding = padding_idx
    if rows.guests is not None:
        if n:
            rows.guests.look_up(rows, flat, slots, tally, first, counts=counts)
        padding = None if padding_idx is None else rows.residents.slot_or_none(padding_idx)
    elif n:
        finder = notes.finder(len(rows))
        finder.claim(flat)
        number = rows.residents.next_stamp()
        finder.give(flat, slots, tally, number, uses=notes.begin(counts=counts))
    matrix: torch.Tensor = rows.parameter.data
    if wants_grad:
        matrix = rows.training.hold(matrix, NONE, NONE, whole=True, on_device=slots[0])
    return matrix, slots[1].view(ids.shape), padding
