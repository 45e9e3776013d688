"""Passes without hooks: of a model whose plan changes nothing, with inputs like those of others.

A planner that has nothing to do is to cost nothing: where all is kept, and takes far less than the
limit, passes whose inputs were seen before are left to torch, but for one in some.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

#: Returns the hooks of saved tensors that are active in this thread.
_outer_hooks = torch._C._autograd._top_saved_tensors_default_hooks
#: Of passes that are left to torch, one of so many is seen all the same.
SEEN_EVERY = 16
#: Share of the limit that a step's peak may be: what branches a pass takes is not seen.
MOST_SHARE = 0.75
#: Kinds of inputs that are known, at most.
MOST_KINDS = 1024
#: What decides with its value what a pass does.
_PLAIN = (bool, int, str, type(None), torch.dtype, torch.device)


class RestingPasses:
    """Which passes are left to torch."""

    def __init__(self) -> None:
        self._known: set[Hashable] = set()
        self._unseen = 0

    def forget(self) -> None:
        """Let passes with inputs of each kind be seen again."""
        self._known.clear()
        self._unseen = 0

    def rests(self, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a pass is left to torch; else it is seen now.

        Parameters
        ----------
        training : bool
            Whether the model is in training.
        args, kwargs
            What it is given.
        """
        # A checkpoint around the model that is not reentrant counts what its hooks are given, and
        # does so again when it computes the pass once more, within a backward pass.
        if torch._C._current_graph_task_id() != -1 or _outer_hooks(False) is not None:
            return False
        modes = tuple(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        kind = kind_of(training, modes, args, kwargs)
        if kind is None:
            return False
        if kind in self._known and self._unseen < SEEN_EVERY - 1:
            self._unseen += 1
            return True
        if len(self._known) >= MOST_KINDS:
            self._known.clear()
        self._known.add(kind)
        self._unseen = 0
        return False


def kind_of(*given: Any) -> Hashable | None:
    """Return what inputs have in common that make a pass save as much; None for unknown ones.

    Tensors of a kind have shapes, dtypes, devices and a need of gradients alike.
    """
    found = []
    for value in given:
        kind: Hashable | None
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                return None
            kind = value.shape, value.dtype, value.device, value.requires_grad
        elif isinstance(value, _PLAIN):
            kind = type(value), value
        elif isinstance(value, float):  # a rate or scale, which changes from step to step
            kind = float
        elif type(value) in (tuple, list):
            kind = kind_of(*value)
        elif isinstance(value, Mapping) and type(value) is dict:
            kind = kind_of(*value, *value.values())
        else:
            kind = None
        if kind is None:
            return None
        found.append(kind)
    return tuple(found)
