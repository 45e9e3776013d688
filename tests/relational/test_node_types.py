"""Projections of node types: HGT's products of weights, where fewer operations are counted."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import bitslab.relational as rel
from bitslab import CompressedTable
from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.relational import NodeTypes, Passes
from bitslab.relational.passes import InputInfo, cost_of, lowered
from bitslab.relational.steps import Costs
from bitslab.relational.trace import described
from tests import pairwise
from tests.relational.oracle import evaluate
from tests.relational.test_program import OFF, values_and_gradients

#: For each relation the types of its edges' sources and destinations.
ENDS = ((0, 1, 0, 2, 1), (1, 0, 0, 1, 2))


def typed_graph(sizes=(9, 6, 3), edges=60, ends=ENDS, seed=0):
    draw = torch.Generator().manual_seed(seed)
    bounds = (0, *itertools.accumulate(sizes))
    kinds = torch.randint(len(ends[0]), (edges,), generator=draw)
    index = []
    for of_relations in map(torch.tensor, ends):
        of_edges = of_relations[kinds]
        drawn = torch.rand(edges, generator=draw) * torch.tensor(sizes)[of_edges]
        index.append(drawn.long() + torch.tensor(bounds)[of_edges])
    types = NodeTypes(bounds, *ends)
    return rel.RelationalGraph(torch.stack(index), kinds, bounds[-1], len(ends[0]), types)


def hgt(heads, biased):
    found = rel.hgt_of_features(heads, biased)
    assert found is not None
    return found


def inputs_of(graph, heads, biased, width=4, dtype=torch.float64):
    draw = torch.Generator().manual_seed(1)
    types, n, out = graph.node_types.count, graph.num_relations, 6
    shapes = [(graph.num_src, width), *[(types, width, out)] * 3]
    shapes += [(types, out)] * 3 if biased else []
    shapes += [*[(n, heads, out // heads, out // heads)] * 2, (n, heads, 1)]
    return [torch.randn(s, generator=draw, dtype=dtype, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("passes", [*OFF, Passes(reorder=False, fuse=False)], ids=str)
def test_hgt_of_features_with_each_pass_on_and_off(passes, biased, heads):
    graph = typed_graph()
    program = hgt(heads, biased).program
    inputs = dict(zip(program.names, inputs_of(graph, heads, biased), strict=True))
    expected = values_and_gradients(evaluate(program, graph, inputs), inputs)
    for backend in ("auto", "torch"):
        out = program.compile(passes, backend)(graph, *inputs.values())
        for a, b in zip(values_and_gradients((out,), inputs), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_products_of_weights_give_the_result_of_projected_rows(biased, heads, monkeypatch):
    # Many nodes, few of which are sources: rows of pairs cost less than rows of nodes.
    monkeypatch.setattr(
        "bitslab.relational.steps.COSTS", dict.fromkeys(("cpu", "cuda"), Costs(1.0))
    )
    graph = typed_graph(sizes=(900, 600, 300), edges=40)
    program = hgt(heads, biased).program
    inputs = dict(zip(program.names, inputs_of(graph, heads, biased), strict=True))
    found = []
    for passes in (Passes(), Passes(reorder=False)):
        compiled = program.compile(passes)
        plan = compiled.plan(graph, list(inputs.values()))
        products = described(plan.reordered).count("weight_product")
        assert products == (2 if passes.reorder else 0)
        found.append(values_and_gradients((compiled(graph, *inputs.values()),), inputs))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert "weight_product" in program.compile().explain(graph, *inputs.values())


@pytest.mark.parametrize("copies", [0.0, 1.0], ids=["multiplied", "copied"])
@pytest.mark.parametrize("sizes", [(900, 600, 300), (9, 6, 3)], ids=str)
def test_rows_of_types_cost_no_pass_over_pairs(sizes, copies, monkeypatch):
    """They are added in the product, and projections are multiplied first where that is cheaper."""
    costs = dict.fromkeys(("cpu", "cuda"), Costs(1.0, 1.0, copies))
    monkeypatch.setattr("bitslab.relational.steps.COSTS", costs)
    graph = typed_graph(sizes=sizes, edges=200)
    predicted = {}
    for biased in (False, True):
        inputs = inputs_of(graph, 2, biased)
        for reorder in (False, True):
            compiled = hgt(2, biased).program.compile(Passes(reorder=reorder))
            plan = compiled.plan(graph, inputs)
            infos = {
                name: InputInfo(tuple(x.shape))
                for name, x in zip(compiled.program.names, inputs, strict=True)
            }
            made, _ = lowered(graph, infos, Passes(reorder=reorder), compiled.program.outputs)
            predicted[biased, reorder] = cost_of(made)
        assert predicted[biased, True] <= predicted[biased, False]
        steps = [step.op for step in plan.forward.order]
        assert ("weight_product" in steps) == (predicted[biased, True] < predicted[biased, False])
        assert steps.count("typed_linear_add") == 3 * biased and "add" not in steps
    added = predicted[True, True] - predicted[False, True]
    relations, pairs, out, heads = graph.num_relations, graph.rows("pair_src").n, 6, 2
    # Rows of relations times their matrices, for keys and values: read, gathered, multiplied.
    most = 2 * relations * (out * out / heads + 4 * out * copies)
    assert 0 <= added <= most and most < 2 * pairs * out * (2 * copies + 3)


@pytest.mark.parametrize("heads", [1, 2])
def test_bias_that_a_typed_product_reads_is_added_in_it(heads):
    @rel.program
    def biased(g, x, weight, bias):
        message = rel.typed_linear(rel.split(g.src(x), heads), weight) + g.relation(bias)
        return rel.sum_to_dst(message)

    graph = typed_graph()
    draw = torch.Generator().manual_seed(0)
    shapes = [(18, 2 * heads), (5, heads, 2, 3), (5, heads, 3)]
    inputs = {
        name: torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)
        for name, shape in zip(biased.names, shapes, strict=True)
    }
    expected = values_and_gradients(evaluate(biased, graph, inputs), inputs)
    for backend in ("auto", "torch"):
        compiled = biased.compile(Passes(sides=False), backend)
        assert "typed_linear_add" in compiled.explain(graph, *inputs.values())
        out = compiled(graph, *inputs.values())
        for a, b in zip(values_and_gradients((out,), inputs), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_rows_are_projected_first_where_that_costs_less():
    # Each node is a source of each relation of its type, and rows are wider than heads.
    sizes, relations = (40,), 12
    nodes = torch.arange(sizes[0]).repeat(relations)
    kinds = torch.arange(relations).repeat_interleave(sizes[0])
    types = NodeTypes((0, *sizes), (0,) * relations, (0,) * relations)
    graph = rel.RelationalGraph(torch.stack([nodes, nodes]), kinds, sizes[0], relations, types)
    inputs = inputs_of(graph, 3, biased=True, width=64)
    plan = hgt(3, True).plan(graph, inputs)
    assert "weight_product" not in described(plan.reordered)


@pytest.mark.parametrize("reorder", [False, True])
def test_packed_features_give_the_result_of_raw_ones(reorder):
    graph = typed_graph()
    x, *rest = inputs_of(graph, 2, biased=True, width=16)
    compiled = hgt(2, True).program.compile(Passes(reorder=reorder))
    expected = compiled(graph, x, *rest)
    draws = [torch.autograd.grad(expected.square().sum(), rest)]
    out = compiled(graph, CompressedTable.from_tensor(x.detach()), *rest)
    draws.append(torch.autograd.grad(out.square().sum(), rest))
    for a, b in zip([out, *draws[1]], [expected, *draws[0]], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("reorder", [False, True])
def test_generated_gradients_are_those_of_differences(reorder, biased, monkeypatch):
    monkeypatch.setattr(
        "bitslab.relational.steps.COSTS", dict.fromkeys(("cpu", "cuda"), Costs(1.0))
    )
    graph = typed_graph(sizes=(20, 4, 2), edges=8)
    compiled = hgt(2, biased).program.compile(Passes(reorder=reorder))
    inputs = inputs_of(graph, 2, biased, width=2)
    # Of a random direction; element by element takes as many passes as there are numbers.
    assert torch.autograd.gradcheck(
        lambda *args: compiled(graph, *args), inputs, fast_mode=not pairwise.FULL
    )


def test_traced_by_torch_compile_as_a_whole(fresh_compiler):
    graph = typed_graph()
    program = hgt(2, True)
    inputs = inputs_of(graph, 2, biased=True, dtype=torch.float32)

    def run(*args):
        edges = (graph.edge_index, graph.edge_type, (18, 18), 5)
        return rel.run_on_edges(program, *edges, *args, node_types=graph.node_types)

    expected = values_and_gradients((run(*inputs),), dict(enumerate(inputs)))
    out = torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs)
    for a, b in zip(values_and_gradients((out,), dict(enumerate(inputs))), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_errors_name_what_is_wrong():
    graph = typed_graph()
    index, kinds, types = graph.edge_index, graph.edge_type, graph.node_types
    wrong = NodeTypes(types.bounds, (1, *types.src[1:]), types.dst)
    with pytest.raises(ArgumentError, match="edges have a source of another type than their rel"):
        rel.RelationalGraph(index, kinds, 18, 5, wrong)
    for bounds in ((0, 9, 5, 18), (0, 9, 15, 17), (1, 18), ()):
        with pytest.raises(ArgumentError, match="node_types has bounds"):
            rel.RelationalGraph(index, kinds, 18, 5, NodeTypes(bounds, types.src, types.dst))
    for ends in ((0, 1, 0), (0, 1, 0, 3, 1)):
        with pytest.raises(ArgumentError, match=r"node_types\.src is"):
            rel.RelationalGraph(index, kinds, 18, 5, NodeTypes(types.bounds, ends, types.dst))
    untyped = rel.RelationalGraph(index, kinds, 18, 5)
    with pytest.raises(ArgumentError, match="the graph has no node_types"):
        hgt(2, False)(untyped, *inputs_of(graph, 2, biased=False))
    with pytest.raises(rel.ProgramError, match=r"typed_linear by g\.src_type of place"):

        @rel.program
        def crossed(g, x, weight):
            return rel.sum_to_dst(rel.typed_linear(g.dst(x), weight, g.src_type))


def test_any_sequences_of_integers_are_bounds_and_types():
    graph = typed_graph()
    types = graph.node_types
    given: Any = torch.tensor(types.bounds), list(types.src), np.array(types.dst)
    lists = NodeTypes(*given)
    assert lists == types and hash(lists) == hash(types)
    lists.check((graph.num_src, graph.num_dst), graph.num_relations)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0.0, 9.0), "bounds: .*, expected a sequence of int"),
        (9, "bounds: 9, expected a sequence of int"),
    ],
    ids=["floats", "one"],
)
def test_bounds_that_are_no_integers_are_refused(given, message):
    with pytest.raises(ArgumentTypeError, match=message):
        NodeTypes(given, (0,), (0,))


def test_node_types_of_another_kind_are_refused():
    index, kinds = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ArgumentTypeError, match="node_types: expected NodeTypes or None, got tup"):
        rel.RelationalGraph(index, kinds, 9, 1, node_types=(0, 9))  # type: ignore[arg-type]
