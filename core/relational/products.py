"""The GEMM template: rows times the weight of their relation, and the gradients of weights.

On a GPU rows that are read by index, those of many relations and packed ones go to the kernels of
typed_gemm.cu; a few large products of plain rows are torch's. On a CPU matrices of one column or
one row are multiplied by the loops of the traversal template. Packed rows that the kernels do not
take, and those on a CPU, are decoded block by block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..engine.kernels.cpu import typed_products
from ..engine.kernels.cuda.typed_gemm import TypedTiles
from .graph import BATCH_RELATIONS, RelationalGraph, length_of_batch
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
    loops : Any
        The functions of `kernels.cpu.segment_sums`, or of its twin on a GPU; None where torch runs
        all.
    """

    def __init__(self, graph: RelationalGraph, kernels: CudaKernels | None, loops: Any) -> None:
        self.graph, self.kernels, self.loops = graph, kernels, loops

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
        on_cpu = self.loops is not None and self.kernels is None and isinstance(x, torch.Tensor)
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
        starts = self.graph.once(
            ("starts", tuple(bounds)), lambda: torch.tensor(bounds, device=self.graph.device)
        )
        numbers = self._numbers(len(g))[:-1]
        rows = x.reshape(len(x), -1, step.shape[-2]).contiguous()
        elements = g.reshape(len(g), -1).contiguous()
        entries = (starts, numbers if index is None else index, numbers)
        out: torch.Tensor = self.loops.sum_segments(*entries, elements, rows)
        return out.reshape(len(bounds) - 1, *step.shape)

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

    def _tiles(self, space: str, bounds: Sequence[int]) -> TypedTiles:
        return self.graph.once(
            ("tiles", space), lambda: TypedTiles.of(list(bounds), self.graph.device)
        )

    def _padded(self, space: str, bounds: Sequence[int], x: Any) -> Padding | None:
        """Return how relations are padded to one length, or None where each is multiplied alone."""
        if len(x.shape) != 2:
            return None
        device = self.graph.device
        return self.graph.once(("padded", space), lambda: Padding.of(bounds, device))


def _heads(x: Any, ndim: int) -> Iterator[tuple[Any, int | None]]:
    """Yield the rows of each head, and its number: None where there are no heads."""
    if ndim == 2:
        yield x, None
    else:
        for head in range(x.shape[1]):
            yield x[:, head], head
