"""Cache: the interface through which a table uses a cache of its rows."""

from __future__ import annotations

from typing import Protocol

import torch

from ..engine.kernels.format import CacheStorage
from .counters import Counters


class Cache(Protocol):
    """Copies of some of a table's rows, which the table invalidates when these rows change."""

    def storage(self, device: torch.device) -> CacheStorage | None:
        """Return the cached rows as kernels on a device read them; None when it has none."""
        ...

    @property
    def counters(self) -> Counters:
        """Counts of the rows that were gathered through the cache."""
        ...

    def forget(self, ids: torch.Tensor) -> None:
        """Drop the copies of packed rows int64 ``[n]``; no gather runs meanwhile."""
        ...
