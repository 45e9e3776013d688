"""Runs steps: the GEMM template (`products`), the traversal template, and torch's operators.

Traversals are Numba loops on a CPU and kernels of segment_sums.cu on a GPU, in float32 or float64;
without these they are torch's operators over the same entries (the readable definition, which tests
compare with).
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..engine.kernels.cpu import segment_sums
from ..engine.kernels.cpu.typed_products import take
from .graph import Hop, RelationalGraph
from .products import Products
from .steps import Step

if TYPE_CHECKING:
    from ..engine.kernels.cuda import CudaKernels


class Work(NamedTuple):
    """A step of a schedule.

    Attributes
    ----------
    step : Step
        What to do.
    reads : tuple of int
        The ids of the steps whose values it reads.
    gathered : tuple of str or None
        From which space to which a GEMM reads rows by index.
    frees : tuple of int
        The ids of values that no later step reads.
    """

    step: Step
    reads: tuple[int, ...]
    gathered: tuple[str, str] | None
    frees: tuple[int, ...]


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

    Attributes
    ----------
    work : list of Work
        The steps in order, as `Machine.run` takes them.
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
        frees: list[list[int]] = [[] for _ in self.order]
        for key, place in last.items():
            if key not in wanted:
                frees[place].append(key)
        self.work = [self._work(step, tuple(f)) for step, f in zip(self.order, frees, strict=True)]

    def _work(self, step: Step, frees: tuple[int, ...]) -> Work:
        index = None
        if self.gathers(step):
            by = step.args[0]
            index = (by.attrs[0], by.space)
        return Work(step, tuple(map(id, self.reads(step))), index, frees)

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
        gathered = step.op in ("typed_linear", "weight_grad") and step.args[0].op == "gather"
        if not gathered or id(step.args[0]) in self._given:
            return False
        return self.fuse or step.args[0].args[0].op == "packed"


@functools.cache
def gpu_kernels(device: torch.device) -> CudaKernels | None:
    """Return the kernels of a GPU, compiled; None on a CPU, and with a warning where they fail."""
    if device.type != "cuda":
        return None
    from ..engine.kernels.cuda import kernels_on

    try:
        kernels = kernels_on(device, raise_errors=False)
        x = torch.zeros(1, 1, 4, device=device)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        kernels.segments.sum_segments(none.new_zeros(2), none, none, x[0, :0], x)
    except Exception as error:
        warnings.warn(
            f"relational programs on {device} run torch's operators, since their kernels cannot be "
            f"compiled or started: {error}",
            stacklevel=2,
        )
        return None
    return kernels


class Machine(Products):
    """Runs schedules on one graph.

    Parameters
    ----------
    graph : RelationalGraph
        The graph.
    dtype : torch.dtype
        Of the inputs.
    compiled : bool
        Whether products and traversals may be compiled loops and kernels; else torch runs all.
    """

    def __init__(self, graph: RelationalGraph, dtype: torch.dtype, compiled: bool = True) -> None:
        kernels = gpu_kernels(graph.device) if compiled else None
        # What loops over entries: the kernels or the twins, which have the same functions.
        loops: Any = None if kernels is None else kernels.segments
        if compiled and graph.device.type == "cpu" and loops is None:
            loops = segment_sums
        super().__init__(graph, kernels, loops)
        self.dtype = dtype

    def run(self, schedule: Schedule, values: dict[int, Any]) -> list[torch.Tensor | None]:
        """Return the results; `values` has what is given, by the id of its step, and is used up."""
        for step, reads, gathered, frees in schedule.work:
            arguments = [values[key] for key in reads]
            run: Callable[..., Any] = getattr(self, step.op)
            if gathered is None:
                values[id(step)] = run(step, *arguments)
            else:
                index = self.graph.gather_index(*gathered)
                values[id(step)] = run(step, *arguments, index=index)
            for key in frees:
                del values[key]
        return [None if r is None else values[id(r)] for r in schedule.results]

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
        if self.loops and _looped(rows) and step.width:
            out: torch.Tensor = self.loops.sum_segments(
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
        heads, width = step.width, step.args[0].width // max(step.width, 1)
        g, x = (_wide(t).reshape(len(t), heads, width) for t in (to, source))
        if self.loops and _looped(x) and width:
            ends = (hop.to, hop.source, hop.edge)
            out: torch.Tensor = self.loops.dot_entries(
                *ends, g.contiguous(), x.contiguous(), hop.n_edges
            )
        else:
            weighed = (hop.edge >= 0).nonzero().flatten()
            out = x.new_zeros(hop.n_edges, heads)
            product = (g[hop.to[weighed]] * x[hop.source[weighed]]).sum(-1)
            out[hop.edge[weighed]] = product
        return out.to(to.dtype).reshape(len(out), *step.shape)

    def softmax(self, step: Step, x: torch.Tensor) -> torch.Tensor:
        """Return the softmax over the edges of each destination."""
        logits, starts = _wide(x).reshape(len(x), step.width).contiguous(), self.graph.starts
        if self.loops and _looped(logits):
            out: torch.Tensor = self.loops.softmax_segments(starts, logits)
        else:
            dst = self.graph.rows("dst").of_edge
            largest = torch.segment_reduce(logits, "max", offsets=starts, axis=0)
            out = (logits - largest[dst]).exp()
            out = out / torch.segment_reduce(out, "sum", offsets=starts, axis=0, initial=0)[dst]
        return out.to(x.dtype).reshape(x.shape)

    def softmax_grad(self, step: Step, y: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the softmax."""
        flat = [_wide(t).reshape(len(t), step.width).contiguous() for t in (y, g)]
        if self.loops and _looped(flat[0]):
            out: torch.Tensor = self.loops.softmax_segments_gradient(self.graph.starts, *flat)
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
        found: torch.Tensor = torch.ops.aten.leaky_relu_backward(g, x, step.attrs[0], False)
        return found


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
