"""Relational programs on a real GPU: the CPU's results, packed rows, and when the host waits."""

from __future__ import annotations

import gc

import pytest
import torch

import bitslab
import bitslab.relational as rel
from bitslab.engine.kernels.typed_products import SCHEDULES
from bitslab.errors import ArgumentError, IndexRangeError
from bitslab.relational import Passes, RelationalGraph, product_ways
from bitslab.relational.steps import Costs
from tests.gpu import counted_waits, waiting_raises
from tests.relational.oracle import random_graph
from tests.relational.programs import PROGRAMS, inputs_of, rgcn
from tests.relational.test_node_types import hgt, typed_graph
from tests.relational.test_node_types import inputs_of as typed_inputs

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU


def on_gpu(graph):
    sizes = (graph.num_src, graph.num_dst)
    edges = graph.edge_index.cuda(), graph.edge_type.cuda()
    return RelationalGraph(*edges, sizes, graph.num_relations)


def run(program, graph, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs.values()]
    outputs = program(graph, *leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    found = torch.autograd.grad([o.float().square().sum() for o in outputs], leaves)
    return [*outputs, *found]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("sizes", [(12, 12, 60, 4), (500, 500, 20_000, 30), (9, 9, 0, 3)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_the_cpu(name, sizes, backend):
    graph = random_graph(0, *sizes)
    inputs = inputs_of(name, graph, torch.float64)
    program = PROGRAMS[name].compile(backend=backend)
    expected = run(program, graph, inputs)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        there = {k: x.to("cuda", dtype) for k, x in inputs.items()}
        again = [run(program, on_gpu(graph), there) for _ in range(2)]
        for a, b, c in zip(*again, expected, strict=True):
            assert torch.equal(a, b)
            scale = 1 + float(c.detach().abs().max()) if c.numel() else 1.0
            torch.testing.assert_close(a.cpu().double(), c, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["table", "feature", "cache"])
def test_packed_rows_give_the_results_of_raw_rows(kind, dtype):
    graph = on_gpu(random_graph(0, 3000, 3000, 20_000, 7))
    draw = torch.Generator().manual_seed(0)
    x = (0.1 * torch.randn(3000, 256, generator=draw)).bfloat16().to(dtype)
    weight, root, norm = (
        torch.randn(*shape, generator=draw).to("cuda", dtype)
        for shape in ((7, 256, 40), (256, 40), (20_000,))
    )
    table = bitslab.CompressedTable.from_tensor(x, progress=False)
    packed: bitslab.CompressedTable | bitslab.CompressedFeature | bitslab.SlabCache = table
    if kind == "feature":
        packed = bitslab.CompressedFeature.from_tensor(x, cache_ratio=0.3)
    elif kind == "cache":
        packed = cache = bitslab.SlabCache(table, 4 << 20)
        assert cache.fill(torch.arange(3000)) == 3000
    program = rgcn.compile(Passes(sides=False))
    found = []
    for given in (x.cuda(), packed):
        leaves = [t.clone().requires_grad_() for t in (weight, root, norm)]
        out = program(graph, given, *leaves)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    bitslab.raise_pending_errors()
    for a, b in zip(*found, strict=True):
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        scale = float(a.detach().abs().max())
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)


def test_layers_do_not_wait_for_the_gpu_once_warm():
    graph = on_gpu(random_graph(0, 300, 300, 2000, 12))
    inputs = {k: x.cuda() for k, x in inputs_of("rgat", graph, torch.float32).items()}
    program = PROGRAMS["rgat"].compile()
    run(program, graph, inputs)
    with waiting_raises():
        run(program, graph, inputs)


def test_no_raw_row_is_written_to_device_memory():
    graph = on_gpu(random_graph(0, 20_000, 100, 20_000, 2))
    x = torch.randn(20_000, 512).bfloat16().float()  # 40 MB raw
    table = bitslab.CompressedTable.from_tensor(x, progress=False)
    weight = torch.randn(2, 512, 8, device="cuda", requires_grad=True)

    @rel.program
    def messages(g, x, weight):
        return rel.sum_to_dst(rel.typed_linear(g.src(x), weight))

    program = messages.compile()
    program(graph, table, weight).sum().backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    program(graph, table, weight).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 4 << 20


def test_the_memory_of_a_graph_goes_with_its_last_user():
    plain = random_graph(0, 300, 300, 2000, 12)
    drawn = inputs_of("rgat", plain, torch.float32).values()
    inputs = [x.cuda().requires_grad_() for x in drawn]
    program = PROGRAMS["rgat"].compile()
    program(on_gpu(plain), *inputs)  # compiles
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        graph = on_gpu(plain)
        # A backward pass ends in a thread of torch's, which lets go of its memory a moment later.
        outputs = program(graph, *inputs)
        assert torch.cuda.memory_allocated() > before
        del graph, outputs
        assert torch.cuda.memory_allocated() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["rgcn", "rgat"])
def test_a_small_graph_is_read_once(name):
    plain = random_graph(0, 300, 300, 2000, 12)
    inputs = {k: x.cuda() for k, x in inputs_of(name, plain, torch.float32).items()}
    program = PROGRAMS[name].compile()
    run(program, on_gpu(plain), inputs)  # compiles
    other = random_graph(1, 300, 300, 2000, 12)
    edges = other.edge_index.cuda(), other.edge_type.cuda()
    with counted_waits() as waits:
        graph = RelationalGraph(*edges, (300, 300), 12)
    assert len(waits) == 1
    with waiting_raises():
        run(program, graph, inputs)


@pytest.mark.parametrize("sides", [None, True], ids=["default", "sides"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_that_its_gpu_surveys_gives_the_bits_of_one_of_the_host(name, sides, monkeypatch):
    plain = random_graph(0, 300, 300, 2000, 12)
    surveyed = on_gpu(plain)
    with monkeypatch.context() as patched:
        patched.setattr("bitslab.relational.graph.gpu_kernels", lambda device: None)
        by_host = on_gpu(plain)
    assert surveyed.survey is not None and by_host.survey is None
    inputs = {k: x.cuda() for k, x in inputs_of(name, plain, torch.float32).items()}
    passes = Passes() if sides is None else Passes(sides=sides)
    found, expected = (run(PROGRAMS[name].compile(passes), g, inputs) for g in (surveyed, by_host))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("edges", "types", "message"),
    [
        ([[0, 5], [1, 1]], [0, 1], r"edge_index\[0\] has 5; accepted are 0 to 4"),
        ([[0, 1], [-3, 9]], [0, 1], r"edge_index\[1\] has -3; accepted are 0 to 4"),
        ([[0, 1], [1, 1]], [0, 2], r"edge_type has 2; accepted are 0 to 1"),
    ],
)
def test_edges_out_of_range_are_refused(edges, types, message):
    with pytest.raises(IndexRangeError, match=message):
        RelationalGraph(torch.tensor(edges).cuda(), torch.tensor(types).cuda(), 5, 2)


def test_a_plan_inside_a_capture_is_refused():
    plain = random_graph(0, 300, 300, 2000, 12)
    inputs = [x.cuda() for x in inputs_of("rgcn", plain, torch.float32).values()]
    made, program = on_gpu(plain), PROGRAMS["rgcn"].compile()
    captured = torch.cuda.CUDAGraph()
    with torch.no_grad():
        program(on_gpu(plain), *inputs)  # compiles
        with pytest.raises(ArgumentError, match="inside the capture of a CUDA graph"):
            with torch.cuda.graph(captured):
                inputs[0].add(1)  # torch warns of a capture without an operator
                program(made, *inputs)
        expected = program(made, *inputs)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            found = program(made, *inputs)
        captured.replay()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("on_host", [False, True], ids=["planned by the GPU", "by the host"])
@pytest.mark.parametrize("reorder", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
def test_hgt_of_features_gives_the_results_of_the_cpu(heads, reorder, on_host, monkeypatch):
    monkeypatch.setattr("bitslab.relational.graph.HOST_ROWS", 1 << 15 if on_host else 0)
    # Operations alone count: products of weights are left out of graphs this small else.
    costs = dict.fromkeys(("cpu", "cuda"), Costs(1.0))
    monkeypatch.setattr("bitslab.relational.steps.COSTS", costs)
    made = typed_graph(sizes=(900, 600, 300), edges=400)
    inputs = dict(enumerate(typed_inputs(made, heads, True)))
    program = hgt(heads, True).program.compile(Passes(reorder=reorder))
    expected = run(program, made, inputs)
    edges = made.edge_index.cuda(), made.edge_type.cuda()
    there = RelationalGraph(*edges, made.num_src, made.num_relations, made.node_types)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        on_device = {k: x.detach().to("cuda", dtype) for k, x in inputs.items()}
        assert ("weight_product" in program.explain(there, *on_device.values())) == reorder
        for a, b in zip(run(program, there, on_device), expected, strict=True):
            scale = 1 + float(b.detach().abs().max())
            torch.testing.assert_close(a.cpu().double(), b, rtol=0, atol=tolerance * scale)
    with waiting_raises():
        run(program, there, on_device)


@rel.program
def biased(g, x, weight, bias):
    return rel.sum_to_dst(rel.typed_linear(g.src(x), weight) + g.relation(bias))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(), (3,)], ids=str)
def test_rows_of_relations_are_added_and_their_gradients_summed_by_pieces(heads, dtype):
    graph = random_graph(0, 4000, 4000, 60_000, 5)
    draw = torch.Generator().manual_seed(0)
    shapes = (4000, *heads, 16), (5, *heads, 16, 24), (5, *heads, 24)
    inputs = {
        name: torch.randn(shape, generator=draw, dtype=torch.float64)
        for name, shape in zip(biased.names, shapes, strict=True)
    }
    inputs = {k: x.to(dtype).double() for k, x in inputs.items()}
    program, there = biased.compile(Passes(sides=False)), on_gpu(graph)
    expected = run(program, graph, inputs)
    on_device = {k: x.to("cuda", dtype) for k, x in inputs.items()}
    explained = program.explain(there, *on_device.values())
    assert "typed_linear_add" in explained
    again = [run(program, there, on_device) for _ in range(2)]
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    for a, b, c in zip(*again, expected, strict=True):
        assert torch.equal(a, b)
        scale = 1 + float(c.detach().abs().max())
        torch.testing.assert_close(a.cpu().double(), c, rtol=0, atol=tolerance * scale)
    with waiting_raises():
        run(program, there, on_device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_products_are_the_same_in_every_way(dtype, monkeypatch, tmp_path):
    graph = on_gpu(random_graph(0, 30_000, 30_000, 100_000, 9))
    draw = torch.Generator().manual_seed(0)
    inputs = {
        name: torch.randn(*shape, generator=draw).to("cuda", dtype)
        for name, shape in (
            ("x", (30_000, 64)), ("weight", (9, 64, 48)), ("root", (64, 48)), ("norm", (100_000,))
        )
    }  # fmt: skip
    found = {}
    ways = [schedule.name for schedule in SCHEDULES]
    for way in ways:
        asked: list[str] = []

        def chosen(names, *_, way=way, asked=asked):
            asked.append(way)
            return way if way in names else names[0]

        monkeypatch.setattr(product_ways, "fastest_way", chosen)
        found[way] = run(rgcn.compile(Passes(sides=False)), graph, inputs)
        assert asked
        gathered = run(rgcn.compile(Passes(sides=False, fuse=False)), graph, inputs)
        for a, b in zip(gathered, found[way], strict=True):
            largest = float(b.detach().abs().max())
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * largest)
    usual = found[SCHEDULES[0].name]
    monkeypatch.undo()
    monkeypatch.setenv("BITSLAB_CACHE", str(tmp_path))
    monkeypatch.setattr("bitslab.engine.advisor.product_times._known", {})
    state = torch.cuda.get_rng_state()
    measured = run(rgcn.compile(Passes(sides=False)), graph, inputs)
    assert list(tmp_path.glob("ways-*.json"))
    assert torch.equal(torch.cuda.get_rng_state(), state)  # the caller's random numbers
    for way, results in [*found.items(), ("measured", measured)]:
        for a, b in zip(results, usual, strict=True):
            assert torch.equal(a, b), way
