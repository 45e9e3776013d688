"""DLRM with divided tables: raw and lossless give the same training, other ways fewer bytes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dlrm.exchanges import PackedAllToAll, pack, unpack
from dlrm.sharded import owners_of, part_sizes
from dlrm.torchrec_tables import missing_torchrec

from .conftest import ROOT
from .forked_ranks import run_ranks_of

SMALL = "--scale 1e-4 --lines 450 --batch-size 64 --embedding-dim 8 --bottom 8 --top 8".split()
STEPS = 6
#: What ranks are forks of has imported, once for all tests of this file.
IMPORTS = ("torch", "torch._dynamo", "bitslab", "sklearn.metrics", "tests.distributed.warm")
SCRIPT = ROOT / "examples" / "train_dlrm_distributed.py"


def trained(folder: Path, *options: str, ranks: int = 2) -> dict[str, Any]:
    """Run the script on some ranks, as torchrun does; return what it wrote, and checked output."""
    json_file = folder / "it.json"
    imports = [*IMPORTS, *([] if missing_torchrec() else ["torchrec"])]
    given = [*SMALL, *options, "--json", str(json_file)]
    done = run_ranks_of(SCRIPT, given, ranks=ranks, imports=imports)
    for rank, each in enumerate(done):
        assert each.returncode == 0, each.stderr
        assert bool(each.stdout) == (rank == 0)
    report: dict[str, Any] = json.loads(json_file.read_text())
    report["output"] = done[0].stdout
    return report


@pytest.mark.parametrize("torchrec", [False, True], ids=["plain", "torchrec"])
def test_all_ways_train_on_two_ranks(tmp_path: Path, torchrec: bool) -> None:
    if torchrec and (why := missing_torchrec()):
        raise ModuleNotFoundError(why, name="torchrec")
    picture = tmp_path / "it.png"
    options = ["--exchange", "raw", "lossless", "adaptive", "fp16", "--plot", str(picture)]
    # TorchRec's bytes are for rows of 32.
    options += ["--torchrec"] if torchrec else ["--exchange", *options[1:5], "int8"]
    report = trained(tmp_path, *options)
    assert report["ranks"] == 2 and report["lossless_is_raw"] is True
    assert "equal to the last bit" in report["output"] and picture.stat().st_size > 10_000
    runs = {run["way"]: run for run in report["runs"]}
    assert runs["lossless"]["losses"] == runs["raw"]["losses"]
    assert all(len(run["losses"]) == len(run["steps"]) == STEPS for run in runs.values())
    ratios = {way: run["ratio"]["forward"] for way, run in runs.items()}
    assert ratios["raw"] == 1 and ratios["fp16"] == 2
    assert ratios.get("int8", 2.0) == 2.0  # 8 bytes, and two numbers of 4
    assert ratios["lossless"] > 1 and ratios["adaptive"] > 2
    # What crosses of all ranks: of each table the lines that are not its rank's.
    raw = {sum(t["raw_bytes"] for t in run["tables"].values()) for run in runs.values()}
    assert raw == {STEPS * 32 * 26 * 8 * 4}
    adaptive = runs["adaptive"]
    assert adaptive["tables"].keys() == report["tables"].keys()
    assert {t["class"] for t in adaptive["tables"].values()} <= {"large", "medium", "small"}
    assert {t["class"] for t in runs["lossless"]["tables"].values()} == {None}
    assert adaptive["steps"][0]["factor"] == 2.0 > adaptive["steps"][-1]["factor"] > 1
    assert adaptive["losses"] != runs["raw"]["losses"]
    assert adaptive["losses"] == pytest.approx(runs["raw"]["losses"], rel=0.05)


def test_gradients_of_copies_go_back_as_sums(tmp_path: Path) -> None:
    report = trained(tmp_path, "--exchange", "raw", "lossless", "--row-ids")
    raw, lossless = report["runs"]
    assert lossless["losses"] == pytest.approx(raw["losses"], rel=1e-5)
    assert raw["ratio"]["backward"] == 1 < lossless["ratio"]["backward"]


def test_one_rank_trains_alone(tmp_path: Path) -> None:
    report = trained(tmp_path, "--exchange", "raw", "lossless", ranks=1)
    assert report["ranks"] == 1 and report["lossless_is_raw"] is True


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--root", "nowhere"], "argument --root: nowhere is no folder"),
        (["--bound", "0"], "argument --bound"),
        (["--exchange", "zip"], "argument --exchange: invalid choice: 'zip'"),
        (["--decay-steps", "0"], "argument --decay-steps"),
        (
            ["--torchrec", "--exchange", "int8", "--embedding-dim", "8"],
            "argument --embedding-dim: 8; TorchRec's int8",
        ),
        (["--codec", "raw"], "argument --codec: invalid choice: 'raw'"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--torchrec" in options and missing_torchrec():
        text = "argument --torchrec: TorchRec does not load"
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("train_dlrm_distributed").main(options)
    assert text in capsys.readouterr().err


def test_fewer_lines_than_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("train_dlrm_distributed").main(["--batch-size", "3"])
    assert "--batch-size: 3, fewer than 4 ranks" in capsys.readouterr().err


def test_tables_are_divided_evenly() -> None:
    assert owners_of({"a": 10, "b": 9, "c": 2, "d": 1}, 2) == {"a": 0, "b": 1, "c": 1, "d": 0}
    assert owners_of({"a": 1}, 3) == {"a": 0}
    assert part_sizes(7, 3) == [3, 2, 2]


@pytest.mark.parametrize(("way", "limit"), [("raw", 0.0), ("fp16", 2e-3), ("int8", 0.02)])
def test_packed_rows_are_near(way: str, limit: float) -> None:
    rows = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
    found = unpack(pack(rows, way), way, 6)
    assert float((found - rows).abs().max()) <= limit
    constant = torch.full((3, 6), 0.25)
    assert torch.equal(unpack(pack(constant, way), way, 6), constant)
    assert unpack(pack(rows[:0], way), way, 6).shape == (0, 6)
    assert PackedAllToAll(way, ["t"]).stats()["tables"]["t"]["raw_bytes"] == 0
