"""Prefetched rows of the next lookup."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..engine.transfer.lanes import StreamLane, Task
from ..tables.feature import fetchers
from ..tables.slabs import SlabCache
from ..tables.table import CompressedTable

Array = np.ndarray[Any, Any]


class Prefetched:
    """Some rows of a table, decoded asynchronously.

    On a GPU they are decoded on a stream of their own, on the CPU by another thread.

    Parameters
    ----------
    source : CompressedTable or SlabCache
        What has the rows.
    ids : numpy.ndarray
        int64 ``[n]``, ascending, no two alike.
    device : torch.device
        Where they are decoded to.
    """

    def __init__(
        self, source: CompressedTable | SlabCache, ids: Array, device: torch.device
    ) -> None:
        self._ids = ids
        self._valid = np.ones(len(ids), bool)
        lane = fetchers if device.type == "cpu" else StreamLane(device)
        self._rows: Task[torch.Tensor] = lane.submit(
            source.gather, torch.from_numpy(ids), None, device
        )

    def forget(self, ids: Array) -> None:
        """Drop rows that are about to change in the table."""
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        self._valid[at[self._ids[at] == ids]] = False
        # A thread that still decodes must not see a row half changed, nor hold the table's lock.
        self._rows.wait()

    def _failed(self) -> bool:
        """Return whether decoding failed; the lookup then decodes again and raises the error."""
        return self._rows.exception() is not None

    def gather(
        self,
        source: CompressedTable | SlabCache,
        ids: Array,
        out: torch.Tensor | None,
        device: torch.device,
    ) -> torch.Tensor:
        """Return rows ``[n, D]`` of int64 ``[n]`` ids, prefetched or not."""
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        here = (self._ids[at] == ids) & self._valid[at]
        if not here.any() or self._failed():
            return source.gather(torch.from_numpy(ids), out, device)
        rows = self._rows.result()
        if out is None:
            out = torch.empty((len(ids), *rows.shape[1:]), dtype=rows.dtype, device=device)
        found = torch.from_numpy(np.flatnonzero(here)).to(device)
        out[found] = rows[torch.from_numpy(at[here]).to(device)]
        if not here.all():
            others = np.flatnonzero(~here)
            more = source.gather(torch.from_numpy(ids[others]), None, device)
            out[torch.from_numpy(others).to(device)] = more
        return out
