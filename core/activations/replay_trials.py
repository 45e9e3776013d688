"""Replays that a profiled step tries: whether they give every bit, and how long they take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import BitslabError
from .moments import Moment
from .operands import Operands
from .replay import differing_elements, replay_of


@dataclass(eq=False)
class TriedReplay:
    """A replay that was tried.

    Parameters
    ----------
    signature : tuple
        What replays of the site have in common.
    begin, end : Moment
        When it began and ended.
    differing : torch.Tensor
        int64 ``[]``, the elements that have other bits.
    weights : set of int
        Numbers of the storages of weights that it reads.
    operands : Operands
        Of its pass.
    sources : tuple of str
        The sites that it reads.
    """

    signature: tuple[Any, ...]
    begin: Moment
    end: Moment
    differing: torch.Tensor
    weights: set[int]
    operands: Operands
    sources: tuple[str, ...] = ()


def tried_replay(
    root: torch.Tensor, operands: Operands, now: Callable[[], Moment]
) -> TriedReplay | None:
    """Compute a tensor once more; None where it is none that can be.

    Parameters
    ----------
    root : torch.Tensor
        What was saved.
    operands : Operands
        Of its pass, so far.
    now : callable
        Returns the moment that the device has reached.
    """
    with contextlib.suppress(BitslabError, RuntimeError):  # as memory that runs out; optional
        found = replay_of(root, operands)
        if found is None:
            return None
        found.tensor()  # what it reads may be away, and is back from here on
        begin = now()
        again = found.tensor()
        end = now()
        differing = differing_elements(again, root)
        if differing is not None:
            weights = set(found.weights)
            return TriedReplay(found.signature, begin, end, differing, weights, operands)
    return None


def exact_replays(tried: Mapping[str, TriedReplay | None]) -> dict[str, TriedReplay]:
    """Return by site the replays that gave every bit, and read weights that remain where they are.

    Parameters
    ----------
    tried : mapping of str to TriedReplay or None
        By site, once the pass is over.
    """
    found = {name: each for name, each in tried.items() if each is not None}
    if not found:
        return {}
    differing = torch.stack([each.differing for each in found.values()]).tolist()
    return {
        name: each
        for (name, each), n in zip(found.items(), differing, strict=True)
        if not n and not each.weights & each.operands.unsure
    }
