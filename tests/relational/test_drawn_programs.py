"""Programs of drawn operators against the same computed edge by edge, each pass on and off."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bitslab.relational as rel
from bitslab.relational import Passes, RelationalGraph
from bitslab.relational.trace import in_order
from tests.relational.drawn_programs import Drawn, programs
from tests.relational.oracle import evaluate, random_graph

#: All passes, none, each one off, and sums that come first wherever that costs less.
PASSES = [
    Passes(),
    Passes(sides=True),
    Passes(False, False, False, False),
    *(dataclasses.replace(Passes(), **{f.name: False}) for f in dataclasses.fields(Passes)),
]


@st.composite
def graphs(draw):
    """Draw a graph: with no edges, nodes and relations without, self-loops and parallel edges.

    Or one of more edges, from many nodes to few or back, of which passes do something.
    """
    if draw(st.booleans()):
        few, many = draw(st.integers(1, 3)), draw(st.integers(20, 60))
        ends = draw(st.sampled_from([*[(many, few)] * 4, (few, many), (many, many)]))
        sizes = draw(st.integers(60, 120)), draw(st.sampled_from([9, 2, 1]))
        return random_graph(draw(st.integers(0, 99)), ends[0], ends[1], *sizes)
    src, dst, relations = (draw(st.integers(1, n)) for n in (6, 6, 10))
    if draw(st.booleans()):
        src = dst  # self-loops are among the edges
    edge = st.tuples(*(st.integers(0, n - 1) for n in (src, dst, relations)))
    edges = draw(st.lists(edge, max_size=12))
    edges += [draw(st.sampled_from(edges)) for _ in range(draw(st.integers(0, 4))) if edges]
    columns = torch.tensor(edges, dtype=torch.int64).reshape(-1, 3)
    return RelationalGraph(columns[:, :2].t(), columns[:, 2], (src, dst), relations)


def far_from_kinks(program, graph, inputs):
    """Return whether no logit of a leaky ReLU is so small that rounding decides its sign."""
    args = tuple(v.args[0] for v in in_order(program.outputs) if v.op == "leaky_relu")
    with torch.no_grad():
        found = evaluate(cast(Any, SimpleNamespace(outputs=args)), graph, inputs)
    return all(bool(((x == 0) | (x.abs() > 1e-7)).all()) for x in found)


def values_and_gradients(outputs, inputs):
    """Return outputs and gradients; of outputs of no input, as of inverse counts, they are zero."""
    draw, leaves = torch.Generator().manual_seed(7), list(inputs.values())
    seeds = [torch.randn(o.shape, generator=draw, dtype=o.dtype) for o in outputs]
    terms = [(o * seed).sum() for o, seed in zip(outputs, seeds, strict=True)]
    total = sum([0 * leaf.sum() for leaf in leaves], torch.zeros(())) + sum(terms)
    return [*outputs, *torch.autograd.grad(total, leaves)]


def check(drawn, graph, backend, seed):
    program, inputs = drawn.program(), drawn.tensors(graph, seed)
    if not far_from_kinks(program, graph, inputs):
        return
    expected = values_and_gradients(evaluate(program, graph, inputs), inputs)
    for passes in PASSES:
        outputs = program.compile(passes, backend)(graph, *inputs.values())
        for a, b in zip(values_and_gradients(outputs, inputs), expected, strict=True):
            largest = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
            what = f"{passes}, {backend}:\n{program}\n{graph}\n"
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * largest, msg=what.__add__)


@given(programs(), graphs(), st.sampled_from(["auto", "torch"]), st.integers(0, 1000))
def test_drawn_programs(drawn, graph, backend, seed):
    check(drawn, graph, backend, seed)


def shared_factor(g, x, w):
    return (rel.sum_to_dst(g.src(x) * rel.shared(w)),)


def one_shared_number(g, x, w):
    return (rel.sum_to_dst(g.inverse_counts * rel.exp(rel.shared(w))) + g.dst(x),)


def square(g, x, w):
    message = g.src(x)
    return (rel.sum_to_dst(message * message) * rel.shared(w),)


def square_of_edges(g, x, w):
    logit = g.src(x) - g.dst(x)
    return rel.sum_to_dst(logit * g.inverse_counts * logit), rel.softmax_by_dst(logit * logit)


FOUND = [
    (shared_factor, (4,), (4,)),
    (shared_factor, (4,), (1,)),
    (shared_factor, (4,), ()),
    (one_shared_number, (), ()),
    (square, (4,), (1,)),
    (square_of_edges, (3,), (1,)),
]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(("function", "row", "shared"), FOUND)
def test_programs_that_were_wrong(function, row, shared, backend):
    inputs = {"x": ("s", row), "w": (" ", shared)}
    drawn = Drawn(inputs=inputs)
    drawn.program = lambda: rel.program(function)  # type: ignore[method-assign]
    check(drawn, random_graph(0, 7, 7, 30, 3), backend, seed=1)
