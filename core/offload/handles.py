"""WeightHandle: a tensor without data that replaces a packed parameter in a model.

While a unit's forward pass runs, its parameters are ordinary tensors. At all other times, and for
whoever uses a parameter without calling its module, a handle replaces it: a tensor with the
parameter's shape, dtype and the device it is used on, that holds no data and decodes itself for
whatever operation it is given to. An operation that takes rows, as a look-up in an embedding or
``weight[ids]``, decodes only these rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..engine.tensor_rows import are_row_ids, is_row_dim, written_tensors
from ..errors import BitslabError

_aten = torch.ops.aten
_CPU = torch.device("cpu")
#: Operations that look at no data.
_KEPT = {_aten.detach.default, _aten.lift_fresh.default}


class WeightSource(Protocol):
    """Decodes the tensors of handles."""

    def whole(self, name: str) -> torch.Tensor:
        """Decode a tensor on the device that it is used on."""

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Decode rows of a tensor on the device that it is used on."""


class WeightHandle(torch.Tensor):
    """A packed parameter.

    Parameters
    ----------
    source : WeightSource
        What decodes it.
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

    @staticmethod
    def __new__(
        cls,
        source: WeightSource,
        name: str = "",
        like: torch.Tensor | None = None,
        device: torch.device | None = None,
        **options: Any,
    ) -> WeightHandle:
        """Make a tensor with no data.

        Raises
        ------
        BitslabError
            When the arguments are those of `torch.nn.Parameter`: data, and ``requires_grad``.
        """
        if like is None or options:
            # accelerate's way to move a parameter: another one of its class, with other data.
            raise BitslabError(
                "model: its weights are packed, so accelerate (cpu_offload, disk_offload, "
                "dispatch_model) and others that replace parameters cannot place them elsewhere; "
                "bitslab.offload.restore_weights(model) gives it ordinary parameters to place"
            )
        handle: WeightHandle = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        return handle

    def __init__(
        self,
        source: WeightSource,
        name: str = "",
        like: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._source = source
        self._name = name
        self._is_param = True  # an nn.Parameter for `isinstance` and modules

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def packed_name(self) -> str:
        """Name of the tensor among the packed weights."""
        return self._name

    @property
    def data(self) -> torch.Tensor:
        """The detached handle, as for any tensor; it cannot be set."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> NoReturn:
        raise self.refusal("given other data")

    @property
    def requires_grad(self) -> bool:
        """False, and it cannot be True: an optimizer would be given a gradient of nothing."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> WeightHandle:
        """Return the handle; BitslabError where a gradient is asked for."""
        if requires_grad:
            raise self.refusal("trained, as requires_grad=True asks; train adapters beside it")
        return self

    def decode(self) -> torch.Tensor:
        """Return the parameter's data, on the handle's device."""
        return self._source.whole(self._name)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows ``[*ids.shape, *shape[1:]]``, decoded, on the handle's device."""
        return self._source.rows(self._name, ids)

    def alias(self) -> WeightHandle:
        """Return another handle of the same tensor."""
        return type(self)(self._source, self._name, self, self.device)

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
        if func.is_view and torch.is_inference_mode_enabled():
            # A parameter is no tensor of inference, and torch wants none as a view of one.
            with torch.inference_mode(False):
                return cls.__torch_dispatch__(func, types, args, kwargs)
        if func is _aten.alias.default:  # such as weight[:], and torch wants another tensor
            return args[0].alias()
        if func in _ROWS and isinstance(args[0], cls):
            ids = _ROWS[func](*args)
            if ids is not None:
                return args[0].rows(ids)
        for value in written_tensors(func, args, kwargs):
            if isinstance(value, cls):
                raise value.refusal(f"changed in place ({func})")
        args, kwargs = tree_map_only(cls, cls.decode, (args, kwargs))
        return func(*args, **kwargs)

    def refusal(self, what: str) -> BitslabError:
        """Return the error of an operation that a packed weight cannot take part in."""
        return BitslabError(
            f"{self._name}: this weight is packed and cannot be {what}; call "
            "bitslab.offload.restore_weights(model) first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise self.refusal("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise self.refusal("pickled; save its state_dict()")

    def __repr__(self, *, tensor_contents: None = None) -> str:  # type: ignore[override]
        return f"WeightHandle({self._name!r}, {list(self.shape)}, {self.dtype}, {self.device})"


# Which rows an operation takes, by the arguments that torch gives it. None leaves it to torch, with
# the whole tensor: where it takes something else than rows, and where it fails, with torch's error.


def _embedded(handle: WeightHandle, ids: torch.Tensor, *options: Any) -> torch.Tensor | None:
    return None if isinstance(ids, WeightHandle) else ids


def _indexed(handle: WeightHandle, indices: list[torch.Tensor | None]) -> torch.Tensor | None:
    (ids, *others) = indices
    if others or ids is None or not _takes_rows(handle, ids) or _takes_most(handle, ids.numel()):
        return None
    lowest, highest = _bounds(ids)
    if lowest < -len(handle) or highest >= len(handle):
        return None
    return torch.where(ids < 0, ids + len(handle), ids)


def _index_selected(handle: WeightHandle, dim: int, ids: torch.Tensor) -> torch.Tensor | None:
    if not _is_decodable_dim(handle, dim) or ids.dim() > 1 or not _takes_rows(handle, ids):
        return None
    if _takes_most(handle, ids.numel()):
        return None
    lowest, highest = _bounds(ids)
    return ids.reshape(-1) if lowest >= 0 and highest < len(handle) else None


def _selected(handle: WeightHandle, dim: int, index: int) -> torch.Tensor | None:
    n_rows = len(handle) if _is_decodable_dim(handle, dim) else 0
    return _numbers(handle, index % n_rows) if -n_rows <= index < n_rows else None


def _sliced(
    handle: WeightHandle,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> torch.Tensor | None:
    if not _is_decodable_dim(handle, dim) or step < 1:
        return None
    picked = range(*slice(start, end, step).indices(len(handle)))
    return None if _takes_most(handle, len(picked)) else _numbers(handle, picked)


_ROWS: dict[Any, Callable[..., torch.Tensor | None]] = {
    _aten.embedding.default: _embedded,
    _aten.index.Tensor: _indexed,
    _aten.index_select.default: _index_selected,
    _aten.select.int: _selected,
    _aten.slice.Tensor: _sliced,
}


def _takes_most(handle: WeightHandle, n: int) -> bool:
    """Return whether decoding the whole tensor is faster than decoding so many rows."""
    return n > 0.75 * len(handle)


def _is_decodable_dim(handle: WeightHandle, dim: int) -> bool:
    """Return whether a dimension is that of the rows, and rows can be decoded one by one."""
    by_row = handle.dim() > 1 and handle.numel() > 0 and handle.is_contiguous()
    return by_row and is_row_dim(handle, dim)


def _takes_rows(handle: WeightHandle, ids: torch.Tensor) -> bool:
    """Return whether torch takes a tensor as row numbers; a uint8 one is a mask."""
    numbers = are_row_ids(ids) and not isinstance(ids, WeightHandle)
    there = ids.device in (handle.device, _CPU) and not ids.is_meta
    return numbers and there and _is_decodable_dim(handle, 0)


def _bounds(ids: torch.Tensor) -> tuple[int, int]:
    """Return the lowest and the highest id; 0 and -1 where that would wait for a GPU.

    A GPU that reads the rows checks the ids itself.
    """
    if ids.device != _CPU or not ids.numel():
        return 0, -1
    lowest, highest = ids.aminmax()
    return int(lowest), int(highest)


def _numbers(handle: WeightHandle, rows: int | range) -> torch.Tensor:
    """Return row numbers on the device that they are used on, made there without a copy."""
    device = _CPU if handle.is_meta else handle.device  # of a deferred state dict: read on the host
    if isinstance(rows, int):
        return torch.full((), rows, device=device)
    return torch.arange(len(rows), device=device) * rows.step + rows.start


def bound_parameter(tensor: torch.Tensor) -> nn.Parameter:
    """Return the parameter that a module has while its unit runs."""
    with torch.inference_mode(False):  # a later pass may be one with gradients
        return nn.Parameter(tensor, requires_grad=False)
