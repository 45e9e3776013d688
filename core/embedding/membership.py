"""Which parameters of an optimizer are those of cached rows; each step asks it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .state import CacheState

_watched: weakref.WeakValueDictionary[int, CacheState] = weakref.WeakValueDictionary()
# How often `add_watched` was called.
_n_watched = 0


class _Membership(NamedTuple):
    """Which parameters of an optimizer are those of rows, as of its last step."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    #: `_n_watched` then.
    watched: int
    #: Of each group, the ids of its parameters: so that a step looks no parameter up.
    parameters: list[list[int]]
    #: Rows, the id of their parameter, and the number of its group.
    ours: list[tuple[weakref.ref[CacheState], int, int]]


_memberships: dict[int, _Membership] = {}


def add_watched(rows: CacheState) -> None:
    """Find these rows by their parameter, as it is now, as long as they live."""
    global _n_watched
    _watched[id(rows.parameter)] = rows
    _n_watched += 1


def rows_with(parameter: torch.Tensor) -> CacheState | None:
    """Return the rows that have a parameter, or None."""
    rows = _watched.get(id(parameter))
    return rows if rows is not None and rows.parameter is parameter else None


def rows_among(parameters: Iterable[torch.Tensor]) -> Iterator[CacheState]:
    """Yield the rows that have one of these parameters."""
    for parameter in parameters:
        rows = rows_with(parameter)
        if rows is not None:
            yield rows


def rows_in(
    optimizer: torch.optim.Optimizer, *, same_step: bool = False
) -> list[tuple[CacheState, dict[str, Any]]]:
    """Return rows whose parameters an optimizer has, each with its group of them.

    With `same_step` its groups are taken to have the parameters that they had the last time.
    """
    groups = optimizer.param_groups
    known = _memberships.get(id(optimizer))
    if (
        known is None
        or known.watched != _n_watched
        or known.optimizer() is not optimizer
        or len(known.parameters) != len(groups)
        or not same_step
        and known.parameters != [[*map(id, group["params"])] for group in groups]
    ):
        known = _membership(optimizer, groups)
    found = []
    for owner, parameter, number in known.ours:
        rows = owner()
        if rows is not None and id(rows.parameter) == parameter:
            found.append((rows, groups[number]))
    return found


def _membership(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> _Membership:
    key = id(optimizer)

    def forget(gone: weakref.ref[torch.optim.Optimizer]) -> None:
        kept = _memberships.get(key)
        if kept is not None and kept.optimizer is gone:
            del _memberships[key]

    found = _Membership(
        weakref.ref(optimizer, forget),
        _n_watched,
        [[*map(id, group["params"])] for group in groups],
        [
            (weakref.ref(rows), id(rows.parameter), number)
            for number, group in enumerate(groups)
            for rows in rows_among(group["params"])
        ],
    )
    _memberships[key] = found
    return found
