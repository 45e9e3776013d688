"""The GEMM template: rows times the weight of their relation, and the gradients of weights.

What runs where no kernel is bound (`kernel_steps`). On a CPU matrices of one column or one row are
multiplied by the loops of the traversal template. Packed rows are the kernels' on a GPU
(`packed_products`); those that they do not take, and those on a CPU, are decoded block by block.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..engine.kernels.cpu import typed_products
from ..engine.kernels.cpu.typed_products import BLOCK_ROWS, take
from .graph import RelationalGraph
from .kernel_steps import tiles_of
from .packed_products import PackedProducts
from .rows import length_of_batch
from .steps import Step
from .type_sums import levels

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
        bounds = self.graph.bounds(space)
        if bounds is None:  # one row for each relation
            rows = self._plain(step, x, weight.dtype, index)
            return torch.matmul(rows.unsqueeze(-2), weight).squeeze(-2)
        return self._product(space, bounds, x, weight, step, index)

    def typed_linear_add(
        self,
        step: Step,
        x: Any,
        weight: torch.Tensor,
        bias: torch.Tensor,
        index: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply each row by its relation's or type's weight, and add a row of the same."""
        space = step.args[0].space
        bounds = self.graph.bounds(space)
        assert bounds is not None
        return self._product(space, bounds, x, weight, step, index, bias)

    def weight_product(
        self, step: Step, weight: torch.Tensor, matrix: torch.Tensor
    ) -> torch.Tensor:
        """Multiply weights ``[R, K, H * D]`` by matrices ``[R, H, D, N]``, head by head."""
        if matrix.ndim == 3:
            return torch.bmm(weight, matrix)
        parts = weight.reshape(*weight.shape[:2], *matrix.shape[1:3]).transpose(1, 2)
        return torch.matmul(parts, matrix).transpose(1, 2).flatten(2)

    def weight_product_grad(
        self, step: Step, weight: torch.Tensor, g: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of the matrices of `weight_product`."""
        if len(step.shape) == 2:
            return torch.bmm(weight.transpose(1, 2), g)
        heads, d, n = step.shape
        parts = weight.reshape(*weight.shape[:2], heads, d).permute(0, 2, 3, 1)
        return torch.matmul(parts, g.reshape(*g.shape[:2], heads, n).transpose(1, 2))

    def weight_grad(
        self, step: Step, x: Any, g: torch.Tensor, index: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return for each relation the product of its rows of x, transposed, and of g."""
        space = step.args[0].space
        bounds = self.graph.bounds(space)
        if bounds is None:
            rows = self._plain(step, x, g.dtype, index)
            return torch.mul(rows.unsqueeze(-1), g.unsqueeze(-2))
        return self._gradient(space, bounds, x, g, step, index)

    def _plain(
        self, step: Step, x: Any, dtype: torch.dtype, index: torch.Tensor | None
    ) -> torch.Tensor:
        """Return rows of relations, which are few, decoded."""
        if index is not None:
            x = take(x, index)
        if isinstance(x, torch.Tensor):
            return x
        rows: torch.Tensor = x.gather(torch.arange(len(x), device=self.graph.device))
        return rows.to(dtype).view(len(x), *step.args[0].shape)

    def linear(self, step: Step, x: Any, weight: torch.Tensor) -> torch.Tensor:
        """Multiply rows by a weight that all share."""
        if isinstance(x, torch.Tensor):
            return torch.matmul(x, weight)
        bounds = [0, self.graph.row_count(step.space)]
        if self.packed is not None:
            return self._product(f"all {step.space}", bounds, x, weight[None], step, None)
        out = weight.new_empty(bounds[-1], *step.shape)
        typed_products.multiply_rows(x, weight[None], bounds, out)
        return out

    def linear_add(
        self, step: Step, rest: torch.Tensor, x: Any, weight: torch.Tensor
    ) -> torch.Tensor:
        """Add rows times a weight that all share to other rows, or to one row."""
        if not isinstance(x, torch.Tensor):
            return self._add_packed(step, rest, x, weight)
        if x.ndim == 2:
            return torch.addmm(rest, x, weight)
        flat = (rest.flatten(0, -2), x.flatten(0, -2))
        return torch.addmm(*flat, weight).view(rest.shape)

    def _add_packed(
        self, step: Step, rest: torch.Tensor, x: Any, weight: torch.Tensor
    ) -> torch.Tensor:
        if self.packed is not None:
            return rest + self.linear(step, x, weight)
        out = weight.new_empty(self.graph.row_count(step.space), *step.shape)
        for rows in typed_products.blocks(x, [0, len(out)], None, out.device):
            _, begin, end, decoded = rows
            start = rest if rest.ndim == 1 else rest[begin:end]
            torch.addmm(start, decoded.to(weight.dtype), weight, out=out[begin:end])
        return out

    def linear_grad(self, step: Step, x: Any, g: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weight of `linear`, or of one that was transposed."""
        transposed = bool(step.attrs)
        if isinstance(x, torch.Tensor) and (x.is_cuda or x.ndim != 2 or x.shape[0] <= BLOCK_ROWS):
            if x.ndim == 1:  # a row that all share
                x, g = x[None], g[None]
            rows = (x, g) if x.ndim == 2 else (x.flatten(0, -2), g.flatten(0, -2))
            left, right = rows[::-1] if transposed else rows
            return torch.mm(left.t(), right)
        space = step.args[0].space
        bounds = [0, self.graph.row_count(space)]
        if self.packed is not None:
            shape = step.shape[::-1] if transposed else step.shape
            step = dataclasses.replace(step, shape=shape)
            found = self._gradient(f"all {space}", bounds, x, g, step, None)[0]
            return found.t() if transposed else found
        # Raw rows too go block by block, so that packed ones give their bits.
        out = g.new_zeros(step.shape)
        for _, begin, end, decoded in typed_products.blocks(x, bounds, None, g.device):
            rows = (decoded.to(g.dtype), g[begin:end])
            left, right = rows[::-1] if transposed else rows
            out.addmm_(left.t(), right)
        return out

    def _product(
        self,
        space: str,
        bounds: Sequence[int],
        x: Any,
        weight: torch.Tensor,
        step: Step,
        index: torch.Tensor | None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = weight.new_empty(bounds[-1], *step.shape)

        def multiply(source: Any, rows: torch.Tensor | None, schedule: int = 0) -> None:
            assert self.kernels is not None
            tiles, typed = tiles_of(self.graph, space, bounds), self.kernels.typed
            added = None if bias is None else bias.contiguous()
            typed.product(
                source, weight.contiguous(), tiles, out, index=rows, bias=added, schedule=schedule
            )

        heads = weight.ndim > 3
        if self.packed is not None and not heads and _is_packed(x, weight.dtype):
            what = f"product by {list(weight.shape)}"
            if self.packed.run(x, bounds[-1], weight.shape[-2], index, what, multiply, True):
                return out
        if 1 in weight.shape[-2:] and self._loops_take(x, weight):
            out = self._by_loops(self._relations(space), x, weight, step, index)
            return out if bias is None else out.add_(bias[self._relations(space)])
        padding = None if heads else self._padded(space, bounds)
        if padding is None:
            typed_products.multiply_rows(x, weight, bounds, out, index=index, bias=bias)
            return out
        rows = padding.pad(x, index, clear=False).to(weight.dtype)
        if bias is None:
            return padding.unpad(torch.bmm(rows, weight))
        return padding.unpad(torch.baddbmm(bias.unsqueeze(1), rows, weight))

    # On a CPU: matrices of one column, or of one row

    def _loops_take(self, x: Any, other: torch.Tensor) -> bool:
        wide = x.dtype is other.dtype and x.dtype in (torch.float32, torch.float64)
        return self.loops is not None and wide and 0 not in x.shape and other.numel() > 0

    def _by_loops(
        self,
        relation: torch.Tensor,
        x: Any,
        weight: torch.Tensor,
        step: Step,
        index: torch.Tensor | None,
    ) -> torch.Tensor:
        run = self._dots if weight.shape[-1] == 1 else self._multiples
        if isinstance(x, torch.Tensor):
            return run(relation, x, weight, step, index)
        ends = [*range(0, len(relation), BLOCK_ROWS), len(relation)]
        decoded = self._decoded(x, index, ends)
        return torch.cat([run(relation[b:e], rows, weight, step, None) for b, e, rows in decoded])

    def _decoded(
        self, x: Any, index: torch.Tensor | None, ends: Sequence[int]
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield first and last row, and packed rows, at most BLOCK_ROWS, between two of `ends`."""
        begin = 0
        while begin < ends[-1]:
            end = ends[bisect.bisect_right(ends, begin + BLOCK_ROWS) - 1]
            device = self.graph.device
            ids = torch.arange(begin, end, device=device) if index is None else index[begin:end]
            yield begin, end, x.gather(ids)
            begin = end

    def _numbers(self, n: int) -> torch.Tensor:
        return self.graph.once(
            ("numbers", n), lambda: torch.arange(n + 1, device=self.graph.device)
        )

    def _relations(self, space: str) -> torch.Tensor:
        relation = self.graph.rows(space).relation
        assert relation is not None
        return relation

    def _dots(
        self,
        relation: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        step: Step,
        index: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the dot product of each row and its relation's vector."""
        depth = weight.shape[-2]
        numbers = self._numbers(len(relation))[:-1]
        rows, vectors = (t.reshape(len(t), -1, depth).contiguous() for t in (x, weight))
        ends = (numbers if index is None else index, relation, numbers)
        out: torch.Tensor = self.loops.dot_entries(*ends, rows, vectors, len(relation))
        return out.reshape(len(relation), *step.shape)

    def _multiples(
        self,
        relation: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        step: Step,
        index: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return each row's relation's vector, times the row's one element."""
        width = weight.shape[-1]
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
        pieces, *more = self.graph.once(
            ("pieces", tuple(bounds)), lambda: levels(bounds, BLOCK_ROWS, self.graph.uploads)
        )
        starts = pieces[0]
        elements = g.reshape(len(g), -1).contiguous()
        if isinstance(x, torch.Tensor):
            parts = self._sums_of_pieces(starts, x, elements, step, index)
        else:
            ends, sums, first = starts.tolist(), [], 0
            for begin, end, rows in self._decoded(x, index, ends):
                last = len(starts) - 1 if end == len(g) else bisect.bisect_left(ends, end)
                of_block = starts[first : last + 1] - begin
                sums.append(self._sums_of_pieces(of_block, rows, elements[begin:end], step, None))
                first = last
            parts = torch.cat(sums)
        for of_types, columns in more:
            none = parts.new_empty(0, parts.shape[1])
            parts = self.loops.sum_segments(of_types, columns, columns, none, parts)
        return parts.reshape(len(bounds) - 1, *step.shape)

    def _sums_of_pieces(
        self,
        starts: torch.Tensor,
        x: torch.Tensor,
        elements: torch.Tensor,
        step: Step,
        index: torch.Tensor | None,
    ) -> torch.Tensor:
        numbers = self._numbers(len(elements))[:-1]
        rows = x.reshape(len(x), -1, step.shape[-2]).contiguous()
        entries = (starts, numbers if index is None else index, numbers)
        sums: torch.Tensor = self.loops.sum_segments(*entries, elements, rows)
        return sums

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

        heads = step.shape[:-2]
        if self.packed is not None and not heads and _is_packed(x, g.dtype):
            what = f"gradient of {[relations, depth, *g.shape[1:]]}"
            if self.packed.run(x, bounds[-1], depth, index, what, multiply):
                return found[0]
        if g.shape[-1] == 1 and self._loops_take(x, g):
            return self._weighted_rows(bounds, x, g, step, index)
        padding = None if heads else self._padded(space, bounds)
        if padding is not None:
            rows = padding.pad(x, index, clear=True).to(g.dtype)
            return torch.bmm(rows.transpose(1, 2), padding.pad(g, None, clear=True))
        out = g.new_zeros(relations, *heads, depth, g.shape[-1])
        typed_products.multiply_gradient(x, g, bounds, out, index=index)
        return out

    def _padded(self, space: str, bounds: Sequence[int]) -> Padding | None:
        """Return how relations are padded to one length, or None where each is multiplied alone."""
        device = self.graph.device
        return self.graph.once(("padded", space), lambda: Padding.of(bounds, device))


def _is_packed(x: Any, dtype: torch.dtype) -> bool:
    """Return whether rows are packed, and of a dtype."""
    return x.dtype is dtype and not isinstance(x, torch.Tensor)
