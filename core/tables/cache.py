"""Cache: the interface through which a table uses a cache of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..engine.codecs import RowKernels
from ..engine.kernels.format import CacheStorage
from .counters import Counters


@dataclass(frozen=True, eq=False)
class CacheView(CacheStorage):
    """Cached rows as the gathers of a table read them on one device.

    Parameters
    ----------
    kernels : RowKernels or None
        What gathers from a raw table and the cache, which packs its rows; None where rows are
        stored as in the table.
    """

    kernels: RowKernels | None = None


class Cache(Protocol):
    """Copies of some of a table's rows, which the table invalidates when these rows change."""

    def storage(self, device: torch.device) -> CacheView | None:
        """Return the cached rows as kernels on a device read them; None when it has none."""
        ...

    @property
    def counters(self) -> Counters:
        """Counts of the rows that were gathered through the cache."""
        ...

    def forget(self, ids: torch.Tensor) -> None:
        """Drop the copies of packed rows int64 ``[n]``; no gather runs meanwhile."""
        ...
