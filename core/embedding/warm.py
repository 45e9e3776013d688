"""Warm-up: choosing which rows are resident at first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .arguments import check_warmup_ratio, ids_by_use
from .eviction import EvictionStrategy
from .gradients import Array, to_device
from .slots import Batch
from .state import CacheState
from .whole import flush


def warm_up(
    rows: CacheState, counts: torch.Tensor | Sequence[int] | None, warmup_ratio: float
) -> None:
    """Implement `CachedRows.warm_up`."""
    check_warmup_ratio(warmup_ratio)
    slot_table = rows.slot_table
    by_lfu = slot_table.evict is EvictionStrategy.LFU
    movable_rows = rows.cache_rows - len(rows.pinned_ids)
    most_used = int(np.ceil(movable_rows * warmup_ratio)) if by_lfu else 0
    order, how_often = ids_by_use(counts, len(rows), most_used)
    rows.training.retire_steps()
    if len(slot_table.resident()):
        flush(rows, evict=True)
    if rows.cache == "packed":
        rows.row_store.fill(order)
        return
    if counts is not None and slot_table.evict is EvictionStrategy.DATASET:
        slot_table.order = np.empty(len(rows), np.int64)
        slot_table.order[order] = np.arange(len(rows))
    chosen = _chosen(rows, order, warmup_ratio)
    if len(chosen):
        _fill(rows, chosen, how_often[chosen])


def _chosen(rows: CacheState, order: Array, warmup_ratio: float) -> Array:
    """Return the rows int64 that free slots shall hold; `order` is the ids, the most used first."""
    slot_table = rows.slot_table
    if rows.all_resident:
        # Each in the slot of its own number, where it may lie already.
        return order[:0] if slot_table.free_rows < len(rows) else np.arange(len(rows))
    away = slot_table.slot_of < 0
    fixed = np.array([row for row in rows.pinned_ids if away[row]], np.int64)
    wanted = int(np.ceil((slot_table.free_rows - len(fixed)) * warmup_ratio))
    rest = order[away[order] & ~np.isin(order, fixed)]
    return np.concatenate([fixed, rest[:wanted]])


def _fill(rows: CacheState, chosen: Array, counts: Array) -> None:
    """Put rows into free slots; `counts` says how often each is used."""
    slot_table = rows.slot_table
    fresh = rows.table.gather(torch.from_numpy(chosen), None, rows.device)
    slots = None
    try:
        slots = slot_table.make_room(Batch(chosen, chosen[:0], chosen, counts))
        assert slots is not None  # no more than the free ones
        rows.parameter.data[to_device(slots, rows.device)] = fresh
        slot_table.admit(chosen, slots, counts)
        rows.training.adapters.restore(slots, chosen)
    except BaseException:
        slot_table.repair(slots)
        raise
