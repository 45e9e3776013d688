"""Runs steps: the GEMM template (`products`), the traversal template, and torch's operators.

Traversals are Numba loops on a CPU and kernels of segment_sums.cu on a GPU, in float32 or float64;
without these they are torch's operators over the same entries (the readable definition, which tests
compare with).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..engine.kernels.cpu import segment_sums
from ..engine.kernels.cpu.typed_products import take
from .gpu_kernels import gpu_kernels
from .graph import RelationalGraph
from .kernel_steps import KernelSteps, Run
from .products import Products
from .steps import BY_INDEX, Step
from .stream_order import StreamOrder
from .type_sums import levels_of

#: Returns what runs a step on a machine's graph.
Bind = Callable[["Machine"], Run]
#: torch's operators by step.
_ELEMENTWISE: dict[str, Run] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}


class Schedule:
    """The steps that give some results, in order.

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
        self.given = list(given)
        self._given = frozenset(done)
        for result in results:
            if result is not None:
                self._visit(result, done)

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
        gathered = step.op in BY_INDEX and step.args[0].op == "gather"
        if not gathered or id(step.args[0]) in self._given:
            return False
        return self.fuse or step.args[0].args[0].op == "packed"


class Call(NamedTuple):
    """A step that is bound: what runs it, the places of its arguments and of its result.

    `frees` are the places of values that no later call reads.
    """

    run: Run
    reads: tuple[int, ...]
    to: int
    frees: tuple[int, ...]


class Prepared:
    """A schedule whose steps are prepared; bound to a graph it is a list of calls.

    Threads may share it, and all graphs that share the steps.

    Parameters
    ----------
    schedule : Schedule
        The steps.
    machine : Machine
        Prepares them, for graphs with the relations and types of its graph.
    """

    def __init__(self, schedule: Schedule, machine: Machine) -> None:
        places = {id(step): place for place, step in enumerate(schedule.given)}
        bound = {id(s): machine.prepared(s, schedule.gathers(s)) for s in schedule.order}
        wanted = {id(result) for result in schedule.results}
        shaped = {
            id(read)
            for step in schedule.order
            if not bound[id(step)][1]
            for read in schedule.reads(step)
        }
        n_places = len(places)
        made: list[tuple[Bind, tuple[int, ...], int]] = []
        last: dict[int, int] = {}
        for step in schedule.order:
            reads = tuple(places[id(read)] for read in schedule.reads(step))
            if step.op == "reshape" and id(step) not in wanted | shaped:
                places[id(step)] = reads[0]  # kernels read memory alone
                continue
            last |= dict.fromkeys(reads, len(made))
            places[id(step)] = n_places
            made.append((bound[id(step)][0], reads, n_places))
            n_places += 1
        #: Whether steps may make tables of the graph when they run.
        self._makes = any(not bound[id(step)][1] and _may_make(step) for step in schedule.order)
        results = [None if r is None else places[id(r)] for r in schedule.results]
        frees: list[list[int]] = [[] for _ in made]
        for place, at in last.items():
            if place not in results:
                frees[at].append(place)
        self._made = [
            (bind, (reads, to, tuple(f))) for (bind, reads, to), f in zip(made, frees, strict=True)
        ]
        self._places, self._results = n_places, results

    def on(self, machine: Machine) -> Calls:
        """Return the calls on a machine's graph."""
        calls = [Call(bind(machine), *places) for bind, places in self._made]
        return Calls(calls, self._places, self._results, machine.graph.streams, self._makes)


class Calls:
    """Steps that are bound to a graph: a list of calls that is replayed.

    Threads may share it.

    Parameters
    ----------
    calls : list of Call
        The steps.
    places : int
        Of all values.
    results : list of int or None
        The places of the results.
    streams : StreamOrder
        Of the graph's tables.
    makes : bool
        Whether calls may make some.
    """

    def __init__(
        self,
        calls: list[Call],
        places: int,
        results: list[int | None],
        streams: StreamOrder,
        makes: bool,
    ) -> None:
        self._calls, self._places, self._results = calls, places, results
        self._streams, self._makes = streams, makes

    def run(self, given: Sequence[Any]) -> list[torch.Tensor | None]:
        """Return the results, None where there is none, from what the schedule is given."""
        self._streams.wait()
        values = [*given, *[None] * (self._places - len(given))]
        for run, reads, to, frees in self._calls:
            values[to] = run(*[values[place] for place in reads])
            for place in frees:
                values[place] = None
        if self._makes:
            self._streams.made()
        return [None if place is None else values[place] for place in self._results]


class Machine(Products):
    """Runs steps on one graph.

    Parameters
    ----------
    graph : RelationalGraph
        The graph.
    dtype : torch.dtype
        Of the inputs.
    compiled : bool
        Whether products and traversals may be compiled loops and kernels; else torch runs all.
    tf32 : bool
        Whether torch multiplies float32 by tensor cores.
    """

    def __init__(
        self, graph: RelationalGraph, dtype: torch.dtype, compiled: bool = True, tf32: bool = False
    ) -> None:
        kernels = gpu_kernels(graph.device) if compiled else None
        on_cpu = compiled and kernels is None and graph.device.type == "cpu"
        super().__init__(graph, kernels, segment_sums if on_cpu else None)
        self.dtype = dtype
        self._steps = None if kernels is None else KernelSteps(kernels, dtype, tf32)

    def prepared(self, step: Step, gathers: bool) -> tuple[Bind, bool]:
        """Return what gives, of a machine, what runs a step on its arguments.

        With `gathers` its first argument is read by index. The second value is whether it is a
        kernel.
        """
        on_graph = None
        if self._steps is not None:
            on_graph = self._steps.prepared(step, self.graph, gathers)
        if on_graph is not None:
            kernel = on_graph
            return lambda machine: kernel(machine.graph), True
        if step.op == "inverse_counts":
            return functools.partial(_counts, step.space), False
        if step.op in _ELEMENTWISE:
            same = all(a.space == "shared" or len(a.shape) == len(step.shape) for a in step.args)
            run = _ELEMENTWISE[step.op] if same else functools.partial(_broadcast, step)
            return lambda machine: run, False
        return functools.partial(_by_torch, step, gathers), False

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

    def type_sum(self, step: Step, g: torch.Tensor) -> torch.Tensor:
        """Sum the rows of each type, of relations or nodes."""
        rows = _wide(g).reshape(len(g), 1, step.width).contiguous()
        one = rows.new_empty(0, 1)  # no weights
        for starts, columns in levels_of(self.graph, step.args[0].space):
            if self.loops and _looped(rows) and step.width:
                rows = self.loops.sum_segments(starts, columns, columns, one, rows)
            else:
                rows = torch.segment_reduce(rows, "sum", offsets=starts, axis=0, initial=0)
        return rows.to(g.dtype).reshape(len(rows), *step.shape)

    def hop_dot(self, step: Step, to: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Return the dot products of each edge's rows at both ends."""
        hop = self.graph.hop(*step.attrs)
        heads, width = step.width, step.args[0].width // max(step.width, 1)
        g, x = (_wide(t).reshape(len(t), heads, width) for t in (to, source))
        if self.loops and _looped(x) and width:
            out: torch.Tensor = self.loops.dot_entries(
                *hop.entries(), g.contiguous(), x.contiguous(), hop.n_edges
            )
        else:
            rows, columns, edges = hop.entries()
            weighed = (edges >= 0).nonzero().flatten()
            out = x.new_zeros(hop.n_edges, heads)
            product = (g[rows[weighed]] * x[columns[weighed]]).sum(-1)
            out[edges[weighed]] = product
        return out.to(to.dtype).reshape(len(out), *step.shape)

    def softmax(self, step: Step, *terms: torch.Tensor) -> torch.Tensor:
        """Return the softmax over the edges of each destination, of one term or two of each."""
        starts, (multiplied, slope) = self.graph.starts, step.attrs
        spaces = [term.space for term in step.args]
        flat = [_wide(t).reshape(len(t), step.width) for t in terms]
        if self.loops and _looped(flat[0]):
            out: torch.Tensor = self.loops.softmax_segments(
                starts, *self._terms(spaces, flat), multiplied, slope
            )
        else:
            logits = self._sum_of_terms(spaces, flat, multiplied)
            logits = torch.nn.functional.leaky_relu(logits, slope)
            dst = self.graph.rows("dst").of_edge
            largest = torch.segment_reduce(logits, "max", offsets=starts, axis=0)
            out = (logits - largest[dst]).exp()
            out = out / torch.segment_reduce(out, "sum", offsets=starts, axis=0, initial=0)[dst]
        return out.to(terms[0].dtype).reshape(len(out), *step.shape)

    def softmax_grad(
        self, step: Step, p: torch.Tensor, g: torch.Tensor, *terms: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of the sum or product of a softmax's terms, from its result p."""
        starts, (multiplied, slope) = self.graph.starts, step.attrs
        spaces = [term.space for term in step.args[2:]]
        flat = [_wide(t).reshape(len(t), step.width) for t in (p, g, *terms)]
        if self.loops and _looped(flat[0]):
            both = [t.contiguous() for t in flat[:2]]
            out: torch.Tensor = self.loops.softmax_segments_gradient(
                starts, *both, *self._terms(spaces, flat[2:]), multiplied, slope
            )
        else:
            product = flat[0] * flat[1]
            total = torch.segment_reduce(product, "sum", offsets=starts, axis=0, initial=0)
            out = product - flat[0] * total[self.graph.rows("dst").of_edge]
            if terms:
                positive = self._sum_of_terms(spaces, flat[2:], multiplied) > 0
                out = torch.where(positive, out, out * slope)
        return out.to(p.dtype).reshape(len(out), *step.shape)

    def _terms(self, spaces: list[str], terms: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return x, its rows of edges, y and its rows: None for what there is not."""
        pairs = zip(terms, map(self.graph.rows_of_edges, spaces), strict=True)
        listed = [part for term, rows in pairs for part in (term.contiguous(), rows)]
        return [*listed, None, None, None, None][:4]

    def _sum_of_terms(
        self, spaces: list[str], terms: list[torch.Tensor], multiplied: bool
    ) -> torch.Tensor:
        """Return the sum or the product of the terms of edges."""
        rows = map(self.graph.rows_of_edges, spaces)
        read = [t if at is None else t[at] for t, at in zip(terms, rows, strict=True)]
        combine = torch.mul if multiplied else torch.add
        return functools.reduce(combine, read)

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


def _broadcast(step: Step, *args: torch.Tensor) -> torch.Tensor:
    """Run an operator on rows of other ranks."""
    rank = len(step.shape)
    rows = [
        value if of.space == "shared" else _aligned(value, rank)
        for value, of in zip(args, step.args, strict=True)
    ]
    found: torch.Tensor = _ELEMENTWISE[step.op](*rows)
    return found


def _counts(space: str, machine: Machine) -> Run:
    found = machine.graph.inverse_counts(machine.dtype, space)
    return lambda: found


def _may_make(step: Step) -> bool:
    """Return whether torch's operators for a step look for tables of the graph as they run."""
    return step.op not in _ELEMENTWISE and step.op not in ("inverse_counts", "reshape")


def _by_torch(step: Step, gathers: bool, machine: Machine) -> Run:
    run = getattr(machine, step.op)
    if not gathers:
        return functools.partial(run, step)
    by = step.args[0]
    index = machine.graph.gather_index(by.attrs[0], by.space)
    return functools.partial(run, step, index=index)
