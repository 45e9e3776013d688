"""DLRM is trained the same, to the last bit, however its embeddings are kept."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dlrm.modes import MODES, counted, make_tables, refusal
from dlrm.tables import CachedTables, TableOptions, TorchTables, initial_weights
from dlrm.zipf import draw_clicks

from tests.forked import run_forked

from .conftest import ROOT
from .test_dlrm_data import lines_of_criteo, written

#: 26 tables of about 1,000 rows at most, some batches to train on.
SMALL = "--scale 1e-4 --lines 450 --batch-size 64 --embedding-dim 8 --bottom 8 --top 8".split()
BATCHES = 6
#: What this environment has.
HERE = [mode for mode in MODES if refusal(mode) is None]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def script() -> Any:
    """Import the script that trains."""
    return importlib.import_module("train_dlrm")


def losses(run: dict[str, Any]) -> list[float]:
    return [loss for epoch in run["epochs"] for loss in epoch["losses"]]


def numbers(run: dict[str, Any]) -> list[float]:
    tested = [(epoch["auc"], epoch["test_loss"]) for epoch in run["epochs"]]
    return [*losses(run), *(number for pair in tested for number in pair)]


WAYS: dict[str, list[str]] = {
    "adagrad": [],
    "sgd": ["--optimizer", "sgd", "--lr", "0.5"],
    "sparse sgd": ["--optimizer", "sgd", "--sparse", "--evict", "lru"],
    "sparse adagrad": ["--optimizer", "adagrad", "--sparse"],
    "sparse adam, bfloat16": ["--optimizer", "sparse-adam", "--dtype", "bfloat16"],
    "inplace": ["--layout", "inplace", "--evict", "dataset"],
    "ibp": ["--codec", "ibp", "--dtype", "float16"],
    "pipelined": ["--pipelined", "--cache-ratio", "0.3"],
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_auc_and_losses_are_equal_in_all_modes(
    script: Any, train: Any, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = train(script, *SMALL, *options, "--embedding", "all")
    assert status == 0
    assert report["all_equal"]
    sparse = "--sparse" in options or "sparse-adam" in options
    modes = [run["mode"] for run in report["runs"]]
    assert modes == (["torch", "cached"] if sparse else HERE)
    assert set(report["left_out"]) == set(MODES) - set(modes)
    for run in report["runs"]:
        assert numbers(run) == numbers(report["runs"][0])
        assert len(losses(run)) == BATCHES
        (epoch,) = run["epochs"]
        assert epoch["lookups"] == BATCHES * 64 * 26
        assert epoch["lookups_per_s"] == pytest.approx(epoch["lookups"] / epoch["seconds"])
        assert run["raw_bytes"] == report["runs"][0]["raw_bytes"] > 0
    torch_run, cached = report["runs"][:2]
    assert (torch_run["epochs"][0]["hit_rate"], torch_run["ratio"]) == (None, 1)
    assert 0 < cached["epochs"][0]["hit_rate"] < 1
    assert cached["epochs"][0]["moved_bytes"] > 0
    out = capsys.readouterr().out
    assert f"{BATCHES} batches, {len(modes)} ways: equal to the last bit" in out
    for mode in report["left_out"]:
        assert f"left out: {mode}: " in out


def test_training_learns(script: Any, train: Any) -> None:
    status, report = train(script, "--lines", "12000", "--scale", "1e-4", "--embedding", "torch")
    assert status == 0
    (run,) = report["runs"]
    assert report["tested_lines"] == 1200
    assert losses(run)[-1] < losses(run)[0]
    assert run["epochs"][0]["auc"] > 0.65


def test_a_seed_gives_the_same_again_and_another_does_not(script: Any, train: Any) -> None:
    report = [
        numbers(train(script, *SMALL, "--embedding", "torch", "--seed", seed)[1]["runs"][0])
        for seed in "001"
    ]
    assert report[0] == report[1] != report[2]


def test_a_bit_that_differs_is_reported(
    script: Any, train: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = CachedTables.look_up

    def look_up(self: Any, batch: Any) -> torch.Tensor:
        # The last bit of one number.
        pooled = honest(self, batch)
        return pooled + torch.nn.functional.one_hot(torch.tensor(0), pooled.shape[2]) * 1e-7

    monkeypatch.setattr(CachedTables, "look_up", look_up)
    status, report = train(script, *SMALL, "--embedding", "torch", "cached")
    assert status == 1
    assert not report["all_equal"]
    assert f"{BATCHES} batches, 2 ways: DIFFERENT" in capsys.readouterr().out


def test_training_that_diverges_is_valid_json(script: Any, train: Any, tmp_path: Path) -> None:
    options = ["--optimizer", "sgd", "--lr", "1e30", "--embedding", "torch", "cached"]
    status, report = train(script, *SMALL, *options, "--epochs", "2")
    assert status == 0
    assert report["all_equal"]
    assert losses(report["runs"][0])[-1] is None
    assert "NaN" not in (tmp_path / "report.json").read_text()
    assert report["settings"]["lr"] == 1e30


def test_table_shows_what_the_json_says(
    script: Any, train: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "plot.png"
    options = ["--embedding", "cached", "--epochs", "2", "--plot", str(plot)]
    _, report = train(script, *SMALL, *options)
    out = capsys.readouterr().out
    (run,) = report["runs"]
    lines = [line for line in out.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    for row, epoch in zip(cells, run["epochs"], strict=True):
        assert row[1] == str(epoch["epoch"])
        assert row[2] == f"{epoch['loss']:.6f}"
        assert row[4] == f"{epoch['auc']:.6f}"
        assert row[7] == f"{epoch['hit_rate']:.1%}"
        assert row[8] == f"{epoch['moved_bytes'] / 1e6:,.2f}"
    assert cells[1][9] == f"{run['host_bytes'] / 1e6:,.2f}"
    assert cells[1][11] == f"{run['ratio']:.2f}"
    assert "drawn: 450 lines" in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_json_on_the_output_is_all_of_it(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([*SMALL, "--embedding", "torch", "--device", "cpu", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [run["mode"] for run in report["runs"]] == ["torch"]
    assert report["settings"]["embedding_dim"] == 8
    assert report["tables"]["C3"] == 1013


def test_criteo_and_movielens_are_trained_on(script: Any, train: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "log.tsv", lines_of_criteo())
    options = ["--embedding", "torch", "cached", "--batch-size", "9"]
    status, report = train(script, "--data", str(path), "--max-rows", "4", *options)
    assert status == 0
    assert (report["dataset"], report["lines"], report["settings"]["data"]) == (
        "log.tsv",
        40,
        str(path),
    )
    assert set(report["tables"].values()) == {4}
    status, report = train(script, "--data", str(path), "--lines", "30", *options)
    assert (status, report["lines"]) == (0, 30)

    ratings = [f"{i % 5}\t{i % 7}\t{1 + i % 5}\t{i}\n" for i in range(40)]
    (tmp_path / "u.data").write_text("".join(ratings))
    films = [
        "|".join([str(i), "a", "b", "c", "d", *"0101"[: i % 3].ljust(19, "0")]) for i in range(7)
    ]
    (tmp_path / "u.item").write_text("\n".join(films))
    status, report = train(script, "--root", str(tmp_path), *options)
    assert status == 0
    assert report["tables"] == {"user": 5, "film": 7, "genres": 19}


def test_what_is_saved_is_the_same_in_all_modes(script: Any, tmp_path: Path) -> None:
    saved = {}
    for mode in HERE:
        path = tmp_path / f"{mode}.pt"
        options = [*SMALL, "--embedding", mode, "--device", "cpu", "--save", str(path)]
        assert script.main(options) == 0
        saved[mode] = torch.load(path, weights_only=True)
    expected = saved["torch"]
    assert expected["settings"]["optimizer"] == "adagrad"
    state = expected["model"]
    assert state["tables.embedding_bags.C1.weight"].shape == (1000, 8)
    for other in saved.values():
        assert other["model"].keys() == state.keys()
        for key, value in other["model"].items():
            assert type(value) is torch.Tensor
            assert torch.equal(value, state[key])


def test_weights_do_not_depend_on_the_mode_or_on_other_tables() -> None:
    weights = initial_weights(4, torch.float32, seed=1)
    assert torch.equal(weights("C2", 100), weights("C2", 100))
    assert not torch.equal(weights("C2", 100), weights("C3", 100))
    assert weights("C2", 100).abs().max() <= 0.1
    options = TableOptions(4, torch.float32)
    tables = make_tables("torch", {"a": 5, "b": 7}, weights, torch.device("cpu"), options)
    assert isinstance(tables, TorchTables)
    assert [tuple(p.shape) for p in tables.module.parameters()] == [(5, 4), (7, 4)]


def test_only_lines_to_train_on_are_counted() -> None:
    clicks = draw_clicks(200, 1e-4, 1.05, seed=0, test_share=0.5)
    counts = counted(clicks)
    assert {name: len(count) for name, count in counts.items()} == clicks.table_rows
    assert all(int(count.sum()) == 100 for count in counts.values())


BAD_OPTIONS = {
    "way": (["--embedding", "paper"], "--embedding: invalid choice: 'paper'"),
    "no file": (["--data", "/nowhere"], "--data: /nowhere is no file"),
    "no folder": (["--root", "/nowhere"], "--root: /nowhere is no folder"),
    "both": (["--root", "/", "--data", "/x"], "--root: is for MovieLens, --data for Criteo"),
    "scale": (["--scale", "2"], "--scale: 2, accepted are numbers above 0 and up to 1"),
    "zipf": (["--zipf", "-1"], "--zipf: -1, accepted are numbers from 0 to 10"),
    "cache": (["--cache-ratio", "0"], "--cache-ratio: 0, accepted are numbers above 0"),
    "test share": (
        ["--test-share", "1"],
        "--test-share: 1, accepted are numbers above 0 and below",
    ),
    "widths": (["--top", "64-x"], "--top: 64-x, accepted are widths such as 256-64"),
    "no width": (["--bottom", "0"], "--bottom: 0, accepted are widths"),
    "lr": (["--lr", "nan"], "--lr: nan, accepted are numbers above 0"),
    "epochs": (["--epochs", "0"], "--epochs: 0, accepted are numbers from 1 on"),
    "optimizer": (["--optimizer", "adam"], "--optimizer: invalid choice: 'adam'"),
    "dense": (
        ["--optimizer", "sparse-adam", "--no-sparse"],
        "--no-sparse: --optimizer sparse-adam takes sparse gradients only",
    ),
    "torchrec": (
        ["--embedding", "ebc", "--sparse"],
        "--embedding: ebc: TorchRec's collections have",
    ),
    "device": (["--device", "abacus"], "--device: abacus, accepted are cpu and cuda"),
    "gpu": (["--device", "cuda:99"], "--device: cuda:99, but torch sees"),
    "json": (["--json", "/nowhere/x.json"], "/nowhere is no folder"),
    "save": (["--save", "/nowhere/x.pt"], "/nowhere is no folder"),
    "plot": (["--plot", "x.jpx"], "x.jpx: accepted are names in"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_options_that_are_refused(
    script: Any, options: list[str], message: str, refused: Any
) -> None:
    refused(script.main, options, message)


def test_ways_that_need_what_is_not_installed(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)
    with pytest.raises(SystemExit):
        script.main(["--embedding", "torchrec"])
    assert "--embedding: torchrec: TorchRec does not load" in capsys.readouterr().err
    assert script.wanted_modes(None, script.make_parser().parse_args([]))[0] == ["torch", "cached"]


def test_a_file_that_is_no_log(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log.txt").write_text("a\nb\n")
    assert script.main(["--data", str(tmp_path / "log.txt"), "--device", "cpu"]) == 2
    assert "log.txt: line 1 has 1 fields, expected 40" in capsys.readouterr().err


def test_interrupted(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("dlrm.training.auc", interrupt)
    assert script.main([*SMALL, "--embedding", "torch", "--device", "cpu"]) == 130
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"{Path(sys.argv[0]).name}: interrupted\n")


def test_as_a_script() -> None:
    path = ROOT / "examples" / "train_dlrm.py"
    done = run_forked(
        [path, *SMALL, "--embedding", "torch", "--device", "cpu"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "nn.EmbeddingBag" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("options", [[], ["--pipelined"]], ids=["plain", "pipelined"])
def test_on_a_gpu(script: Any, options: list[str], tmp_path: Path) -> None:
    json_file = tmp_path / "report.json"
    command = [*SMALL, *options, "--embedding", "torch", "cached", "--device", "cuda"]
    # Sums on a GPU have no fixed order, so losses may differ in their last bits.
    assert script.main([*command, "--json", str(json_file)]) in (0, 1)
    first, cached = json.loads(json_file.read_text())["runs"]
    assert losses(cached) == pytest.approx(losses(first), rel=1e-4)
    assert 0 < cached["device_bytes"] < first["device_bytes"]
    assert first["host_bytes"] == 0 < cached["host_bytes"]
