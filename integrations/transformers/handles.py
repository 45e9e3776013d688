"""Handles of K and V: what an update of a packed layer returns in place of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

#: What torch answers of a handle itself: its shape and kind, not its values.
_OF_HANDLES: frozenset[Callable[..., Any]] = frozenset(
    {
        *(
            getattr(torch.Tensor, name).__get__
            for name in (
                "device",
                "dtype",
                "grad_fn",
                "is_cpu",
                "is_cuda",
                "is_leaf",
                "is_meta",
                "is_nested",
                "is_quantized",
                "is_sparse",
                "itemsize",
                "layout",
                "nbytes",
                "ndim",
                "requires_grad",
                "shape",
            )
        ),
        torch.Tensor.__len__,
        torch.Tensor.dim,
        torch.Tensor.element_size,
        torch.Tensor.get_device,
        torch.Tensor.is_contiguous,
        torch.Tensor.is_floating_point,
        torch.Tensor.ndimension,
        torch.Tensor.numel,
        torch.Tensor.size,
        torch.Tensor.stride,
        torch.is_floating_point,
        torch.numel,
    }
)


class Update(Protocol):
    """One update of a layer, as far as handles know it."""

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all K and V of the layer as they were then, ``[B, H, T, D]``."""
        ...


class KVHandle(torch.Tensor):
    """All K or all V of a layer, ``[B, H, T, D]``, packed until values are asked for.

    The attention function "bitslab" reads what is packed. Any other function of torch that is given
    a handle gets the decoded tokens.

    Attributes
    ----------
    update : Update
        The update that returned it.
    which : int
        0 for K, 1 for V.
    """

    update: Update
    which: int

    @staticmethod
    def __new__(cls, update: Update, which: int, like: torch.Tensor, tokens: int) -> KVHandle:
        """Return a handle of `tokens` tokens like those of ``[B, H, any, D]``, K (0) or V (1)."""
        batch, heads, _, dim = like.shape
        found: KVHandle = torch.Tensor._make_wrapper_subclass(
            cls, (batch, heads, tokens, dim), dtype=like.dtype, device=like.device
        )
        found.update, found.which = update, which
        return found

    def dense(self) -> torch.Tensor:
        """Return the tokens."""
        return self.update.dense()[self.which]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer for what a handle is, and decode it for all else."""
        options = {} if kwargs is None else dict(kwargs)
        if func in _OF_HANDLES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **options)
        args, options = tree_map(_dense, (args, options))
        return func(*args, **options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Decode it for functions that torch calls by itself."""
        args, options = tree_map(_dense, (args, dict(kwargs or {})))
        return func(*args, **options)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"KVHandle({list(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.dense().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def update_of(key: torch.Tensor, value: torch.Tensor) -> Update | None:
    """Return the update whose handles K and V are, or None."""
    if isinstance(key, KVHandle) and isinstance(value, KVHandle) and key.update is value.update:
        return key.update
    return None


def _dense(value: Any) -> Any:
    return value.dense() if isinstance(value, KVHandle) else value
