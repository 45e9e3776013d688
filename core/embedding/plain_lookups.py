"""Lookups that fetch nothing: plain ones on a CPU, and lookups by slot instead of id."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import ArgumentError
from .lookup import rows_of
from .ownership import take_back
from .state import CacheState

#: Up to so many bytes of rows are copied in one go; of more, torch sums as fast or faster.
COPIED_BYTES = 1 << 21


def plain_lookup(
    rows: CacheState,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    include_last: bool,
    one_each: bool,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Implement `CachedRows.plain_lookup`."""
    parameter = rows.parameter
    if not parameter.is_cpu or not rows.training.idle:
        return None
    one_each = one_each and parameter.requires_grad == rows.trainable
    if one_each and parameter.is_contiguous():
        # Another thread may move the module meanwhile: this keeps the rows.
        resident = parameter.data
        # If the batch before needed no row of the table, this one probably needs none.
        out = _resident_bags(rows, resident, ids, offsets) if rows.all_hit else None
        if not rows.all_hit:
            out = _decoded_bags(rows, resident, ids, offsets)
        if out is not None:
            return out, None
    host = ids.numpy()
    slots, missing = rows.slot_table.find_bags(host, offsets.numpy(), include_last)
    rows.all_hit = missing == 0
    if missing == 0 and len(slots):
        rows.statistics.record_rows(len(slots), 0)
        return parameter, torch.from_numpy(slots)
    if missing <= 0 or not one_each or not torch.equal(offsets, rows.numbers(len(ids))):
        return None
    # A sum begins with 0, which makes 0 of -0.
    return rows_of(rows, host, slots, missing).add_(0.0), None


def _resident_bags(
    rows: CacheState, resident: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor | None:
    """Return bags of one id each in one go if all rows are resident, and not too many."""
    n = ids.shape[0]
    if n * resident.shape[1] * resident.element_size() > COPIED_BYTES:
        return None
    out = rows.resident_bags.sums(rows.slot_table, resident, ids, offsets)
    rows.all_hit = out is not None
    if out is not None:
        rows.statistics.record_rows(n, 0)
    return out


def _decoded_bags(
    rows: CacheState, resident: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor | None:
    """Return bags of one id each in one go, or None where that cannot be."""
    store = rows.row_store
    if store.prefetched is not None or store.slabs is not None:
        return None
    n = ids.shape[0]
    out = resident.new_empty(n, resident.shape[1])
    slots = rows.resident_bags.slot_map(rows.slot_table, n)
    missing = rows.table.look_up_bags(ids, offsets, slots, resident, out)
    if missing is None:
        return None
    rows.all_hit = missing == 0
    rows.statistics.record_rows(n - missing, missing)
    return out


def look_up_slots(
    rows: CacheState, slots: torch.Tensor, padding_idx: int | None
) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """Implement `CachedRows.lookup_slots`."""
    rows.watch.check()
    take_back(rows)
    host = slots.detach().reshape(-1).cpu().numpy()
    held = rows.slot_table.id_of
    if len(host) and not (0 <= host.min() and host.max() < len(held)):
        raise ArgumentError(f"input: slots outside 0 to {len(held) - 1}")
    used = np.unique(host)
    if (held[used] < 0).any():
        raise ArgumentError("input: names slots that hold no row; call prepare_ids first")
    matrix: torch.Tensor = rows.parameter.data
    if torch.is_grad_enabled() and rows.parameter.requires_grad:
        matrix = rows.training.hold(matrix, used, held[used], whole=True)
    padding = None if padding_idx is None else rows.slot_table.slot_or_none(padding_idx)
    return matrix, slots.to(rows.device, torch.int64), padding
