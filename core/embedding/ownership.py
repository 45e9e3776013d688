"""Who owns the cache: the host's slot table, or, while ids come on a GPU, `DeviceSlots`."""

from __future__ import annotations

import numpy as np
import torch

from .gradients import Array
from .state import CacheState
from .written import write_back


def sync_from_device(rows: CacheState) -> None:
    """Update the host's slot table and rows with what lookups on a GPU have done; waits for it."""
    if rows.device_uses is not None:
        rows.device_uses.sync()
    if rows.device_slots is not None and rows.exchange is not None:
        rows.device_slots.sync()
        rows.exchange.finish()


def take_back(rows: CacheState) -> None:
    """Make the host's slot table the owner of the cache again."""
    sync_from_device(rows)
    device_slots = rows.device_slots
    if device_slots is None:
        return
    held = np.flatnonzero(device_slots.held().cpu().numpy())
    rows.training.sync_slots(held, device_slots)
    rows.training.gradients.reuse_known(device_slots)
    rows.row_store.prefetched = None  # the device has written to the table
    rows.device_slots = rows.exchange = None
    rows.training.has_grown()
    _keep_most_used(rows)


def _keep_most_used(rows: CacheState) -> None:
    """Move the most used rows of the miss buffer into the cache, and evict the others to the host.

    Rows whose gradient waits for a step, or may still be computed, are kept.
    """
    slot_table, training = rows.slot_table, rows.training
    if training.in_pass:
        return
    training.pin()
    filled = np.arange(slot_table.capacity_rows, len(slot_table.id_of))
    filled = filled[(slot_table.id_of[filled] >= 0) & ~slot_table.pinned[filled]]
    if len(filled):
        _exchange(rows, filled)


def _exchange(rows: CacheState, filled: Array) -> None:
    """Empty slots behind those of the cache, int64 ``[n]``; see `_keep_most_used`."""
    slot_table, training = rows.slot_table, rows.training
    filled = filled[np.argsort(-slot_table.keys[filled], kind="stable")]
    came, lost = slot_table.id_of[filled], filled[:0]
    try:
        slots = slot_table.make_room_for(filled)
        moving, unmoved = filled[: len(slots)], filled[len(slots) :]
        left = slots[slot_table.id_of[slots] >= 0]
        leaving = np.concatenate([left, unmoved])
        changed = leaving[slot_table.dirty[leaving]]
        write_back(rows, changed)
        rows.statistics.record_written_back(len(changed))
        training.adapters.save(leaving, slot_table.id_of[leaving])
        training.gradients.record_reuse(np.concatenate([left, filled]))
        lost = slots  # the rows in them are on the host by now
        at, to = (torch.from_numpy(each).to(rows.device) for each in (moving, slots))
        rows.parameter.data[to] = rows.parameter.data[at]
        for adapter in training.adapters:
            adapter.move(at, to)
        slot_table.move(moving, slots)
        slot_table.drop(unmoved)
    except BaseException:
        slot_table.repair(lost[slot_table.id_of[lost] != came[: len(lost)]])
        raise
