"""Passes without hooks: of a model whose plan changes nothing, with inputs like those of others.

A planner that has nothing to do is to cost nothing: where all is kept, passes whose inputs were
seen before are left to torch, but for one in some of each kind; for two of five where keeping all
takes almost as much as the limit allows, since what branches a pass takes is not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import torch

from ..saved_hooks import present_hooks

#: Of passes with inputs of a kind, one of so many is seen all the same, by turns of the one number
#: and the other: where a step's peak is at most `FAR_SHARE` of the limit, and where it is nearer,
#: behind `NEAR_SEEN` that saved what was planned. Their sums are prime, so that of a step with
#: several micro-batches each has its turn.
SEEN_EVERY, SEEN_EVERY_NEAR = (16, 15), (2, 3)
FAR_SHARE = 0.75
NEAR_SEEN = 4
#: Kinds of inputs that are known, and values of inputs that are looked at, at most.
MOST_KINDS, MOST_VALUES = 1024, 64
#: What decides with its value what a pass does.
_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device)


class RestingPasses:
    """Which passes are left to torch."""

    def __init__(self) -> None:
        #: By hash of a kind, the passes since one was seen, and how many were seen.
        self._unseen: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._every, self._known_after = SEEN_EVERY, 1
        self._local = threading.local()

    def begin(self, share: float) -> None:
        """Let passes with inputs of each kind be seen again; a step takes a share of the limit."""
        self._unseen.clear()
        self._seen.clear()
        near = share > FAR_SHARE
        self._every = SEEN_EVERY_NEAR if near else SEEN_EVERY
        self._known_after = NEAR_SEEN if near else 1

    def rests(self, state: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a pass is left to torch; else it is to be seen.

        Parameters
        ----------
        state : hashable
            Of the model, what changes how much it saves.
        args, kwargs
            What it is given.
        """
        # A checkpoint around the model that is not reentrant counts what its hooks are given, and
        # does so again when it computes the pass once more.
        if present_hooks() is not None:
            return False
        modes = tuple(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        kind = kind_of(args, kwargs)
        if kind is None:
            return False
        key = hash((state, modes, kind))
        every = self._every[self._seen.get(key, 0) % 2]
        unseen = self._unseen.get(key, every)
        if unseen < every - 1:
            self._unseen[key] = unseen + 1
            return True
        self._local.kind = key
        return False

    def ended(self, as_planned: bool) -> None:
        """End a pass of this thread; its kind is known where it saved what was planned."""
        key, self._local.kind = getattr(self._local, "kind", None), None
        if key is None or not as_planned:
            return
        if len(self._seen) >= MOST_KINDS:
            self._unseen.clear()
            self._seen.clear()
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen >= self._known_after:
            self._unseen[key] = 0


def kind_of(*given: Any) -> Hashable | None:
    """Return what inputs have in common that make a pass save as much; None for unknown ones.

    Tensors of a kind have shapes, dtypes, devices and a need of gradients alike.
    """
    left = MOST_VALUES

    def of(value: Any) -> Hashable | None:
        nonlocal left
        left -= 1
        kind = type(value)
        if left < 0:
            return None
        if kind in (torch.Tensor, torch.nn.Parameter):
            if value.layout != torch.strided or value.is_nested:
                return None  # whose shapes say little
            return value.shape, value.dtype, value.device, value.requires_grad
        if kind in _PLAIN:
            return kind, value
        if kind is float:  # a rate or scale, which changes from step to step
            return kind, value != 0
        if kind is dict:
            value = (*value, *value.values())
        elif kind not in (tuple, list):
            return None
        found = []
        for each in value:
            found.append(of(each))
            if found[-1] is None:
                return None
        return kind, tuple(found)

    return of(given)
