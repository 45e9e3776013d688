"""Rows of a tensor in host memory by an index on a GPU, which reads them itself where it can."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..dtypes import flat_bytes
from ..engine.advisor import pays_to_sort_rows
from ..engine.codecs.base import bits_in_order
from ..engine.memory.host import HostBuffer
from ..engine.tensor_bits import as_integers
from ..engine.transfer.gather import gather_copied_rows
from ..errors import ArgumentError, ArgumentTypeError, IndexRangeError


def rows_to_gpu(
    source: torch.Tensor,
    buffer: HostBuffer | None,
    index: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather rows, or elements of a mask, to the GPU that the index lies on.

    Parameters
    ----------
    source : torch.Tensor
        ``[N, ...]`` on the CPU, of plain torch.
    buffer : HostBuffer or None
        What its memory belongs to; None for ordinary memory, which a GPU cannot read by itself.
    index : torch.Tensor
        int32 or int64 of any shape, or bool ``[N]`` or of the shape of `source`, on a GPU.
    out : torch.Tensor, optional
        ``[*index.shape, ...]`` of the dtype of `source` on the GPU of `index`, to write to.
    """
    if index.dtype not in (torch.int32, torch.int64, torch.bool):
        raise ArgumentTypeError(
            f"index: expected int32, int64 or bool on a GPU, got {index.dtype} on {index.device}"
        )
    if source.dim() == 0:
        raise IndexRangeError("index: a tensor without dimensions has no rows")
    if index.dtype == torch.bool:
        if index.dim() != 1:
            return by_way_of_cpu(source, index)
        if len(index) != len(source):
            raise IndexRangeError(f"index: a mask of {len(index)} for {len(source)} rows")
        index = index.nonzero().reshape(-1)
    shape = torch.Size((*index.shape, *source.shape[1:]))
    if out is not None and (out.device != index.device or out.dtype != source.dtype):
        raise ArgumentTypeError(
            f"out: expected {source.dtype} on {index.device}, as the rows and the index, "
            f"got {out.dtype} on {out.device}"
        )
    if out is not None and out.shape != shape:
        raise ArgumentError(f"out: expected shape {list(shape)}, got {list(out.shape)}")
    found = rows_of(source)
    differentiable = source.requires_grad and torch.is_grad_enabled()
    if found is None or differentiable or buffer is None or not buffer.ensure_pinned():
        rows = by_way_of_cpu(source, index)
        return rows if out is None else out.copy_(rows)
    rows, row_bytes = found
    direct = out is not None and bits_in_order(out) and not out.requires_grad
    if out is None:
        target = torch.empty(shape, dtype=source.dtype, device=index.device)
    else:
        # A copy of what it holds, since a bad index leaves `out` untouched.
        target = out if direct else out.detach().clone(memory_format=torch.contiguous_format)
    ids = index.reshape(-1).contiguous()
    target_rows = flat_bytes(target).view(len(ids), row_bytes)
    sort = pays_to_sort_rows(ids.device, rows, len(rows), len(ids))
    gather_copied_rows(rows, row_bytes, ids, target_rows, sort=sort)
    return target if out is None or direct else out.copy_(target)


def by_way_of_cpu(source: torch.Tensor, index: Any) -> torch.Tensor:
    """Index with the CPU and copy the result to the GPU of the index: right for every case."""
    device = next(x.device for x in tree_leaves(index) if isinstance(x, torch.Tensor) and x.is_cuda)
    on_cpu = tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, index)
    try:
        if source.requires_grad or source.is_complex() or source.is_neg():
            return source[on_cpu].to(device)
        # As integers, because torch cannot index every dtype.
        return as_integers(source)[on_cpu].to(device).view(source.dtype)
    except IndexError as error:
        raise IndexRangeError(f"index: {error}") from error


def rows_of(t: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """View the items of a tensor's first dimension as rows of bytes.

    Parameters
    ----------
    t : torch.Tensor
        ``[N, ...]``, each item contiguous and items at any distance that does not overlap.

    Returns
    -------
    tuple of torch.Tensor and int, or None
        uint8 ``[N, row_bytes]`` over the same memory, rows ``stride(0)`` bytes apart, and
        row_bytes; None where items are not contiguous, overlap or are empty.
    """
    if t.numel() == 0 or t.is_conj() or t.is_neg() or not t[0].is_contiguous():
        return None
    size = t.element_size()
    row_bytes = t[0].numel() * size
    stride_bytes = t.stride(0) * size if len(t) > 1 else row_bytes
    if stride_bytes < row_bytes:
        return None
    with torch.no_grad():
        flat = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
        rows = flat.as_strided((len(t), row_bytes), (stride_bytes, 1), t.storage_offset() * size)
    return rows, row_bytes
