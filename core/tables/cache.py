"""What a table asks of a cache of its rows."""

from __future__ import annotations

from typing import Protocol

import torch

from ..engine.kernels.format import CacheStorage
from .counters import Counters


class Cache(Protocol):
    """What keeps copies of a table's rows, answers for some of them and must hear of changes."""

    def storage(self, device: torch.device) -> CacheStorage | None:
        """Return the cached rows as the kernels of a device read them; None for none there."""
        ...

    @property
    def counters(self) -> Counters:
        """Counts of the rows that were gathered through it."""
        ...

    def forget(self, ids: torch.Tensor) -> None:
        """Drop the copies of packed rows int64 ``[n]``, before anyone reads again."""
        ...
