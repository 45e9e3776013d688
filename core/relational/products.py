"""The GEMM template: rows times the weight of their relation, and the gradients of weights.

On a GPU rows that are read by index, those of many relations and packed ones go to the kernels of
typed_gemm.cu; a few large products of plain rows are torch's. Packed rows that the kernels do not
take, and those on a CPU, are decoded block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..engine.kernels.cpu import typed_products
from ..engine.kernels.cuda.typed_gemm import TypedTiles
from .graph import RelationalGraph
from .steps import Step

if TYPE_CHECKING:
    from ..engine.kernels.cuda import CudaKernels

#: From so many relations on, products of few rows are one batch of padded products, if padding at
#: most doubles the rows: calls cost more than products then. On a GPU it is one kernel.
BATCH_RELATIONS = 8


@dataclass(frozen=True)
class Padding:
    """Relations padded to one length: where each row stands, int64 ``[n]``."""

    place: torch.Tensor
    relations: int
    length: int

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows ``[n, K]`` as ``[relations, length, K]``, zeros where there is no row."""
        out = rows.new_zeros(self.relations * self.length, rows.shape[1])
        return out.index_copy_(0, self.place, rows).view(self.relations, self.length, -1)


class Products:
    """Runs the steps of the GEMM template on one graph.

    Parameters
    ----------
    graph : RelationalGraph
        The graph.
    kernels : CudaKernels or None
        Those of its GPU; None where torch multiplies.
    """

    def __init__(self, graph: RelationalGraph, kernels: CudaKernels | None) -> None:
        self.graph, self.kernels = graph, kernels

    def typed_linear(
        self, step: Step, x: Any, weight: torch.Tensor, index: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply each row by its relation's weight."""
        space = step.args[0].space
        bounds = self.graph.rows(space).bounds
        if bounds is None:  # one row for each relation
            return torch.matmul(x.unsqueeze(-2), weight).squeeze(-2)
        return self._product(space, bounds, x, weight, step, index)

    def weight_grad(
        self, step: Step, x: Any, g: torch.Tensor, index: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return for each relation the product of its rows of x, transposed, and of g."""
        space = step.args[0].space
        bounds = self.graph.rows(space).bounds
        if bounds is None:
            return torch.mul(x.unsqueeze(-1), g.unsqueeze(-2))
        return self._gradient(space, bounds, x, g, step, index)

    def linear(self, step: Step, x: Any, weight: torch.Tensor) -> torch.Tensor:
        """Multiply rows by a weight that all share."""
        if isinstance(x, torch.Tensor):
            return torch.matmul(x, weight)
        bounds = [0, self.graph.rows(step.space).n]
        return self._product(f"all {step.space}", bounds, x, weight[None], step, None)

    def linear_grad(self, step: Step, x: Any, g: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weight of `linear`."""
        if isinstance(x, torch.Tensor):
            return x.flatten(0, -2).t() @ g.flatten(0, -2)
        space = step.args[0].space
        bounds = [0, self.graph.rows(space).n]
        return self._gradient(f"all {space}", bounds, x, g, step, None)[0]

    def _product(
        self,
        space: str,
        bounds: Sequence[int],
        x: Any,
        weight: torch.Tensor,
        step: Step,
        index: torch.Tensor | None,
    ) -> torch.Tensor:
        out = weight.new_empty(bounds[-1], *step.shape)

        def multiply(source: Any) -> None:
            assert self.kernels is not None
            tiles, whole = self._tiles(space, bounds), weight.contiguous()
            for rows, head in _heads(source, out.ndim):
                matrices = whole if head is None else whole[:, head]
                to = out if head is None else out[:, head]
                self.kernels.typed.product(rows, matrices, tiles, to, index=index)

        same = x.dtype is weight.dtype
        if same and self._on_gpu(x, weight.shape[-2], len(bounds) - 1, index, multiply):
            return out
        padding = self._padded(space, bounds, x)
        if padding is None:
            typed_products.multiply_rows(x, weight, bounds, out, index=index)
            return out
        rows = padding.pad(self._rows(x, index).to(weight.dtype))
        return torch.bmm(rows, weight).flatten(0, 1).index_select(0, padding.place)

    def _gradient(
        self,
        space: str,
        bounds: Sequence[int],
        x: Any,
        g: torch.Tensor,
        step: Step,
        index: torch.Tensor | None,
    ) -> torch.Tensor:
        depth, relations = step.shape[-2], len(bounds) - 1
        found: list[torch.Tensor] = []

        def multiply(source: Any) -> None:
            assert self.kernels is not None
            tiles, gradients = self._tiles(space, bounds), g.contiguous()
            for rows, head in _heads(source, g.ndim):
                part = gradients if head is None else gradients[:, head]
                found.append(self.kernels.typed.gradient(rows, part, tiles, depth, index=index))

        if x.dtype is g.dtype and self._on_gpu(x, depth, relations, index, multiply):
            return found[0] if g.ndim == 2 else torch.stack(found, 1)
        padding = self._padded(space, bounds, x)
        if padding is not None:
            rows = padding.pad(self._rows(x, index).to(g.dtype))
            return torch.bmm(rows.transpose(1, 2), padding.pad(g))
        heads = step.shape[:-2]
        out = g.new_zeros(relations, *heads, depth, g.shape[-1])
        typed_products.multiply_gradient(x, g, bounds, out, index=index)
        return out

    def _on_gpu(
        self,
        x: Any,
        depth: int,
        relations: int,
        index: torch.Tensor | None,
        multiply: Callable[[Any], None],
    ) -> bool:
        """Call `multiply` with what kernels read for x; return False where torch is to multiply."""
        if self.kernels is None:
            return False
        takes = self.kernels.typed.takes
        if not isinstance(x, torch.Tensor):
            with x.read_by_products(self.graph.device) as source:
                taken = source is not None and takes(source, depth)
                if taken:
                    multiply(source)
            return taken
        by_torch = index is None and relations < BATCH_RELATIONS
        if x.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32:
            by_torch = by_torch or index is None  # its tensor cores, which the kernels do not use
        if by_torch or not takes(x, depth):
            return False
        multiply(x.contiguous())
        return True

    def _rows(self, x: Any, index: torch.Tensor | None) -> torch.Tensor:
        if index is None and not isinstance(x, torch.Tensor):
            index = torch.arange(len(x), device=self.graph.device)
        return x if index is None else typed_products.take(x, index)

    def _tiles(self, space: str, bounds: Sequence[int]) -> TypedTiles:
        return self.graph.once(
            ("tiles", space), lambda: TypedTiles.of(list(bounds), self.graph.device)
        )

    def _padded(self, space: str, bounds: Sequence[int], x: Any) -> Padding | None:
        """Return how relations are padded to one length, or None where each is multiplied alone."""
        relations, n = len(bounds) - 1, bounds[-1]
        if len(x.shape) != 2 or relations < BATCH_RELATIONS:
            return None

        def make() -> Padding | None:
            starts = torch.tensor(bounds)
            length = int(starts.diff().max())
            if not 0 < n <= typed_products.BLOCK_ROWS or relations * length > 2 * n:
                return None
            shift = torch.arange(relations) * length - starts[:-1]
            place = shift.repeat_interleave(starts.diff()) + torch.arange(n)
            return Padding(place.to(self.graph.device), relations, length)

        return self.graph.once(("padded", space), make)


def _heads(x: Any, ndim: int) -> Iterator[tuple[Any, int | None]]:
    """Yield the rows of each head, and its number: None where there are no heads."""
    if ndim == 2:
        yield x, None
    else:
        for head in range(x.shape[1]):
            yield x[:, head], head
