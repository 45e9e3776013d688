"""From a traced program to steps: compaction, reordering, sides, fusion.

`lowered` gives the steps of a program for a graph and for shapes of its inputs. Compaction is the
choice of the space that a value stands on, from what it depends on; the choice of sides and the
fusion of sums look at what is summed. `reordered` moves linear operators behind each other where
that costs less for this graph.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ArgumentError
from .graph import RelationalGraph
from .node_types import TYPE_SPACES
from .rows import BATCH_RELATIONS
from .steps import Shape, Step, Steps, weighs
from .trace import Value, in_order

SPACES = {
    "": "shared",
    "s": "src",
    "d": "dst",
    "r": "relation",
    "p": "src_type",
    "q": "dst_type",
    "rs": "pair_src",
    "dr": "pair_dst",
}
ROWS_OF = {
    "s": "src", "d": "dst", "e": "edge", "r": "relation", "p": "src_type", "q": "dst_type"
}  # fmt: skip

#: Products of packed rows, and which of their arguments these are.
PACKED_ROWS = {"typed_linear": 0, "typed_linear_add": 0, "linear": 0, "linear_add": 1}


@dataclass(frozen=True)
class Passes:
    """Which passes run; the result is the same without.

    Attributes
    ----------
    reorder : bool
        Multiply weights by each other first where that costs less.
    compact : bool
        Compute what depends on a node and a relation alone once for each distinct pair.
    sides : bool, optional
        Choose for each relation whether messages are multiplied before or after they are summed.
        None: where that is predicted to save more than the operator that it adds takes; True:
        wherever it is predicted to cost less for any relation, however little.
    fuse : bool
        Sum and multiply along edges in one loop, without edgewise temporaries.
    """

    reorder: bool = True
    compact: bool = True
    sides: bool | None = None
    fuse: bool = True


@dataclass(frozen=True)
class InputInfo:
    """What is known of an input: its shape, and whether its rows are packed."""

    shape: Shape
    packed: bool = False


class Lowering:
    """Makes the steps of one traced program."""

    def __init__(
        self,
        graph: RelationalGraph,
        inputs: Mapping[str, InputInfo],
        passes: Passes,
        outputs: Sequence[Value],
    ) -> None:
        self.steps = Steps(graph)
        self.graph, self.inputs, self.passes = graph, inputs, passes
        self.found: dict[int, Step] = {}
        #: Inputs with a row for each node, edge, relation or type.
        self.placed: list[Value] = []
        self.users = Counter(id(a) for value in in_order(outputs) for a in value.args)
        self.outputs = [self.output(value) for value in outputs]
        self._check_packed()

    def output(self, value: Value) -> Step:
        """Return the step of an output: of destinations, or of edges in the caller's order."""
        step = self.step(value)
        if step.space == "dst":
            return step
        edges = self.steps.gather(step, "edge")
        return self.steps.make("from_order", (edges,), "edge", edges.shape)

    def _check_packed(self) -> None:
        """Raise an error where something else than a product reads packed rows, or as a weight."""
        for step in in_order(self.outputs):
            for place, read in enumerate(step.args):
                source = read.args[0] if read.op == "gather" else read
                if source.op != "packed":
                    continue
                if read.op != "gather" and step.op == "gather":
                    continue
                rows = PACKED_ROWS.get(step.op)
                whole = step.op in ("linear", "linear_add")
                if rows != place or (whole and read.op == "gather"):
                    weight = rows is not None and place == rows + 1
                    what = f"the weight of {step.op}" if weight else f"read by {step.op}"
                    raise ArgumentError(
                        f"input {source.attrs[0]!r} is packed and {what}; accepted are rows of "
                        "typed_linear and @, or decode it first"
                    )

    def step(self, value: Value) -> Step:
        """Return the step of a value, in the space of the value."""
        if id(value) not in self.found:
            make: Callable[[Value], Step] = getattr(self, f"_{value.op}", self._elementwise)
            self.found[id(value)] = make(value)
        return self.found[id(value)]

    def space(self, value: Value) -> str:
        """Return where a value stands."""
        space = SPACES.get("".join(sorted(value.deps)), "edge")
        return "edge" if space[:4] == "pair" and not self.passes.compact else space

    def _place(self, value: Value) -> Step:
        """Return an input with a row for each node, edge or relation."""
        name = value.args[0].attrs[0]
        (letter,) = value.deps
        space, info = ROWS_OF[letter], self.inputs[name]
        check_rows(value, info, self.graph)
        self.placed.append(value)
        op = "packed" if info.packed else "input"
        leaf = self.steps.make(op, (), space, info.shape[1:], name)
        if letter == "e":
            return self.steps.make("to_order", (leaf,), "edge", leaf.shape)
        return leaf

    def _shared(self, value: Value) -> Step:
        name = value.args[0].attrs[0]
        return self.steps.make("input", (), "shared", self.inputs[name].shape, name)

    def _inverse_counts(self, value: Value) -> Step:
        return self.steps.make("inverse_counts", (), self.space(value), ())

    def _elementwise(self, value: Value) -> Step:
        space = self.space(value)
        args = tuple(self.steps.gather(self.step(a), space) for a in value.args)
        if value.op == "add" and self.passes.fuse and len({a.shape for a in args}) == 1:
            return self.steps.plus(*args)
        return self.steps.elementwise(value.op, args, *value.attrs, line=value.line)

    def _split(self, value: Value) -> Step:
        x, (heads,) = self.step(value.args[0]), value.attrs
        if len(x.shape) != 1 or heads < 1 or x.shape[0] % heads:
            raise ArgumentError(f"{value.line}: split of rows {list(x.shape)} into {heads} heads")
        return self.steps.reshape(x, (heads, x.shape[0] // heads))

    def _flatten(self, value: Value) -> Step:
        x = self.step(value.args[0])
        return self.steps.reshape(x, (x.width,))

    def _t(self, value: Value) -> Step:
        return self.steps.transposed(self.step(value.args[0]))

    def _linear(self, value: Value) -> Step:
        x, weight = map(self.step, value.args)
        return self.steps.linear(x, weight, value.line)

    def _typed_linear(self, value: Value) -> Step:
        x, weight = map(self.step, value.args)
        space = self.space(value)
        if weight.space in TYPE_SPACES:
            return self.steps.typed_linear(x, weight, value.line)
        if x.space in TYPE_SPACES:
            x = self.steps.gather(x, space)
        if x.op == "packed" and len(x.shape) == 1 and len(weight.shape) == 3:
            # Rows of heads, which are split as they are decoded.
            x = self.steps.reshape(x, weight.shape[:-1])
        if x.space == "relation":  # the same for every edge: W[r] v[r]
            return self.steps.typed_linear(x, weight, value.line)
        rows = "typed_edge" if space == "edge" else space
        product = self.steps.typed_linear(self.steps.gather(x, rows), weight, value.line)
        return self.steps.gather(product, space)

    def _weight_product(self, value: Value) -> Step:
        weight, matrix = map(self.step, value.args)
        weight = self.steps.gather(weight, "relation")
        return self.steps.weight_product(weight, matrix, value.line)

    def _dot(self, value: Value) -> Step:
        x, y = map(self.step, value.args)
        space = self.space(value)
        if space == "edge" and self.passes.fuse and x.shape == y.shape and len(x.shape) <= 2:
            if x.shape and "shared" not in (x.space, y.space):
                name = f"{x.space}<{y.space}"
                if x.space != y.space:
                    return self.steps.hop_dot(name, x, y, (*x.shape[:-1], 1))
        both = (self.steps.gather(x, space), self.steps.gather(y, space))
        product = self.steps.elementwise("mul", both, line=value.line)
        like = (*product.shape[:-1], 1)
        return self.steps.make("sum_shape", (product,), space, like)

    def _softmax(self, value: Value) -> Step:
        """Fuse a sum or a product of two terms of edges, and a leaky ReLU of it, into a softmax."""
        (x,), slope = value.args, 1.0
        if self.passes.fuse and not self._used_elsewhere([x]):
            if x.op == "leaky_relu":
                (x,), (slope,) = x.args, x.attrs
            if x.op in ("add", "mul") and not self._used_elsewhere([x]):
                terms = tuple(map(self.step, x.args))
                of_rows = {term.shape for term in terms}
                if len(of_rows) == 1 and "shared" not in (term.space for term in terms):
                    attrs = (x.op == "mul", slope)
                    return self.steps.make("softmax", terms, "edge", terms[0].shape, *attrs)
        term = self.step(x)
        if not self.passes.fuse:
            term = self.steps.gather(term, "edge")
        return self.steps.make("softmax", (term,), "edge", term.shape, False, slope)

    # Sums of messages

    def _sum_to_dst(self, value: Value) -> Step:
        factors = list(_factors(value.args[0]))
        if self.passes.fuse:
            for place, message in enumerate(factors):
                rest = factors[:place] + factors[place + 1 :]
                if rest and not any(f.deps for f in rest):
                    continue  # what all edges share is no weight of an edge
                found = self._by_sides(message, rest) or self._along_edges(message, rest)
                if found is not None:
                    return found
            found = self._along_edges(value.args[0], [])
            if found is not None:
                return found
        x = self.steps.gather(self.step(value.args[0]), "edge")
        return self.steps.hop_sum("dst<edge", False, x)

    def _weight(self, factors: Sequence[Value]) -> Step | None:
        """Return the edgewise product of factors; None for no factor."""
        steps = [self.steps.gather(self.step(f), "edge") for f in factors]
        product = steps[0] if steps else None
        for step in steps[1:]:
            assert product is not None
            product = self.steps.elementwise("mul", (product, step))
        return product

    def _along_edges(self, message: Value, rest: Sequence[Value]) -> Step | None:
        """Sum messages that stand on nodes or pairs, weighted by edge values, in one loop."""
        x = self.step(message)
        weight = self._weight(rest)
        if x.space == "shared" or len(x.shape) > 2:
            return None
        if weight is not None and (not weighs(weight.shape, x.shape) or weight.width > x.width):
            return None
        if weight is None and x.space == "edge":
            return self.steps.hop_sum("dst<edge", False, x)
        if x.space == "edge":
            return None
        return self.steps.hop_sum(f"dst<{x.space}", False, x, weight)

    def _by_sides(self, message: Value, rest: Sequence[Value]) -> Step | None:
        """Sum typed products, for each relation multiplied before or after the sum."""
        views, product = [], message
        while product.op in ("split", "flatten"):
            views.append(product)
            product = product.args[0]
        if product.op != "typed_linear" or self.passes.sides is False or not self.passes.compact:
            return None
        x, matrix = map(self.step, product.args)
        if x.op == "packed" or x.space != "src" or self._used_elsewhere([*views, product]):
            return None
        weight = self._weight(rest)
        result = self.step(message).shape
        if weight is not None and not weighs(weight.shape, result):
            return None
        if weight is not None and weight.width != 1 and not weighs(weight.shape, x.shape):
            return None  # each head would have a sum of its own
        y = self.steps.typed_linear(x, matrix, product.line)
        by_dst = self._cheaper_sides(x, y, weight is not None)
        if not any(by_dst):
            return None
        # Rows of heads, and matrices of one column or row, are not multiplied as a batch.
        batched = self.graph.device.type == "cpu" and len(x.shape) == 1 and 1 not in matrix.shape
        kind = "padded" if batched and len(by_dst) >= BATCH_RELATIONS else "mixed"
        space = f"{kind}:" + "".join(str(int(side)) for side in by_dst)
        summed = self.steps.hop_sum(f"in:{space}", False, x, weight)
        y = self.steps.typed_linear(summed, matrix, product.line)
        return self.steps.hop_sum(f"out:{space}", False, self.steps.reshape(y, result), weight)

    def _used_elsewhere(self, chain: Sequence[Value]) -> bool:
        return any(self.users[id(value)] > 1 for value in chain)

    def _cheaper_sides(self, x: Step, y: Step, weighted: bool) -> list[bool]:
        """Return for each relation whether its messages are summed before they are multiplied.

        For none of them unless that pays. Where some are, the rows of the other relations are
        copied, which a product reads by index else, and operators are added: one going forward;
        going backward none, or four where edges are weighted and the weights take a gradient. A
        backward pass saves about twice what a forward pass does. Forward passes alone are compared,
        so that inference has the bits of training. On a GPU products of sums are torch's, one for
        each relation, where there are few, while those of rows that are read by index are a kernel.
        """
        multiply, visit, copy, call, product, _ = self.steps.costs
        sides = self.graph.bounds("pair_src"), self.graph.bounds("pair_dst")
        edges = self.graph.bounds("typed_edge")
        row = x.width * y.shape[-1] * multiply + (x.width + y.width) * copy
        chosen, saved, gains = [], 0.0, False
        for r in range(self.graph.num_relations):
            sources, destinations = (s[r + 1] - s[r] for s in sides if s)
            assert edges is not None
            n = edges[r + 1] - edges[r]
            before = sources * row + n * y.width * visit
            after = destinations * (row + y.width * visit) + n * x.width * visit
            copied = before + sources * x.width * visit
            chosen.append(after < copied)
            saved += before - min(after, copied)
            gains = gains or after < before
        counted = self.steps.costs.products
        more = counted(len(chosen), by_index=False) - counted(len(chosen), by_index=True)
        added = (2 if weighted else 1) * call + more * product
        pays = gains if self.passes.sides else saved > added
        return chosen if pays else [False] * len(chosen)


def check_rows(value: Value, info: InputInfo, graph: RelationalGraph) -> None:
    """Raise an error unless an input has a row for each node, edge, relation or type of a graph."""
    name = value.args[0].attrs[0]
    (letter,) = value.deps
    space = ROWS_OF[letter]
    if space in TYPE_SPACES and graph.node_types is None:
        raise ArgumentError(
            f"{value.line}: input {name!r} is of {space}, and the graph has no node_types"
        )
    rows = graph.row_count(space)
    # A block's destinations are its first sources, and packed rows cannot be cut.
    first = letter == "d" and info.packed and rows <= graph.num_src
    accepted = (rows, graph.num_src) if first else (rows,)
    if not info.shape or info.shape[0] not in accepted:
        hint = "" if letter != "e" else ", or shared(...) of a tensor that all rows share"
        raise ArgumentError(
            f"{value.line}: input {name!r} has shape {list(info.shape)}; accepted are "
            f"{rows} rows, one for each of {space}{hint}"
        )


def _factors(value: Value) -> Iterator[Value]:
    """Yield the factors of a product of rows."""
    if value.op == "mul":
        for argument in value.args:
            yield from _factors(argument)
    else:
        yield value


def cost_of(lowering: Lowering) -> float:
    """Return the predicted nanoseconds of all steps."""
    return math.fsum(lowering.steps.cost(step) for step in in_order(lowering.outputs))


def lowered(
    graph: RelationalGraph,
    inputs: Mapping[str, InputInfo],
    passes: Passes,
    outputs: Sequence[Value],
) -> tuple[Lowering, Sequence[Value]]:
    """Return the steps of a program, and the program as it was reordered."""
    best = Lowering(graph, inputs, passes, outputs)
    if not passes.reorder:
        return best, outputs
    lowest = cost_of(best)
    for make in (_after_typed, _other_side, _before_typed):
        place = 0
        while (candidate := _rewritten(outputs, make, place)) is not None:
            place += 1
            try:
                lowering = Lowering(graph, inputs, passes, candidate)
            except ArgumentError:  # shapes for which the operators cannot be exchanged
                continue
            cost = cost_of(lowering)
            if cost < lowest:
                best, outputs, lowest = lowering, candidate, cost
                place -= 1  # what was there is no match any more, or costs more as it was
    return best, outputs


def _after_typed(value: Value) -> Value | None:
    """``(x W[r]) q`` is ``x (W[r] q)``."""
    if value.op != "linear" or value.args[0].op != "typed_linear":
        return None
    product, q = value.args
    x, matrix = product.args
    weight = Value("linear", (matrix, q), (), "r", value.line)
    return Value("typed_linear", (x, weight), (), product.deps, product.line)


def _other_side(value: Value) -> Value | None:
    """``<x W[r], y>`` is ``<x, y W[r]^T>``: the product moves to the side with fewer pairs."""
    if value.op != "dot":
        return None
    for product, other in (value.args, value.args[::-1]):
        if product.op == "typed_linear" and other.op != "typed_linear":
            x, matrix = product.args
            weight = Value("t", (matrix,), (), "r", product.line)
            moved = Value("typed_linear", (other, weight), (), other.deps | {"r"}, product.line)
            return Value("dot", (x, moved), (), value.deps, value.line)
    return None


def _before_typed(value: Value) -> Value | None:
    """``(x P[type] + b[type]) W[r]`` is ``x (P[type] W[r]) + b[type] W[r]``, for each head alone.

    The type of a node at one end of an edge is that of the edge's relation.
    """
    if value.op != "typed_linear":
        return None
    rows, matrix = value.args
    heads = rows.attrs if rows.op == "split" else ()
    rows = rows.args[0] if heads else rows
    bias = None
    if rows.op == "add":
        rows, bias = rows.args if rows.args[0].op == "typed_linear" else rows.args[::-1]
        if bias.op != "place" or not bias.deps < {"p", "q"}:
            return None
    if rows.op != "typed_linear" or not rows.args[1].deps < {"p", "q"}:
        return None
    x, projection = rows.args
    weight = Value("weight_product", (projection, matrix), (), "r", value.line)
    result = Value("typed_linear", (x, weight), (), value.deps, value.line)
    if heads:
        result = Value("split", (result,), heads, None, value.line)
    if bias is None:
        return result
    if heads:
        bias = Value("split", (bias,), heads, None, value.line)
    return Value(
        "add", (result, Value("typed_linear", (bias, matrix), (), "r", value.line)), (), None,
        value.line,
    )  # fmt: skip


def _rewritten(
    outputs: Sequence[Value], make: Callable[[Value], Value | None], place: int
) -> list[Value] | None:
    """Return outputs with one value that `make` rewrites, the `place`-th, exchanged."""
    matches = [v for v in in_order(outputs) if make(v) is not None]
    if place >= len(matches):
        return None
    new: dict[int, Value] = {}
    for value in in_order(outputs):
        if value is matches[place]:
            found = make(value)
            assert found is not None
            new[id(value)] = found
        elif any(new[id(a)] is not a for a in value.args):
            new[id(value)] = value.with_args([new[id(a)] for a in value.args])
        else:
            new[id(value)] = value
    return [new[id(o)] for o in outputs]
