"""benchmarks/activations.py --only gpu, at tiny sizes on a CPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.quick_measuring import measure_quickly

from .conftest import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    measure_quickly(monkeypatch, tmp_path / "cache")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("activations_gpu")


def arguments_of(*given: str) -> Any:
    parser = importlib.import_module("activations").make_parser()
    sizes = "--shapes 64x2 --sequence 32 --gpu-batch 2 --head-dim 32 --repetitions 1"
    return parser.parse_args(["--only", "gpu", "--device", "cpu", *sizes.split(), *given])


def test_ways_of_a_shape(script: Any) -> None:
    ways = ("keep", "checkpoint", "save_on_cpu", "planned 55%")
    said: list[str] = []
    made = arguments_of("--gpu-models", "t5", "gpt2", "--gpu-ways", *ways)
    ((title, rows),) = script.gpu(made, said.append).items()
    assert title == "hidden 64 x 2 layers, batch 2, 32 tokens, cpu"
    assert [row["way"] for row in rows] == [*ways, *ways]
    assert all(row["gradients"] == "equal" for row in rows)
    by_way = {(row["model"], row["way"]): row for row in rows}
    for model in ("t5", "gpt2"):
        keep = by_way[model, "keep"]["activations MB"]
        assert by_way[model, "checkpoint"]["activations MB"] < 0.9 * keep
        assert by_way[model, "planned 55%"]["activations MB"] < 0.9 * keep
        assert by_way[model, "planned 55%"]["planned MB"]
        assert by_way[model, "keep"]["times keep"] == 1
    assert not any("left out" in each for each in said)


def test_the_planner_is_given_the_peaks_of_peers(script: Any) -> None:
    said: list[str] = []
    made = arguments_of("--gpu-models", "llama", "--gpu-ways", "keep", "checkpoint", "--at-peaks")
    ((_, _, planned),) = script.gpu(made, said.append).values()
    assert planned["way"] == "planned at the peak of checkpoint"
    assert planned["gradients"] == "equal" and planned["times the peer"] > 0
    assert [each for each in said if "times the peer" in each]


def test_peers_that_are_not_installed_are_named(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise ImportError("No module named 'torchtune'")

    monkeypatch.setitem(script.PEERS, "torchtune", missing)
    said: list[str] = []
    made = arguments_of("--gpu-models", "gpt2", "--gpu-ways", "keep", "torchtune")
    (rows,) = script.gpu(made, said.append).values()
    assert [row["way"] for row in rows] == ["keep"]
    assert "left out: torchtune (No module named 'torchtune')" in said


def test_the_papers_shapes_are_the_default(script: Any) -> None:
    parser = importlib.import_module("activations").make_parser()
    assert parser.parse_args([]).shapes == ["8192x4", "12288x3", "16384x2"]
    assert script.difference([torch.ones(2)], [torch.tensor([1.0, 2.0])]) == "off by 5.0e-01"
