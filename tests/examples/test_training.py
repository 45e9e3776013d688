"""Losses are the same to the last bit however features are kept, in both frameworks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graphsage import datasets
from graphsage.modes import MODES, Column, Traffic

import bitslab
from tests.forked import IMPORTS

from .conftest import ROOT
from .forked_ranks import run_ranks_of

SMALL = "--scale-up 300 --degree 12 --epochs 1 --batch-size 64 --hidden 8 --cache-ratio 0.1".split()


def losses(run: dict[str, Any]) -> list[float]:
    return [loss for epoch in run["epochs"] for loss in epoch["losses"]]


@pytest.mark.drawn(3)
@pytest.mark.pairwise
@pytest.mark.parametrize("edges", [False, True], ids=["nodes", "nodes and edges"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_losses_are_equal_in_all_modes(
    script: Any, train: Any, tmp_path: Path, dtype: str, edges: bool
) -> None:
    plot = tmp_path / "plot.png"
    options = ["--dtype", dtype, *(["--edge-features"] if edges else ["--plot", str(plot)])]
    status, report = train(script, *SMALL, *options, "--features", "all")
    assert status == 0
    assert report["losses_equal"]
    assert (report["nodes"], report["dtype"]) == (300, dtype)
    assert report["edge_features"] == (8 if edges else 0)
    runs = {run["mode"]: run for run in report["runs"]}
    assert tuple(runs) == MODES
    assert len(losses(runs["raw"])) == 3
    for run in runs.values():
        assert losses(run) == losses(runs["raw"])
        assert run["validation_accuracy"] == runs["raw"]["validation_accuracy"]
        (epoch,) = run["epochs"]
        assert epoch["gathered_bytes"] == runs["raw"]["epochs"][0]["gathered_bytes"] > 0
        parts = epoch["training_seconds"] + epoch["waiting_seconds"]
        assert epoch["seconds"] == pytest.approx(parts)
    moved = {mode: run["epochs"][0]["moved_bytes"] for mode, run in runs.items()}
    assert moved["raw"] == moved["unified"] > moved["cache"] > moved["host"] > moved["both"]
    fewer = moved["raw"] / moved["host"]
    if dtype == "float32" and not edges:  # of smaller rows, these few take less than the rest
        assert fewer == pytest.approx(runs["host"]["memory_ratio"], rel=0.05)
    for mode, run in runs.items():
        assert (run["memory_ratio"] > 1.2) == (mode in ("host", "both"))
        hit_rate = run["epochs"][0]["hit_rate"]
        assert (hit_rate is not None and 0.1 < hit_rate < 1) == (mode in ("cache", "both"))
    assert edges or plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("edges", [False, True], ids=["nodes", "nodes and edges"])
def test_losses_of_attention_are_equal_in_all_modes(script: Any, train: Any, edges: bool) -> None:
    options = ["--model", "gat", *(["--edge-features"] if edges else [])]
    status, report = train(script, *SMALL, *options, "--features", "all")
    assert status == 0 and report["losses_equal"] and report["settings"]["model"] == "gat"
    _, plain = train(script, *SMALL, *options[2:], "--features", "raw")
    assert losses(report["runs"][0]) != losses(plain["runs"][0])


def test_heads_share_the_width_evenly(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--model", "gat", "--hidden", "6"])
    assert "--hidden: 6, accepted with --model gat are multiples of 4" in capsys.readouterr().err


@pytest.mark.drawn(1)
def test_losses_do_not_depend_on_the_sampling_process(script: Any, train: Any) -> None:
    calls = []
    for options in ([], ["--no-pipeline"], ["--workers", "1"]):
        status, report = train(script, *SMALL, *options, "--edge-features")
        assert status == 0
        calls.append(losses(report["runs"][0]))
    assert calls[0] == calls[1] == calls[2]
    _, other = train(script, *SMALL, "--edge-features", "--seed", "1")
    assert losses(other["runs"][0]) != calls[0]


def test_training_learns(script: Any, train: Any) -> None:
    status, report = train(script, "--epochs", "4", "--hidden", "32", "--lr", "0.02")
    assert status == 0
    (run,) = report["runs"]
    assert (report["dataset"], run["mode"]) == ("digits", "both")
    assert run["epochs"][-1]["loss"] < run["epochs"][0]["loss"] / 2
    assert run["validation_accuracy"] > 0.7


def test_a_bit_that_differs_is_reported(
    script: Any, train: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = bitslab.CompressedFeature.gather

    def gather(self: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        rows = honest(self, *arguments, **options)
        rows[0, 0] += 1
        return rows

    monkeypatch.setattr(bitslab.CompressedFeature, "gather", gather)
    status, report = train(script, *SMALL, "--features", "all")
    assert status == 1
    assert not report["losses_equal"]
    assert "losses of 3 batches, 5 ways: DIFFERENT" in capsys.readouterr().out


def test_json_on_the_output_is_all_of_it(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([*SMALL, "--features", "raw", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [run["mode"] for run in report["runs"]] == ["raw"]


def test_training_that_diverges_is_valid_json(script: Any, train: Any, tmp_path: Path) -> None:
    status, report = train(script, *SMALL, "--lr", "1e30", "--features", "all")
    assert status == 0
    assert report["losses_equal"]
    assert losses(report["runs"][0])[-1] is None
    assert "NaN" not in (tmp_path / "report.json").read_text()
    assert report["settings"]["lr"] == 1e30


def test_all_nodes_for_validation_count(
    script: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = datasets.digits()
    # As in the frameworks' splits, where fewer are trained on.
    few = replace(graph, train=graph.train[:40])
    monkeypatch.setattr(datasets, "digits", lambda: few)
    _, report = train(script, "--features", "raw", "--epochs", "1", "--hidden", "8")
    right = report["runs"][0]["validation_accuracy"] * len(graph.validated)
    assert 0 < right < len(graph.validated) == 599
    assert right == pytest.approx(round(right))


def test_interrupted(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("graphsage.training.functional.cross_entropy", interrupt)
    assert script.main([*SMALL, "--device", "cpu"]) == 130
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"{Path(sys.argv[0]).name}: interrupted\n")


def test_table_shows_what_the_json_says(
    script: Any, train: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = train(script, *SMALL, "--features", "both")
    out = capsys.readouterr().out
    (run,) = report["runs"]
    (epoch,) = run["epochs"]
    assert f"both, IBP(C/M): features of {run['raw_bytes'] / 1e6:.2f} MB take" in out
    (line,) = [line for line in out.splitlines() if line.startswith("│")]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells[1] == f"{epoch['loss']:.6f}"
    assert cells[8] == f"{epoch['moved_bytes'] / 1e6:.2f}"
    assert cells[9] == f"{epoch['ratio']:.2f}"
    assert cells[10] == f"{epoch['hit_rate']:.1%}"


def test_max_train_bounds_an_epoch(script: Any, train: Any) -> None:
    status, report = train(script, *SMALL, "--max-train", "70", "--features", "raw")
    assert status == 0
    assert len(losses(report["runs"][0])) == 1
    status, report = train(script, *SMALL, "--max-train", "30", "--features", "raw")
    assert len(losses(report["runs"][0])) == 1


def test_planetoid_is_trained_on(script: Any, train: Any, planetoid: Path) -> None:
    options = ["--dataset", "citeseer", "--root", str(planetoid), "--batch-size", "20"]
    status, report = train(script, *options, "--features", "all", "--epochs", "1")
    assert status == 0
    assert (report["dataset"], report["nodes"]) == ("citeseer", 60)


def torchrun(path: Path, options: list[str]) -> str:
    """Return what two ranks print that torchrun starts."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        + [str(path), *options],
        # Where a rank ends by a signal, its stacks are printed.
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.drawn(1)
def test_two_ranks_train_as_one(script: Any, train: Any, tmp_path: Path) -> None:
    """Two processes on a CPU, one copy of the features, half of each batch each."""
    # What is drawn for a node depends on the batch around it; all of its neighbours do not.
    options = [*SMALL, "--fanouts", "-1", "-1", "--epochs", "2", "--features", "both"]
    _, alone = train(script, *options)
    json_file = tmp_path / "two.json"
    path = ROOT / "examples" / f"{script.__name__}.py"
    given = [*options, "--device", "cpu", "--json", str(json_file)]
    if "pyg" in script.__name__:
        assert torchrun(path, given).count("digits SU: ") == 1
    else:  # torchrun imports nothing of the script's, and each of its ranks takes five seconds
        done = run_ranks_of(path, given, imports=[*IMPORTS, "dgl"])
        assert not any(rank.returncode for rank in done), done
        assert "".join(rank.stdout for rank in done).count("digits SU: ") == 1
    together = json.loads(json_file.read_text())
    assert together["ranks"] == 2
    (one,), (two,) = alone["runs"], together["runs"]
    assert two["copies"] == 1
    assert two["host_bytes"] == one["host_bytes"]
    # Halves are summed in another order than the whole, and steps of Adam carry it on.
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)
    assert len(losses(two)) == 6


def test_a_batch_that_gives_some_ranks_nothing(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as stopped:
        script.main(["--batch-size", "3", "--device", "cpu"])
    assert stopped.value.code == 2
    assert "--batch-size: 3, which is none for some of 4 ranks" in capsys.readouterr().err


def test_traffic_of_plain_rows_is_what_was_asked_for() -> None:
    column = Column(torch.zeros(10, 3, dtype=torch.float16))
    column.count(7)
    traffic = column.traffic()
    assert traffic.moved_bytes == traffic.gathered_bytes == 7 * 3 * 2
    assert (traffic.ratio, traffic.hit_rate) == (1, None)
    assert Traffic(100, 0, hits=5).ratio is None


@pytest.mark.parametrize("model", ["", "GAT, "], ids=["sage", "gat"])
def test_benchmark_measures_all_modes_in_turn(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    import importlib

    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module("gnn")
    out = tmp_path / "gnn.md"
    options = "--datasets digits --scale-up 300 --max-train 64 --hidden 8 --batch-size 64"
    command = ["gnn.py", *options.split(), "--epochs", "1", "--device", "cpu", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*command, *(["--model", "gat"] if model else [])])
    assert benchmark.main() == 0
    text = out.read_text()
    graph = "digits SU: 300 nodes of 256 bytes, 1 batches of 64"
    assert text.count(f"### DGL as dgl, {model}{graph}") == 1
    assert text.count("### PyG as legion") == 1
    for mode in (*MODES, "raw cache"):
        assert text.count(f"| {mode}") >= 4
    assert text in capsys.readouterr().out + "\n"


@pytest.mark.gpu
@pytest.mark.parametrize("pipeline", ["--pipeline", "--no-pipeline"])
def test_on_a_gpu(pipeline: str, tmp_path: Path) -> None:
    script = pytest.importorskip("train_graphsage_pyg", exc_type=ImportError)
    json_file = tmp_path / "report.json"
    options = [*SMALL, "--edge-features", "--device", "cuda", pipeline, "--json", str(json_file)]
    # Sums on a GPU have no fixed order, so losses may differ in their last bits.
    assert script.main([*options, "--features", "all"]) in (0, 1)
    runs = json.loads(json_file.read_text())["runs"]
    for run in runs:
        assert losses(run) == pytest.approx(losses(runs[0]), rel=1e-4)
    moved = {run["mode"]: run["epochs"][0]["moved_bytes"] for run in runs}
    assert moved["raw"] == moved["unified"] > moved["cache"] > moved["both"]
    assert moved["raw"] > moved["host"] > moved["both"]
