"""Sums before products: only where a graph is so large that the operator which this adds pays."""

from __future__ import annotations

import pytest
import torch

import bitslab.relational as rel
from bitslab.relational import TYPED_SUM, WEIGHTED_SUM, Passes, execute, graph, rows, steps
from tests.relational.oracle import random_graph
from tests.relational.test_host_calls import launches_of
from tests.simt.runner import simt_kernels

DIM = 64


def stars(leaves: int, relations: int = 2) -> rel.RelationalGraph:
    """Return a graph whose relation 0 leads from leaves to one node, relation 1 back to them.

    Of other relations there are no edges.
    """
    many, one = torch.arange(leaves), torch.zeros(leaves, dtype=torch.long)
    ends = torch.stack([torch.cat([many, one]), torch.cat([one, many])])
    kinds = torch.arange(2).repeat_interleave(leaves)
    return rel.RelationalGraph(ends, kinds, leaves, relations)


def inputs_of(leaves: int, relations: int = 2, dim: int = DIM) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = ((leaves, dim), (relations, dim, dim))
    return [torch.randn(*shape, generator=draw).requires_grad_() for shape in shapes]


def space_of_products(made: rel.RelationalGraph, passes: Passes, leaves: int) -> str:
    program = TYPED_SUM.program.compile(passes)
    order = program.plan(made, inputs_of(leaves)).forward.order
    (product,) = [step for step in order if step.op == "typed_linear"]
    return product.space


def on_device(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Let plans on the CPU be chosen by what a device's operators cost."""
    monkeypatch.setitem(steps.COSTS, "cpu", steps.COSTS[device])


SIZES = pytest.mark.parametrize(
    ("device", "leaves", "sums_first"),
    [("cpu", 10, False), ("cpu", 2_000, True), ("cuda", 2_000, False), ("cuda", 100_000, True)],
    ids=["cpu-small", "cpu-large", "gpu-small", "gpu-large"],
)


@SIZES
def test_a_large_graph_is_summed_first_and_a_small_one_is_not(
    device: str, leaves: int, sums_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(monkeypatch, device)
    found = space_of_products(stars(leaves), Passes(), leaves)
    assert found == ("mixed:10" if sums_first else "pair_src")


@SIZES
@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "off"])
def test_an_option_that_is_given_is_followed_for_any_size(
    asked: bool, device: str, leaves: int, sums_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(monkeypatch, device)
    found = space_of_products(stars(leaves), Passes(sides=asked), leaves)
    assert found == ("mixed:10" if asked else "pair_src")


def test_edges_that_are_weighted_add_more_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch, "cuda")
    leaves = 29_000  # saves more than three calls take, and less than four
    made, inputs = stars(leaves), inputs_of(leaves)
    spaces = {}
    for program, more in ((TYPED_SUM, []), (WEIGHTED_SUM, [torch.ones(made.num_edges)])):
        order = program.plan(made, [*inputs, *more]).forward.order
        spaces[program] = [step.space for step in order if step.op == "typed_linear"]
    assert spaces == {TYPED_SUM: ["mixed:10"], WEIGHTED_SUM: ["pair_src"]}


@pytest.mark.parametrize("relations", [2, 7, 8, 20])
def test_products_that_a_gpu_is_called_for_one_by_one_count(
    relations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few relations torch multiplies sums, relation by relation, and of many one kernel."""
    on_device(monkeypatch, "cuda")
    leaves = 20_000  # saves more than two calls take, and less than three
    made = stars(leaves, relations)
    program = TYPED_SUM.program.compile()
    order = program.plan(made, inputs_of(leaves, relations)).forward.order
    (space,) = [step.space for step in order if step.op == "typed_linear"]
    few = relations < rows.BATCH_RELATIONS
    assert space.rpartition(":")[2] == ("pair_src" if few else "1" + "0" * (relations - 1))


@pytest.mark.parametrize("kernels", [False, True])
def test_rows_of_relations_are_one_product(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = steps.Costs(call_ns=1.0, product_ns=100.0, kernels=kernels)
    monkeypatch.setitem(steps.COSTS, "cpu", costs)
    made = steps.Steps(stars(10, relations=4))
    weight = made.make("input", (), "relation", (3, 5))
    for space, products in (("relation", 0), ("pair_src", 4)):
        x = made.make("input", (), space, (3,))
        assert made.cost(made.typed_linear(x, weight)) == 1 + 100 * products


def test_no_relation_is_summed_first_where_none_is_cheaper_so() -> None:
    made = stars(2_000)
    # From one node to its leaves alone.
    away = rel.RelationalGraph(made.edge_index[:, 2_000:], made.edge_type[2_000:], 2_000, 2)
    assert space_of_products(away, Passes(sides=True), 2_000) == "pair_src"


@pytest.mark.parametrize(("leaves", "as_if"), [(10, False), (2_000, True)], ids=["small", "large"])
def test_what_is_chosen_has_the_bits_of_the_same_choice_when_given(
    leaves: int, as_if: bool
) -> None:
    made = stars(leaves)
    results = []
    for passes in (Passes(), Passes(sides=as_if)):
        inputs = inputs_of(leaves)
        out = TYPED_SUM.program.compile(passes)(made, *inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_inference_and_training_have_the_same_bits() -> None:
    made, inputs = stars(2_000), inputs_of(2_000)
    program = TYPED_SUM.program.compile()
    with torch.no_grad():
        expected = program(made, *inputs)
    assert torch.equal(program(made, *inputs), expected)


def test_the_copy_of_rows_that_are_not_summed_first_counts() -> None:
    """Alone relation 1 is multiplied first; beside relation 0 its rows would be copied for that."""
    n = 2_000
    many, one = torch.arange(n), torch.zeros(n, dtype=torch.long)
    ends = torch.stack([torch.cat([many, many]), torch.cat([one, many * 9 // 10])])
    kinds = torch.arange(2).repeat_interleave(n)
    alone = rel.RelationalGraph(ends[:, n:], kinds[n:], n, 2)
    assert space_of_products(alone, Passes(), n) == "pair_src"
    both = rel.RelationalGraph(ends, kinds, n, 2)
    assert space_of_products(both, Passes(), n) == "mixed:11"


def test_a_small_graph_launches_no_kernel_for_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    found, runner = simt_kernels()
    monkeypatch.setattr(execute, "gpu_kernels", lambda device: found)
    monkeypatch.setattr(graph, "read_at_once", lambda device: True)
    on_device(monkeypatch, "cuda")
    made = random_graph(0, 60, 3, 300, 9)  # few destinations: each relation is cheaper summed first
    counts = {}
    for sides in (None, False, True):
        program = TYPED_SUM.program.compile(Passes(sides=sides))
        inputs = inputs_of(60, relations=9, dim=8)
        launches_of(program, made, inputs, runner)  # makes the plan
        counts[sides] = launches_of(program, made, inputs, runner)
    assert counts[None] == counts[False]
    assert counts[None][0] == counts[True][0] - 1
