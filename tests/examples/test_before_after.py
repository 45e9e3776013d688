"""benchmarks/before_after.py compares two versions; benchmarks/host_time.py times each call."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT

BENCHMARK = """
import json, sys
assert sys.argv[1:] == ["--only", "cpu", "--json"]
import bitslab
print("a warning")
rows = [{"way": "ours", "calls": 3, "host us": bitslab.US, "M/s": bitslab.RATE}]
print(json.dumps({"a table": rows, "sizes": [{"way": "ours", "MB": 5}]}))
"""


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module(name)


def checkout(folder: Path, us: float, rate: float) -> str:
    """Make a checkout whose package holds the figures that its benchmark prints."""
    for part in ("core", "integrations", "benchmarks"):
        (folder / part).mkdir(parents=True)
    (folder / "core" / "__init__.py").write_text(f"US, RATE = {us}, {rate}\n")
    (folder / "benchmarks" / "x.py").write_text(BENCHMARK)
    return str(folder)


@pytest.mark.parametrize(
    ("us", "rate", "slower"),
    [(100.0, 7.0, []), (104.0, 7.0, ["host us"]), (90.0, 6.0, ["M/s"]), (102.0, 7.1, [])],
    ids=["equal", "longer", "lower rate", "within the limit"],
)
def test_what_got_slower_is_named(
    us: float,
    rate: float,
    slower: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    before_after = script("before_after", monkeypatch)
    old, new = checkout(tmp_path / "old", 100, 7), checkout(tmp_path / "new", us, rate)
    monkeypatch.setattr(
        sys, "argv", ["before_after.py", old, new, "--rounds", "1", "--json", "x.py --only cpu"]
    )
    assert before_after.main() == 0
    tables = json.loads(capsys.readouterr().out)
    found = [line for lines in tables.values() for line in lines]
    assert [line["figure"] for line in found if line["slower"]] == slower
    assert all(line["row"] == "ours, 3" for line in found)
    assert not any(line["figure"] == "MB" for line in found)  # equal ones are counted only


@pytest.mark.parametrize(
    ("rounds", "slower"), [([100.0, 101.0], "yes"), ([100.0, 120.0], "")], ids=["quiet", "noisy"]
)
def test_a_change_within_the_noise_is_none(
    rounds: list[float], slower: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = script("before_after", monkeypatch).Figure("a row", "host us")
    figure.rounds = {"before": rounds, "after": [110.0, 111.0]}
    assert figure.line(3)["slower"] == slower


def test_rows_are_paired_where_a_version_measures_more_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tables(*rows: tuple[str, float]) -> dict[str, Any]:
        return {"a table": [{"data": name, "host us": us} for name, us in rows]}

    old = {"gone": [], **tables(("x", 1.0), ("x", 2.0), ("y", 3.0))}
    new = tables(("x", 1.5), ("new", 9.0), ("x", 2.5), ("y", 3.5), ("y", 8.0))
    figures = script("before_after", monkeypatch).figures_of([old], [new])["a table"]
    found = [(f.row, f.rounds["before"], f.rounds["after"]) for f in figures]
    assert found == [("x", [1.0], [1.5]), ("x", [2.0], [2.5]), ("y", [3.0], [3.5])]


def test_a_ratio_that_falls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = script("before_after", monkeypatch).Figure("a table", "published ratio")
    figure.rounds = {"before": [1.2005], "after": [1.1563]}
    assert figure.line(3)["slower"] == "yes"


@pytest.mark.parametrize(
    ("title", "figures"),
    [
        ("lookups, million a second", ["bag M/s", "nn M/s", "bag of nn"]),
        ("steps, microseconds", ["bag us", "nn us", "bag of nn"]),
        ("a table", ["bag of nn"]),
    ],
    ids=["a rate", "a time", "no unit"],
)
def test_columns_without_a_unit_have_that_of_their_title(
    title: str, figures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"ids": 512, "bag": 2.0, "nn": 3.0, "bag / nn": 1.5, "bag of nn": 0.5}
    tables = [{title: [row]}]
    (found,) = script("before_after", monkeypatch).figures_of(tables, tables).values()
    assert [each.column for each in found] == figures
    assert found[-1].higher_is_better
    assert all(each.row == "512" for each in found)


def test_host_time_measures_every_call(
    one_thread: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    host_time = script("host_time", monkeypatch)
    monkeypatch.setattr(sys, "argv", "host_time.py --device cpu --calls 2 --runs 1 --json".split())
    assert host_time.main() == 0
    (rows,) = json.loads(capsys.readouterr().out).values()
    assert len(rows) == 10
    assert all(row["host us"] > 0 for row in rows)
