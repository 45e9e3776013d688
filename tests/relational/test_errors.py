"""What programs, graphs and inputs must not be; each error names it."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from typing import Any, cast

import pytest
import torch

import bitslab
import bitslab.relational as rel
from bitslab.errors import (
    ArgumentError,
    ArgumentTypeError,
    IndexRangeError,
    ModifiedInPlaceError,
)
from bitslab.relational import kept_graphs, rows
from tests.relational.oracle import random_graph
from tests.relational.programs import arithmetic, inputs_of, rgcn

EDGES = torch.tensor([[0, 1, 2], [2, 1, 0]])
TYPES = torch.tensor([0, 1, 0])


@pytest.mark.parametrize(
    ("edges", "types", "nodes", "relations", "error", "message"),
    [
        (EDGES, TYPES, 2, 2, IndexRangeError, "edge_index[0] has 2; accepted are 0 to 1"),
        (EDGES, TYPES, (3, 2), 2, IndexRangeError, "edge_index[1] has 2; accepted are 0 to 1"),
        (EDGES, TYPES - 1, 3, 2, IndexRangeError, "edge_type has -1; accepted are 0 to 1"),
        (EDGES, TYPES, 3, 1, IndexRangeError, "edge_type has 1; accepted are 0 to 0"),
        (EDGES, TYPES[:2], 3, 2, ArgumentError, "edge_type has shape [2]; accepted is [3]"),
        (EDGES.t(), TYPES, 3, 2, ArgumentError, "edge_index has shape [3, 2]"),
        (EDGES.float(), TYPES, 3, 2, ArgumentTypeError, "edge_index is torch.float32"),
        (EDGES, [0, 1, 0], 3, 2, ArgumentTypeError, "edge_type is list"),
        (EDGES, TYPES.to("meta"), 3, 2, ArgumentTypeError, "edge_type is on meta"),
        (EDGES, TYPES, -1, 2, ArgumentError, "num_nodes is (-1, -1)"),
        (EDGES, TYPES, 3, -2, ArgumentError, "num_relations is -2"),
    ],
)
def test_graph(edges, types, nodes, relations, error, message):
    with pytest.raises(error, match=re.escape(message)):
        rel.RelationalGraph(edges, types, nodes, relations)


def branch(g, x):
    return rel.sum_to_dst(g.src(x) if g.src(x) > 0 else g.src(x) * 2)


def compared(g, x):
    return rel.sum_to_dst(g.src(x) if g.src(x) == x else g.src(x) * 2)


def torch_function(g, x):
    return torch.sigmoid(g.src(x))


def method(g, x):
    return rel.sum_to_dst(g.src(x).tanh())


def unknown_of_graph(g, x):
    return rel.sum_to_dst(g.both(x))


def other_types(g, x, w, t):
    return rel.sum_to_dst(rel.typed_linear(g.src(x), w, t))


def made_weight(g, x, w):
    return rel.sum_to_dst(g.src(x) @ (g.src(x) @ w))


def nothing(g, x):
    return None


def tensor_inside(g, x):
    return rel.dot(g.src(x), cast(Any, [1]))


def looped(g, x):
    return rel.sum_to_dst(sum(g.src(x)))


def sum_of_shared(g, x):
    return rel.sum_to_dst(rel.exp(rel.shared(x)))


def product_of_shared(g, x, w):
    return rel.sum_to_dst(rel.typed_linear(rel.shared(x), w))


def dot_of_shared(g, x):
    return rel.dot(rel.shared(x), rel.shared(x))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (branch, "Python branch"),
        (compared, "Python branch"),
        (torch_function, "torch's sigmoid"),
        (method, "no operation 'tanh'"),
        (unknown_of_graph, "the graph has no 'both'"),
        (other_types, "accepted are g.edge_type, g.src_type"),
        (made_weight, "a weight is an input"),
        (nothing, "returned NoneType"),
        (tensor_inside, "not list"),
        (looped, "iterated"),
        (sum_of_shared, "sum_to_dst of a value that all rows share"),
        (product_of_shared, "typed_linear of a value that all rows share"),
        (dot_of_shared, "dot of a value that all rows share"),
    ],
)
def test_program_that_cannot_be_compiled(function, message):
    with pytest.raises(rel.ProgramError, match=re.escape(message)) as caught:
        rel.program(function)
    if function is not nothing:
        line = function.__code__.co_firstlineno + 1
        assert f"{__file__}:{line}:" in str(caught.value)


def test_program_takes_inputs_by_name():
    with pytest.raises(rel.ProgramError, match="each by name"):
        rel.program(lambda g, *inputs: inputs[0])
    with pytest.raises(rel.ProgramError, match="one input or more"):
        rel.program(lambda g: rel.sum_to_dst(g.inverse_counts))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": None}, ArgumentTypeError, "input 'x' is NoneType"),
        ({"x": torch.ones(11, 4)}, ArgumentError, "input 'x' has shape [11, 4]"),
        ({"x": torch.ones(12, 5)}, ArgumentError, "typed_linear of rows of shape [5]"),
        ({"weight": torch.ones(3, 4, 6)}, ArgumentError, "input 'weight' has shape [3, 4, 6]"),
        ({"root": torch.ones(5, 6)}, ArgumentError, "@ a weight [5, 6]"),
        ({"norm": torch.ones(6)}, ArgumentError, "shared(...)"),
        ({"norm": torch.ones(60, 5)}, ArgumentError, "mul of rows of shapes"),
        ({"root": torch.ones(4, 6).double()}, ArgumentTypeError, "'root' is torch.float64"),
        ({"x": torch.ones(12, 4, dtype=torch.long)}, ArgumentTypeError, "'x' is torch.int64"),
        ({"x": torch.ones(12, 4, device="meta")}, ArgumentTypeError, "'x' is on meta"),
    ],
)
def test_input(change, error, message):
    graph = random_graph(0, 12, 12, 60, 4)
    inputs = inputs_of("rgcn", graph, torch.float32) | change
    with pytest.raises(error, match=re.escape(message)):
        rgcn.compile()(graph, *inputs.values())


def test_number_of_inputs():
    with pytest.raises(ArgumentError, match="1 inputs; accepted are 4: x, weight, root, norm"):
        rgcn.compile()(random_graph(0, 12, 12, 60, 4), torch.ones(12, 4))


def test_backend():
    with pytest.raises(ArgumentError, match="backend is 'fast'"):
        rgcn.compile(backend="fast")


def test_graph_that_was_changed_in_place():
    graph = random_graph(0, 12, 12, 60, 4)
    inputs = inputs_of("rgcn", graph).values()
    rgcn.compile()(graph, *inputs)
    graph.edge_type[0] = 3 - graph.edge_type[0]
    with pytest.raises(ModifiedInPlaceError, match="changed in place"):
        rgcn.compile()(graph, *inputs)


def test_plain_tensors_that_changed_in_place_have_another_graph():
    edges, types = EDGES.clone(), TYPES.clone()
    x, e = torch.randn(3, 4), torch.randn(3, 1)
    compiled = arithmetic.compile()

    def run():
        return rel.run_on_edges(compiled, edges, types, (3, 3), 2, x, x, e, torch.ones(4))[0]

    before = run()
    assert torch.equal(run(), before)
    edges[1, 0] = 1
    graph = rel.RelationalGraph(edges.clone(), types, 3, 2)
    assert torch.equal(run(), compiled(graph, x, x, e, torch.ones(4))[0])
    assert not torch.equal(run(), before)


def test_tensors_of_inference_mode_have_graphs_of_their_own():
    with torch.inference_mode():
        edges, types = EDGES.clone(), TYPES.clone()
        x, e = torch.randn(3, 4), torch.randn(3, 1)
        args = ((3, 3), 2, x, x, e, torch.ones(4))
        before = rel.run_on_edges(arithmetic.compile(), edges, types, *args)[0]
        edges[1, 0] = 1
        after = rel.run_on_edges(arithmetic.compile(), edges, types, *args)[0]
    assert not torch.equal(before, after)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 8 GiB"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["numpy", "GPU", "torch"],
)
def test_memory_that_runs_out_in_a_plan_has_an_error_of_its_own(error, monkeypatch):
    def fail(*args):
        raise error

    inputs = inputs_of("rgcn", random_graph(0, 12, 12, 60, 4), torch.float32)
    with monkeypatch.context() as patched:
        patched.setattr("bitslab.engine.kernels.cpu.segment_sums.survey_edges", fail)
        with pytest.raises(rel.PlanMemoryError, match="no memory for the plan of a graph: "):
            rel.RelationalGraph(EDGES, TYPES, 3, 2)
    monkeypatch.setattr("bitslab.relational.graph.HOST_ROWS", 0)  # as of a large graph
    made = random_graph(0, 12, 12, 60, 4)
    with monkeypatch.context() as patched:
        patched.setattr("bitslab.relational.graph.sort", fail)
        with pytest.raises(rel.PlanMemoryError, match="no memory for the plan of a graph: "):
            rgcn.compile()(made, *inputs.values())
        with pytest.raises(rel.PlanMemoryError):
            rel.RelationalGraph(EDGES, TYPES, 3, 2)
    assert rgcn.compile()(made, *inputs.values()).shape == (12, 6)  # nothing half made remains


def without_memory(*args):
    raise MemoryError("Unable to allocate 8 GiB")


@pytest.mark.parametrize("late", [False, True], ids=["pairs", "order of rows"])
def test_a_graph_without_memory_for_its_plan_is_not_kept(late, monkeypatch):
    made, plain = [], rows.sort

    def fail(*args):
        caller = sys._getframe(1)
        if caller.f_code.co_name == "_pairs" and not late:
            raise MemoryError("Unable to allocate 8 GiB")
        if caller.f_code.co_name == "_place":
            made.append(weakref.ref(caller.f_locals["self"]))
        return plain(*args)

    monkeypatch.setattr("bitslab.relational.graph.HOST_ROWS", 0)  # as of a large graph
    inputs = inputs_of("rgcn", random_graph(0, 12, 12, 60, 4), torch.float32)
    edges, types = torch.randint(12, (2, 60)), torch.randint(4, (60,))
    with monkeypatch.context() as patched:
        patched.setattr("bitslab.relational.graph.sort", fail)
        if late:
            patched.setattr("bitslab.relational.rows.EdgeHop._sorted", without_memory)
        with pytest.raises(rel.PlanMemoryError):
            rel.run_on_edges(rgcn.compile(), edges, types, (12, 12), 4, *inputs.values())
    gc.collect()
    assert made and all(ref() is None for ref in made)
    out = rel.run_on_edges(rgcn.compile(), edges, types, (12, 12), 4, *inputs.values())
    assert out.shape == (12, 6)


def test_what_is_kept_by_tensors_is_found_by_objects_and_by_memory():
    kept, tensors = rel.KeptByTensors(limit=2), [torch.arange(4), torch.arange(3)]
    make = iter([object() for _ in range(9)]).__next__
    first = kept.find(tensors, 1, make)
    assert kept.find(tensors, 1, make) is first
    assert kept.find([t.view(-1) for t in tensors], 1, make) is first  # other objects
    assert kept.find(tensors, 2, make) is not first
    tensors[0][0] = 7
    second = kept.find(tensors, 1, make)
    assert second is not first
    tensors[1].data = tensors[1][:2]
    third = kept.find(tensors, 1, make)
    assert third not in (first, second)
    kept.forget(third)
    assert kept.find(tensors, 1, make) is not third
    refs = weakref.ref(tensors[0])
    kept.find([torch.arange(2)], 3, make)
    kept.find([torch.arange(2)], 4, make)
    del tensors
    gc.collect()
    assert refs() is None  # the last two remain


def test_the_graphs_of_more_than_eight_batches_are_found_again():
    batches = [(torch.randint(12, (2, 60)), torch.randint(4, (60,))) for _ in range(40)]
    first = [kept_graphs.graph_of(*batch, (12, 12), 4) for batch in batches]
    again = [kept_graphs.graph_of(*batch, (12, 12), 4) for batch in batches]
    assert list(map(id, again)) == list(map(id, first))


@pytest.mark.parametrize("limit", [64, 12])
def test_many_results_of_small_tensors_are_kept_and_few_of_large_ones(limit):
    made: list[int] = []

    def make() -> int:
        made.append(1)
        return len(made)

    def find(kept, tensors):
        for t in tensors:
            kept.find([t], None, make)

    small = [torch.arange(3) for _ in range(limit)]
    kept = rel.KeptByTensors(limit, max_bytes=24 * limit)
    find(kept, 2 * small)
    assert len(made) == limit, "what was kept was made again"
    find(kept, [torch.arange(3)])  # one too many: the first goes, with its tensors
    refs = [weakref.ref(t) for t in small]
    del small
    gc.collect()
    assert [r() is None for r in refs] == [True] + [False] * (limit - 1)
    large = [torch.arange(9 * limit) for _ in range(10)]
    find(kept, large)
    made.clear()
    find(kept, large[2:])
    assert not made, "the last eight are kept, whatever their bytes"
    find(kept, large[:1])
    assert made
    assert all(r() is None for r in refs)


def test_inputs_of_several_dtypes_are_cast_by_autocast_alone():
    made = random_graph(0, 12, 12, 60, 4)
    inputs = list(inputs_of("rgcn", made, torch.float32).values())
    mixed = [inputs[0].bfloat16(), *inputs[1:]]
    compiled = rgcn.compile()
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = compiled(made, *mixed), compiled(made, *inputs)
        assert out.dtype is torch.bfloat16 and torch.equal(out, expected)
        with pytest.raises(ArgumentTypeError, match="'x' is torch.int32"):
            compiled(made, inputs[0].int(), *inputs[1:])
        with pytest.raises(ArgumentTypeError, match="accepted is one floating dtype"):
            compiled(made, inputs[0].double(), *inputs[1:])
    with pytest.raises(ArgumentTypeError, match="accepted is one floating dtype"):
        compiled(made, *mixed)


def test_other_errors_in_a_plan_are_as_they_are(monkeypatch):
    def fail(*args):
        raise RuntimeError("something else")

    monkeypatch.setattr("bitslab.engine.kernels.cpu.segment_sums.survey_edges", fail)
    with pytest.raises(RuntimeError, match="something else") as caught:
        rel.RelationalGraph(EDGES, TYPES, 3, 2)
    assert not isinstance(caught.value, MemoryError)


def test_packed_input_is_read_by_products_only():
    table = bitslab.CompressedTable.from_tensor(torch.ones(12, 4))
    graph = random_graph(0, 12, 12, 60, 4)
    inputs = inputs_of("rgcn", graph, torch.float32) | {"x": table}
    torch.testing.assert_close(
        rgcn.compile()(graph, *inputs.values()),
        rgcn.compile()(graph, *(inputs | {"x": torch.ones(12, 4)}).values()),
    )
    with pytest.raises(ArgumentError, match="'x' is packed"):
        arithmetic.compile()(graph, table, torch.ones(12, 4), torch.ones(60, 1), torch.ones(4))
    weights = bitslab.CompressedTable.from_tensor(torch.ones(4, 4, 6))
    with pytest.raises(ArgumentError, match="'weight' is packed and the weight of typed_linear"):
        rgcn.compile()(graph, *(inputs | {"x": torch.ones(12, 4), "weight": weights}).values())


def test_second_derivatives_are_refused_and_not_a_part_of_the_result():
    graph = random_graph(0, 12, 12, 60, 4)
    inputs = inputs_of("rgcn", graph, torch.float32)
    x = inputs["x"].requires_grad_()
    # The sum has another way to x, which autograd would differentiate alone.
    loss = (rgcn.compile()(graph, *inputs.values()) + x.sum()).square().sum()
    with pytest.raises(RuntimeError, match="create_graph=True .* no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)
    (again,) = torch.autograd.grad(loss, x)
    assert again.abs().sum() > 0 and not again.requires_grad
