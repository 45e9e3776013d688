"""Cache: the interface through which a table uses a cache of its rows; and those that it has."""

from __future__ import annotations

import weakref
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


class Caches:
    """The caches over one table, held weakly. True where there are any."""

    def __init__(self) -> None:
        self._caches: weakref.WeakSet[Cache] = weakref.WeakSet()

    def __bool__(self) -> bool:
        return bool(self._caches)

    def add(self, cache: Cache) -> None:
        """Drop copies from this cache too when their rows change from now on."""
        self._caches.add(cache)

    def forget(self, ids: torch.Tensor) -> None:
        """Drop all copies of packed rows; see `Cache.forget`."""
        for cache in list(self._caches):
            cache.forget(ids)
