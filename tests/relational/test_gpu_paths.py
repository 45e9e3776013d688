"""The path of graphs on a GPU, run on the CPU: kernels by SIMT, plans that the host reads once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import bitslab
import bitslab.relational as rel
from bitslab.engine.kernels.typed_products import SCHEDULES, PackedRows, schedules_of
from bitslab.errors import IndexRangeError
from bitslab.relational import (
    ADDED_OF_NODES,
    BIASED_OF_NODES,
    Passes,
    RelationalGraph,
    execute,
    graph,
    kernel_steps,
    packed_products,
    product_ways,
    type_sums,
)
from bitslab.relational.gpu_kernels import gpu_kernels
from bitslab.relational.program import tf32_allowed
from bitslab.relational.steps import Costs
from tests.relational.oracle import evaluate, random_graph
from tests.relational.programs import PROGRAMS, inputs_of, rgat, rgcn
from tests.relational.test_node_types import hgt, typed_graph
from tests.relational.test_node_types import inputs_of as typed_inputs
from tests.relational.test_program import values_and_gradients
from tests.simt.runner import simt_kernels


@rel.program
def of_edges(g, e, weight):
    return rel.typed_linear(e, weight)


@pytest.fixture
def kernels(monkeypatch):
    """Take SIMT's kernels for those of the graph's GPU; return their runner."""
    found, runner = simt_kernels()
    monkeypatch.setattr(execute, "gpu_kernels", lambda device: found)
    monkeypatch.setattr(graph, "read_at_once", lambda device: True)
    return runner


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run_on_kernels(name, kernels):
    made = random_graph(0, 12, 12, 60, 4)
    inputs = {k: x.requires_grad_() for k, x in inputs_of(name, made, torch.float32).items()}
    expected = values_and_gradients(evaluate(PROGRAMS[name], made, inputs), inputs)
    outputs = PROGRAMS[name].compile()(made, *inputs.values())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for a, b in zip(values_and_gradients(outputs, inputs), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * (1 + float(b.detach().abs().max())))
    used = {kernel for _, kernel in kernels.launched}
    products = {"multiply_rows", "multiply_gradient"} if "weight" in inputs else set()
    loops = {"sum_segments"} if name != "edge_features" else {"dot_entries"}
    assert used >= products | loops


@pytest.mark.parametrize("sizes", [(7, 5, 40, 6), (3, 4, 1, 2), (5, 5, 0, 3)], ids=str)
def test_a_plan_that_is_read_once_is_that_of_the_cpu(sizes, monkeypatch):
    plain = random_graph(1, *sizes)
    reads = []
    to_list = torch.Tensor.tolist

    def counted(t):
        reads.append(t)
        return to_list(t)

    with monkeypatch.context() as patched:
        patched.setattr(graph, "read_at_once", lambda device: True)
        patched.setattr(torch.Tensor, "tolist", counted)
        ends = (plain.edge_index, plain.edge_type)
        other = RelationalGraph(*ends, (plain.num_src, plain.num_dst), plain.num_relations)
        rows = {s: other.rows(s) for s in ("pair_src", "pair_dst")}
        if sizes[2]:
            rows["typed_edge"] = other.rows("typed_edge")
        assert len(reads) == bool(sizes[2])
    for space, found in rows.items():
        expected = plain.rows(space)
        assert (found.n, found.bounds) == (expected.n, expected.bounds)
        for a, b in (
            (found.of_edge, expected.of_edge),
            (found.node, expected.node),
            (found.relation, expected.relation),
        ):
            assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.parametrize(
    ("column", "value"), [(0, 7), (1, -1), (2, 9)], ids=["source", "destination", "type"]
)
def test_ends_out_of_range_are_reported_with_the_plan(column, value, monkeypatch):
    monkeypatch.setattr(graph, "read_at_once", lambda device: True)
    columns = torch.zeros(3, 10, dtype=torch.int64)
    columns[column, 4] = value
    with pytest.raises(IndexRangeError, match=f"has {value}; accepted are 0 to"):
        RelationalGraph(columns[:2], columns[2], 7, 5)


def opened(kind, x):
    """Return a packed input, and its table."""
    if kind == "feature":
        feature = bitslab.CompressedFeature.from_tensor(x, cache_ratio=0.5, device="cpu")
        return feature, feature.table
    table = bitslab.CompressedTable.from_tensor(x, progress=False)
    if kind == "table":
        return table, table
    cache = bitslab.SlabCache(table, 1000, devices=["cpu"])
    assert 0 < cache.fill(torch.arange(0, len(x), 2)) < len(x)
    return cache, table


class PackedLayer:
    """A layer of packed rows, as of a table that a GPU reads: the product's device is no CPU."""

    def __init__(self, kind, monkeypatch, dtype=torch.float32):
        self.graph = random_graph(0, 40, 40, 200, 3)
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(40, 32, generator=draw)
        self.x = self.x.bfloat16().to(dtype)
        self.others = [torch.randn(3, 32, 6, generator=draw), torch.randn(32, 6, generator=draw)]
        self.others = [x.to(dtype) for x in self.others]
        self.norm = torch.rand(200, generator=draw).to(dtype)
        self.packed, table = opened(kind, self.x)
        rows = table._gathers._rows
        self.gathers = 0
        monkeypatch.setattr(packed_products, "LEAST_ENTRIES", 0.1)  # few rows are cached here

        def for_products(device, cache):
            cached = None if cache is None else cache.storage(torch.device("cpu"))
            return PackedRows(rows.storage(), rows.kernels.layout, table.dtype, cached)

        gather_with, plain = table.gather_with, type(self.packed).read_by_products

        def counted(*args, **options):
            self.gathers += 1
            return gather_with(*args, **options)

        monkeypatch.setattr(table._gathers, "for_products", for_products)
        monkeypatch.setattr(table._lock, "mark_gpu_read", lambda device: None)
        monkeypatch.setattr(table, "gather_with", counted)
        monkeypatch.setattr(
            type(self.packed),
            "read_by_products",
            lambda self, device: plain(self, torch.device("meta")),
        )
        monkeypatch.setattr(
            bitslab.CompressedFeature, "_cache_for", lambda feature, device: feature.cache
        )

    def run(self, given):
        """Return the outputs and the gradients of weights."""
        leaves = [t.clone().requires_grad_() for t in self.others]
        out = rgcn.compile(Passes(sides=False))(self.graph, given, *leaves, self.norm)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    def check(self):
        wide = self.x.dtype == torch.float32
        for a, b in zip(self.run(self.x), self.run(self.packed), strict=True):
            atol = (
                1e-4 if wide else 1e-2 * float(a.detach().abs().max())
            )  # of sums in another order
            torch.testing.assert_close(a, b, rtol=1e-5 if wide else 1e-2, atol=atol)


def choosing(*wanted):
    """Return what measures nothing, but runs all ways and chooses the first of those wanted."""

    def fastest_way(names, product, rows, device, prepare):
        state = torch.get_rng_state()
        ways = prepare(rows)
        assert torch.equal(torch.get_rng_state(), state)  # the caller's random numbers
        assert tuple(ways) == names
        for work in ways.values():
            work()
        return next(way for way in (*wanted, names[0]) if way in names)

    return fastest_way


@pytest.mark.parametrize("kind", ["table", "feature", "cache"])
def test_packed_rows_are_rebuilt_in_the_product(kind, kernels, monkeypatch):
    layer = PackedLayer(kind, monkeypatch)
    monkeypatch.setattr(packed_products, "fastest_way", choosing(SCHEDULES[0].name))
    layer.check()
    assert {v.name for v, _ in kernels.launched if v.name.startswith("typed_gemm-4B")}
    if kind == "table":
        assert not layer.gathers
    before = layer.gathers
    layer.run(layer.packed)
    if kind != "table":  # another plan: measured once for each of three products
        assert layer.gathers - before == before


@pytest.mark.parametrize("kind", ["table", "cache"])
def test_rows_of_nodes_and_of_heads_are_rebuilt_or_decoded(kind, kernels, monkeypatch):
    layer = PackedLayer(kind, monkeypatch)
    monkeypatch.setattr(packed_products, "fastest_way", choosing(SCHEDULES[0].name))
    draw = torch.Generator().manual_seed(1)
    few = random_graph(0, 40, 9, 60, 3)  # a block: destinations are the first sources
    cases = [
        (BIASED_OF_NODES, layer.graph, ((6,), (6, 32)), 40),
        (ADDED_OF_NODES, few, ((9, 6), (32, 6)), 9),
        (PROGRAMS["blocks"].compile(Passes(sides=False)), layer.graph, ((3, 2, 16, 6),), 40),
    ]
    for program, graph_of_case, shapes, n in cases:
        before, found = len(kernels.launched), []
        leaves = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
        for x in (layer.x[: n if program is ADDED_OF_NODES else 40], layer.packed):
            given = (x, *leaves) if len(leaves) == 1 else (leaves[0], x, leaves[1])
            out = program(graph_of_case, *given)
            found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
        packed = [v for v, _ in kernels.launched[before:] if v.name.startswith("typed_gemm-4B")]
        assert bool(packed) == (len(leaves) == 2)


@pytest.mark.parametrize("kind", ["table", "cache"])
def test_rows_of_relations_are_added_to_products_of_packed_rows(kind, kernels, monkeypatch):
    @rel.program
    def biased(g, x, weight, bias):
        return rel.sum_to_dst(rel.typed_linear(g.src(x), weight) + g.relation(bias))

    layer = PackedLayer(kind, monkeypatch)
    monkeypatch.setattr(packed_products, "fastest_way", choosing(SCHEDULES[0].name))
    leaves = [layer.others[0].requires_grad_(), torch.randn(3, 6).requires_grad_()]
    found = []
    for x in (layer.x, layer.packed):
        kernels.launched.clear()
        out = biased.compile()(layer.graph, x, *leaves)
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert any(v.name.startswith("typed_gemm-4B") for v, _ in kernels.launched)
    assert "typed_linear_add" in biased.compile().explain(layer.graph, layer.packed, *leaves)
    assert torch.equal(found[0][0], found[1][0])  # the same kernel over raw rows
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("number", schedules_of(2, packed=True))
def test_cached_rows_are_rebuilt_by_the_schedule_that_was_fastest(number, kernels, monkeypatch):
    layer = PackedLayer("cache", monkeypatch, torch.bfloat16)
    monkeypatch.setattr(packed_products, "fastest_way", choosing(SCHEDULES[number].name))
    layer.check()
    program, leaves = rgcn.compile(Passes(sides=False)), [*layer.others, layer.norm]
    expected = program(layer.graph, layer.packed, *leaves)  # measures
    launches = len(kernels.launched)
    assert torch.equal(program(layer.graph, layer.packed, *leaves), expected)
    again = [v for v, _ in kernels.launched[launches:] if v.name.startswith("typed_gemm-2B")]
    assert {v.schedule for v in again} == {number}


def test_large_products_of_plain_rows_have_the_schedule_that_was_fastest(kernels, monkeypatch):
    monkeypatch.setattr(product_ways, "can_measure", lambda device: True)
    monkeypatch.setattr(product_ways, "LARGE_ROWS", 1)
    made = random_graph(0, 12, 12, 60, 4)
    inputs = inputs_of("rgcn", made, torch.float32)
    found = []
    for schedule in SCHEDULES:
        monkeypatch.setattr(product_ways, "fastest_way", choosing(schedule.name))
        compiled = rgcn.compile(Passes(sides=False))
        compiled.plan(made, list(inputs.values()))
        launches = len(kernels.launched)
        found.append(compiled(made, *inputs.values()))
        products = [v for v, name in kernels.launched[launches:] if name == "multiply_rows"]
        settings = {
            (dict(v.settings)["TILE_ROWS"], dict(v.settings)["PRODUCT_BLOCKS"]) for v in products
        }
        assert settings == {(schedule.tile_rows, schedule.blocks)}
    assert all(torch.equal(out, found[0]) for out in found)


@pytest.mark.parametrize("heads", [1, 2])
def test_rows_of_types_are_added_in_the_product_by_every_schedule(heads, kernels, monkeypatch):
    costs = dict.fromkeys(("cpu", "cuda"), Costs(1.0, kernels=True))
    monkeypatch.setattr("bitslab.relational.steps.COSTS", costs)
    monkeypatch.setattr(product_ways, "can_measure", lambda device: True)
    monkeypatch.setattr(product_ways, "LARGE_ROWS", 1)
    monkeypatch.setattr(type_sums, "PIECE_ROWS", 4)
    program, found = hgt(heads, True).program, []
    for schedule in SCHEDULES:
        monkeypatch.setattr(product_ways, "fastest_way", choosing(schedule.name))
        made = typed_graph(sizes=(900, 600, 300), edges=40)
        # Small: the reference takes exponentials of all logits less each destination's largest.
        drawn = [
            (0.3 * t).detach().requires_grad_()
            for t in typed_inputs(made, heads, True, dtype=torch.float32)
        ]
        inputs = dict(zip(program.names, drawn, strict=True))
        compiled = program.compile()
        explained = compiled.explain(made, *drawn)
        forward = explained.partition("\nforward\n")[2].partition("\nbackward\n")[0]
        added = [line for line in forward.splitlines() if "typed_linear_add" in line]
        assert sum("# pair_src" in line for line in added) == 2 and " = add(" not in forward
        kernels.launched.clear()
        found.append(values_and_gradients((compiled(made, *drawn),), inputs))
        products = [v for v, name in kernels.launched if name == "multiply_rows"]
        blocks = {dict(v.settings)["PRODUCT_BLOCKS"] for v in products}
        assert schedule.blocks in blocks
    expected = values_and_gradients(evaluate(program, made, inputs), inputs)
    for results in found:
        for a, b, c in zip(results, found[0], expected, strict=True):
            assert torch.equal(a, b)
            scale = 1 + float(c.detach().abs().max())
            torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-4 * scale)


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "gathered"])
def test_as_many_rows_are_measured_as_the_product_reads(fuse, kernels, monkeypatch):
    read = []
    usual = product_ways.fastest_product

    def fastest(ways, shape, bounds, dtype, device, index):
        read.append((shape[0], bounds[-1] if index is None else int(index.max()) + 1))
        return usual(ways, shape, bounds, dtype, device, index)

    monkeypatch.setattr(product_ways, "LARGE_ROWS", 4)
    monkeypatch.setattr(product_ways, "fastest_product", fastest)
    made = random_graph(0, 12, 12, 60, 9)
    inputs = inputs_of("rgcn", made, torch.float32)
    rgcn.compile(Passes(fuse=fuse, sides=False, compact=False))(made, *inputs.values())
    assert read and all(there >= rows for there, rows in read)


@pytest.mark.parametrize("kind", ["feature", "cache"])
def test_cached_rows_are_gathered_first_where_that_was_faster(kind, kernels, monkeypatch):
    layer = PackedLayer(kind, monkeypatch)
    monkeypatch.setattr(packed_products, "fastest_way", choosing(packed_products.GATHERED))
    layer.check()
    program, leaves = rgcn.compile(Passes(sides=False)), [*layer.others, layer.norm]
    expected = program(layer.graph, layer.packed, *leaves)
    launches, gathers = len(kernels.launched), layer.gathers
    assert torch.equal(program(layer.graph, layer.packed, *leaves), expected)
    assert layer.gathers == gathers + 2
    again = kernels.launched[launches:]
    assert not [v.name for v, _ in again if v.name.startswith("typed_gemm-4B")]
    monkeypatch.setattr(packed_products, "MAX_GATHERED_BYTES", 0)  # no room for raw rows
    plain = rgcn.compile(Passes(sides=False))(layer.graph, layer.packed, *leaves)
    assert torch.equal(plain, expected)
    assert layer.gathers == gathers + 2


def test_rows_that_kernels_do_not_take_are_decoded_in_blocks(kernels):
    made = random_graph(0, 12, 12, 60, 4)
    inputs = inputs_of("rgcn", made, torch.float32)
    table = bitslab.CompressedTable.from_tensor(inputs["x"], progress=False)
    found = rgcn.compile()(made, *(inputs | {"x": table}).values())
    torch.testing.assert_close(found, rgcn.compile(Passes(sides=False))(made, *inputs.values()))
    assert not any(v.name.startswith("typed_gemm-4B") for v, _ in kernels.launched)


def test_kernels_that_fail_leave_the_work_to_torch(monkeypatch):
    def fail(device, **options):
        raise RuntimeError("NVRTC is not there")

    monkeypatch.setattr("bitslab.engine.kernels.cuda.kernels_on", fail)
    gpu_kernels.cache_clear()
    with pytest.warns(UserWarning, match="run torch's operators.*NVRTC is not there"):
        assert gpu_kernels(torch.device("cuda", 0)) is None
    gpu_kernels.cache_clear()


@pytest.fixture
def little_memory(kernels):
    """Take a device whose multiprocessors have too little shared memory for any product."""
    kernels.shared_bytes_per_multiprocessor = 5 << 10
    kernel_steps._note_little_memory.cache_clear()
    yield kernels
    kernel_steps._note_little_memory.cache_clear()


NOTE = "do not fit its shared memory run torch's operators"


def test_a_device_with_little_shared_memory_runs_torchs_products_and_says_so_once(little_memory):
    made = random_graph(0, 12, 12, 60, 4)
    inputs = {k: x.requires_grad_() for k, x in inputs_of("rgcn", made, torch.float32).items()}
    expected = values_and_gradients(evaluate(rgcn, made, inputs), inputs)
    with pytest.warns(UserWarning, match=NOTE) as caught:
        found = values_and_gradients((rgcn.compile()(made, *inputs.values()),), inputs)
    assert len(caught) == 1
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    used = {kernel for _, kernel in little_memory.launched}
    assert "sum_segments" in used and not used & {"multiply_rows", "multiply_gradient"}
    rgcn.compile(Passes(sides=False))(made, *inputs.values())  # another plan, no other warning


@pytest.mark.parametrize("kind", ["table", "cache"])
def test_packed_rows_without_shared_memory_are_decoded_in_blocks(kind, little_memory, monkeypatch):
    layer = PackedLayer(kind, monkeypatch)
    with pytest.warns(UserWarning, match=NOTE):
        layer.check()
    assert layer.gathers and not any(
        v.name.startswith("typed_gemm") for v, _ in little_memory.launched
    )


def test_float64_which_no_kernel_multiplies_is_not_noted(little_memory):
    made = random_graph(0, 12, 12, 60, 4)
    assert rgcn.compile()(made, *inputs_of("rgcn", made).values()).dtype is torch.float64


@pytest.fixture
def tf32():
    """Restore what torch is asked to do."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


ASKED = {
    "not asked": lambda: None,
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
}


@pytest.mark.parametrize("asked", ASKED)
def test_tf32_is_used_where_torch_is_asked_to(asked, tf32, kernels, monkeypatch):
    """Without being asked float32 is the kernel's, which has no TF32; else it may be torch's."""
    ASKED[asked]()
    allowed = asked in ("high", "allow_tf32")
    assert torch.backends.cuda.matmul.allow_tf32 == allowed
    assert tf32_allowed() == allowed
    plain = rel.CompiledProgram._make

    def as_on_a_gpu(program, rows, inputs, graded, autocast, tf32):
        assert not tf32  # a graph on a CPU
        return plain(program, rows, inputs, graded, autocast, tf32_allowed())

    monkeypatch.setattr(rel.CompiledProgram, "_make", as_on_a_gpu)
    made = random_graph(0, 30, 30, 300, 9)  # so many relations are one kernel's
    for dtype in (torch.float32, torch.bfloat16):
        kernels.launched.clear()
        inputs = [t.to(dtype) for t in (torch.randn(300, 4), torch.randn(9, 4, 6))]
        of_edges.compile(Passes(fuse=False))(made, *inputs)
        by_kernel = "multiply_rows" in {kernel for _, kernel in kernels.launched}
        assert by_kernel == (not allowed or dtype is torch.bfloat16)
        assert not [v.name for v, _ in kernels.launched if "tf32" in v.name.lower()]


def test_tf32_that_is_asked_for_by_torchs_newest_option():
    """Torch does not read `allow_tf32` then; a process of its own, as it is not restored."""
    option, on, off = "fp32_precision", "'tf32'", "'ieee'"
    if not hasattr(torch.backends.cuda.matmul, option):  # before torch 2.9
        option, on, off = "allow_tf32", "True", "False"
    code = (
        "import torch; from bitslab.relational.program import tf32_allowed as allowed;"
        "m = torch.backends.cuda.matmul; assert not allowed();"
        f"m.{option} = {on}; assert allowed();"
        f"m.{option} = {off}; assert not allowed()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_packed_rows_under_autocast():
    made = random_graph(0, 12, 12, 60, 4)
    inputs = inputs_of("rgcn_mean", made, torch.float32)
    inputs["x"] = inputs["x"].bfloat16().float()
    table = bitslab.CompressedTable.from_tensor(inputs["x"], progress=False)
    program = PROGRAMS["rgcn_mean"].compile(Passes(sides=False))
    with torch.autocast("cpu", torch.bfloat16):
        found = program(made, *(inputs | {"x": table}).values())
        expected = program(made, *inputs.values())
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_a_slab_cache_takes_the_place_of_rows_on_a_cpu():
    made = random_graph(0, 12, 12, 60, 4)
    inputs = inputs_of("rgat", made, torch.float32)
    table = bitslab.CompressedTable.from_tensor(inputs["x"], progress=False)
    cache = bitslab.SlabCache(table, 200, devices=["cpu"])
    cache.fill(torch.arange(12))
    found = rgat.compile()(made, *(inputs | {"x": cache}).values())
    for a, b in zip(found, rgat.compile()(made, *inputs.values()), strict=True):
        torch.testing.assert_close(a, b)
    assert cache.stats()["hits"]


def test_large_products_are_measured_by_few_rows_and_kept_by_powers_of_two(kernels, monkeypatch):
    asked, drawn, plain = [], [], torch.randn

    def fastest(names, product, rows, device, prepare):
        asked.append(product)
        return choosing(names[0])(names, product, rows, device, prepare)

    def counted(shape, **options):
        drawn.append(shape)
        return plain(shape, **options)

    monkeypatch.setattr(product_ways, "can_measure", lambda device: True)
    monkeypatch.setattr(product_ways, "LARGE_ROWS", 4)
    monkeypatch.setattr(product_ways, "fastest_way", fastest)
    program = rgcn.compile(Passes(compact=False, sides=False))
    for relations, nodes in ((4, 12), (5, 13)):
        made = random_graph(0, nodes, nodes, 60, relations)
        inputs = inputs_of("rgcn", made, torch.float32)
        expected = evaluate(rgcn, made, inputs)[0]
        monkeypatch.setattr(torch, "randn", counted)
        found = program(made, *inputs.values())
        monkeypatch.setattr(torch, "randn", plain)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert len(set(asked)) == 1 and len(asked) == 2
    assert {rows for rows, *_ in drawn[::2]} == {4}
