"""Runs steps: the GEMM template, the traversal template, and torch's operators.

On a CPU float32 and float64 traversals are Numba loops; elsewhere, and for other dtypes, they are
torch's operators over the same entries (the readable definition, which tests compare with).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..engine.kernels.cpu import segment_sums
from .graph import Hop, RelationalGraph
from .steps import Step

#: Rows that a GEMM gathers at a time: what it holds beyond its result.
BLOCK_ROWS = 1 << 14
#: From so many relations on, products of few rows are one batch of padded products, if padding at
#: most doubles the rows: calls cost more than products then.
BATCH_RELATIONS = 8


class RowSource(Protocol):
    """Rows that are decoded by index, such as a `bitslab.CompressedTable`."""

    def gather(self, ids: torch.Tensor, /) -> torch.Tensor:
        """Return rows ``[n, K]``."""
        ...


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


class Schedule:
    """The steps that give some results, in order, and when each value is no longer needed.

    Parameters
    ----------
    results : sequence of Step or None
        What to compute.
    given : sequence of Step
        Values that are there already.
    fuse : bool
        Whether a GEMM reads its rows by index, instead of a gathered copy.
    """

    def __init__(
        self, results: Sequence[Step | None], given: Sequence[Step] = (), fuse: bool = True
    ) -> None:
        self.results, self.fuse = list(results), fuse
        self.order: list[Step] = []
        done = {id(step) for step in given}
        self._given = frozenset(done)
        for result in results:
            if result is not None:
                self._visit(result, done)
        last: dict[int, int] = {}
        for place, step in enumerate(self.order):
            for argument in self.reads(step):
                last[id(argument)] = place
        wanted = {id(r) for r in results}
        self.frees: list[list[int]] = [[] for _ in self.order]
        for key, place in last.items():
            if key not in wanted:
                self.frees[place].append(key)

    def _visit(self, step: Step, done: set[int]) -> None:
        if id(step) in done:
            return
        done.add(id(step))
        for argument in self.reads(step):
            self._visit(argument, done)
        self.order.append(step)

    def reads(self, step: Step) -> tuple[Step, ...]:
        """Return the values that a step reads."""
        if self.gathers(step):
            return (step.args[0].args[0], *step.args[1:])
        return step.args

    def gathers(self, step: Step) -> bool:
        """Return whether a GEMM reads its first argument by index."""
        packed = step.op in ("typed_linear", "weight_grad") and step.args[0].op == "gather"
        if not packed or id(step.args[0]) in self._given:
            return False
        return self.fuse or step.args[0].args[0].op == "packed"


class Machine:
    """Runs schedules on one graph.

    Parameters
    ----------
    graph : RelationalGraph
        The graph.
    dtype : torch.dtype
        Of the inputs.
    numba : bool
        Whether traversals of float32 and float64 on a CPU may be Numba loops.
    """

    def __init__(self, graph: RelationalGraph, dtype: torch.dtype, numba: bool = True) -> None:
        self.graph, self.dtype = graph, dtype
        self.numba = numba and graph.device.type == "cpu"

    def run(self, schedule: Schedule, values: dict[int, Any]) -> list[torch.Tensor | None]:
        """Return the results; `values` has what is given, by the id of its step, and is used up."""
        for place, step in enumerate(schedule.order):
            if schedule.gathers(step):
                index = self.graph.gather_index(step.args[0].attrs[0], step.args[0].space)
                arguments = [values[id(a)] for a in schedule.reads(step)]
                values[id(step)] = getattr(self, step.op)(step, *arguments, index=index)
            else:
                arguments = [values[id(a)] for a in step.args]
                values[id(step)] = getattr(self, step.op)(step, *arguments)
            for key in schedule.frees[place]:
                del values[key]
        return [None if r is None else values[id(r)] for r in schedule.results]

    # GEMM template: Y = X[index] W[relation]

    def _blocks(self, step: Step, x: Any, index: Any) -> Iterator[tuple[int, int, int, Any]]:
        """Yield relation, first and last row, and the rows of x, block by block."""
        bounds = self.graph.rows(step.args[0].space).bounds
        if bounds is None:  # one row for each relation
            bounds = list(range(self.graph.num_relations + 1))
        for r, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
            for begin in range(low, high, BLOCK_ROWS):
                end = min(begin + BLOCK_ROWS, high)
                yield r, begin, end, x[begin:end] if index is None else take(x, index[begin:end])

    def _padded(self, step: Step) -> Padding | None:
        """Return how relations are padded to one length, or None where each is multiplied alone."""
        space, relations = step.args[0].space, self.graph.num_relations
        if len(step.args[0].shape) != 1 or relations < BATCH_RELATIONS or space == "relation":
            return None

        def make() -> Padding | None:
            rows = self.graph.rows(space)
            bounds = torch.tensor(rows.bounds)
            length = int(bounds.diff().max())
            if not 0 < rows.n <= BLOCK_ROWS or relations * length > 2 * rows.n:
                return None
            shift = torch.arange(relations) * length - bounds[:-1]
            place = shift.repeat_interleave(bounds.diff()) + torch.arange(rows.n)
            return Padding(place.to(self.graph.device), relations, length)

        return self.graph.once(("padded", space), make)

    def typed_linear(
        self, step: Step, x: Any, weight: torch.Tensor, index: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply each row by its relation's weight."""
        padding = self._padded(step)
        if padding is not None:
            rows = padding.pad(x if index is None else take(x, index))
            return torch.bmm(rows, weight).flatten(0, 1).index_select(0, padding.place)
        out = weight.new_empty(self.graph.rows(step.space).n, *step.shape)
        for r, begin, end, rows in self._blocks(step, x, index):
            if rows.ndim == 2:
                torch.mm(rows, weight[r], out=out[begin:end])
            else:
                product = torch.bmm(rows.transpose(0, 1), weight[r])
                out[begin:end] = product.transpose(0, 1)
        return out

    def weight_grad(
        self, step: Step, x: Any, g: torch.Tensor, index: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return for each relation the product of its rows of x, transposed, and of g."""
        padding = self._padded(step)
        if padding is not None:
            rows = padding.pad(x if index is None else take(x, index))
            return torch.bmm(rows.transpose(1, 2), padding.pad(g))
        out = g.new_zeros(self.graph.num_relations, *step.shape)
        for r, begin, end, rows in self._blocks(step, x, index):
            part = g[begin:end]
            if rows.ndim == 2:
                out[r].addmm_(rows.t(), part)
            else:
                out[r].baddbmm_(rows.permute(1, 2, 0), part.transpose(0, 1))
        return out

    # Traversal template: loops over the entries of each row

    def hop_sum(
        self, step: Step, x: torch.Tensor, weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum x over the entries of each row."""
        name, transposed = step.attrs
        hop = self.graph.hop(name)
        heads = 1 if weight is None else max(1, math.prod(weight.shape[1:]))
        summed = _wide(x)
        rows = summed.reshape(len(x), heads, step.width // heads)
        weights = rows.new_empty(0, heads)
        if weight is not None:
            weights = weight.to(summed.dtype).reshape(len(weight), heads)
        starts, columns, edges = hop.by_row(transposed)
        if self.numba and _looped(rows) and step.width:
            out = segment_sums.sum_segments(
                starts, columns, edges, weights.contiguous(), rows.contiguous()
            )
        else:
            values = rows[columns]
            if weight is not None and len(weights):
                one = (edges < 0)[:, None]
                scale = weights[edges.clamp(min=0)].masked_fill(one, 1)
                values = values * scale[:, :, None]
            out = torch.segment_reduce(values, "sum", offsets=starts, axis=0, initial=0)
        return out.to(x.dtype).reshape(len(out), *step.shape)

    def hop_dot(self, step: Step, to: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Return the dot products of each edge's rows at both ends."""
        hop: Hop = self.graph.hop(*step.attrs)
        heads = step.width
        g, x = (_wide(t).reshape(len(t), heads, -1 if t.numel() else 0) for t in (to, source))
        if self.numba and _looped(x):
            ends = (hop.to, hop.source, hop.edge)
            out = segment_sums.dot_entries(*ends, g.contiguous(), x.contiguous(), hop.n_edges)
        else:
            weighed = (hop.edge >= 0).nonzero().flatten()
            out = x.new_zeros(hop.n_edges, heads)
            product = (g[hop.to[weighed]] * x[hop.source[weighed]]).sum(-1)
            out[hop.edge[weighed]] = product
        return out.to(to.dtype).reshape(len(out), *step.shape)

    def softmax(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        """Return the softmax over the edges of each destination."""
        logits, starts = _wide(x).reshape(len(x), step.width).contiguous(), self.graph.starts
        if self.numba and _looped(logits):
            out = segment_sums.softmax_segments(starts, logits)
        else:
            dst = self.graph.rows("dst").of_edge
            largest = torch.segment_reduce(logits, "max", offsets=starts, axis=0)
            out = (logits - largest[dst]).exp()
            out = out / torch.segment_reduce(out, "sum", offsets=starts, axis=0, initial=0)[dst]
        return out.to(x.dtype).reshape(x.shape)

    def softmax_grad(self, step: Step, y: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the softmax."""
        flat = [_wide(t).reshape(len(t), step.width).contiguous() for t in (y, g)]
        if self.numba and _looped(flat[0]):
            out = segment_sums.softmax_segments_gradient(self.graph.starts, *flat)
        else:
            dst = self.graph.rows("dst").of_edge
            product = flat[0] * flat[1]
            total = torch.segment_reduce(
                product, "sum", offsets=self.graph.starts, axis=0, initial=0
            )
            out = product - flat[0] * total[dst]
        return out.to(y.dtype).reshape(y.shape)

    # torch's operators

    def gather(self, step: Step, x: Any) -> torch.Tensor:
        """Take the row of another space for each row."""
        return take(x, self.graph.gather_index(step.attrs[0], step.space))

    def to_order(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        """Bring edge values to the order of destinations."""
        return x.index_select(0, self.graph.order)

    def from_order(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        """Bring edge values to the caller's order."""
        return torch.empty_like(x).index_copy_(0, self.graph.order, x)

    def linear(self, step: Step, x: Any, weight: torch.Tensor) -> torch.Tensor:
        """Multiply rows by a weight that all share."""
        if isinstance(x, torch.Tensor):
            return torch.matmul(x, weight)
        out = weight.new_empty(self.graph.rows(step.space).n, *step.shape)
        for begin, end, rows in blocks_of(x, len(out)):
            torch.mm(rows, weight, out=out[begin:end])
        return out

    def linear_grad(self, step: Step, x: Any, g: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weight of `linear`."""
        if isinstance(x, torch.Tensor):
            return x.flatten(0, -2).t() @ g.flatten(0, -2)
        out = g.new_zeros(step.shape)
        for begin, end, rows in blocks_of(x, len(g)):
            out.addmm_(rows.t(), g[begin:end])
        return out

    def inverse_counts(self, step: Step) -> torch.Tensor:
        """Return 1 / (edges of the pair) of each destination and relation."""
        return self.graph.inverse_counts(self.dtype)

    def reshape(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        """Change the shape of rows."""
        return x.reshape(len(x), *step.shape)

    def t(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        """Exchange the last two dimensions."""
        return x.transpose(-1, -2)

    def expand(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        """Repeat elements of rows."""
        rank = len(step.shape)
        return _aligned(x, rank).expand(len(x), *step.shape)

    def sum_shape(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        """Sum over elements of rows that were repeated."""
        rank = x.ndim - 1
        ones = (1,) * (rank - len(step.shape))
        return x.sum_to_size(len(x), *ones, *step.shape).reshape(len(x), *step.shape)

    def sum_rows(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        """Sum over rows."""
        return x.sum(0).sum_to_size(step.shape)

    def add(self, step: Step, *args: torch.Tensor) -> torch.Tensor:
        """Add."""
        return torch.add(*_broadcast(step, args))

    def sub(self, step: Step, *args: torch.Tensor) -> torch.Tensor:
        """Subtract."""
        return torch.sub(*_broadcast(step, args))

    def mul(self, step: Step, *args: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return torch.mul(*_broadcast(step, args))

    def div(self, step: Step, *args: torch.Tensor) -> torch.Tensor:
        """Divide."""
        return torch.div(*_broadcast(step, args))

    def add_number(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        """Add a number."""
        return torch.add(x, step.attrs[0])

    def sub_number(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        """Subtract a number."""
        return torch.sub(x, step.attrs[0])

    def mul_number(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        """Multiply by a number."""
        return torch.mul(x, step.attrs[0])

    def div_number(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        """Divide by a number."""
        return torch.div(x, step.attrs[0])

    def exp(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        """Return e to the power of x."""
        return x.exp()

    def leaky_relu(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        """Return x where it is positive, else slope * x."""
        return torch.nn.functional.leaky_relu(x, step.attrs[0])

    def leaky_relu_grad(self, step: Step, g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient of `leaky_relu`."""
        return torch.where(x > 0, g, g * step.attrs[0])


def take(x: torch.Tensor | RowSource, index: torch.Tensor) -> torch.Tensor:
    """Return rows of a tensor, or decode them."""
    return x.index_select(0, index) if isinstance(x, torch.Tensor) else x.gather(index)


def blocks_of(x: RowSource, n: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield all rows, decoded block by block."""
    for begin in range(0, n, BLOCK_ROWS):
        end = min(begin + BLOCK_ROWS, n)
        yield begin, end, x.gather(torch.arange(begin, end))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return float16 and bfloat16 as float32, in which sums are made."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _looped(x: torch.Tensor) -> bool:
    return x.dtype in (torch.float32, torch.float64)


def _aligned(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x if x.ndim == rank + 1 else x.reshape(len(x), *(1,) * (rank + 1 - x.ndim), *x.shape[1:])


def _broadcast(step: Step, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    rank = len(step.shape)
    return [
        value if of.space == "shared" else _aligned(value, rank)
        for value, of in zip(args, step.args, strict=True)
    ]
