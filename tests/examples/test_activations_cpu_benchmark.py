"""benchmarks/activations.py --only cpu trains in every way, with the same gradients."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from bitslab.activations.disk import DiskRates, tier

from .conftest import ROOT


@pytest.mark.usefixtures("one_thread")
def test_every_way_has_the_gradients_of_plain_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module("activations")
    ways = importlib.import_module("activations_cpu")
    rates = DiskRates(64 << 10, 1, 1, 1e9, 1e9, 1e9, 1e9, direct=True)
    monkeypatch.setattr(tier, "disk_rates", lambda folder: rates)
    for name, value in {"LAYERS": 2, "HIDDEN": 64, "HEADS": 2, "STEPS": 3}.items():
        monkeypatch.setattr(ways, name, value)
    monkeypatch.setattr(ways, "IN_FLIGHT_BYTES", 0)
    folders = set()

    def measure(way: str, arguments: Any, folder: str, seed: int, env: Any) -> dict[str, Any]:
        """Train in this process, whose memory is not that of the way alone."""
        folders.add(Path(folder))
        found: dict[str, Any] = ways.run_way(
            way, folder, arguments.cpu_batch, arguments.cpu_tokens, seed
        )
        return {**found, "peak": 1_000_000}

    monkeypatch.setattr(ways, "measure", measure)
    given = ["--only", "cpu", "--repetitions", "1", "--json", "--folder", str(tmp_path)]
    given += ["--turns"]
    assert benchmark.main([*given, "1"]) == 0
    tables = json.loads(capsys.readouterr().out)
    *_, (title, planned) = tables.items()
    assert title == "planned steps beside plain ones: 4 x 256 tokens, medians of 1 turns"
    assert planned[2]["plan"].startswith("Declined: all fits") and tables.pop(title)
    assert len(tables) == len(ways.ALLOCATORS)
    for rows in tables.values():
        by_way = {row["way"]: row for row in rows}
        assert tuple(by_way) == ways.WAYS
        assert {row["gradients"] for row in rows} == {"equal"}
        assert by_way["plain"]["x plain"] == 1 and by_way["plain"]["to the disk"] == 0
        moved = by_way["bitslab disk"]["moved MB a step"]
        assert by_way["bitslab disk"]["to the disk"] == moved > 0
        assert 0 < by_way["bitslab disk, packed"]["to the disk"] < moved
    assert all(not folder.exists() for folder in folders) and not list(tmp_path.iterdir())
    assert benchmark.main([*given, "0", "--cpu-ways", "bitslab host"]) == 0
    for rows in json.loads(capsys.readouterr().out).values():
        assert [row["way"] for row in rows] == ["plain", "bitslab host"]
