"""What the operations of a pass have saved, as far as it may be computed with once more.

A replay computes with what an operation saved, earlier in the backward pass than the operation
itself does. So it must be known where that lies: with the hooks of this pass, and if it is a weight
then where the model had it when the pass began. It is not known

- of what others' hooks were given, such as those of a checkpoint, which computes its region again;
- of a weight that is gathered for its layer and given up behind it (FSDP, ZeRO 3), or that lies in
  memory which others use, too: that may be filled with another one by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..engine.versions import version_of
from .guards import Storages, StoredTensor, is_cast_of_leaf, is_form_of_leaf, is_plain

#: Bytes that addresses of a matrix product's operands are multiples of, on a CPU and a GPU: what
#: comes back lies at such an address, and at others products may have other bits.
ALIGNED_BYTES = {"cpu": 64}
ALIGNED_BYTES_GPU = 256

#: The number that the next node of autograd gets in this thread.
_next_number = torch._C._autograd._get_sequence_nr
#: Whether torch says whose hooks a saved tensor has, and whether tensors are saved by no node.
_NAMES_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")
_SAVES_ALONE = hasattr(torch._C._autograd, "_make_saved_tensor")


class Operands:
    """The saved tensors of a pass's operations, by number of their node of autograd.

    Parameters
    ----------
    parameters : dict
        `guards.storages_of` the model when the pass began.

    Attributes
    ----------
    unpack : callable or None
        The hook by which autograd reads what was noted.
    unsure : set of int
        Numbers of storages of the model from which more than one weight was saved, whose memory is
        filled with one after another, and of those that were emptied when the pass ended.
    """

    def __init__(self, parameters: Storages) -> None:
        self._parameters = parameters
        self.unpack: Callable[[Any], Any] | None = None
        #: Whether all that a node saved is known to be where it was.
        self._known: dict[int, bool] = {}
        #: Nodes that saved a tensor at an odd address.
        self._odd: set[int] = set()
        #: Storages of weights that nodes saved.
        self._weights: dict[int, list[int]] = {}
        self._owners: dict[int, int] = {}
        self.unsure: set[int] = set()

    def noting(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """Return a hook that also takes note of what it is given."""

        def note_and_pack(t: torch.Tensor) -> Any:
            # Hooks are called when their node has its number, and before there is another node.
            node = _next_number() - 1
            self._known[node] = self._note(node, t) and self._known.get(node, True)
            return pack(t)

        return note_and_pack

    def _note(self, node: int, t: torch.Tensor) -> bool:
        """Return whether a tensor will be where it is."""
        if not is_plain(t):
            return False
        if t.data_ptr() % ALIGNED_BYTES.get(t.device.type, ALIGNED_BYTES_GPU):
            self._odd.add(node)
        storage = t.untyped_storage()
        number = id(storage)
        known = self._parameters.get(number)
        if known is None or known.ref() is not storage:
            # Other leaves are whoever's that called, or were gathered for a layer.
            return not is_form_of_leaf(t) or is_cast_of_leaf(t)
        base = t if t._base is None else t._base
        if self._owners.setdefault(number, id(base)) != id(base):
            self.unsure.add(number)
        self._weights.setdefault(node, []).append(number)
        return True

    def knows(self, node: Any, *saved: str, aligned: bool = False) -> bool:
        """Return whether what a node saved is known to be where it was, or comes back.

        Parameters
        ----------
        node : node of autograd
            Of this pass.
        *saved : str
            The names that it has for it.
        aligned : bool
            Whether it must have been at even addresses as well.
        """
        number = node._sequence_nr()
        if not self._known.get(number, False) or (aligned and number in self._odd):
            return False
        # What no node saves, as a checkpoint does, is noted for the node before.
        return all(self._is_ours(getattr(node, f"_raw_saved_{name}", None)) for name in saved)

    def _is_ours(self, saved: Any) -> bool:
        """Return whether a saved tensor is read by the hook of this pass; reads nothing."""
        if not _NAMES_HOOKS:
            return not _SAVES_ALONE
        found: bool = saved is not None and saved.unpack_hook is self.unpack
        return found

    def knows_leaf(self, leaf: torch.Tensor) -> bool:
        """Return whether a leaf that was not saved is the model's, and as the pass began."""
        if not is_plain(leaf):
            return False
        storage = leaf.untyped_storage()
        known = self._parameters.get(id(storage))
        if known is None or known.ref() is not storage or not known.is_there():
            return False
        return known.version == version_of(leaf)

    def close(self) -> None:
        """Take note of weights that are emptied now: the pass is over."""
        for number in {number for own in self._weights.values() for number in own}:
            known = self._parameters[number]
            if known is None or not known.is_there():
                self.unsure.add(number)

    def weights(self, node: Any) -> dict[int, StoredTensor]:
        """Return the storages of weights that a node saved, by number."""
        numbers = self._weights.get(node._sequence_nr(), [])
        return {n: known for n in numbers if (known := self._parameters[n]) is not None}
