"""Programs against the same computed edge by edge: values, gradients, each pass on and off."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bitslab.relational as rel
from bitslab.engine.kernels.cpu import segment_sums
from bitslab.errors import ArgumentError
from bitslab.relational import Passes
from bitslab.relational.rows import NO_NODE
from bitslab.relational.symbolic import symbolic_inputs
from tests.relational.drawn_programs import programs
from tests.relational.oracle import evaluate, random_graph
from tests.relational.programs import PROGRAMS, SAME_NODES, hgt, inputs_of, one_head, rgat, rgcn

OFF = [
    Passes(),
    Passes(sides=True),
    *(dataclasses.replace(Passes(), **{f.name: False}) for f in dataclasses.fields(Passes)),
    Passes(False, False, False, False),
]


def values_and_gradients(outputs, inputs):
    draw = torch.Generator().manual_seed(7)
    leaves = list(inputs.values())
    seeds = [torch.randn(o.shape, generator=draw, dtype=o.dtype) for o in outputs]
    found = torch.autograd.grad(outputs, leaves, seeds, materialize_grads=True)
    return [*outputs, *found]


def check(name, graph, passes, backend="auto"):
    inputs = {k: x.requires_grad_() for k, x in inputs_of(name, graph).items()}
    expected = values_and_gradients(evaluate(PROGRAMS[name], graph, inputs), inputs)
    outputs = PROGRAMS[name].compile(passes, backend)(graph, *inputs.values())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for a, b in zip(values_and_gradients(outputs, inputs), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.drawn(36)
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("passes", OFF, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_result_and_gradients_of_each_pass(name, passes, backend):
    check(name, random_graph(0, 12, 12, 60, 4), passes, backend)


@given(
    name=st.sampled_from(sorted(PROGRAMS)),
    passes=st.builds(
        Passes, *[st.booleans()] * 2, st.sampled_from([None, False, True]), st.booleans()
    ),
    backend=st.sampled_from(["auto", "torch"]),
    sizes=st.tuples(*[st.integers(1, 6)] * 2, st.integers(0, 25), st.integers(1, 10)),
    seed=st.integers(0, 1000),
)
def test_random_graphs(name, passes, backend, sizes, seed):
    src, dst, edges, relations = sizes
    graph = random_graph(seed, src, src if name in SAME_NODES else dst, edges, relations)
    check(name, graph, passes, backend)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_generated_gradients_are_those_of_differences(name):
    graph = random_graph(1, 5, 5, 12, 3)
    inputs = [x.requires_grad_() for x in inputs_of(name, graph).values()]
    compiled = PROGRAMS[name].compile()
    assert torch.autograd.gradcheck(lambda *args: compiled(graph, *args), inputs)


@pytest.mark.parametrize("name", ["rgcn", "rgat", "edge_features"])
def test_many_relations_of_few_rows_are_one_batch(name, monkeypatch):
    batches = []
    plain = torch.bmm

    def counted(*args):
        batches.append(1)
        return plain(*args)

    monkeypatch.setattr(torch, "bmm", counted)
    check(name, random_graph(3, 20, 20, 400, 9), Passes())
    assert batches
    batches.clear()
    # One relation with most of the edges: padding would more than double the rows.
    few = random_graph(3, 20, 20, 400, 9)
    kinds = few.edge_type * (torch.arange(400) % 10 == 0)
    check(name, rel.RelationalGraph(few.edge_index, kinds, 20, 9), Passes(sides=False))
    assert not batches


def test_rows_that_are_summed_first_have_the_lengths_of_a_batch():
    made = random_graph(3, 20, 20, 400, 9)
    space = "padded:010101010"
    rows = made.rows(space)
    assert len({b - a for a, b in itertools.pairwise(rows.bounds)}) == 1
    empty = rows.node == NO_NODE
    assert 0 < int(empty.sum()) < rows.n
    # No edge leads there or comes from there.
    assert not empty[made.hop(f"in:{space}").entries()[0]].any()
    assert not empty[made.hop(f"out:{space}").entries()[1]].any()
    assert not empty[rows.of_edge].any()


@rel.program
def one_sum(g, x, w):
    return rel.sum_to_dst(rel.typed_linear(g.src(x), w))


@pytest.mark.parametrize(
    ("row", "weight", "padded"),
    [((4,), (4, 6), True), ((2, 2), (2, 2, 3), False), ((1,), (1, 6), False)],
    ids=["rows", "heads", "one row of a matrix"],
)
def test_only_rows_of_a_batch_are_padded(row, weight, padded):
    made = random_graph(3, 300, 20, 400, 9)
    sums_first = one_sum.compile(Passes(sides=True))
    plan = sums_first.plan(made, [torch.ones(300, *row), torch.ones(9, *weight)])
    (product,) = [s for s in plan.forward.order if s.op == "typed_linear"]
    assert product.space.partition(":")[0] == ("padded" if padded else "mixed")
    assert bool((made.rows(product.space).node == NO_NODE).any()) == padded


@pytest.mark.parametrize("compact", [True, False])
def test_gradients_of_one_column_are_summed_in_pieces(compact, monkeypatch):
    """One thread sums a piece: the rows of one relation are shared too."""
    starts = []
    plain = segment_sums.sum_segments

    def counted(*args):
        starts.append(args[0])
        return plain(*args)

    monkeypatch.setattr(segment_sums, "sum_segments", counted)
    monkeypatch.setattr("bitslab.relational.products.BLOCK_ROWS", 16)
    graph = random_graph(3, 50, 50, 300, 3)
    graph = rel.RelationalGraph(graph.edge_index, graph.edge_type.clamp(max=1), 50, 3)
    inputs = {
        "x": torch.randn(50, 4, dtype=torch.float64),
        "w": torch.randn(3, 4, 1, dtype=torch.float64, requires_grad=True),
    }
    expected = torch.autograd.grad(evaluate(one_sum, graph, inputs)[0].sum(), inputs["w"])
    out = one_sum.compile(Passes(compact=compact, sides=False))(graph, *inputs.values())
    starts.clear()
    torch.testing.assert_close(torch.autograd.grad(out.sum(), inputs["w"]), expected)
    (pieces,) = [s for s in starts if int(s.diff().max()) == 16]
    assert len(pieces) > 4


def steps_of(program, graph, name, passes=None):
    compiled = program.compile(passes)
    inputs = [x.requires_grad_() for x in inputs_of(name, graph).values()]
    return compiled.plan(graph, inputs)


def test_compact_rows_are_the_distinct_pairs():
    graph = random_graph(2, 5, 5, 400, 3)
    distinct = len(set(zip(graph.edge_index[0].tolist(), graph.edge_type.tolist(), strict=True)))
    assert graph.rows("pair_src").n == distinct < 400
    plan = steps_of(rgcn, graph, "rgcn", Passes(sides=False))
    products = [s for s in plan.forward.order if s.op == "typed_linear"]
    assert [s.space for s in products] == ["pair_src"]
    plain = steps_of(rgcn, graph, "rgcn", Passes(compact=False))
    assert [s.space for s in plain.forward.order if s.op == "typed_linear"] == ["typed_edge"]


def test_each_relation_is_summed_first_where_that_leaves_fewer_products():
    # Relation 0 leads from many sources to one destination, relation 1 the other way.
    many, one = torch.arange(200), torch.zeros(200, dtype=torch.long)
    edges = torch.stack([torch.cat([many, one]), torch.cat([one, many])])
    graph = rel.RelationalGraph(edges, torch.arange(2).repeat_interleave(200), 200, 2)
    plan = steps_of(rgcn, graph, "rgcn", Passes(sides=True))
    (product,) = [s for s in plan.forward.order if s.op == "typed_linear"]
    assert product.space == "mixed:10"
    assert graph.rows("mixed:10").n == 2
    check("rgcn", graph, Passes(sides=True))


def test_weights_are_multiplied_first_where_that_costs_less():
    graph = random_graph(3, 500, 500, 2000, 2)
    plan = steps_of(rgat, graph, "rgat")
    query = [s for s in plan.forward.order if s.op == "linear" and s.space == "relation"]
    assert query, "q is not multiplied by the weights"
    few = random_graph(3, 3, 3, 4, 500)
    plan = steps_of(rgat, few, "rgat")
    assert not [s for s in plan.forward.order if s.op == "linear" and s.space == "relation"]


def test_the_product_of_a_dot_moves_to_the_side_with_fewer_pairs():
    def side_of(src, dst):
        plan = steps_of(hgt, random_graph(4, src, dst, 3000, 2), "hgt")
        (dot,) = [s for s in plan.forward.order if s.op == "hop_dot"]
        return {a.space for a in dot.args}

    assert side_of(1000, 3) == {"src", "pair_dst"}
    assert side_of(3, 1000) == {"pair_src", "dst"}


@pytest.mark.parametrize("passes", [Passes(), Passes(fuse=False)], ids=["fused", "not-fused"])
def test_tensors_that_all_rows_share_are_added(passes):
    @rel.program
    def biased(g, x, bias, row, weight):
        return g.dst(x) + (rel.shared(bias) + rel.shared(row) @ weight)

    graph, draw = random_graph(5, 6, 6, 10, 2), torch.Generator().manual_seed(0)
    x, bias, row = (torch.randn(s, generator=draw) for s in ((6, 3), (3,), (4,)))
    weight = torch.randn(4, 3, generator=draw)
    found = biased.compile(passes)(graph, x, bias, row, weight)
    torch.testing.assert_close(found, x + (bias + row @ weight))


def test_attention_of_one_head_is_summed_by_sides():
    src, kinds = torch.arange(300), torch.zeros(300, dtype=torch.long)
    graph = rel.RelationalGraph(torch.stack([src, src % 2]), kinds, 300, 1)
    plan = steps_of(one_head, graph, "one_head", Passes(sides=True))
    spaces = {s.space for s in plan.forward.order if s.op == "typed_linear"}
    assert "mixed:1" in spaces
    check("one_head", graph, Passes(sides=True))


def test_weights_are_not_copied_by_edge():
    graph = random_graph(5, 50, 50, 3000, 4)
    for name, program in PROGRAMS.items():
        plan = steps_of(program, graph, name)
        assert plan.backward is not None
        for step in [*plan.forward.order, *plan.backward.order]:
            assert step.width < 24 or step.space in ("relation", "shared"), (name, step.op)


def test_gradients_that_nobody_wants_are_not_computed():
    graph = random_graph(6, 20, 20, 100, 3)
    inputs = inputs_of("rgcn", graph)
    inputs["root"].requires_grad_()
    plan = rgcn.compile().plan(graph, list(inputs.values()))
    assert plan.backward is not None
    assert [s.op for s in plan.backward.order] == ["linear_grad"]
    with torch.no_grad():
        assert rgcn.compile().plan(graph, list(inputs.values())).backward is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["rgcn", "rgat", "hgt"])
def test_narrow_dtypes(name, dtype):
    graph = random_graph(8, 30, 30, 200, 3)
    wide = inputs_of(name, graph)
    narrow = [x.to(dtype) for x in wide.values()]
    exact = evaluate(PROGRAMS[name], graph, {k: x.to(dtype).double() for k, x in wide.items()})[0]
    out = PROGRAMS[name].compile()(graph, *narrow)
    out = out[0] if isinstance(out, tuple) else out
    assert out.dtype is dtype
    assert (out.double() - exact).abs().max() <= 0.04 * exact.abs().max()


def test_autocast_computes_in_its_dtype():
    graph = random_graph(9, 20, 20, 100, 3)
    inputs = [x.requires_grad_() for x in inputs_of("rgcn", graph, torch.float32).values()]
    plain = rgcn.compile()(graph, *inputs)
    with torch.autocast("cpu", torch.bfloat16):
        out = rgcn.compile()(graph, *inputs)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), plain, rtol=0.05, atol=0.1)
    out.float().sum().backward()
    assert all(x.grad is not None and x.grad.dtype is torch.float32 for x in inputs)


def test_terms_of_a_softmax_are_read_by_index():
    graph = random_graph(10, 40, 40, 500, 3)
    plan = steps_of(rgat, graph, "rgat")
    (softmax,) = [s for s in plan.forward.order if s.op == "softmax"]
    assert {term.space for term in softmax.args} == {"pair_src", "pair_dst"}
    assert softmax.attrs == (False, 0.2)
    assert not {"gather", "leaky_relu", "add"} & {
        s.op for s in plan.forward.order if s.space == "edge"
    }
    (gradient,) = [s for s in plan.backward.order if s.op == "softmax_grad"]
    assert gradient.args[2:] == softmax.args  # the signs of logits
    plain = steps_of(rgat, graph, "rgat", Passes(fuse=False))
    assert "leaky_relu" in {s.op for s in plain.forward.order}


def test_a_logit_that_is_used_twice_is_computed_once():
    @rel.program
    def both(g, x, y):
        score = g.src(x) * g.dst(y)
        return rel.softmax_by_dst(score), score

    graph = random_graph(10, 9, 9, 50, 3)
    inputs = {k: torch.randn(9, 2, dtype=torch.float64).requires_grad_() for k in "xy"}
    compiled = both.compile()
    plan = compiled.plan(graph, list(inputs.values()))
    assert [s.op for s in plan.forward.order].count("mul") == 1
    found = values_and_gradients(compiled(graph, *inputs.values()), inputs)
    expected = values_and_gradients(evaluate(both, graph, inputs), inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_plan_made_in_inference_mode_serves_training():
    graph = random_graph(9, 20, 20, 100, 3)
    inputs = [x.requires_grad_() for x in inputs_of("rgcn_mean", graph).values()]
    program, run = PROGRAMS["rgcn_mean"].compile(), []
    with torch.inference_mode():
        made = rel.RelationalGraph(graph.edge_index, graph.edge_type, 20, 3)
        run.append(program(made, *inputs))
    run.append(program(made, *inputs))
    torch.testing.assert_close(*run)
    assert all(g is not None for g in torch.autograd.grad(run[1].sum(), inputs))


def test_sums_are_the_same_from_run_to_run():
    graph = random_graph(10, 40, 40, 5000, 3)
    inputs = [x.requires_grad_() for x in inputs_of("rgat", graph, torch.float32).values()]
    runs = []
    for _ in range(2):
        out, attention = rgat.compile()(graph, *inputs)
        runs.append([out, attention, *torch.autograd.grad(out.square().sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_threads_share_a_compiled_program():
    graph = random_graph(11, 40, 40, 3000, 3)
    inputs = list(inputs_of("rgat", graph).values())
    compiled, expected, wrong = rgat.compile(), rgat.compile()(graph, *inputs), []

    def work():
        for _ in range(20):
            if not torch.equal(compiled(graph, *inputs)[0], expected[0]):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_explain_has_both_levels():
    graph = random_graph(12, 100, 100, 3000, 2)
    inputs = [x.requires_grad_() for x in inputs_of("rgat", graph).values()]
    text = rgat.compile().explain(graph, *inputs)
    for part in ("program rgat", "reordered", "forward", "backward", "GEMM", "traversal", "pair_"):
        assert part in text
    rows = graph.rows("pair_src").n
    assert f"pair_src {rows} x [6], {rows * 6 * 8} B" in text


def test_explain_of_a_graph_alone_has_symbols_for_sizes_of_inputs():
    graph = random_graph(12, 100, 100, 3000, 2)
    text = rgcn.compile().explain(graph)
    for part in ("x [100, F1], weight [2, F1, F2], root [F1, F2], norm [3000]", "backward", "GEMM"):
        assert part in text
    rows = graph.rows("pair_src").n
    assert f"pair_src {rows} x [F2], {4 * rows} F2 B" in text
    assert f"relation 2 x [F1, F2], {4 * 2} F1 F2 B" in text


@pytest.mark.parametrize("name", PROGRAMS)
def test_explain_of_a_graph_alone_has_the_steps_of_inputs_of_such_shapes(name):
    graph, compiled = random_graph(12, 50, 50, 400, 3), PROGRAMS[name].compile()
    infos = symbolic_inputs(PROGRAMS[name].names, PROGRAMS[name].outputs, graph)
    inputs = [torch.ones(*map(int, i.shape)).requires_grad_() for i in infos.values()]
    explained = {True: compiled.explain(graph), False: compiled.explain(graph, *inputs)}
    steps = [[line.split(" #")[0] for line in t.splitlines() if " #" in line] for t in
             explained.values()]  # fmt: skip
    assert steps[0] == steps[1] and len(steps[0]) > 3
    # The same inputs have heads where the program splits rows.
    assert {"blocks": "x [50, 2 F1], weight [3, 2, F1, F2]", "hgt": "keys [3, 2, F1, F2]"}.get(
        name, ""
    ) in explained[True]


@given(programs(), st.integers(0, 99))
def test_explain_of_drawn_programs_and_a_graph_alone(drawn, seed):
    compiled, graph = drawn.program().compile(), random_graph(seed, 6, 6, 20, 3)
    assert "forward" in compiled.explain(graph, *drawn.tensors(graph, seed).values())
    try:
        assert "forward" in compiled.explain(graph)
    except ArgumentError as error:  # a weight for rows of two ranks, of which one was guessed
        assert "shapes of inputs do not follow from drawn" in str(error)


def test_explain_of_a_graph_alone_takes_vectors_where_numbers_do_not_fit():
    @rel.program
    def later(g, e, weight):
        return rel.typed_linear(rel.sum_to_dst(e), weight)

    @rel.program
    def heads(g, x, weight):
        vectors = rel.typed_linear(g.src(x), weight)
        return vectors, rel.typed_linear(rel.split(vectors, 2), weight)

    graph = random_graph(0, 6, 6, 20, 3)
    assert "e [20, F1], weight [3, F1, F2]" in later.compile().explain(graph)
    with pytest.raises(ArgumentError, match="shapes of inputs do not follow from heads"):
        heads.compile().explain(graph)


@pytest.mark.parametrize("heads, shapes", [(1, "x [6, F1], c [6, F1]"), (2, "x [6, 2], c [6, 2]")])
def test_explain_of_a_graph_alone_where_rows_and_their_heads_take_one_factor(heads, shapes):
    @rel.program
    def factor(g, x, c):
        return g.src(x) * g.src(c), rel.split(g.src(x), heads) * g.src(c)

    graph, compiled = random_graph(0, 6, 6, 20, 3), factor.compile()
    assert f"for {shapes}, of" in compiled.explain(graph)
    inputs = [torch.randn(6, heads) for _ in range(2)]
    assert compiled(graph, *inputs)[1].shape == (20, heads, heads)


def test_explain_of_a_graph_alone_where_rows_and_their_flattened_rows_are_of_one_size():
    @rel.program
    def joined(g, x):
        return g.src(x) + rel.flatten(g.src(x))

    @rel.program
    def weighted(g, x, weight):
        return rel.flatten(g.src(x)) @ weight, g.src(x) @ weight

    graph = random_graph(0, 6, 6, 20, 3)
    assert "for x [6, F1, 1], of" in joined.compile().explain(graph)
    assert "for x [6, 1, F1], weight [F1, F2], of" in weighted.compile().explain(graph)


def test_explain_of_a_graph_alone_when_no_weight_fits_rows_and_their_heads():
    @rel.program
    def weighted(g, x, weight):
        return g.src(x) @ weight, rel.split(g.src(x), 2) @ weight

    with pytest.raises(ArgumentError, match="a size would be 2 times itself"):
        weighted.compile().explain(random_graph(0, 6, 6, 20, 3))


def test_inputs_that_are_outputs_inside_torch_compile(fresh_compiler):
    @rel.program
    def returned(g, y, e):
        return g.dst(y), g.edge(e)

    graph = random_graph(14, 20, 20, 100, 3)
    leaves = {"y": torch.randn(20, 4), "e": torch.randn(100, 4)}
    compiled = returned.compile()

    def model(*args):
        return rel.run_on_edges(compiled, graph.edge_index, graph.edge_type, (20, 20), 3, *args)

    inputs = {k: x.requires_grad_() for k, x in leaves.items()}
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = values_and_gradients(whole(*inputs.values()), inputs)
    expected = values_and_gradients(evaluate(returned, graph, inputs), inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_traced_by_torch_compile_as_a_whole(fresh_compiler):
    graph = random_graph(13, 20, 20, 100, 3)
    inputs = {k: x.requires_grad_() for k, x in inputs_of("rgat", graph, torch.float32).items()}
    compiled = rgat.compile()

    def model(x, *rest):
        edges = (graph.edge_index, graph.edge_type, (20, 20), 3)
        out, attention = rel.run_on_edges(compiled, *edges, x.tanh(), *rest)
        return out.relu(), attention

    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = values_and_gradients(whole(*inputs.values()), inputs)
    expected = values_and_gradients(model(*inputs.values()), inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
