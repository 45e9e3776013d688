"""Embeddings are looked up for inference, bit for bit those of nn.EmbeddingBag, and timed."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from dlrm.serving import percentile, same_bits
from dlrm.tables import UncachedTables

from tests.forked import run_forked

from .conftest import ROOT
from .test_dlrm_data import lines_of_criteo, written

SMALL = "--scale 1e-4 --embedding-dim 32 --batch-sizes 16 64 --repeats 4 --counted 2000".split()
SMALL += ["--seconds", "600"]  # or a busy machine would answer fewer requests
#: On a CPU, where host would be raw.
MODES = ["raw", "rows", "packed", "uncached"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def script() -> Any:
    """Import the script that serves."""
    return importlib.import_module("serve_dlrm")


CASES: dict[str, list[str]] = {
    "float32": ["--cache-ratio", "0.2"],
    "bfloat16": ["--dtype", "bfloat16"],
    "float16, inplace": ["--dtype", "float16", "--layout", "inplace"],
    "ibp, lru, uniform": ["--codec", "ibp", "--evict", "LRU", "--zipf", "0"],
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_lookups_are_those_of_torch(
    script: Any, train: Any, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = train(script, *SMALL, *options)
    assert status == 0
    assert [run["mode"] for run in report["runs"]] == MODES
    assert report["requests_that_differ"] == 0
    assert report["requests_compared"] == 3 * 2 * 4
    for run in report["runs"]:
        assert [size["batch_size"] for size in run["sizes"]] == [16, 64]
        for size in run["sizes"]:
            assert size["requests"] == 4
            assert size["lookups"] == 4 * 26 * size["batch_size"]
            times = [size[f"p{p}_seconds"] for p in (50, 90, 99)]
            assert 0 < times[0] <= times[1] <= times[2]
            assert size["request_p50_seconds"] > times[0]
    raw, rows, packed, uncached = report["runs"]
    assert raw["ratio"] == 1
    for run in (rows, packed, uncached):
        assert (run["host_bytes"] < raw["host_bytes"]) == (
            "inplace" not in report["settings"]["layout"]
        )
    for run in (rows, packed):
        assert 0 < run["sizes"][0]["hit_rate"] < 1
    assert all(size["moved_bytes"] > 0 for size in uncached["sizes"])
    assert "24 requests compared bit for bit with nn.EmbeddingBag: all equal" in (
        capsys.readouterr().out
    )


def test_requests_are_of_fresh_ids(script: Any) -> None:
    options = script.make_parser().parse_args(SMALL)
    draw = script.drawer(options, {"a": 1000, "b": 50}, 13, None)
    one, two = draw(100), draw(100)
    assert one.dense.shape == (100, 13)
    for (ids, offsets), (others, _) in zip(one.bags, two.bags, strict=True):
        assert offsets.tolist() == list(range(100))
        assert not torch.equal(ids, others)


def test_rows_that_are_asked_for_most_are_hot(script: Any, train: Any) -> None:
    report = [train(script, *SMALL, "--counted", n, "--modes", "rows")[1] for n in ("1", "20000")]
    rates = [one["runs"][1]["sizes"][1]["hit_rate"] for one in report]
    assert rates[0] < rates[1]
    counts = script.counted(
        script.drawer(script.make_parser().parse_args(SMALL), {"a": 1000, "b": 50}, 13, None),
        {"a": 1000, "b": 50},
        20_000,
        lambda done, total: None,
    )
    assert [(len(count), int(count.sum())) for count in counts.values()] == [
        (1000, 20_000),
        (50, 20_000),
    ]


def test_a_row_that_differs_is_reported(
    script: Any, train: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = UncachedTables.look_up

    def look_up(self: Any, batch: Any) -> torch.Tensor:
        pooled = honest(self, batch)
        pooled[0, 0, 0] = -pooled[0, 0, 0]
        return pooled

    monkeypatch.setattr(UncachedTables, "look_up", look_up)
    status, report = train(script, *SMALL, "--modes", "uncached")
    assert status == 1
    assert report["requests_that_differ"] == report["requests_compared"] + 2 * 2  # warm-ups too
    assert "8 requests compared bit for bit with nn.EmbeddingBag: 12 DIFFER" in (
        capsys.readouterr().out
    )


def test_a_trained_model_is_served(script: Any, train: Any, tmp_path: Path) -> None:
    trainer = importlib.import_module("train_dlrm")
    log, path = written(tmp_path / "log.csv", lines_of_criteo(), ","), tmp_path / "dlrm.pt"
    data = ["--data", str(log), "--max-rows", "5"]
    training = "--embedding cached --embedding-dim 16 --dtype bfloat16 --batch-size 9 --top 8-4"
    saving = ["--save", str(path), "--device", "cpu"]
    assert trainer.main([*data, *training.split(), *saving]) == 0
    options = ["--checkpoint", str(path), "--batch-sizes", "8", "--repeats", "3"]
    status, report = train(script, *options, *data)
    assert status == 0
    assert report["requests_from"] == "log.csv"
    assert set(report["tables"].values()) == {5}
    assert report["row_bytes"] == 32
    status, report = train(script, *options)
    assert (status, report["requests_from"]) == (0, "drawn")
    status = script.main([*options, "--data", str(log), "--max-rows", "4", "--device", "cpu"])
    assert status == 2


def test_table_shows_what_the_json_says(
    script: Any, train: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "plot.png"
    _, report = train(script, *SMALL, "--modes", "rows", "--plot", str(plot))
    out = capsys.readouterr().out
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in out.splitlines()
        if line.startswith("│")
    ]
    raw, rows = report["runs"]
    assert cells[1][0] == "rows: hot rows as they are"
    assert cells[1][1:] == [
        f"{rows['host_bytes'] / 1e6:,.2f}",
        f"{rows['device_bytes'] / 1e6:,.2f}",
        f"{rows['ratio']:.2f}",
    ]
    assert [line[1] for line in cells[2:]] == ["raw", "rows", "raw", "rows"]
    size = rows["sizes"][1]
    shown = cells[5]
    assert shown[3] == f"{size['p50_seconds'] * 1e3:.2f}"
    assert shown[6] == f"{size['lookups_per_s']:,.0f}"
    times = size["lookups_per_s"] / raw["sizes"][1]["lookups_per_s"]
    assert shown[7] == f"{times:.2f}"
    assert shown[8] == f"{size['hit_rate']:.1%}"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("seconds", "percent", "expected"),
    [([3.0, 1.0, 2.0], 50, 2.0), ([3.0, 1.0, 2.0], 99, 3.0), ([1.0], 50, 1.0)],
    ids=["median", "highest", "one"],
)
def test_percentiles_are_times_that_were_measured(
    seconds: list[float], percent: int, expected: float
) -> None:
    assert percentile(seconds, percent) == expected
    assert percentile([float(i + 1) for i in range(100)], 90) == 90


def test_bits_are_compared_and_not_numbers() -> None:
    zero, nan = torch.zeros(3), torch.full((3,), float("nan"))
    assert not same_bits(zero, -zero)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, zero.half())
    assert not same_bits(zero.half(), -zero.half())


BAD_OPTIONS = {
    "mode": (["--modes", "fast"], "--modes: invalid choice: 'fast'"),
    "host": (["--modes", "host", "--device", "cpu"], "--modes: host: on a CPU this is raw"),
    "sizes": (["--batch-sizes", "0"], "--batch-sizes: 0, accepted are numbers from 1 on"),
    "repeats": (["--repeats", "0"], "--repeats: 0, accepted"),
    "seconds": (["--seconds", "0"], "--seconds: 0, accepted are numbers above 0"),
    "checkpoint": (["--checkpoint", "/nowhere"], "--checkpoint: /nowhere is no file"),
    "data": (["--data", "/nowhere"], "--data: /nowhere is no file"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_options_that_are_refused(
    script: Any, options: list[str], message: str, refused: Any
) -> None:
    refused(script.main, options, message)


BAD_CHECKPOINTS: dict[str, tuple[Any, str]] = {
    "text": (b"no model", "cannot be read"),
    "nothing": (b"", "cannot be read"),
    "weights alone": ({"bottom.0.weight": torch.zeros(2)}, "not written by train_dlrm.py --save"),
    "no tables": ({"model": {}, "settings": {}}, "has no tables or no bottom perceptron"),
}


@pytest.mark.parametrize(("content", "message"), BAD_CHECKPOINTS.values(), ids=BAD_CHECKPOINTS)
def test_files_that_are_no_checkpoints(
    script: Any, content: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dlrm.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert script.main(["--checkpoint", str(path), "--device", "cpu"]) == 2
    assert f"--checkpoint {path}: {message}" in capsys.readouterr().err


def test_as_a_script_with_json_on_the_output() -> None:
    path = ROOT / "examples" / "serve_dlrm.py"
    options = [*SMALL, "--modes", "uncached", "--device", "cpu", "--json", "-"]
    done = run_forked([path, *options], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    report = json.loads(done.stdout)
    assert [run["mode"] for run in report["runs"]] == ["raw", "uncached"]
    assert report["settings"]["batch_sizes"] == [16, 64]


@pytest.mark.gpu
def test_on_a_gpu(script: Any, tmp_path: Path) -> None:
    json_file = tmp_path / "report.json"
    assert script.main([*SMALL, "--device", "cuda", "--json", str(json_file)]) == 0
    runs = {run["mode"]: run for run in json.loads(json_file.read_text())["runs"]}
    assert list(runs) == ["raw", "host", "rows", "packed", "uncached"]
    assert runs["raw"]["host_bytes"] == runs["host"]["device_bytes"] == 0
    assert runs["rows"]["device_bytes"] < runs["raw"]["device_bytes"]
