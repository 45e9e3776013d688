"""The GEMM template: rows times the weight of their relation, and the gradients of weights.

What runs where no kernel is bound (`kernel_steps`). On a CPU matrices of one column or one row are
multiplied by the loops of the traversal template. Packed rows are the kernels' on a GPU
(`packed_products`); those that they do not take, and those on a CPU, are decoded block by block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..engine.kernels.cpu import typed_products
from ..engine.kernels.cpu.typed_products import BLOCK_ROWS
from .graph import RelationalGraph, length_of_batch
from .kernel_steps import tiles_of
from .packed_products import PackedProducts
from .steps import Step

if TYPE_CHECKING:
    from ..engine.kernels.cuda import CudaKernels


@dataclass(frozen=True)
class Padding:
    """Relations padded to one length.

    Attributes
    ----------
    place : torch.Tensor
        int64 ``[n]``: where each row stands.
    row : torch.Tensor
        int64 ``[relations * length]``: the row at each place, any where none stands.
    holes : torch.Tensor
        int64: the places where none stands.
    relations : int
        How many.
    """

    place: torch.Tensor
    row: torch.Tensor
    holes: torch.Tensor
    relations: int

    @classmethod
    def of(cls, bounds: Sequence[int], device: torch.device) -> Padding | None:
        """Return that of the rows that begin at `bounds`; None where it is not worth it."""
        starts = torch.tensor(bounds)
        length = length_of_batch(starts.diff().tolist())
        if length is None:
            return None
        relations, n = len(bounds) - 1, bounds[-1]
        shift = torch.arange(relations) * length - starts[:-1]
        place = shift.repeat_interleave(starts.diff()) + torch.arange(n)
        row = torch.full((relations * length,), -1).index_copy_(0, place, torch.arange(n))
        holes = (row < 0).nonzero().flatten()
        return cls(place.to(device), row.clamp(min=0).to(device), holes.to(device), relations)

    @property
    def whole(self) -> bool:
        """Whether the rows have one length already."""
        return len(self.holes) == 0

    def unpad(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows ``[relations, length, M]`` as ``[n, M]``."""
        flat = rows.flatten(0, 1)
        return flat if self.whole else flat.index_select(0, self.place)

    def pad(self, x: Any, index: torch.Tensor | None, clear: bool) -> torch.Tensor:
        """Return rows ``[n, K]``, read by index, as ``[relations, length, K]``.

        Where no row stands are zeros if `clear`, else another row: what is computed of it is not
        read.
        """
        if isinstance(x, torch.Tensor) and index is None and self.whole:
            rows = x
        elif isinstance(x, torch.Tensor):
            row = self.row if index is None else index.index_select(0, self.row)
            rows = x.index_select(0, row)
        else:  # a packed row is decoded once
            index = torch.arange(len(x), device=self.row.device) if index is None else index
            rows = x.gather(index).index_select(0, self.row)
        if clear and not self.whole:
            rows.index_fill_(0, self.holes, 0)
        return rows.view(self.relations, len(self.row) // self.relations, x.shape[1])


class Products:
    """Runs the steps of the GEMM template on one graph.

    Parameters
    ----------
    graph : RelationalGraph
        The graph.
    kernels : CudaKernels or None
        Those of its GPU; None where torch multiplies.
    loops : module or None
        `kernels.cpu.segment_sums`; None where torch or the kernels of a GPU run all.
    """

    def __init__(self, graph: RelationalGraph, kernels: CudaKernels | None, loops: Any) -> None:
        self.graph, self.kernels, self.loops = graph, kernels, loops
        self.packed = None if kernels is None else PackedProducts(graph.device, kernels)

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
            rows = (x, g) if x.ndim == 2 else (x.flatten(0, -2), g.flatten(0, -2))
            return torch.mm(rows[0].t(), rows[1])
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

        def multiply(source: Any, rows: torch.Tensor | None) -> None:
            assert self.kernels is not None
            tiles = tiles_of(self.graph, space, bounds)
            self.kernels.typed.product(source, weight.contiguous(), tiles, out, index=rows)

        if self.packed is not None and x.dtype is weight.dtype and not isinstance(x, torch.Tensor):
            what = f"product by {list(weight.shape)}"
            if self.packed.run(x, weight.shape[-2], index, what, multiply):
                return out
        if 1 in weight.shape[-2:] and self._loops_take(x, weight):
            by_loops = self._dots if weight.shape[-1] == 1 else self._multiples
            return by_loops(space, x, weight, step, index)
        padding = self._padded(space, bounds, x)
        if padding is None:
            typed_products.multiply_rows(x, weight, bounds, out, index=index)
            return out
        rows = padding.pad(x, index, clear=False).to(weight.dtype)
        return padding.unpad(torch.bmm(rows, weight))

    # On a CPU: matrices of one column, or of one row

    def _loops_take(self, x: Any, other: torch.Tensor) -> bool:
        on_cpu = self.loops is not None and isinstance(x, torch.Tensor)
        wide = x.dtype is other.dtype and x.dtype in (torch.float32, torch.float64)
        return on_cpu and wide and x.numel() > 0 and other.numel() > 0

    def _numbers(self, n: int) -> torch.Tensor:
        return self.graph.once(
            ("numbers", n), lambda: torch.arange(n + 1, device=self.graph.device)
        )

    def _relations(self, space: str) -> torch.Tensor:
        relation = self.graph.rows(space).relation
        assert relation is not None
        return relation

    def _dots(
        self, space: str, x: Any, weight: torch.Tensor, step: Step, index: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the dot product of each row and its relation's vector."""
        relation, depth = self._relations(space), weight.shape[-2]
        numbers = self._numbers(len(relation))[:-1]
        rows, vectors = (t.reshape(len(t), -1, depth).contiguous() for t in (x, weight))
        ends = (numbers if index is None else index, relation, numbers)
        out: torch.Tensor = self.loops.dot_entries(*ends, rows, vectors, len(relation))
        return out.reshape(len(relation), *step.shape)

    def _multiples(
        self, space: str, x: Any, weight: torch.Tensor, step: Step, index: torch.Tensor | None
    ) -> torch.Tensor:
        """Return each row's relation's vector, times the row's one element."""
        relation, width = self._relations(space), weight.shape[-1]
        starts = self._numbers(len(relation))
        entries = (starts, relation, starts[:-1] if index is None else index)
        elements = x.reshape(len(x), math.prod(x.shape[1:])).contiguous()
        vectors = weight.reshape(len(weight), -1, width).contiguous()
        out: torch.Tensor = self.loops.sum_segments(*entries, elements, vectors)
        return out.reshape(len(relation), *step.shape)

    def _weighted_rows(
        self, bounds: Sequence[int], x: Any, g: torch.Tensor, step: Step, index: torch.Tensor | None
    ) -> torch.Tensor:
        """Return for each relation the sum of its rows, each times its one element of g."""
        starts, relations = self.graph.once(("pieces", tuple(bounds)), lambda: _pieces(bounds))
        numbers = self._numbers(len(g))[:-1]
        rows = x.reshape(len(x), -1, step.shape[-2]).contiguous()
        elements = g.reshape(len(g), -1).contiguous()
        entries = (starts, numbers if index is None else index, numbers)
        parts: torch.Tensor = self.loops.sum_segments(*entries, elements, rows)
        if relations is not None:
            out = parts.new_zeros(len(bounds) - 1, *parts.shape[1:])
            parts = out.index_add_(0, relations, parts)
        return parts.reshape(len(bounds) - 1, *step.shape)

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

        def multiply(source: Any, rows: torch.Tensor | None) -> None:
            assert self.kernels is not None
            tiles = tiles_of(self.graph, space, bounds)
            product = self.kernels.typed.gradient(source, g.contiguous(), tiles, depth, index=rows)
            found[:] = [product]

        if self.packed is not None and x.dtype is g.dtype and not isinstance(x, torch.Tensor):
            what = f"gradient of {[relations, depth, *g.shape[1:]]}"
            if self.packed.run(x, depth, index, what, multiply):
                return found[0]
        if g.shape[-1] == 1 and self._loops_take(x, g):
            return self._weighted_rows(bounds, x, g, step, index)
        padding = self._padded(space, bounds, x)
        if padding is not None:
            rows = padding.pad(x, index, clear=True).to(g.dtype)
            return torch.bmm(rows.transpose(1, 2), padding.pad(g, None, clear=True))
        heads = step.shape[:-2]
        out = g.new_zeros(relations, *heads, depth, g.shape[-1])
        typed_products.multiply_gradient(x, g, bounds, out, index=index)
        return out

    def _padded(self, space: str, bounds: Sequence[int], x: Any) -> Padding | None:
        """Return how relations are padded to one length, or None where each is multiplied alone."""
        if len(x.shape) != 2:
            return None
        device = self.graph.device
        return self.graph.once(("padded", space), lambda: Padding.of(bounds, device))


def _pieces(bounds: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the starts of pieces of relations, and the relation of each, which threads share.

    A sum is one thread's: that of a long relation is made of several. None where each is whole.
    """
    counts = (torch.tensor(bounds).diff() + BLOCK_ROWS - 1).div(BLOCK_ROWS, rounding_mode="floor")
    counts.clamp_(min=1)
    relations = torch.arange(len(counts)).repeat_interleave(counts)
    place = torch.arange(len(relations)) - (counts.cumsum(0) - counts)[relations]
    starts = torch.tensor(bounds)[relations] + BLOCK_ROWS * place
    starts = torch.cat([starts, torch.tensor(bounds[-1:])])
    return starts, None if len(relations) == len(counts) else relations
