"""The arithmetic of benchmarks/activations.py --only model."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from .conftest import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("activations_model")


def test_sizes_are_those_that_torch_saves(script: Any) -> None:
    times = script.measure(128, 64, [1, 2], torch.device("cpu"), 1)
    row = script.size_row(times)
    assert row["off %"] == pytest.approx(0, abs=3)
    assert row["backward / forward"] > 0 and times.update > 0


def test_gains_are_split_and_bubbles_grow(script: Any) -> None:
    # A second for one sequence, half of it each for eight; an update takes two.
    times = script.LayerTimes(8192, 1024, 2, {1: 0.4, 8: 1.6}, {1: 0.6, 8: 2.4}, 2.0, 1)
    one, eight = script.gain_rows(times)
    assert one["throughput over one %"] == 0 and one["by kernels, of the gain %"] is None
    assert eight["ms a sequence"] == pytest.approx(750)
    assert eight["throughput over one %"] == pytest.approx(300)
    assert eight["by kernels, of the gain %"] == pytest.approx(100 * 0.5 / 2.25)
    assert eight["by updates, of the gain %"] == pytest.approx(100 * 1.75 / 2.25)
    one, eight = script.pipeline_rows(times)
    assert one["bubbles, of the step %"] == pytest.approx(100 * 11 / (32 + 11 + 2))
    assert eight["bubbles, of the step %"] == pytest.approx(100 * 44 / (16 + 44 + 2))
    assert eight["throughput over one"] == pytest.approx(45 / 62)
    # BLOOM's, with micro-batches of four: 11.5 % in section 5.4.4.
    four = script.LayerTimes(8192, 1024, 2, {4: 1.0}, {4: 2.0}, 1.0, 1)
    assert script.pipeline_rows(four)[0]["(p - 1) / (p m), as the paper %"] == pytest.approx(
        11.5, abs=0.05
    )


def test_larger_systems_need_less_and_their_drives_last_longer(script: Any) -> None:
    flop = 1024 * (24 * 8192**2 + 2 * 1024 * 8192)
    times = script.LayerTimes(8192, 1024, 2, {1: flop / 140e12}, {1: 1.0}, 1.0, 1)
    rows = script.system_rows(times, 80e9)
    rates = [row["GB/s to write"] for row in rows]
    years = [row["years, D7-P5620"] for row in rows]
    assert rates == sorted(rates, reverse=True) and years == sorted(years)
    # At 140 TFLOP/s, as measured on A100 there: at most 12.1 GB/s, and more than three years.
    within = [row for row in rows if row["hidden"] >= 12288]
    assert max(row["GB/s to write"] for row in within) < 12.1
    assert min(row["years, D7-P5620"] for row in within) > 3
    # A step is three forward passes, and half of it writes.
    first, bytes_of_one = rows[0], 32 * 1024 * 8192 / 8
    assert first["GB/s to write"] == pytest.approx(
        bytes_of_one / (1.5 * flop / 8 / 140e12) / 1e9, rel=0.01
    )
