"""Rows by index of tensor subclasses: which functions of torch take rows, and of which arguments.

Subclasses of tensor whose rows are decoded or read elsewhere (compressed features, unified tensors,
handles of packed weights) answer these functions themselves, and leave all others to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def row_functions(
    *, get_item: Callable[..., Any], index_select: Callable[..., Any], embedding: Callable[..., Any]
) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the functions of torch that take rows by index, with what answers each.

    Parameters
    ----------
    get_item : callable
        ``(tensor, index)``, for ``tensor[index]``.
    index_select : callable
        ``(tensor, dim, index, *, out=None)``.
    embedding : callable
        ``(ids, weight, ...)``, as `torch.nn.functional.embedding`.

    Returns
    -------
    dict
        By what ``__torch_function__`` gets.
    """
    return {
        torch.Tensor.__getitem__: get_item,
        torch.Tensor.index_select: index_select,
        torch.index_select: index_select,
        # Also by this name: PyG replaces `torch.index_select` by a function of its own.
        torch._C._VariableFunctions.index_select: index_select,
        torch.nn.functional.embedding: embedding,
    }


def is_row_dim(t: torch.Tensor, dim: Any) -> bool:
    """Return whether a dimension, counted from either end, is the first one of a tensor."""
    return isinstance(dim, int) and dim in (0, -t.dim())


def are_row_ids(ids: Any) -> bool:
    """Return whether torch takes a value as row numbers: int32 or int64; uint8 is a mask."""
    return isinstance(ids, torch.Tensor) and ids.dtype in (torch.int32, torch.int64)


def written_tensors(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes to, those in lists too.

    Parameters
    ----------
    func : torch._ops.OpOverload
        An operator, as ``__torch_dispatch__`` gets it.
    args, kwargs
        Its arguments.
    """
    for position, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (value for value in tree_leaves(given) if isinstance(value, torch.Tensor))
