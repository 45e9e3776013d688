"""The optimizer adapters of cached rows, and state whose optimizer has not come yet."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

from ..errors import BitslabError
from .gradients import Array
from .optimizers import OptimizerAdapter, check_optimizer, has_stepped
from .row_state import RowState
from .state import CacheState


class Adapters:
    """Makes the state of all optimizers of cached rows follow them. Callers hold the rows' lock.

    Parameters
    ----------
    rows : CacheState
        The rows.
    stores : list of dict of str to RowState
        State of optimizers that are not attached yet, from before a copy.
    """

    def __init__(self, rows: CacheState, stores: list[dict[str, RowState]]) -> None:
        self._owner = weakref.ref(rows)
        self._adapters: list[OptimizerAdapter] = []
        self._unclaimed = list(stores)

    def __iter__(self) -> Iterator[OptimizerAdapter]:
        """Yield the adapters in the order in which their optimizers came."""
        return iter(self._adapters)

    def of(self, optimizer: torch.optim.Optimizer) -> OptimizerAdapter | None:
        """Return the adapter of an optimizer, or None."""
        for adapter in self._adapters:
            if adapter.optimizer is optimizer:
                return adapter
        return None

    def attached(
        self, optimizer: torch.optim.Optimizer, *, row_wise: bool = False
    ) -> OptimizerAdapter:
        """Return the adapter of an optimizer, made if there is none yet."""
        found: OptimizerAdapter | None = None
        gone = False
        for each in self._adapters:
            theirs = each.optimizer
            if theirs is optimizer:
                found = each
            gone |= theirs is None
        if gone:
            self._adapters = [each for each in self._adapters if each.optimizer is not None]
        if found is None:
            rows = self._owner()
            if rows is None:
                raise BitslabError("optimizer: its rows are gone")
            stores: dict[str, RowState] | None = None
            if self._unclaimed and has_stepped(optimizer, rows.parameter):
                stores, *self._unclaimed = self._unclaimed
            found = OptimizerAdapter(rows, optimizer, row_wise=row_wise, stores=stores)
            self._adapters.append(found)
        return found

    def attach(self, optimizer: torch.optim.Optimizer, *, row_wise: bool = False) -> None:
        """Make an optimizer's state follow the rows; see `CachedRows.attach_optimizer`."""
        self.attached(check_optimizer(optimizer), row_wise=row_wise).align()

    def followed_states(self) -> list[tuple[torch.Tensor, RowState]] | None:
        """Return optimizer state of rows in slots ``[S, ...]``, and that of all rows.

        None where a GPU cannot exchange them.
        """
        found: list[tuple[torch.Tensor, RowState]] = []
        for adapter in self._adapters:
            followed = adapter.followed()
            if followed is None:
                return None
            found += followed
        return found

    def save(self, slots: Array, ids: Array) -> None:
        """Save optimizer state of rows that leave their slots: int64 ``[n]`` each."""
        for adapter in self._adapters:
            adapter.save(slots, ids)

    def restore(self, slots: Array, ids: Array) -> None:
        """Load optimizer state of rows that were put into slots: int64 ``[n]`` each."""
        for adapter in self._adapters:
            adapter.restore(slots, ids)

    def grow(self, ids: Array, first: int) -> None:
        """Append the state of rows ``ids``, for slots from `first` on."""
        for adapter in self._adapters:
            adapter.grow(ids, first)

    def shrink(self, slots: int) -> None:
        """Cut the state off behind the first `slots` slots; `save` it before."""
        for adapter in self._adapters:
            adapter.shrink(slots)

    def stores(self) -> list[dict[str, RowState]]:
        """Return the optimizers' state of all rows, for a copy of the rows."""
        return [*(adapter.complete() for adapter in self._adapters), *self._unclaimed]
