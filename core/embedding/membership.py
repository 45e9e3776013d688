"""Which parameters of an optimizer are those of cached rows; each step asks it."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from .state import CacheState

_watched: weakref.WeakValueDictionary[int, CacheState] = weakref.WeakValueDictionary()
# How often `add_watched` was called.
_n_watched = 0


class _Membership:
    """Which parameters of an optimizer are those of rows, as of its last step.

    The optimizer owns it: parameters may have hooks that keep their optimizer alive.
    """

    __slots__ = ("ours", "parameters", "watched")

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        #: `_n_watched` then.
        self.watched = _n_watched
        #: Of each group.
        self.parameters: list[list[torch.Tensor]] = [[*group["params"]] for group in groups]
        #: Rows, the id of their parameter, and the number of its group.
        self.ours = [
            (weakref.ref(rows), id(rows.parameter), number)
            for number, parameters in enumerate(self.parameters)
            for rows in rows_among(parameters)
        ]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Leave it out of copies of the optimizer."""
        return type(None), ()

    def is_of(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Return whether the groups have the same parameters still."""
        return len(groups) == len(self.parameters) and all(
            len(known) == len(group["params"]) and all(map(operator.is_, known, group["params"]))
            for known, group in zip(self.parameters, groups, strict=True)
        )


#: Where an optimizer has its membership.
_ATTRIBUTE = "_bitslab_membership"


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
    known: _Membership | None = optimizer.__dict__.get(_ATTRIBUTE)
    if (
        known is None
        or known.watched != _n_watched
        or (len(groups) != len(known.parameters) if same_step else not known.is_of(groups))
    ):
        known = optimizer.__dict__[_ATTRIBUTE] = _Membership(groups)
    found = []
    for owner, parameter, number in known.ours:
        rows = owner()
        if rows is not None and id(rows.parameter) == parameter:
            found.append((rows, groups[number]))
    return found
