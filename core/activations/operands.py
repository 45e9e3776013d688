"""What the operations of a pass have saved, as far as it may be computed with once more.

A replay computes with what an operation saved, earlier in the backward pass than the operation
itself does. So it must be known where that lies: with the hooks of this pass, and if it is a weight
then where the model had it when the pass began. It is not known

- of what others' hooks were given, such as those of a checkpoint, which computes its region again;
- of a weight that is gathered for its layer and given up behind it (FSDP, ZeRO 3), or that lies in
  memory which others use, too: that may be filled with another one by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ..engine.versions import version_of
from .guards import has_storage, is_cast_of_leaf, is_form_of_leaf, is_plain

#: By type of device, bytes that addresses of a product's operands are multiples of: what comes back
#: lies at such an address, and at others products may have other bits.
ALIGNED_BYTES = {"cpu": 64, "cuda": 256}

#: The number that the next node of autograd gets in this thread.
_next_number = torch._C._autograd._get_sequence_nr
#: Whether torch names the hooks of a saved tensor, and whether tensors are saved by no node.
_NAMES_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")
_SAVES_ALONE = hasattr(torch._C._autograd, "_make_saved_tensor")


class Weight(NamedTuple):
    """A storage of the model, its bytes, and the version of the tensor in it as the pass began."""

    ref: weakref.ref[torch.UntypedStorage]
    nbytes: int
    version: int

    def is_there(self) -> bool:
        """Return whether the storage lives, with as many bytes: it may be emptied meanwhile."""
        storage = self.ref()
        return storage is not None and storage.nbytes() == self.nbytes


class Operands:
    """The saved tensors of a pass's operations, by number of their node of autograd.

    Parameters
    ----------
    tensors : iterable of torch.Tensor or None
        The model's parameters and buffers, as the pass begins.

    Attributes
    ----------
    unpack : callable or None
        The hook by which autograd reads what was recorded.
    unsure : set of int
        Numbers of storages of the model from which more than one weight was saved, whose memory is
        filled with one after another, and of those that were emptied when the pass ended.
    """

    def __init__(self, tensors: Iterable[torch.Tensor | None]) -> None:
        #: By number of their storage; None for one that several tensors share.
        self._model: dict[int, Weight | None] = {}
        for t in filter(has_storage, tensors):
            storage = t.untyped_storage()
            own = Weight(weakref.ref(storage), storage.nbytes(), version_of(t))
            self._model[id(storage)] = None if id(storage) in self._model else own
        self.unpack: Callable[[Any], Any] | None = None
        #: Whether all that a node saved is known to be where it was.
        self._known: dict[int, bool] = {}
        #: Nodes that saved a tensor at an odd address.
        self._odd: set[int] = set()
        #: By node the weights that it saved, by number of their storage.
        self._weights: dict[int, dict[int, Weight]] = {}
        #: By number of a storage, that of the parameter which was saved from it.
        self._owners: dict[int, int] = {}
        self.unsure: set[int] = set()

    def recording(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """Return a hook that also records what it is given."""

        def record_and_pack(t: torch.Tensor) -> Any:
            # Hooks are called when their node has its number, and before there is another node.
            node = _next_number() - 1
            self._known[node] = self._record(node, t) and self._known.get(node, True)
            return pack(t)

        return record_and_pack

    def _record(self, node: int, t: torch.Tensor) -> bool:
        """Return whether a tensor that a node saves will be where it is."""
        if not is_plain(t):
            return False
        if t.data_ptr() % ALIGNED_BYTES[t.device.type]:
            self._odd.add(node)
        weight = self._weight_in(t)
        if weight is None:
            # Other leaves are whoever's that called, or were gathered for a layer.
            return not is_form_of_leaf(t) or is_cast_of_leaf(t)
        number = id(t.untyped_storage())
        parameter = t if t._base is None else t._base
        if self._owners.setdefault(number, id(parameter)) != id(parameter):
            self.unsure.add(number)
        self._weights.setdefault(node, {})[number] = weight
        return True

    def _weight_in(self, t: torch.Tensor) -> Weight | None:
        """Return what is known of a tensor's storage, if it is the model's since the pass began."""
        storage = t.untyped_storage()
        weight = self._model.get(id(storage))
        return weight if weight is not None and weight.ref() is storage else None

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
        number = _number_of(node)
        if not self._known.get(number, False) or (aligned and number in self._odd):
            return False
        if not all(weight.is_there() for weight in self.weights(node).values()):
            return False
        # What no node saves, as a checkpoint does, is recorded for the node before.
        return all(self._is_ours(getattr(node, f"_raw_saved_{name}", None)) for name in saved)

    def _is_ours(self, saved: Any) -> bool:
        """Return whether a saved tensor is read by the hook of this pass; reads nothing."""
        if not _NAMES_HOOKS:
            return not _SAVES_ALONE
        found: bool = saved is not None and saved.unpack_hook is self.unpack
        return found

    def knows_leaf(self, leaf: torch.Tensor) -> bool:
        """Return whether a leaf that was not saved is the model's, and as the pass began."""
        weight = self._weight_in(leaf) if is_plain(leaf) else None
        return weight is not None and weight.is_there() and weight.version == version_of(leaf)

    def weights(self, node: Any) -> dict[int, Weight]:
        """Return the weights that a node saved, by number of their storage."""
        return self._weights.get(_number_of(node), {})

    def close(self) -> None:
        """Record which weights are emptied now: the pass is over."""
        for own in self._weights.values():
            self.unsure.update(number for number, weight in own.items() if not weight.is_there())


def _number_of(node: Any) -> int:
    number: int = node._sequence_nr()
    return number
