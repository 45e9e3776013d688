"""Lookups that need nothing brought: plain ones on a CPU, and those by slots instead of ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..errors import ArgumentError
from .lookups import rows_of

if TYPE_CHECKING:
    from .rows import CachedRows


def plain_lookup(
    rows: CachedRows,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    include_last: bool,
    one_each: bool,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Do what `CachedRows.plain_lookup` says."""
    if rows.device.type != "cpu" or not rows.training.idle:
        return None
    one_each = one_each and rows.parameter.requires_grad == rows.trainable
    # Where the batch before needed no row of the table, this one probably needs none.
    if one_each and not rows.all_hit:
        out = _decoded_bags(rows, ids, offsets)
        if out is not None:
            return out, None
    host = ids.numpy()
    slots, missing = rows.residents.find_bags(host, offsets.numpy(), include_last)
    rows.all_hit = missing == 0
    if missing == 0 and len(slots):
        rows.statistics.note_rows(len(slots), 0)
        return rows.parameter, torch.from_numpy(slots)
    if missing <= 0 or not one_each or not torch.equal(offsets, rows.numbers(len(ids))):
        return None
    # A sum begins with 0, which makes 0 of -0.
    return rows_of(rows, host, slots, missing).add_(0.0), None


def _decoded_bags(
    rows: CachedRows, ids: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor | None:
    """Return bags of one id each in one go, or None where that cannot be."""
    source = rows.source
    if source.prefetched is not None or source.slabs is not None:
        return None
    out = torch.empty(len(ids), rows.row_dim, dtype=rows.dtype)
    slot_of, resident = rows.residents.slot_of, rows.parameter.data
    missing = rows.table.look_up_bags(ids, offsets, slot_of, resident, out)
    if missing is None:
        return None
    rows.all_hit = missing == 0
    rows.statistics.note_rows(len(ids) - missing, missing)
    return out


def look_up_slots(
    rows: CachedRows, slots: torch.Tensor, padding_idx: int | None
) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """Do what `CachedRows.lookup_slots` says."""
    host = slots.detach().reshape(-1).cpu().numpy()
    held = rows.residents.id_of
    if len(host) and not (0 <= host.min() and host.max() < len(held)):
        raise ArgumentError(f"input: slots outside 0 to {len(held) - 1}")
    used = np.unique(host)
    if (held[used] < 0).any():
        raise ArgumentError("input: names slots that hold no row; call prepare_ids first")
    matrix: torch.Tensor = rows.parameter.data
    if torch.is_grad_enabled() and rows.parameter.requires_grad:
        matrix = rows.training.hold(matrix, used, held[used], whole=True)
    padding = None if padding_idx is None else int(rows.residents.slot_of[padding_idx])
    return matrix, slots.to(rows.device, torch.int64), padding
