"""ColumnTensor: the tensor that ``graph.ndata["feat"]`` returns for a compressed column."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from bitslab import CompressedFeature
from bitslab.engine.memory import plain, read_only
from bitslab.tensors import FeatureTensor, is_fact, name_of

# Functions that concern the gradient of a leaf, not its elements.
_OF_LEAVES = frozenset(
    ["register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"]
)


class ColumnTensor(FeatureTensor):
    """The rows of a compressed column as a read-only tensor on the CPU ``[N, *row_shape]``.

    It is a `bitslab.tensors.feature_tensor.FeatureTensor`: shape, dtype, device and length decode
    nothing, and indexed rows are decoded alone. Everything else decodes all rows once, and the
    feature keeps them. For DGL:

    - ``print`` shows the same as for a plain tensor, and decodes only the rows that are shown;
    - ``requires_grad_()`` is accepted; gradients reach ``.grad`` from the whole and from rows;
    - ``contiguous()`` returns the decoded rows, since DGL's kernels then read their memory;
    - pickles and deep copies of it are plain tensors.

    Parameters
    ----------
    feature : CompressedFeature
        ``[N, *row_shape]``.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run gradient functions on the leaf, memory access on the decoded rows."""
        kwargs = kwargs or {}
        name, attribute = name_of(func)
        first = args[0] if args else None
        sets = name == "__set__" and attribute in ("requires_grad", "grad")
        if name in _OF_LEAVES or sets or func is torch.autograd.grad:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            if isinstance(first, ColumnTensor):
                first.feature.hold_leaf(first if first.requires_grad else None)
            return result
        about_elements = not is_fact(func) and name != "detach" and attribute != "data"
        if about_elements and torch.is_grad_enabled():
            replaced, used = _with_gradients(args, kwargs)
            if used:
                return func(*replaced[0], **replaced[1])
        if isinstance(first, ColumnTensor) and name in ("contiguous", "untyped_storage"):
            return func(first.feature.whole(), *args[1:], **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        """Return the repr of a plain tensor; only the rows that are shown are decoded."""
        return repr(_excerpt(self.feature).requires_grad_(self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor."""
        return self._plain_copy().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy to a plain tensor."""
        copied = memo[id(self)] = self._plain_copy()
        return copied

    def _plain_copy(self) -> torch.Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)


def column_tensor(feature: CompressedFeature) -> ColumnTensor:
    """Return the tensor of a feature's column, the same one while it is in use."""
    t = feature.stand_in(ColumnTensor)
    assert isinstance(t, ColumnTensor)
    return t


class _Elements(torch.autograd.Function):
    """The decoded rows of a leaf, through which gradients reach it."""

    @staticmethod
    def forward(ctx: Any, t: ColumnTensor) -> torch.Tensor:
        return plain(t.feature.whole()).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _with_gradients(args: Any, kwargs: Any) -> tuple[Any, bool]:
    """Replace leaves by decoded rows; return the arguments, and whether there was a leaf."""
    used = False

    def replace(x: Any) -> Any:
        nonlocal used
        if not isinstance(x, ColumnTensor) or not x.requires_grad:
            return x
        used = True
        return read_only(_Elements.apply(x))  # type: ignore[no-untyped-call]

    return tree_map(replace, (args, kwargs)), used


def _excerpt(feature: CompressedFeature) -> torch.Tensor:
    """Return a tensor that prints like all rows, without most of the rows that are not shown."""
    options: Any = torch._tensor_str.PRINT_OPTS
    n_rows, n_edge = len(feature), int(options.edgeitems)
    row_numel = feature.shape[1:].numel()
    if n_rows <= 2 * n_edge or n_rows * row_numel <= options.threshold:
        return feature.table.decoded(0, n_rows)
    if not n_edge:
        return torch.zeros((), dtype=feature.dtype).expand(feature.shape)
    # Enough rows for torch to leave out the middle.
    n_shown = min(n_rows, max(2 * n_edge, int(options.threshold) // row_numel) + 1)
    shown = torch.zeros((n_shown, *feature.shape[1:]), dtype=feature.dtype)
    shown[:n_edge] = feature.table.decoded(0, n_edge)
    shown[n_shown - n_edge :] = feature.table.decoded(n_rows - n_edge, n_rows)
    return shown
