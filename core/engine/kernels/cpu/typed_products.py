"""Rows times the weight of their type, type by type: the definition of typed_gemm.cu, in torch.

This is also the path on a CPU, and on a GPU for rows that the kernels do not take. Rows may be
those of a table that decodes them by index: blocks of them are decoded as they are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

#: Rows that are gathered at a time: what a product holds beyond its result.
BLOCK_ROWS = 1 << 14


class RowGatherer(Protocol):
    """Rows that are decoded by index, such as a `bitslab.CompressedTable`."""

    def gather(self, ids: torch.Tensor, /) -> torch.Tensor:
        """Return rows ``[n, K]`` on the device of the ids."""
        ...


Rows = torch.Tensor | RowGatherer


def take(x: Rows, index: torch.Tensor) -> torch.Tensor:
    """Return rows of a tensor by index, or decode them."""
    return x.index_select(0, index) if isinstance(x, torch.Tensor) else x.gather(index)


def blocks(
    x: Rows, bounds: Sequence[int], index: torch.Tensor | None, device: torch.device
) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """Yield type, first and last row, and the rows of x, of up to BLOCK_ROWS rows of one type.

    Of a tensor on a GPU whose rows are not gathered, all rows of a type: a block takes a launch.
    """
    whole = index is None and isinstance(x, torch.Tensor) and x.is_cuda
    for r, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
        rows = max(high - low, 1) if whole else BLOCK_ROWS
        for begin in range(low, high, rows):
            end = min(begin + rows, high)
            if index is not None:
                yield r, begin, end, take(x, index[begin:end])
            elif isinstance(x, torch.Tensor):
                yield r, begin, end, x[begin:end]
            else:
                yield r, begin, end, x.gather(torch.arange(begin, end, device=device))


def multiply_rows(
    x: Rows,
    weight: torch.Tensor,
    bounds: Sequence[int],
    out: torch.Tensor,
    *,
    index: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scatter: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """Multiply rows by the weight of their type, and add the type's row of `bias`.

    ``out[scatter] = scale * (x[index] weight[type] + bias[type])``.

    Parameters
    ----------
    x : torch.Tensor or table
        ``[N, K]``, or ``[N, H, K]`` with a weight for each head, of a table ``[N, H * K]`` too;
        converted to the weight's dtype block by block.
    weight : torch.Tensor
        ``[types, K, M]``, or ``[types, H, K, M]``.
    bounds : sequence of int
        The first row of each type, and the end.
    out : torch.Tensor
        ``[rows, M]``, or ``[rows, H, M]``.
    index, scatter : torch.Tensor, optional
        int64 ``[rows]``: the row of x, and of `out`, of each row.
    bias : torch.Tensor, optional
        ``[types, M]``, or ``[types, H, M]``.
    scale : torch.Tensor, optional
        ``[rows]``: what each row of the product is multiplied by.
    """
    for r, begin, end, decoded in blocks(x, bounds, index, out.device):
        rows = decoded.to(weight.dtype).view(end - begin, *weight.shape[1:-1])
        plain = scatter is None and scale is None
        if plain and rows.ndim == 2:
            if bias is None:
                torch.mm(rows, weight[r], out=out[begin:end])
            else:
                torch.addmm(bias[r], rows, weight[r], out=out[begin:end])
            continue
        product = torch.einsum("n...k,...km->n...m", rows, weight[r])
        if bias is not None:
            product = product + bias[r]
        if scale is not None:
            product = product * scale[begin:end].view(-1, *(1,) * (product.ndim - 1))
        if scatter is None:
            out[begin:end] = product
        else:
            out.index_copy_(0, scatter[begin:end], product)


def multiply_gradient(
    x: Rows,
    g: torch.Tensor,
    bounds: Sequence[int],
    out: torch.Tensor,
    *,
    index: torch.Tensor | None = None,
) -> None:
    """Add to `out`, shaped like the weight of `multiply_rows`, the weight's gradient, from `g`."""
    for r, begin, end, decoded in blocks(x, bounds, index, g.device):
        rows = decoded.to(g.dtype).view(end - begin, *out.shape[1:-1])
        if rows.ndim == 2:
            out[r].addmm_(rows.t(), g[begin:end])
        else:
            out[r].baddbmm_(rows.permute(1, 2, 0), g[begin:end].transpose(0, 1))
