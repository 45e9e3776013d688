"""Resident rows that differ from those of the table on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from .gradients import NONE, Array, on_device_of

if TYPE_CHECKING:
    from .rows import CachedRows


def differing(rows: CachedRows, slots: Array) -> Array:
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
