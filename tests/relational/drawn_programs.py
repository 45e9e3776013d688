"""Programs that hypothesis draws: compositions of the language's operators, valid by construction.

A recipe is a list of operators on what stands before it. Each value has a shape and a degree, about
the highest power of inputs in it: exponentials of high powers would overflow, and small differences
in the order of sums would become large ones.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

import bitslab.relational as rel
from bitslab.relational.steps import Shape
from bitslab.relational.trace import transposed

ROWS: list[Shape] = [(4,), (6,), (4,), (6,), (2, 1), (2, 3), (1,), ()]
WIDTHS = [6, 4, 1]
MOST_DEGREES = 4


@dataclass
class Drawn:
    """A program, and how its inputs are drawn.

    Attributes
    ----------
    steps : list of tuple
        What makes each value, as a name and arguments; numbers among these are earlier values.
    inputs : dict of str to tuple
        For each input its place (s, d, e, r, or a blank for a shared one) and the shape of a row.
    shapes, degrees : list
        Of each value.
    outputs : list of int
        Which values are returned.
    """

    steps: list[tuple[Any, ...]] = field(default_factory=list)
    inputs: dict[str, tuple[str, Shape]] = field(default_factory=dict)
    shapes: list[Shape] = field(default_factory=list)
    degrees: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def add(self, shape: Shape, degree: int, *step: Any) -> int:
        self.steps.append(step)
        self.shapes.append(shape)
        self.degrees.append(degree)
        return len(self.steps) - 1

    def input(self, draw: Any, place: str, shape: Shape) -> str:
        """Return the name of an input, one that is there already or another."""
        same = [name for name, known in self.inputs.items() if known == (place, shape)]
        name: str = draw(st.sampled_from([*same, f"{place.strip() or 'w'}{len(self.inputs)}"]))
        self.inputs[name] = (place, shape)
        return name

    def program(self) -> rel.Program:
        """Return the program."""

        def drawn(g: Any, *values: Any) -> Any:
            return self._run(g, dict(zip(self.inputs, values, strict=True)))

        names = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in
                 ("g", *self.inputs)]  # fmt: skip
        drawn.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
        return rel.program(drawn)

    def _run(self, g: Any, inputs: dict[str, Any]) -> Any:
        made: list[Any] = []
        for name, *args in self.steps:
            made.append(_MAKE[name](g, inputs, made, *args))
        return tuple(made[i] for i in self.outputs)

    def tensors(self, graph: rel.RelationalGraph, seed: int) -> dict[str, torch.Tensor]:
        """Draw the inputs."""
        counts = {
            "s": graph.num_src, "d": graph.num_dst, "e": graph.num_edges, "r": graph.num_relations
        }  # fmt: skip
        draw = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(
                (*([counts[place]] if place in counts else []), *shape),
                generator=draw, dtype=torch.float64,
            ).requires_grad_()
            for name, (place, shape) in self.inputs.items()
        }  # fmt: skip


_MAKE: dict[str, Any] = {
    "s": lambda g, x, v, name: g.src(x[name]),
    "d": lambda g, x, v, name: g.dst(x[name]),
    "e": lambda g, x, v, name: g.edge(x[name]),
    "r": lambda g, x, v, name: g.relation(x[name]),
    "inverse_counts": lambda g, x, v: g.inverse_counts,
    "typed_linear": lambda g, x, v, i, w: rel.typed_linear(v[i], x[w]),
    "linear": lambda g, x, v, i, w: v[i] @ x[w],
    "transposed": lambda g, x, v, i, w: v[i] @ transposed(x[w]),
    "sum_to_dst": lambda g, x, v, i: rel.sum_to_dst(v[i]),
    "dst_of_sum": lambda g, x, v, i: g.dst(rel.sum_to_dst(v[i])),
    "softmax": lambda g, x, v, i: rel.softmax_by_dst(v[i]),
    "dot": lambda g, x, v, i, j: rel.dot(v[i], v[j]),
    "add": lambda g, x, v, i, j: v[i] + v[j],
    "sub": lambda g, x, v, i, j: v[i] - v[j],
    "mul": lambda g, x, v, i, j: v[i] * v[j],
    "div": lambda g, x, v, i, j: v[i] / (v[j] * v[j] + 1.5),
    "add_relation": lambda g, x, v, i, b: v[i] + g.relation(x[b]),
    "add_shared": lambda g, x, v, i, w: v[i] + rel.shared(x[w]),
    "mul_shared": lambda g, x, v, i, w: v[i] * rel.shared(x[w]),
    "exp_shared": lambda g, x, v, i, w: v[i] * rel.exp(rel.shared(x[w]) * 0.1),
    "linear_of_shared": lambda g, x, v, i, w, m: v[i] + rel.shared(x[w]) @ x[m],
    "numbers": lambda g, x, v, i: (0.7 - v[i] * 0.3) / 2.0,
    "neg": lambda g, x, v, i: -v[i],
    "exp": lambda g, x, v, i: rel.exp(v[i] * 0.1),
    "leaky_relu": lambda g, x, v, i: rel.leaky_relu(v[i], 0.2),
    "split": lambda g, x, v, i: rel.split(v[i], 2),
    "flatten": lambda g, x, v, i: rel.flatten(v[i]),
}


def _fits(a: Shape, b: Shape) -> bool:
    pairs = zip(a[::-1], b[::-1], strict=False)
    return all(x == y or 1 in (x, y) for x, y in pairs)


def _joined(a: Shape, b: Shape) -> Shape:
    return tuple(torch.broadcast_shapes(a, b))


@st.composite
def programs(draw: Any) -> Drawn:
    """Draw a program of up to 8 operators on 2 to 4 values of nodes, edges or relations."""
    made = Drawn()
    for _ in range(draw(st.integers(2, 4))):
        place = draw(st.sampled_from("ssdder"))
        shape = draw(st.sampled_from(ROWS))
        made.add(shape, 1, place, made.input(draw, place, shape))
    if draw(st.booleans()):
        made.add((), 0, "inverse_counts")
    for _ in range(draw(st.integers(2, 8))):
        _operator(draw, made)
    used = {i for step in made.steps for i in step[1:] if isinstance(i, int)}
    ends = [i for i in range(len(made.steps)) if i not in used and made.steps[i][0] not in "sder"]
    made.outputs = [*ends[-4:], *draw(st.lists(st.integers(0, len(made.steps) - 1), max_size=1))]
    return made


def _operator(draw: Any, made: Drawn) -> None:
    """Add an operator, of those that fit a value that is drawn, mostly of the last ones."""
    n = len(made.steps)
    i = n - 1 - draw(st.integers(0, min(n - 1, 3)))
    shape, degree = made.shapes[i], made.degrees[i]
    others = [
        j
        for j in range(n)
        if _fits(shape, made.shapes[j]) and degree + made.degrees[j] <= MOST_DEGREES
    ]  # fmt: skip
    chosen = ["sum_to_dst", "dst_of_sum", "numbers", "neg", "leaky_relu"]
    if shape and degree < MOST_DEGREES:
        chosen += ["typed_linear"] * 3 + ["linear", "transposed"]
        chosen += ["linear_of_shared"] * (len(shape) == 1)
    if len(shape) == 1 and degree + 1 < MOST_DEGREES:
        chosen += ["product_of_products", "dot_of_products"] * 3 + ["sum_of_products"] * 9
    if degree <= 2:
        chosen += ["softmax", "exp"]
    if others:
        chosen += ["add", "sub", "mul", "mul", "div"]
    if any(made.shapes[j] and shape and made.shapes[j][-1] == shape[-1] for j in others):
        chosen += ["dot"]
    if degree < MOST_DEGREES:
        chosen += ["add_shared", "mul_shared", "exp_shared"]
    if shape in ((4,), (6,)):
        chosen += ["split"] * 2
    if len(shape) == 2:
        chosen += ["flatten"] * 2
    op = draw(st.sampled_from(chosen))
    if op in ("product_of_products", "sum_of_products", "dot_of_products"):
        _chain(draw, made, op, i)
    elif op == "typed_linear":
        wide = (*shape[:-1], draw(st.sampled_from(WIDTHS)))
        weight = (*shape[:-1], shape[-1], wide[-1])
        product = made.add(wide, degree + 1, op, i, made.input(draw, "r", weight))
        if draw(st.booleans()):
            made.add(wide, degree + 1, "add_relation", product, made.input(draw, "r", wide))
    elif op == "linear_of_shared":
        names = made.input(draw, " ", (4,)), made.input(draw, " ", (4, *shape))
        made.add(shape, degree + 1, op, i, *names)
    elif op in ("linear", "transposed"):
        n_out = draw(st.sampled_from(WIDTHS))
        weight = (shape[-1], n_out) if op == "linear" else (n_out, shape[-1])
        made.add((*shape[:-1], n_out), degree + 1, op, i, made.input(draw, " ", weight))
    elif op in ("add_shared", "mul_shared", "exp_shared"):
        made.add(shape, degree + 1, op, i, made.input(draw, " ", shape[-1:]))
    elif op == "dot":
        fitting = [j for j in others if made.shapes[j][-1:] == shape[-1:]]
        j = draw(st.sampled_from(fitting))
        both = _joined(shape, made.shapes[j])
        made.add((*both[:-1], 1), degree + made.degrees[j], op, i, j)
    elif op in ("add", "sub", "mul", "div"):
        j = draw(st.sampled_from(others))
        i, j = draw(st.sampled_from([(i, j), (j, i)]))
        both = _joined(made.shapes[i], made.shapes[j])
        made.add(both, made.degrees[i] + made.degrees[j], op, i, j)
    elif op == "split":
        made.add((2, shape[0] // 2), degree, op, i)
    elif op == "flatten":
        made.add((shape[0] * shape[1],), degree, op, i)
    else:
        made.add(shape, degree, op, i)


def _chain(draw: Any, made: Drawn, op: str, i: int) -> None:
    """Add operators that passes look for: linear after linear, sums and dot products of products.

    All but the last are used by the next one alone.
    """
    if draw(st.booleans()):
        i = made.add((4,), 1, "s", made.input(draw, "s", (4,)))
    (width,), degree = made.shapes[i], made.degrees[i] + 1
    n_out = draw(st.sampled_from(WIDTHS))
    product = made.add((n_out,), degree, "typed_linear", i, made.input(draw, "r", (width, n_out)))
    if op == "product_of_products":
        weight = made.input(draw, " ", (n_out, n_out // 2 or 1))
        made.add((n_out // 2 or 1,), degree + 1, "linear", product, weight)
    elif op == "dot_of_products":
        place = draw(st.sampled_from("sd"))
        other = made.add((n_out,), 1, place, made.input(draw, place, (n_out,)))
        made.add((1,), degree + 1, "dot", *draw(st.permutations([product, other])))
    else:
        weights = [j for j in range(product) if made.shapes[j] in ((), (1,)) and j != i]
        weights = [j for j in weights if made.degrees[j] + degree <= MOST_DEGREES]
        if weights and draw(st.booleans()):
            weight = draw(st.sampled_from(weights))
            degree += made.degrees[weight]
            product = made.add((n_out,), degree, "mul", weight, product)
        made.add((n_out,), degree, draw(st.sampled_from(["sum_to_dst", "dst_of_sum"])), product)
