"""What is left alone, and the check of changes in place that torch leaves to hooks.

With hooks torch does not compare versions of saved tensors any more: a program that it refuses
gave gradients three times too large. Here the version is recorded when a tensor is saved, and
compared when it is read, so that the same programs are refused with the same error.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from ..engine.versions import version_of
from ..errors import ModifiedInPlaceError

#: Functions of autograd between a leaf and what is only another form of it.
_FORMS = (
    "ToCopy",
    "T",
    "Transpose",
    "Permute",
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "AsStrided",
    "Alias",
    "Expand",
    "Slice",
    "Select",
    "Squeeze",
    "Unsqueeze",
    "Split",
    "Clone",
)
#: Name of the node of a leaf.
_LEAF = "torch::autograd::AccumulateGrad"
#: A chain of forms is followed as far as this.
_MOST_FORMS = 6

_PLAIN_TYPES = (torch.Tensor, nn.Parameter)
_STRIDED = torch.strided
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_transforms = torch._C._functorch.peek_interpreter_stack
_dispatch_mode, _FAKE_MODE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE

#: Classes of nodes that are none of these.
_no_forms: set[type] = set()
_empties: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def is_computed_again() -> bool:
    """Return whether the node that runs now, of a backward pass, computes with Python.

    As that of a reentrant checkpoint does. What torch's own nodes save is of a graph of the
    backward pass itself, which is read much later.
    """
    return isinstance(torch._C._current_autograd_node(), BackwardCFunction)


def version_witness(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor of no memory with the version counter of `t`.

    Whoever holds it sees changes of `t` and keeps none of its bytes; `t` itself, the output of a
    node that saves it, would make a cycle with the node that is never freed.
    """
    witness = t.detach()
    witness.data = no_bytes_of(t.dtype, t.device)
    return witness


def no_bytes_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an empty tensor, which a tensor can have as its ``data`` to keep no memory."""
    key = dtype, device
    empty = _empties.get(key)
    if empty is None:
        empty = _empties[key] = torch.empty(0, dtype=dtype, device=device)
    return empty


def modified(shape: Iterable[int], dtype: torch.dtype, at: int, saved: int, what: str) -> Exception:
    """Return torch's error of a saved tensor that was changed in place."""
    return ModifiedInPlaceError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{dtype} {list(shape)}]{what} is at version {at}; expected version {saved} "
        "instead. Hint: torch.autograd.set_detect_anomaly(True) finds the operation"
    )


def unchanged(t: torch.Tensor, version: int) -> torch.Tensor:
    """Return a tensor that was kept, or refuse one that was changed since."""
    if (found := version_of(t)) != version:
        raise modified(t.shape, t.dtype, found, version, "")
    return t


def is_plain(t: torch.Tensor) -> bool:
    """Return whether a tensor is dense, of torch's own class, and has memory on a CPU or a GPU."""
    return (
        type(t) in _PLAIN_TYPES
        and t.layout is _STRIDED
        and (t.is_cpu or t.is_cuda)
        and not t.is_nested
        and not t.is_quantized
        and not _is_wrapped(t)
        # Its copy would be a fake one, and serve saves of the same storage behind the mode.
        and _dispatch_mode(_FAKE_MODE) is None
    )


def is_transformed() -> bool:
    """Return whether a transform of torch.func or a fake mode is on, whose tensors have no bits."""
    return _transforms() is not None or _dispatch_mode(_FAKE_MODE) is not None


def is_form_of_leaf(t: torch.Tensor) -> bool:
    """Return whether a tensor is a leaf that needs a gradient, or a view or cast of one.

    So are autocast's copies of weights, and FSDP2's unsharded parameters, which no module lists.
    """
    base = t._base
    if base is None:
        base = t
    node = base.grad_fn
    if type(node) in _no_forms:  # of nearly all
        return False
    if node is None:  # a leaf
        return base.requires_grad or isinstance(base, nn.Parameter)
    for _ in range(_MOST_FORMS):
        if node is None:
            return False
        name = node.name()
        if name == _LEAF:
            return True
        if not _is_form(name):
            if type(node).__name__ == name:  # else one class stands for several operations
                _no_forms.add(type(node))
            return False
        following = node.next_functions
        if len(following) != 1:
            return False
        node = following[0][0]
    return False


def is_cast_of_leaf(t: torch.Tensor) -> bool:
    """Return whether a form of a leaf is in memory of its own, as autocast's copies are."""
    node = (t if t._base is None else t._base).grad_fn
    for _ in range(_MOST_FORMS):
        if node is None or node.name() == "ToCopyBackward0":
            break
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return node is not None and node.name() == "ToCopyBackward0"


@functools.cache
def _is_form(name: str) -> bool:
    return name.rstrip("0123456789").removesuffix("Backward") in _FORMS


def storages_of(tensors: Iterable[torch.Tensor | None]) -> set[int]:
    """Return the numbers of the storages of tensors, while these live.

    Tensors of a transform of torch.func, which ``functional_call`` gives a model, have none.
    """
    return {id(t.untyped_storage()) for t in tensors if has_storage(t)}


def has_storage(t: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return whether a tensor is dense, of torch's own class and of no transform."""
    return t is not None and type(t) in _PLAIN_TYPES and t.layout is _STRIDED and not _is_wrapped(t)
