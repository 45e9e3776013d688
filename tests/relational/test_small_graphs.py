"""Graphs of sampled blocks: steps that like ones share, and plans of a GPU that the host makes."""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import pickle
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bitslab.relational as rel
from bitslab.engine.kernels import uploads
from bitslab.engine.kernels.cuda import CudaKernels
from bitslab.engine.kernels.cuda.survey import MOST_ENTRIES
from bitslab.engine.kernels.cuda.typed_gemm import TypedTiles
from bitslab.engine.kernels.edge_survey import EdgeSurvey
from bitslab.engine.kernels.uploads import Uploads
from bitslab.errors import ArgumentError, IndexRangeError
from bitslab.relational import (
    NodeTypes,
    Passes,
    RelationalGraph,
    execute,
    graph,
    product_ways,
)
from bitslab.relational.rows import Rows, UploadedRows
from bitslab.relational.steps import COSTS
from bitslab.relational.type_sums import levels_of
from tests.relational.oracle import random_graph
from tests.relational.programs import PROGRAMS, inputs_of
from tests.relational.test_node_types import hgt, typed_graph
from tests.relational.test_node_types import inputs_of as typed_inputs
from tests.relational.test_program import values_and_gradients
from tests.simt.runner import simt_kernels


class LateUploads(Uploads):
    """Uploads to the CPU that are copied as late as those to a GPU; -1 before."""

    def of(self, tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with self:
            return [self._placed(table) for table in tables]


def made_on_host(
    monkeypatch: pytest.MonkeyPatch, *given: Any, kernels: CudaKernels | None = None
) -> RelationalGraph:
    """Return a graph as those of a GPU are, whose edges its kernels survey.

    What they do not find another one, of the host, makes; without kernels all.
    """
    once, of_host = iter([True]), iter([LateUploads])
    monkeypatch.setattr(
        uploads, "_page_locked", lambda n: torch.zeros(n, dtype=torch.uint8, device="cpu")
    )
    empty = torch.empty

    def filled(*size: Any, **options: Any) -> torch.Tensor:
        found = empty(*size, **options)
        return found.fill_(255) if options.get("dtype") is torch.uint8 else found

    monkeypatch.setattr(torch, "empty", filled)
    with monkeypatch.context() as patched:
        patched.setattr(graph, "planned_on_host", lambda *sizes: next(once, False))
        patched.setattr(graph, "gpu_kernels", lambda device: kernels)
        patched.setattr(graph, "Uploads", lambda *a, **k: next(of_host, Uploads)(*a, **k))
        return RelationalGraph(*given)


@functools.cache
def simt() -> CudaKernels:
    return simt_kernels()[0]


#: Of a small graph of a GPU: all is made by the host, or edges are surveyed by a kernel.
BY_HOST_AND_KERNEL = pytest.mark.parametrize("surveyed", [False, True], ids=["host", "kernel"])


def kernels_if(surveyed: bool) -> CudaKernels | None:
    return simt() if surveyed else None


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


@given(
    st.lists(st.tuples(*[st.integers(0, 6)] * 2, st.integers(0, 4)), min_size=1, max_size=40),
    st.integers(7, 9),
)
def test_a_survey_finds_what_is_found_step_by_step(
    edges: list[tuple[int, int, int]], n_dst: int
) -> None:
    *ends, types = torch.tensor(edges).t()
    index = torch.stack(ends)
    surveyed = RelationalGraph(index, types, (7, n_dst), 5)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(graph, "HOST_ROWS", 0)
        large = RelationalGraph(index, types, (7, n_dst), 5)
    for name in ("order", "starts"):
        assert torch.equal(getattr(surveyed, name), getattr(large, name))
    spaces = ("src", "dst", "edge", "relation", "typed_edge", "pair_src", "pair_dst")
    for space in spaces:
        found, expected = surveyed.rows(space), large.rows(space)
        assert (found.n, found.bounds) == (expected.n, expected.bounds)
        for name in ("of_edge", "node", "relation"):
            a, b = getattr(found, name), getattr(expected, name)
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
    for to, source in itertools.permutations(spaces, 2):
        hop, other = (each.hop(f"{to}<{source}") for each in (surveyed, large))
        pairs = [(hop.entries(), other.entries())]
        pairs += [(hop.by_row(t), other.by_row(t)) for t in (False, True)]
        for these, those in pairs:
            assert all(map(torch.equal, these, those))


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


@BY_HOST_AND_KERNEL
@pytest.mark.parametrize("passes", [Passes(), Passes(sides=True)], ids=["default", "sides"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plan_of_a_gpu_is_that_of_the_graph(
    name: str, passes: Passes, surveyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = random_graph(3, 60, 60, 200, 4)
    given = (plain.edge_index, plain.edge_type, 60, 4)
    made = made_on_host(monkeypatch, *given, kernels=kernels_if(surveyed))
    assert (made.survey is not None) == surveyed
    inputs = inputs_of(name, plain, torch.float64)
    found = outputs_of(PROGRAMS[name].compile(passes), made, inputs)
    expected = outputs_of(PROGRAMS[name].compile(passes), plain, inputs)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def counted_copies(monkeypatch: pytest.MonkeyPatch) -> list[EdgeSurvey]:
    """Return the surveys that are copied to the host from now on."""
    copied: list[EdgeSurvey] = []
    plain = EdgeSurvey.cpu

    def copy(found: EdgeSurvey) -> EdgeSurvey:
        copied.append(found)
        return plain(found)

    monkeypatch.setattr(EdgeSurvey, "cpu", copy)
    return copied


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_layers_need_of_a_surveyed_graph_is_on_its_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kernels run the steps, so that they are those of a GPU.
    monkeypatch.setattr(execute, "gpu_kernels", lambda device: simt())
    monkeypatch.setitem(COSTS, "cpu", COSTS["cuda"])
    copied = counted_copies(monkeypatch)
    plain = random_graph(3, 60, 60, 200, 6)
    given = (plain.edge_index, plain.edge_type, 60, 6)
    made = made_on_host(monkeypatch, *given, kernels=simt())
    inputs = inputs_of(name, plain, torch.float32)
    found = outputs_of(PROGRAMS[name].compile(), made, inputs)
    assert not copied
    for a, b in zip(found, outputs_of(PROGRAMS[name].compile(), plain, inputs), strict=True):
        assert torch.equal(a, b)


def test_a_survey_is_copied_once_for_all_that_the_host_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied = counted_copies(monkeypatch)
    plain = random_graph(3, 60, 60, 200, 4)
    given = (plain.edge_index, plain.edge_type, 60, 4)
    made = made_on_host(monkeypatch, *given, kernels=simt())
    for name in ("mixed:0110", "mixed:1010"):
        found, expected = made.rows(name), plain.rows(name)
        assert isinstance(found, UploadedRows) and isinstance(expected, Rows)
        assert torch.equal(found.of_edge, expected.of_edge)
        for hop in (f"in:{name}", f"out:{name}", f"gather:{name}<src"):
            for transposed in (False, True):
                these, those = made.hop(hop).by_row(transposed), plain.hop(hop).by_row(transposed)
                assert all(map(torch.equal, these, those))
    assert len(copied) == 1
    # Parts of the survey are not uploaded.
    survey = made.survey
    assert survey is not None
    at = made.hop("in:mixed:0110").entries()[2].data_ptr() - survey.block.data_ptr()
    assert not 0 <= at < survey.block.nbytes
    host = made._on_host()
    assert made._tables.on_device(host.order).data_ptr() == survey.order.data_ptr()


def test_products_of_both_sides_copy_a_survey_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = counted_copies(monkeypatch)
    draw = torch.Generator().manual_seed(0)
    few, many = (torch.randint(n, (200,), generator=draw) for n in (4, 60))
    edges = torch.cat([torch.stack([few, many]), torch.stack([many, few])], 1)
    types = torch.arange(2).repeat_interleave(200)
    plain = RelationalGraph(edges, types, 60, 2)
    made = made_on_host(monkeypatch, edges, types, 60, 2, kernels=simt())
    inputs = inputs_of("rgcn", plain, torch.float64)
    compiled = PROGRAMS["rgcn"].compile(Passes(sides=True))
    found, expected = (outputs_of(compiled, each, inputs) for each in (made, plain))
    assert any("mixed:" in str(key) for key in made._made) and len(copied) == 1
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_edges_in_any_layout_are_surveyed(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = random_graph(3, 60, 50, 200, 4)
    edges = plain.edge_index.to(dtype).t().contiguous().t()
    types = plain.edge_type.to(dtype).repeat_interleave(2)[::2]
    assert not edges.is_contiguous() and not types.is_contiguous()
    made = made_on_host(monkeypatch, edges, types, (60, 50), 4, kernels=simt())
    assert made.survey is not None
    for space in ("src", "dst", "pair_src", "pair_dst", "typed_edge"):
        assert torch.equal(made.rows(space).of_edge, plain.rows(space).of_edge)
    assert torch.equal(made.order, plain.order) and torch.equal(made.starts, plain.starts)


def test_a_graph_that_does_not_fit_the_kernel_is_planned_by_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = random_graph(3, 60, 60, 200, 4)
    relations = MOST_ENTRIES + 1
    given = (plain.edge_index, plain.edge_type, 60, relations)
    made = made_on_host(monkeypatch, *given, kernels=simt())
    assert made.survey is None
    assert made.rows("pair_src").n == plain.rows("pair_src").n


@pytest.mark.parametrize("biased", [False, True])
def test_types_of_nodes_are_those_of_the_host(
    biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = typed_graph(sizes=(9, 6, 3), edges=60)
    given = (plain.edge_index, plain.edge_type, plain.num_src, plain.num_relations)
    made = made_on_host(monkeypatch, *given, plain.node_types, kernels=simt())
    assert made.survey is None
    inputs = dict(enumerate(typed_inputs(plain, 2, biased)))
    compiled = hgt(2, biased)
    found, expected = (
        outputs_of(compiled, each, inputs)  # type: ignore[arg-type]
        for each in (made, plain)
    )
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@BY_HOST_AND_KERNEL
def test_a_thread_waits_for_what_another_has_not_copied(
    surveyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = random_graph(3, 60, 60, 200, 4)
    given = (plain.edge_index, plain.edge_type, 60, 4)
    made = made_on_host(monkeypatch, *given, kernels=kernels_if(surveyed))
    inside, go = threading.Event(), threading.Event()

    def plan(rows: RelationalGraph) -> bool:
        found.append(rows.rows("mixed:0110").of_edge)
        rows.order, rows.rows("pair_src"), rows.hop("dst<edge").by_row(False)
        inside.set()
        return go.wait(30)

    def read() -> None:
        found.append(made.rows("mixed:0110").of_edge.clone())
        found.append(made.order.clone())
        found.append(made.rows("pair_src").of_edge.clone())
        found.append(made.hop("dst<edge").by_row(False)[0].clone())

    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=made.plan, args=("plan", plan))]
    threads[0].start()
    assert inside.wait(30) and int(found[0].max()) == -1
    threads.append(threading.Thread(target=read))
    threads[1].start()
    threads[1].join(0.2)
    go.set()
    for thread in threads:
        thread.join()
    mixed = plain.rows("mixed:0110").of_edge
    expected = (
        mixed,
        mixed,
        plain.order,
        plain.rows("pair_src").of_edge,
        plain.hop("dst<edge").by_row(False)[0],
    )
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@BY_HOST_AND_KERNEL
def test_what_was_not_copied_is_not_kept(surveyed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = random_graph(3, 60, 60, 200, 4)
    given = (plain.edge_index, plain.edge_type, 60, 4)
    made = made_on_host(monkeypatch, *given, kernels=kernels_if(surveyed))
    if surveyed:  # what is uploaded then is of gradients of weights, which kernels sum
        monkeypatch.setattr(execute, "gpu_kernels", lambda device: simt())
    inputs = inputs_of("rgat", plain, torch.float32)
    compiled = PROGRAMS["rgat"].compile()

    def fail(chunk: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patched:
        patched.setattr("bitslab.engine.kernels.uploads._Chunk.copy", fail)
        with pytest.raises(rel.PlanMemoryError, match="no memory for the plan"):
            compiled(made, *(x.clone().requires_grad_(surveyed) for x in inputs.values()))
    found, expected = outputs_of(compiled, made, inputs), outputs_of(compiled, plain, inputs)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["rgcn", "rgat"])
def test_inference_on_a_surveyed_graph_uploads_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = random_graph(3, 60, 60, 200, 4)
    given = (plain.edge_index, plain.edge_type, 60, 4)
    made = made_on_host(monkeypatch, *given, kernels=kernels_if(True))
    monkeypatch.setattr(execute, "gpu_kernels", lambda device: simt())
    copied: list[Any] = []
    monkeypatch.setattr("bitslab.engine.kernels.uploads._Chunk.copy", copied.append)
    inputs = inputs_of(name, plain, torch.float32)
    program = PROGRAMS[name].compile()
    with torch.no_grad():
        found = program(made, *inputs.values())
        assert not copied
        expected = program(plain, *inputs.values())
    found, expected = ([x] if isinstance(x, torch.Tensor) else x for x in (found, expected))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_the_default_device_may_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = typed_graph(sizes=(9, 6, 3), edges=60)
    given = (plain.edge_index, plain.edge_type, plain.num_src, plain.num_relations)
    with torch.device("meta"):
        made = made_on_host(monkeypatch, *given, plain.node_types)
        for space in ("pair_src", "pair_dst", "typed_edge", "src"):
            assert made.rows(space).of_edge.device.type == "cpu"
        made.hop("dst<pair_src").by_row(True)
        levels_of(made, "pair_src")
        assert TypedTiles([0, 3, 9], torch.device("cpu")).tiles.device.type == "cpu"


def test_training_has_the_bits_of_inference_after_other_graphs() -> None:
    draw = torch.Generator().manual_seed(0)
    ends = torch.randint(500, (2, 8000), generator=draw)
    types, weight = (
        torch.randint(3, (8000,), generator=draw),
        torch.randn(3, 64, 64, generator=draw),
    )
    x = torch.randn(500, 64, generator=draw)
    compiled = rel.TYPED_SUM.program.compile()
    few = (torch.stack([ends[0], ends[1] % 8]), torch.stack([ends[0] % 8, ends[1]]))
    for edges in few:
        compiled(RelationalGraph(edges, types, 500, 3), x, weight.clone().requires_grad_())
    for edges in few[::-1]:
        made = RelationalGraph(edges, types, 500, 3)
        trained = compiled(made, x, weight.clone().requires_grad_())
        assert torch.equal(trained.detach(), compiled(made, x, weight))


def test_graphs_of_other_pairs_have_other_steps() -> None:
    draw = torch.Generator().manual_seed(0)
    hubs, others = (torch.randint(n, (30_000,), generator=draw) for n in (30, 3000))
    types = torch.randint(6, (30_000,), generator=draw)
    inputs = (torch.randn(3000, 64), torch.randn(6, 64, 64))
    shared = rel.TYPED_SUM.program.compile()
    for ends in ((others, hubs), (hubs, others)):
        made = RelationalGraph(torch.stack(ends), types, 3000, 6)
        alone = rel.TYPED_SUM.program.compile().plan(made, inputs)
        found = shared.plan(made, inputs)
        assert [s.space for s in found.forward.order] == [s.space for s in alone.forward.order]


def test_a_compiled_program_is_saved() -> None:
    compiled = PROGRAMS["rgat"].compile(Passes(sides=False))
    loaded = pickle.loads(pickle.dumps(compiled))
    assert loaded.number != compiled.number and loaded.passes == compiled.passes
    made = random_graph(0, 60, 60, 200, 4)
    inputs = inputs_of("rgat", made, torch.float64)
    for a, b in zip(
        outputs_of(loaded, made, inputs), outputs_of(compiled, made, inputs), strict=True
    ):
        assert torch.equal(a, b)


def test_no_product_is_measured_while_a_plan_is_made() -> None:
    assert graph.HOST_ROWS < product_ways.LARGE_ROWS


@BY_HOST_AND_KERNEL
def test_what_the_host_reads_is_checked(surveyed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    edges, types = torch.tensor([[0, 1], [1, 9]]), torch.tensor([0, -1])
    kernels = kernels_if(surveyed)
    with pytest.raises(IndexRangeError, match=r"edge_index\[1\] has 9; accepted are 0 to 4"):
        made_on_host(monkeypatch, edges, types, 5, 2, kernels=kernels)
    edges[1, 1] = 0
    with pytest.raises(IndexRangeError, match=r"edge_type has -1; accepted are 0 to 1"):
        made_on_host(monkeypatch, edges, types, 5, 2, kernels=kernels)
    types[1] = 1
    with pytest.raises(ArgumentError, match="1 edges have a source of another type"):
        of_nodes = NodeTypes((0, 1, 5), (0, 0), (1, 0))
        made_on_host(monkeypatch, edges, types, 5, 2, of_nodes, kernels=kernels)


@pytest.mark.parametrize("padded", [False, True], ids=["mixed", "padded"])
def test_entries_are_counted_without_making_them(padded: bool) -> None:
    made = random_graph(3, 60, 50, 200, 9)
    space = ("padded:" if padded else "mixed:") + "010110010"
    names = ["dst<pair_src", "dst<edge", "gather:pair_src<src", f"in:{space}", f"out:{space}"]
    for name in names:
        assert made.entry_count(name) == len(made.hop(name).entries()[0])
