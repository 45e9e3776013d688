"""Graphs of sampled blocks: steps that like ones share, and plans of a GPU that the host makes."""

from __future__ import annotations

import gc
import importlib
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bitslab.relational as rel
from bitslab.errors import ArgumentError, IndexRangeError
from bitslab.relational import NodeTypes, Passes, RelationalGraph, graph
from tests.relational.oracle import random_graph
from tests.relational.programs import PROGRAMS, inputs_of
from tests.relational.test_node_types import hgt, typed_graph
from tests.relational.test_node_types import inputs_of as typed_inputs
from tests.relational.test_program import values_and_gradients


def made_on_host(monkeypatch: pytest.MonkeyPatch, *given: Any) -> RelationalGraph:
    """Return a graph whose plan another one, of the host, makes, as those of a GPU are."""
    once = iter([True])
    with monkeypatch.context() as patched:
        patched.setattr(graph, "planned_on_host", lambda *sizes: next(once, False))
        return RelationalGraph(*given)


def outputs_of(
    compiled: rel.CompiledProgram, made: RelationalGraph, inputs: dict[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Return outputs and gradients."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    found = compiled(made, *leaves.values())
    outputs = found if isinstance(found, tuple) else (found,)
    values: list[torch.Tensor] = values_and_gradients(outputs, leaves)
    return values


@pytest.mark.parametrize("seed", [1, 2], ids=["like", "like, too"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_gives_what_it_gives_alone_after_one_like_it(name: str, seed: int) -> None:
    first, other = (random_graph(s, 60, 60, 200, 4) for s in (0, seed))
    compiled = PROGRAMS[name].compile()
    outputs_of(compiled, first, inputs_of(name, first, torch.float64))
    inputs = inputs_of(name, other, torch.float64)
    found = outputs_of(compiled, other, inputs)
    expected = outputs_of(PROGRAMS[name].compile(), other, inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@given(st.lists(st.tuples(*[st.integers(1, 90)] * 3, st.integers(0, 3)), min_size=2, max_size=5))
def test_graphs_in_turn_give_what_they_give_alone(
    sizes: list[tuple[int, int, int, int]],
) -> None:
    shared = PROGRAMS["rgat"].compile()
    for src, dst, edges, seed in sizes:
        made = random_graph(seed, src, dst, edges, 3)
        inputs = inputs_of("rgat", made, torch.float64)
        expected = outputs_of(PROGRAMS["rgat"].compile(), made, inputs)
        for a, b in zip(outputs_of(shared, made, inputs), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_steps_are_chosen_once_for_small_graphs_of_like_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = importlib.import_module("bitslab.relational.program")
    chosen, plain = [], program.lowered

    def counted(*args: Any) -> Any:
        chosen.append(args[0])
        return plain(*args)

    monkeypatch.setattr(program, "lowered", counted)
    compiled = PROGRAMS["rgcn"].compile()

    def call(seed: int, edges: int, width: int = 6) -> None:
        made = random_graph(seed, 60, 60, edges, 4)
        inputs = inputs_of("rgcn", made, torch.float32)
        shapes = {"weight": (4, 4, width), "root": (4, width)}
        inputs |= {name: torch.randn(shape) for name, shape in shapes.items()}
        compiled(made, *inputs.values())

    for seed in range(3):
        call(seed, 200 + seed)
    assert len(chosen) == 1
    call(0, 600)
    assert len(chosen) == 2
    call(0, 200, width=7)
    assert len(chosen) == 3
    monkeypatch.setattr(program, "LIKE_EDGES", 100)
    call(0, 200)
    call(1, 200)
    assert len(chosen) == 5


def test_inputs_are_checked_on_every_graph() -> None:
    compiled = PROGRAMS["rgcn"].compile()
    first, other = (random_graph(seed, 60, 60, 200, 4) for seed in range(2))
    inputs = inputs_of("rgcn", first, torch.float32)
    compiled(first, *inputs.values())
    for name in ("x", "norm"):
        wrong = inputs | {name: inputs[name][1:]}
        with pytest.raises(ArgumentError, match=f"input '{name}' has shape"):
            compiled(other, *wrong.values())
    with pytest.raises(ArgumentError, match="rows of shape"):  # what all rows share
        compiled(other, *(inputs | {"root": inputs["root"][1:]}).values())


def test_steps_hold_no_graph() -> None:
    compiled = PROGRAMS["rgat"].compile()
    made = random_graph(0, 60, 50, 200, 4)
    compiled(made, *inputs_of("rgat", made, torch.float32).values())
    held = weakref.ref(made)
    del made
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("passes", [Passes(), Passes(sides=True)], ids=["default", "sides"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plan_that_the_host_makes_is_that_of_the_graph(
    name: str, passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = random_graph(3, 60, 60, 200, 4)
    made = made_on_host(monkeypatch, plain.edge_index, plain.edge_type, 60, 4)
    inputs = inputs_of(name, plain, torch.float64)
    found = outputs_of(PROGRAMS[name].compile(passes), made, inputs)
    expected = outputs_of(PROGRAMS[name].compile(passes), plain, inputs)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("biased", [False, True])
def test_types_of_nodes_are_those_of_the_host(
    biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = typed_graph(sizes=(9, 6, 3), edges=60)
    given = (plain.edge_index, plain.edge_type, plain.num_src, plain.num_relations)
    made = made_on_host(monkeypatch, *given, plain.node_types)
    inputs = dict(enumerate(typed_inputs(plain, 2, biased)))
    compiled = hgt(2, biased)
    found, expected = (
        outputs_of(compiled, each, inputs)  # type: ignore[arg-type]
        for each in (made, plain)
    )
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_what_the_host_reads_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    edges, types = torch.tensor([[0, 1], [1, 9]]), torch.tensor([0, 1])
    with pytest.raises(IndexRangeError, match=r"edge_index\[1\] has 9; accepted are 0 to 4"):
        made_on_host(monkeypatch, edges, types, 5, 2)
    edges[1, 1] = 0
    with pytest.raises(ArgumentError, match="1 edges have a source of another type"):
        made_on_host(monkeypatch, edges, types, 5, 2, NodeTypes((0, 1, 5), (0, 0), (1, 0)))


@pytest.mark.parametrize("padded", [False, True], ids=["mixed", "padded"])
def test_entries_are_counted_without_making_them(padded: bool) -> None:
    made = random_graph(3, 60, 50, 200, 9)
    space = ("padded:" if padded else "mixed:") + "010110010"
    names = ["dst<pair_src", "dst<edge", "gather:pair_src<src", f"in:{space}", f"out:{space}"]
    for name in names:
        assert made.entry_count(name) == len(made.hop(name).entries()[0])
