"""What benchmarks/relational_gpu.py compares: layers of plain torch give the results of PyG's."""

from __future__ import annotations

import gzip
import importlib
import time
from typing import Any

import pytest
import torch

from .conftest import ROOT


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("relational_gpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", ["RGCN", "RGAT", "HGT"])
def test_peers_compute_the_same(model, dtype, benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "has_grouped_kernel", lambda *of: dtype is torch.bfloat16)
    graph = benchmark.drawn("small", (40, 300, 5, 0.4))
    assert graph.edges.shape == (2, 300) and int(graph.edges.max()) < 40
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    ((name, ways),) = benchmark.models(graph, 8, [model], dtype)
    assert name == model
    assert list(ways) == ["ours", "PyG", "torch", *["grouped"] * (dtype is torch.bfloat16)]
    expected = ways["PyG"](x).detach().float()
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    for run in ways.values():
        found = run(x).detach().float()
        assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("model", ["RGCN", "RGAT", "HGT"])
def test_a_pass_that_changes_no_step_is_not_timed(model, benchmark):
    graph = benchmark.drawn("small", (40, 300, 5, 0.4))
    rows = benchmark.pass_rows(graph, benchmark.layer_programs()[model], 8)
    assert list(rows) == ["inference", "step"]
    for row in rows.values():
        assert list(row) == ["all", "no reorder", "no compact", "no sides", "no fuse"]
        assert all(ms == "same" or float(ms) > 0 for ms in row.values())
        assert float(row["all"]) > 0 and float(row["no compact"]) > 0
        if model != "HGT":  # there it is a matter of costs
            assert (row["no reorder"] == "same") == (model == "RGCN")


def test_rows_are_printed_as_they_come(benchmark, capsys):
    table = benchmark.Printer("Title")
    table.add({"a": 1})
    assert capsys.readouterr().out.splitlines()[-1] == "| 1 |"
    table.add({"a": 2})
    assert capsys.readouterr().out.splitlines() == ["| 2 |"]
    assert table.rows == [{"a": 1}, {"a": 2}]


def test_the_clock_ends(benchmark):
    assert benchmark.Clock(time.monotonic() - 1).over()
    assert not benchmark.Clock(time.monotonic() + 60).over()


def test_statements_of_mutag_are_read_with_inverse_relations(benchmark, tmp_path, monkeypatch):
    graphs = importlib.import_module("relational_graphs")
    monkeypatch.setenv("BITSLAB_DATA", str(tmp_path))
    assert graphs.mutag() is None
    (tmp_path / "rdf").mkdir()
    text = '<a> <p> <b> .\n<b> <q> "1.5 g"^^<float> .\n<a> <p> "1.5 g"^^<float> .\n\n'
    (tmp_path / "rdf" / "mutag_stripped.nt.gz").write_bytes(gzip.compress(text.encode()))
    found = graphs.mutag()
    assert (found.nodes, found.relations) == (3, 4)
    assert torch.equal(found.edges[:, :3], found.edges[:, 3:].flip(0))


def test_all_parts_of_a_data_set_are_read(benchmark, tmp_path, monkeypatch):
    graphs = importlib.import_module("relational_graphs")
    monkeypatch.setenv("BITSLAB_DATA", str(tmp_path))
    folder = tmp_path / "pykeen" / "datasets" / "umls"
    folder.mkdir(parents=True)
    for part, ends in (("train", "a\tr\tb"), ("valid", "b\tr\tc"), ("test", "c\ts\ta")):
        (folder / f"{part}.txt").write_text(ends + "\n")
    found = graphs.whole("umls")
    assert (found.nodes, found.relations, found.edges.shape[1]) == (3, 4, 6)


def test_peaks_of_memory_are_those_of_the_allocator(benchmark):
    size = importlib.import_module("relational_size")

    def run() -> torch.Tensor:
        for _ in range(3):
            torch.empty(1 << 20, dtype=torch.uint8)
        return torch.empty(1 << 18, dtype=torch.uint8)

    assert 1 << 20 <= size.peak_bytes(run) < (1 << 20) + (1 << 19)


def test_rows_of_a_plan_are_counted_by_where_they_stand(benchmark):
    size = importlib.import_module("relational_size")
    graphs = importlib.import_module("relational_graphs")
    made = size.typed(graphs.drawn_kinships())
    program, inputs = size.programs(made, 8)["RGCN"]
    of_rows, of_nodes = size.rows_bytes(made, program, inputs)
    assert of_nodes == 104 * 8 * 4  # the sums alone
    assert of_rows == made.rows("pair_src").n * 8 * 4


def test_plans_of_new_graphs_are_timed(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    plans = importlib.import_module("relational_plans")
    draw = torch.Generator().manual_seed(0)

    def block():
        edges = torch.stack([torch.randint(n, (300,), generator=draw) for n in (40, 20)])
        graph = plans.Graph(edges, torch.randint(5, (300,), generator=draw), {})
        graph.relations = 5
        return graph, (40, 20)

    made = [block() for _ in range(5)]
    row = plans.row("block", "RGCN", plans.TYPED_SUM, made, 8, torch.device("cpu"))
    assert row["edges"] == 300 and row["graph"] == "mag-0.1, blocks of 1,024 papers, fanout 10"
    assert all(row[f"{what} ms"] > 0 for what in ("plan", "first call", "later call"))
