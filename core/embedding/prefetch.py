"""Ids and rows on their way to a lookup to come."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import torch

from ..memory.feature import fetchers
from ..memory.slabs import SlabCache
from ..memory.table import CompressedTable

Array = np.ndarray[Any, Any]


class ArrivingIds:
    """Ids on a GPU that are copied to the host beside what else is going on.

    Parameters
    ----------
    ids : torch.Tensor
        int32 or int64 of any shape, as the current stream of their GPU leaves them. They may change
        once the copy is done, but then a lookup does not go by it.

    Attributes
    ----------
    fetched : bool
        Whether their rows were asked for.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self.fetched = False
        self._ids = ids.detach()
        self._version = _version(ids)
        self._host = torch.empty(ids.numel(), dtype=ids.dtype, pin_memory=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        stream = torch.cuda.Stream(device=ids.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(ids.device))
        with torch.cuda.stream(stream):
            self._host.copy_(self._ids.reshape(-1), non_blocking=True)
            self._event.record(stream)
        # Their memory is not given away before the copy is done, even if this is forgotten.
        self._ids.record_stream(stream)

    def are(self, ids: torch.Tensor) -> bool:
        """Tell whether ids are these: the same memory seen in the same way, not written since."""
        mine = self._ids
        return (
            ids.is_cuda
            and ids.data_ptr() == mine.data_ptr()
            and ids.shape == mine.shape
            and ids.stride() == mine.stride()
            and ids.dtype is mine.dtype
            and self._version is not None
            and _version(mine) == self._version == _version(ids)
        )

    def arrived(self) -> bool:
        """Tell whether they are there, without waiting."""
        there: bool = self._event.query()  # type: ignore[no-untyped-call]
        return there

    def wait(self) -> torch.Tensor:
        """Wait for the copy, and for nothing else on the GPU; return ``[n]`` on the CPU."""
        self._event.synchronize()
        return self._host


def _version(t: torch.Tensor) -> int | None:
    """Return how often torch has written to a tensor; None where it does not count."""
    return None if t.is_inference() else t._version


class Prefetched:
    """Some rows of a table, decoded beside what else is going on.

    On a GPU they are decoded on a stream of their own, on the CPU by another thread.

    Parameters
    ----------
    source : CompressedTable or SlabCache
        What has the rows.
    ids : numpy.ndarray
        int64 ``[n]``, ascending, no two alike.
    device : torch.device
        Where they are wanted.
    """

    def __init__(
        self, source: CompressedTable | SlabCache, ids: Array, device: torch.device
    ) -> None:
        self._ids = ids
        self._valid = np.ones(len(ids), bool)
        self._device = device
        wanted = torch.from_numpy(ids)
        self._event: torch.cuda.Event | None = None
        self._rows: torch.Tensor | Future[torch.Tensor]
        if device.type == "cpu":
            self._rows = fetchers.submit(lambda: source.gather(wanted, None, device))
            return
        stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._rows = source.gather(wanted, None, device)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def forget(self, ids: Array) -> None:
        """Use rows no more that are about to change in the table."""
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        self._valid[at[self._ids[at] == ids]] = False
        # A thread that still decodes must not see a row half changed, nor hold the table's lock.
        if isinstance(self._rows, Future):
            wait([self._rows])
        else:
            self._arrived()

    def _failed(self) -> bool:
        """Tell whether nothing came; who needs the rows then gets the error, if it is one still."""
        return isinstance(self._rows, Future) and self._rows.exception() is not None

    def gather(
        self,
        source: CompressedTable | SlabCache,
        ids: Array,
        out: torch.Tensor | None,
        device: torch.device,
    ) -> torch.Tensor:
        """Return rows ``[n, D]`` of int64 ``[n]`` ids, those that are here and the others."""
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        here = (self._ids[at] == ids) & self._valid[at]
        if not here.any() or self._failed():
            return source.gather(torch.from_numpy(ids), out, device)
        rows = self._arrived()
        if out is None:
            out = torch.empty((len(ids), *rows.shape[1:]), dtype=rows.dtype, device=device)
        found = torch.from_numpy(np.flatnonzero(here)).to(device)
        out[found] = rows[torch.from_numpy(at[here]).to(device)]
        if not here.all():
            others = np.flatnonzero(~here)
            more = source.gather(torch.from_numpy(ids[others]), None, device)
            out[torch.from_numpy(others).to(device)] = more
        return out

    def _arrived(self) -> torch.Tensor:
        """Return the rows, for work on the current stream."""
        rows = self._rows if isinstance(self._rows, torch.Tensor) else self._rows.result()
        if self._event is not None:
            self._event.wait(torch.cuda.current_stream(self._device))
            rows.record_stream(torch.cuda.current_stream(self._device))
        return rows
