"""ForwardPass: one pass of a model over a cache, which an error undoes in all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, WeakSet, ref

import torch

#: The passes of all caches: attention functions see tensors alone.
_passes: WeakSet[ForwardPass] = WeakSet()


class ForwardPass:
    """The updates of a cache from the first layer of a model to the last one.

    Parameters
    ----------
    undo : callable, optional
        The method of a cache that takes this, and undoes it if it is the last one of that cache.

    Attributes
    ----------
    layers : list of int
        The packed layers that were updated, ascending.
    returned : list of weakref.ref
        What the updates returned as K.
    """

    def __init__(self, undo: Callable[[ForwardPass], None] | None = None) -> None:
        self.layers: list[int] = []
        self.returned: list[ref[torch.Tensor]] = []
        # Whoever keeps a handle keeps no cache.
        self._undo = None if undo is None else WeakMethod(undo)
        _passes.add(self)

    def undo(self) -> None:
        """Put all layers back to what they were like before, if this is the cache's last pass."""
        undo = None if self._undo is None else self._undo()
        if undo is not None:
            undo(self)

    def __reduce__(self) -> Any:
        return ForwardPass, ()  # a copy of a cache goes on with a new one


def undo_pass_of(keys: torch.Tensor) -> None:
    """Undo the pass in which an update returned this very tensor, if any did."""
    for each in list(_passes):
        if any(returned() is keys for returned in each.returned):
            each.undo()
