"""WeightHandle: what stands in a model where a packed parameter was.

While a unit's forward pass runs, its parameters are ordinary tensors. At all other times, and for
whoever uses a parameter without calling its module, a handle is in its place: a tensor with the
parameter's shape, dtype and the device it is used on, that holds no data and decodes itself for
whatever operation it is given to. A look-up of rows decodes only these rows.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import BitslabError

_aten = torch.ops.aten
#: Operations that look at no data.
_KEPT = {_aten.detach.default, _aten.lift_fresh.default}


class WeightSource(Protocol):
    """Where handles get their data from."""

    def whole(self, name: str) -> torch.Tensor:
        """Decode a tensor on the device that it is used on."""

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Decode rows of a tensor on the device that it is used on."""


class WeightHandle(torch.Tensor):
    """A packed parameter.

    Parameters
    ----------
    source : WeightSource
        Where its data come from.
    name : str
        Its name there.
    like : torch.Tensor
        A tensor of its shape, dtype and strides; its data are not looked at.
    device : torch.device
        Where it is used.

    Notes
    -----
    Read-only: loading into it or changing it in place raises, as do copying and pickling.
    `restore_weights` gives the model its ordinary parameters back.
    """

    _source: WeightSource
    _name: str

    @staticmethod
    def __new__(
        cls, source: WeightSource, name: str, like: torch.Tensor, device: torch.device
    ) -> WeightHandle:
        """Make a tensor with no data."""
        handle: WeightHandle = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        handle._source, handle._name = source, name
        handle._is_param = True
        return handle

    def __init__(
        self, source: WeightSource, name: str, like: torch.Tensor, device: torch.device
    ) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def packed_name(self) -> str:
        """Name of the tensor among the packed weights."""
        return self._name

    @property
    def data(self) -> torch.Tensor:
        """The handle without its history, as for any tensor; it cannot be set."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> NoReturn:
        self._refuse("given other data")

    def decode(self) -> torch.Tensor:
        """Return the parameter's data, on the handle's device."""
        return self._source.whole(self._name)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Decode handles for an operation."""
        kwargs = kwargs or {}
        if func in _KEPT:
            return args[0]
        if func is _aten.alias.default:  # such as weight[:], and torch wants another tensor
            (handle,) = args
            return cls(handle._source, handle._name, handle, handle.device)
        if func is _aten.embedding.default and isinstance(args[0], cls):
            handle, ids = args[0], args[1]
            if not isinstance(ids, cls):
                return handle._source.rows(handle._name, ids)
        for place, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                for value in tree_leaves(given):  # some operations write to a list of tensors
                    if isinstance(value, cls):
                        value._refuse(f"changed in place ({func})")
        args, kwargs = tree_map_only(cls, cls.decode, (args, kwargs))
        return func(*args, **kwargs)

    def _refuse(self, what: str) -> NoReturn:
        raise BitslabError(
            f"{self._name}: this weight is packed and cannot be {what}; call "
            "bitslab.offload.restore_weights(model) first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickled; save its state_dict()")

    def __repr__(self, *, tensor_contents: None = None) -> str:  # type: ignore[override]
        return f"WeightHandle({self._name!r}, {list(self.shape)}, {self.dtype}, {self.device})"


def bound_parameter(tensor: torch.Tensor) -> nn.Parameter:
    """Make the parameter that a module sees while its unit runs."""
    with torch.inference_mode(False):  # a later pass may be one with gradients
        return nn.Parameter(tensor, requires_grad=False)
