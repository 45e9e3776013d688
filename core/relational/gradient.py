"""The backward program: steps that give the gradients of inputs, from those of outputs.

Each rule gives the gradients of a step's arguments. They are steps of the same kinds, on the same
spaces: the gradient of a compact value is compact, and a sum over edges goes back as a sum over the
transposed matrix, row by row and without atomics, so that results are the same from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .steps import Step, Steps
from .trace import in_order

Gradients = Sequence[Step | None]


def _zero_slope(s: Steps, step: Step, g: Step) -> Gradients:
    (x,) = step.args
    return (s.elementwise("leaky_relu_grad", (g, x), *step.attrs),)


def _add(s: Steps, step: Step, g: Step) -> Gradients:
    return g, g


def _sub(s: Steps, step: Step, g: Step) -> Gradients:
    return g, s.elementwise("mul_number", (g,), -1.0)


def _mul(s: Steps, step: Step, g: Step) -> Gradients:
    x, y = step.args
    return s.elementwise("mul", (g, y)), s.elementwise("mul", (g, x))


def _div(s: Steps, step: Step, g: Step) -> Gradients:
    _, y = step.args
    gx = s.elementwise("div", (g, y))
    gy = s.elementwise("mul", (gx, step))
    return gx, s.elementwise("mul_number", (gy,), -1.0)


def _same(s: Steps, step: Step, g: Step) -> Gradients:
    return (g,)


def _scaled(s: Steps, step: Step, g: Step) -> Gradients:
    return (s.elementwise(step.op, (g,), *step.attrs),)


def _exp(s: Steps, step: Step, g: Step) -> Gradients:
    return (s.elementwise("mul", (g, step)),)


def _reshape(s: Steps, step: Step, g: Step) -> Gradients:
    return (s.reshape(g, step.args[0].shape),)


def _t(s: Steps, step: Step, g: Step) -> Gradients:
    return (s.transposed(g),)


def _to_order(s: Steps, step: Step, g: Step) -> Gradients:
    return (s.make("from_order", (g,), "edge", g.shape),)


def _from_order(s: Steps, step: Step, g: Step) -> Gradients:
    return (s.make("to_order", (g,), "edge", g.shape),)


def _from_edges(s: Steps, g: Step, space: str) -> Step:
    """Return the gradient of rows of a space, of that of the edges that read them."""
    return g if space == "edge" else s.hop_sum(f"{space}<edge", False, g)


def _gather(s: Steps, step: Step, g: Step) -> Gradients:
    (source,) = step.attrs
    if step.space == "edge":
        return (_from_edges(s, g, source),)
    if s.in_order(step.space, source):
        return (s.type_sum(g, source, step.shape),)
    return (s.hop_sum(f"gather:{step.space}<{source}", True, g),)


def _sum_shape(s: Steps, step: Step, g: Step) -> Gradients:
    (x,) = step.args
    return (s.make("expand", (g,), x.space, x.shape),)


def _product(s: Steps, x: Step, weight: Step, g: Step) -> Gradients:
    gw = s.make("linear_grad", (x, g), "shared", weight.shape)
    return s.linear(g, s.transposed(weight)), gw


def _linear(s: Steps, step: Step, g: Step) -> Gradients:
    x, weight = step.args
    return _product(s, x, weight, g)


def _typed_linear(s: Steps, step: Step, g: Step) -> Gradients:
    x, weight = step.args
    return _typed_product(s, x, weight, g)


def _typed_product(s: Steps, x: Step, weight: Step, g: Step) -> Gradients:
    gw = s.make("weight_grad", (x, g), weight.space, weight.shape)
    return s.typed_linear(g, s.transposed(weight)), gw


def _typed_linear_add(s: Steps, step: Step, g: Step) -> Gradients:
    x, weight, bias = step.args
    return *_typed_product(s, x, weight, g), s.type_sum(g, bias.space, bias.shape)


def _weight_product(s: Steps, step: Step, g: Step) -> Gradients:
    weight, matrix = step.args
    gm = s.make("weight_product_grad", (weight, g), "relation", matrix.shape)
    return s.weight_product(g, s.transposed(matrix)), gm


def _hop_sum(s: Steps, step: Step, g: Step) -> Gradients:
    name, transposed = step.attrs
    x, weight = step.args[0], step.args[1] if len(step.args) > 1 else None
    back = s.hop_sum(name, not transposed, g, weight)
    if weight is None:
        return (back,)
    ends = (x, g) if transposed else (g, x)
    return back, s.hop_dot(name, *ends, weight.shape)


def _hop_dot(s: Steps, step: Step, g: Step) -> Gradients:
    (name,) = step.attrs
    to, source = step.args
    return s.hop_sum(name, False, source, g), s.hop_sum(name, True, to, g)


def _softmax(s: Steps, step: Step, g: Step) -> Gradients:
    terms, (multiplied, slope) = step.args, step.attrs
    read = () if slope == 1 else terms  # the sign of logits
    found = s.make("softmax_grad", (step, g, *read), "edge", step.shape, *step.attrs)
    parts = [found] * len(terms)
    if multiplied:
        others = [s.gather(other, "edge") for other in reversed(terms)]
        parts = [s.elementwise("mul", (found, other)) for other in others]
    return [_from_edges(s, part, term.space) for part, term in zip(parts, terms, strict=True)]


def _linear_add(s: Steps, step: Step, g: Step) -> Gradients:
    _, x, weight = step.args
    return [g, *_product(s, x, weight, g)]


RULES: dict[str, Callable[[Steps, Step, Step], Gradients]] = {
    "add": _add,
    "add_number": _same,
    "div": _div,
    "div_number": _scaled,
    "exp": _exp,
    "from_order": _from_order,
    "gather": _gather,
    "hop_dot": _hop_dot,
    "hop_sum": _hop_sum,
    "leaky_relu": _zero_slope,
    "linear": _linear,
    "linear_add": _linear_add,
    "mul": _mul,
    "mul_number": _scaled,
    "reshape": _reshape,
    "softmax": _softmax,
    "sub": _sub,
    "sub_number": _same,
    "sum_shape": _sum_shape,
    "t": _t,
    "to_order": _to_order,
    "typed_linear": _typed_linear,
    "typed_linear_add": _typed_linear_add,
    "weight_product": _weight_product,
}


def differentiated(
    steps: Steps, outputs: Sequence[Step], wanted: Sequence[str]
) -> tuple[list[Step | None], list[Step]]:
    """Return the gradients of inputs.

    Parameters
    ----------
    steps : Steps
        Makes the steps.
    outputs : sequence of Step
        The outputs of the program.
    wanted : sequence of str
        Names of inputs.

    Returns
    -------
    gradients : list of Step or None
        For each name; None for an input that no output depends on.
    seeds : list of Step
        The gradients of the outputs, inputs of the backward program by the name ``grad I``.
    """
    forward = in_order(outputs)
    needs = set[int]()
    for step in forward:
        if (step.op == "input" and step.attrs[0] in wanted) or any(
            id(a) in needs for a in step.args
        ):
            needs.add(id(step))
    found: dict[int, Step] = {}
    seeds = []

    def add(to: Step, g: Step) -> None:
        g = steps.sum_to(g, to)
        before = found.get(id(to))
        found[id(to)] = g if before is None else steps.plus(before, g)

    for i, output in enumerate(outputs):
        seeds.append(steps.make("input", (), output.space, output.shape, f"grad {i}"))
        if id(output) in needs:
            add(output, seeds[-1])
    for step in reversed(forward):
        g = found.get(id(step))
        if g is None or step.op not in RULES:
            continue
        for argument, part in zip(step.args, RULES[step.op](steps, step, g), strict=True):
            if part is not None and id(argument) in needs:
                add(argument, part)
    results: list[Step | None] = []
    for name in wanted:
        parts = [
            found[id(s)]
            for s in forward
            if s.op == "input" and s.attrs[0] == name and id(s) in found
        ]
        results.append(_together(steps, parts))
    return results, seeds


def _together(steps: Steps, parts: list[Step]) -> Step | None:
    """Return the sum of the gradients of an input that is read in several spaces."""
    if not parts:
        return None
    total = parts[0]
    for part in parts[1:]:
        # One tensor, so that rows agree in number, whatever they are called.
        total = steps.make("add", (total, part), total.space, total.shape)
    return total


#: Forward steps that the backward program makes again from what is kept.
AGAIN = ("gather", "reshape", "t", "to_order")


def kept_of(forward: Sequence[Step], gradients: Sequence[Step]) -> list[Step]:
    """Return the values of the forward program that the backward program reads.

    What only gathers or reshapes a kept value is made again.
    """
    known = {id(step) for step in in_order(forward)}
    kept: dict[int, Step] = {}
    seen = set[int]()
    stack = list(gradients)
    while stack:
        step = stack.pop()
        if id(step) in seen:
            continue
        seen.add(id(step))
        if id(step) in known and step.op not in AGAIN:
            kept[id(step)] = step
        else:
            stack.extend(step.args)
    return list(kept.values())
