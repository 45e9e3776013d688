"""benchmarks/activations.py --only rok, and steps of an idle planner, at tiny sizes on a CPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.quick_measuring import measure_quickly

from .conftest import ROOT

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:bitslab. memory_bytes:UserWarning"),  # of the least possible
]
TINY = "--device cpu --models llama --hidden 64 --layers 2 --sequence 32 --repetitions 1"
PNG = b"\x89PNG"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    measure_quickly(monkeypatch, tmp_path / "cache")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("activations")


def test_a_table_and_a_picture_of_throughput_over_peak(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "made" / "rok.svg"
    given = ["--only", "rok", *TINY.split(), "--batches", "2", "4", "--json"]
    assert script.main([*given, "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    ((title, rows),) = json.loads(said[said.index("{") :]).items()
    assert title == "rok: llama, hidden 64 x 2 layers, batch as shown, 32 tokens, cpu"
    ways = [
        *("keep", "checkpoint", "save_on_cpu", "raw"),
        *("planned at keep", "planned at checkpoint", "planned at save_on_cpu"),
    ]
    for batch in (2, 4):
        mine = [row for row in rows if row["batch"] == batch]
        assert [row["way"] for row in mine] == ways
        assert mine[0]["of keep"] == "1.00"
        assert all(row["tokens/s"] > 0 and row["peak MB"] > 0 for row in mine)
    drawn = picture.read_text()
    assert all(f">{text}<" in drawn for text in (*ways, "peak, MB", "tokens/s", "2", "4"))


def test_batches_grow_until_keeps_memory_is_full(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = importlib.import_module("activations_rok")

    def point(name: str, batch: int, way: str, limit: int | None, *more: Any) -> Any:
        """Have each sequence take 10 ms and 100 bytes, or half of them where it is planned."""
        asked.append((batch, limit))
        return batch / 100, batch * 50 if limit else batch * 100, ""

    asked: list[tuple[int, int | None]] = []
    said: list[str] = []
    monkeypatch.setattr(curves, "point_of", point)
    arguments = script.make_parser().parse_args(["--only", "rok", *TINY.split()])
    arguments.batches, arguments.device = [8, 4], "cuda"
    (rows,) = curves.rok(arguments, said.append).values()
    mine = [row for row in rows if row["way"] == "planned at keep's peak"]
    # Of 800 bytes; the next would be 18.
    assert [row["batch"] for row in mine] == [10, 12, 15, 16]
    assert [row["times keep's batch"] for row in mine] == ["1.25", "1.50", "1.88", "2.00"]
    assert {row["of keep"] for row in mine} == {"1.00"}
    assert [each for each in asked if each[0] >= 10] == [(b, 800) for b in (10, 12, 15, 16, 18)]
    assert said[-1] == "llama, batch 18: 0.0 MB, where keeping takes 0.0 MB"


def test_ways_and_growth_of_batches_may_be_chosen(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = importlib.import_module("activations_rok")
    peaks = iter([100, 60, 90])
    monkeypatch.setattr(curves, "Job", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(curves, "way_point", lambda *_: (0.5, next(peaks), "all"))
    chosen = ["--rok-ways", "keep", "--batches", "4", "--growth", "1.75"]
    arguments = script.make_parser().parse_args(["--only", "rok", *TINY.split(), *chosen])
    said: list[str] = []
    (rows,) = curves.rok(arguments, said.append).values()
    ways = ["keep", "planned at keep", "planned at keep's peak"]
    assert [row["way"] for row in rows] == ways and [row["batch"] for row in rows] == [4, 4, 7]
    assert said[-1] == "llama, batch 7, planned at keep's peak: 500.0 ms, 0 MB all"


def test_a_batch_that_the_device_has_no_room_for_ends_them(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = importlib.import_module("activations_rok")

    def point(job: Any, way: str, limit: int | None, repetitions: int) -> Any:
        if job.batch > 5:
            raise torch.OutOfMemoryError
        return 1.0, 100, ""

    monkeypatch.setattr(curves, "way_point", point)
    said: list[str] = []
    arguments = script.make_parser().parse_args(["--only", "rok", *TINY.split()])
    arguments.batches = [4, 6]
    (rows,) = curves.rok(arguments, said.append).values()
    assert {row["batch"] for row in rows} == {4, 5}
    assert [row["batch"] for row in rows if row["way"] == "planned at keep's peak"] == [5]
    assert said[-1].startswith("llama, batch 6: more than there is")


def test_a_picture_of_a_part_that_does_not_run_is_refused(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.main(["--only", "disk", "--plot", str(tmp_path / "rok.png")])
    assert "argument --plot: it draws the part rok" in capsys.readouterr().err
    pictures = importlib.import_module("activations_pictures")
    with pytest.raises(ValueError, match="none begins with 'rok: '"):
        pictures.draw({"other": []}, tmp_path / "rok.png")


def test_pictures_have_a_place_for_each_model(script: Any, tmp_path: Path) -> None:
    pictures = importlib.import_module("activations_pictures")
    row = {"batch": 1, "way": "keep", "peak MB": 2.0, "tokens/s": 3}
    pictures.draw({f"rok: {name}": [row] for name in "abc"}, tmp_path / "rok.png")
    assert (tmp_path / "rok.png").read_bytes().startswith(PNG)


def test_planned_steps_take_turns_with_plain_ones(script: Any, tmp_path: Path) -> None:
    turns = importlib.import_module("activations_turns")

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))

    arguments = script.make_parser().parse_args(
        "--only cpu --cpu-batch 8 --cpu-tokens 256 --turns 3".split()
    )
    said: list[str] = []
    folder = tmp_path / "disk"
    folder.mkdir()
    found = turns.table(arguments, make, 32, str(folder), said.append)
    ((title, rows),) = found.items()
    assert title == "planned steps beside plain ones: 8 x 256 tokens, medians of 3 turns"
    by_way = {row["way"]: row for row in rows}
    assert tuple(by_way) == turns.WAYS
    assert float(by_way["plain"]["times plain"]) == 1
    assert {row["gradients"] for row in rows} == {"equal"}
    for way in (turns.IDLE, turns.NEAR):
        assert by_way[way]["plan"].startswith("Declined: all fits")
        assert by_way[way]["written MB"] == by_way[way]["waits ms"] == 0
    assert by_way[turns.PLANNED_DISK]["plan"] != "none"
    assert said and not list(folder.iterdir())
