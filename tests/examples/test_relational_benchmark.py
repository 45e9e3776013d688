"""What benchmarks/relational_gpu.py compares: layers of plain torch give the results of PyG's."""

from __future__ import annotations

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


def test_a_pass_that_changes_no_step_is_not_timed(benchmark):
    graph = benchmark.drawn("small", (40, 300, 5, 0.4))
    row = benchmark.pass_row(graph, benchmark.TYPED_SUM, 8)
    assert row["no reorder"] == row["no sides"] == "same"
    assert all(float(row[name]) > 0 for name in ("all", "no compact", "no fuse"))


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
