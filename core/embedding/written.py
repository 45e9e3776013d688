"""Resident rows that differ from those of the table on the host."""

from __future__ import annotations

import numpy as np
import torch

from .gradients import NONE, Array, on_device_of, to_device
from .state import CacheState


def differing(rows: CacheState, slots: Array) -> Array:
    """Return those of some slots int64 ``[n]`` whose row differs by a bit from the host's.

    Both are compared in pieces, on the device.
    """
    found, data = [NONE], rows.parameter.data
    for begin, end in rows.ranges(0, len(slots)):
        some = slots[begin:end]
        ids = torch.from_numpy(rows.slot_table.id_of[some])
        kept = rows.table.gather(ids, None, rows.device)
        here = data[on_device_of(data, some)]
        differs = (kept.view(torch.uint8) != here.view(torch.uint8)).any(1)
        found.append(some[differs.cpu().numpy()])
    return np.concatenate(found)


def write_back(rows: CacheState, slots: Array) -> None:
    """Pack the rows of some slots int64 ``[n]`` into the table."""
    if len(slots):
        changed = rows.parameter.data[to_device(slots, rows.device)]
        rows.row_store.update(rows.slot_table.id_of[slots], changed)
        # A step may still apply a gradient that is there.
        rows.slot_table.dirty[slots] = rows.training.step_may_come
