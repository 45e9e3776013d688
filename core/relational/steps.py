"""The second level: steps on rows of known spaces, each an instance of a template.

- GEMM, ``Y = X[gather] W[type] + B[type]`` by slices of rows of one relation, or nodes of one type:
  `typed_linear`, `typed_linear_add`, `weight_grad`.
- Traversal, a loop over the entries of each row of a sparse matrix: `hop_sum`, `hop_dot`,
  `type_sum`, `softmax`, `softmax_grad`.
- torch, one of its operators: all others.

Steps are made by `Steps`, which knows shapes and finds a step that was made before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError
from .graph import RelationalGraph
from .node_types import TYPE_SPACES
from .rows import BATCH_RELATIONS

Shape = tuple[int, ...]

TEMPLATES = {
    **dict.fromkeys(("typed_linear", "typed_linear_add", "weight_grad"), "GEMM"),
    **dict.fromkeys(("hop_sum", "hop_dot", "type_sum", "softmax", "softmax_grad"), "traversal"),
}

#: Products that read their first argument by index.
BY_INDEX = ("typed_linear", "typed_linear_add", "weight_grad")

#: Spaces whose rows stand relation after relation.
BY_RELATION = ("pair_src", "pair_dst", "typed_edge")


@dataclass(eq=False)
class Step:
    """An operation on rows.

    Attributes
    ----------
    op : str
        Its name, a method of `execute.Machine`.
    args : tuple of Step
        What it is applied to.
    attrs : tuple
        Numbers and names that belong to it.
    space : str
        The rows of its result (`graph`); "shared" for a tensor without rows.
    shape : tuple of int
        The shape of one row.
    """

    op: str
    args: tuple[Step, ...]
    attrs: tuple[Any, ...]
    space: str
    shape: Shape

    @property
    def template(self) -> str:
        """The template that it is an instance of."""
        return TEMPLATES.get(self.op, "torch")

    @property
    def width(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape)


class Costs(NamedTuple):
    """What operations take on a device.

    Attributes
    ----------
    multiply_ns : float
        A multiplication with its addition.
    visit_ns : float
        An element that is visited along an edge.
    copy_ns : float
        An element that is read or written in order.
    call_ns : float
        An operator that is called.
    product_ns : float
        The product of each type, where torch multiplies type by type.
    kernels : bool
        Whether one kernel multiplies rows that are read by index, or are of many types.
    """

    multiply_ns: float = 0.0
    visit_ns: float = 0.0
    copy_ns: float = 0.0
    call_ns: float = 0.0
    product_ns: float = 0.0
    kernels: bool = False

    def products(self, types: int, by_index: bool) -> int:
        """Return how many products are called one by one for rows of so many types."""
        return 0 if self.kernels and (by_index or types >= BATCH_RELATIONS) else types


#: Estimates: of a CPU from steps of 64 float32 values and programs on some hundred edges; of a GPU
#: such that steps of RGCN, 64 float32 values, on graphs of the sizes of FB15k-237 and AM, with and
#: without compaction, are predicted within a factor of two of what training on an H100 took. Calls
#: and products are what they take the host there: on mag-0.1, of six relations, a training step of
#: an H200 took 3.2 ms where sums came first, for each relation a product of its own, and 2.0 else.
COSTS = {
    "cpu": Costs(0.04, 0.7, 0.3, 20_000.0, 5000.0),
    "cuda": Costs(0.0002, 0.005, 0.003, 10_000.0, 10_000.0, kernels=True),
}


def costs_of(device: torch.device) -> Costs:
    """Return the costs of a device."""
    return COSTS.get(device.type, COSTS["cuda"])


class Steps:
    """Makes the steps of a program for one graph.

    Parameters
    ----------
    graph : RelationalGraph
        Its sizes give costs.
    made : dict, optional
        Steps of another one, which are found again.
    """

    def __init__(self, graph: RelationalGraph, made: dict[Any, Step] | None = None) -> None:
        self.graph = graph
        self.made: dict[Any, Step] = {} if made is None else made
        self.costs = costs_of(graph.device)

    def make(self, op: str, args: tuple[Step, ...], space: str, shape: Shape, *attrs: Any) -> Step:
        """Return a step; one that was made before where it is the same."""
        key = (op, tuple(map(id, args)), space, shape, attrs)
        if key not in self.made:
            self.made[key] = Step(op, args, attrs, space, shape)
        return self.made[key]

    def rows(self, space: str) -> int:
        """Return the rows of a space; 1 for shared."""
        return 1 if space == "shared" else self.graph.row_count(space)

    def gather(self, x: Step, space: str) -> Step:
        """Return x on the rows of another space."""
        if x.space in (space, "shared"):
            return x
        if x.op == "inverse_counts":  # what the graph has
            return self.make(x.op, (), space, x.shape)
        if x.op == "gather":  # of the edges' values: those of pairs, then of nodes
            return self.gather(x.args[0], space)
        return self.make("gather", (x,), space, x.shape, x.space)

    def elementwise(self, op: str, args: tuple[Step, ...], *attrs: Any, line: str = "") -> Step:
        """Return an operation on elements of rows of one space, and of shared tensors."""
        spaces = {a.space for a in args} - {"shared"}
        assert len(spaces) <= 1, (op, spaces)
        shape = args[0].shape
        for other in args[1:]:
            shape = broadcast(shape, other.shape, op, line)
        return self.make(op, args, spaces.pop() if spaces else "shared", shape, *attrs)

    def reshape(self, x: Step, shape: Shape) -> Step:
        """Return x with rows of another shape."""
        if x.op == "reshape":
            x = x.args[0]
        if x.op == "packed" and x.width == math.prod(shape):  # decoded to this shape
            return self.make("packed", (), x.space, shape, *x.attrs)
        return x if x.shape == shape else self.make("reshape", (x,), x.space, shape)

    def transposed(self, weight: Step) -> Step:
        """Return weights with their last two dimensions exchanged."""
        if weight.op == "t":
            return weight.args[0]
        *rest, k, n = weight.shape
        if weight.op == "linear_grad":  # multiplied the other way, as torch does
            return self.make(weight.op, weight.args, weight.space, (n, k), "transposed")
        return self.make("t", (weight,), weight.space, (*rest, n, k))

    def typed_linear(self, x: Step, weight: Step, line: str = "") -> Step:
        """Return x times the weight of each row's relation, or of each node's type."""
        *heads, k, n = weight.shape if len(weight.shape) >= 2 else (0, 0)
        typed = weight.space == "relation" or TYPE_SPACES.get(weight.space) == x.space
        if not typed or x.shape != (*heads, k) or len(heads) > 1:
            raise ArgumentError(
                f"{line}: typed_linear of rows of shape {list(x.shape)} by weights "
                f"[R, {', '.join(map(str, weight.shape))}]; accepted are [K] by [R, K, N], or "
                "[H, K] by [R, H, K, N]"
            )
        return self.make("typed_linear", (x, weight), x.space, (*heads, n))

    def weight_product(self, weight: Step, matrix: Step, line: str = "") -> Step:
        """Return weights ``[K, H * D]`` of relations times matrices ``[H, D, N]`` of theirs."""
        heads = matrix.shape[0] if len(matrix.shape) == 3 else 1
        *more, d, n = matrix.shape if len(matrix.shape) >= 2 else (0, 0)
        fits = len(weight.shape) == 2 and len(more) <= 1 and weight.shape[1] == heads * d
        if not fits or (weight.space, matrix.space) != ("relation", "relation"):
            raise ArgumentError(
                f"{line}: weights {list(weight.shape)} times matrices {list(matrix.shape)}; "
                "accepted are [K, H * D] and [H, D, N]"
            )
        shape = (weight.shape[0], heads * n)
        return self.make("weight_product", (weight, matrix), "relation", shape)

    def linear(self, x: Step, weight: Step, line: str = "") -> Step:
        """Return x times a weight that all rows share."""
        if len(weight.shape) != 2 or x.shape[-1:] != weight.shape[:1]:
            raise ArgumentError(
                f"{line}: rows of shape {list(x.shape)} @ a weight {list(weight.shape)}; accepted "
                "are rows [..., K] and a weight [K, N]"
            )
        return self.make("linear", (x, weight), x.space, (*x.shape[:-1], weight.shape[1]))

    def plus(self, x: Step, y: Step) -> Step:
        """Return a sum of rows; of a product and what it can be added to it is one operator."""
        for rest, product in ((x, y), (y, x)):
            found = self._typed_linear_add(rest, product)
            if found is not None:
                return found
            of_rows = product.op == "linear" and product.space != "shared"
            # One row for all is added to rows of one dimension.
            spaces = (product.space, "shared") if len(product.shape) == 1 else (product.space,)
            if of_rows and rest.shape == product.shape and rest.space in spaces:
                args = (rest, *product.args)
                return self.make("linear_add", args, product.space, product.shape)
        return self.elementwise("add", (x, y))

    def _typed_linear_add(self, rest: Step, product: Step) -> Step | None:
        """Return a typed product plus rows, if these are one for each relation or type of nodes.

        Between both the product may have been gathered and split to heads: that comes last then.
        """
        views, shape = [], product.shape
        while product.op in ("gather", "reshape"):
            views.append(product)
            product = product.args[0]
        if product.op != "typed_linear" or rest.op != "gather" or rest.shape != shape:
            return None
        x, weight = product.args
        (bias,) = rest.args
        if bias.space != weight.space or not self.in_order(product.space, bias.space):
            return None
        args = (x, weight, self.reshape(bias, product.shape))
        found = self.make("typed_linear_add", args, product.space, product.shape)
        for view in reversed(views):
            gathered = view.op == "gather"
            found = self.gather(found, view.space) if gathered else self.reshape(found, view.shape)
        return found

    def in_order(self, space: str, types: str) -> bool:
        """Return whether rows of a space stand type after type, of relations or types of nodes."""
        return space in BY_RELATION if types == "relation" else TYPE_SPACES.get(types) == space

    def type_sum(self, g: Step, types: str, shape: Shape) -> Step:
        """Return for each type the sum of its rows, which stand type after type."""
        return self.make("type_sum", (g,), types, shape)

    def hop_sum(self, name: str, transposed: bool, x: Step, weight: Step | None = None) -> Step:
        """Return the sum over each row's entries of a matrix, weighted by edge values ``[.., 1]``.

        `weight` has rows of one element, or one for each head of x's rows ``[H, D]``.
        """
        to = ends_of(name)[transposed]
        args = (x,) if weight is None else (x, weight)
        return self.make("hop_sum", args, to, x.shape, name, transposed)

    def hop_dot(self, name: str, to: Step, source: Step, shape: Shape) -> Step:
        """Return for each edge the dot products of its rows at both ends of a matrix."""
        return self.make("hop_dot", (to, source), "edge", shape, name)

    def sum_to(self, g: Step, like: Step) -> Step:
        """Return a gradient summed over what `like` was broadcast over."""
        if g.space != "shared" and like.space == "shared":
            return self.make("sum_rows", (g,), "shared", like.shape)
        if g.shape != like.shape:
            return self.make("sum_shape", (g,), g.space, like.shape)
        return g

    def cost(self, step: Step) -> float:
        """Return the predicted nanoseconds of a step."""
        multiply, visit, copy, call, product, _ = self.costs
        if step.op in ("input", "inverse_counts", "reshape", "t", "shared"):
            return 0.0
        if step.op == "weight_product":
            matrix = step.args[1]
            return self.rows("relation") * step.width * matrix.shape[-2] * multiply + call
        if step.op in ("typed_linear", "typed_linear_add", "linear", "linear_add"):
            x, weight = step.args[1:] if step.op == "linear_add" else step.args[:2]
            rows = self.rows(step.space)
            if weight.space not in ("shared", step.space):  # rows of relations are one product
                by_index = x.op == "gather"
                call += self.costs.products(self.rows(weight.space), by_index) * product
            moved = rows * (x.width + step.width) * copy
            return rows * x.width * weight.shape[-1] * multiply + moved + call
        if step.op == "hop_sum":
            return self.graph.entry_count(step.attrs[0]) * step.width * visit + call
        if step.op == "hop_dot":
            return self.graph.num_edges * step.args[1].width * visit + call
        return self.rows(step.space) * step.width * copy * (len(step.args) + 1) + call


def ends_of(name: str) -> tuple[str, str]:
    """Return the spaces that a matrix leads to and comes from."""
    if "<" in name:
        to, source = name.removeprefix("gather:").split("<")
        return to, source
    way, _, space = name.partition(":")
    return (space, "src") if way == "in" else ("dst", space)


def weighs(weight: Shape, x: Shape) -> bool:
    """Return whether edge values of rows `weight` can weigh entries whose rows have the shape x."""
    return math.prod(weight) == 1 and len(weight) <= len(x) or (len(x) == 2 and weight == (x[0], 1))


def broadcast(a: Shape, b: Shape, op: str, line: str) -> Shape:
    """Return the shape of an elementwise result.

    Raises
    ------
    ArgumentError
        When shapes do not fit.
    """
    n = max(len(a), len(b))
    pairs = list(zip((1,) * (n - len(a)) + a, (1,) * (n - len(b)) + b, strict=True))
    if any(x != y and 1 not in (x, y) for x, y in pairs):
        raise ArgumentError(f"{line}: {op} of rows of shapes {list(a)} and {list(b)}")
    return tuple(max(x, y) if 0 not in (x, y) else 0 for x, y in pairs)
