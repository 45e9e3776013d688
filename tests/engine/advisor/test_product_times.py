"""Times of products with packed weights: measured once, and kept."""

from __future__ import annotations

import time

import pytest
import torch

from bitslab.engine.advisor import fastest_way, fused_times, measured_rows

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BITSLAB_CACHE", str(tmp_path))
    monkeypatch.setattr("bitslab.engine.advisor.product_times._known", {})
    return tmp_path


def test_rows_are_measured_by_powers_of_two():
    assert [measured_rows(n) for n in (1, 2, 3, 4, 5, 9, 16)] == [1, 2, 4, 4, 8, 16, 16]


def test_times_are_medians_measured_once_and_kept_between_processes(cache, monkeypatch):
    """By a clock that only the work moves, of which the first run compiles and one is held up."""
    prepared, now = [], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def work(*seconds):
        left = list(seconds)

        def run():
            now[0] += left.pop(0)

        return run

    def prepare(rows):
        prepared.append(rows)
        return work(9, 2, 1, 2, 8, 3), work(9, 40, 20, 30, 10, 90)

    first = fused_times("weight", 3, CPU, prepare)
    assert (first.fused_s, first.decoded_s) == (2, 30)
    assert fused_times("weight", 4, CPU, prepare) == first
    monkeypatch.setattr("bitslab.engine.advisor.product_times._known", {})
    assert fused_times("weight", 4, CPU, prepare) == first and prepared == [4]
    fused_times("weight", 5, CPU, prepare)
    fused_times("another", 4, CPU, prepare)
    assert prepared == [4, 8, 4]


@pytest.mark.parametrize("text", ["{}", "no json", '{"fused_s": -1.0, "decoded_s": 1.0}'])
def test_damaged_files_are_measured_anew(cache, monkeypatch, text):
    prepared = []

    def prepare(rows):
        prepared.append(rows)
        return (lambda: None), (lambda: None)

    fused_times("weight", 1, CPU, prepare)
    (file,) = cache.glob("fused-*.json")
    file.write_text(text)
    monkeypatch.setattr("bitslab.engine.advisor.product_times._known", {})
    fused_times("weight", 1, CPU, prepare)
    assert prepared == [1, 1]


def test_the_fastest_way_is_measured_once_and_kept_between_processes(cache, monkeypatch):
    prepared, now = [], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def takes(seconds):
        def run():
            now[0] += seconds

        return run

    def prepare(rows):
        prepared.append(rows)
        return {"slow": takes(3), "fast": takes(1), "as fast": takes(1)}

    names = ("slow", "fast", "as fast")
    assert fastest_way(names, "product", 3, CPU, prepare) == "fast"
    monkeypatch.setattr("bitslab.engine.advisor.product_times._known", {})
    assert fastest_way(names, "product", 4, CPU, prepare) == "fast" and prepared == [4]
    fastest_way(names, "product", 5, CPU, prepare)
    assert fastest_way(("slow",), "product", 4, CPU, prepare) == "slow"
    assert prepared == [4, 8, 4]


def test_ways_that_cannot_run_are_left_out_of_what_is_kept(cache, monkeypatch):
    prepared = []

    def prepare(rows):
        prepared.append(rows)
        return {"usual": lambda: None}

    for _ in range(2):
        assert fastest_way(("usual", "refused"), "product", 4, CPU, prepare) == "usual"
        monkeypatch.setattr("bitslab.engine.advisor.product_times._known", {})
    assert prepared == [4]
