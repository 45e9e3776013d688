"""Times of products with packed weights: measured once, and kept."""

from __future__ import annotations

import time

import pytest
import torch

from bitslab.engine.advisor import fused_times, measured_rows

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BITSLAB_CACHE", str(tmp_path))
    monkeypatch.setattr("bitslab.engine.advisor.product_times._known", {})
    return tmp_path


def test_rows_are_measured_by_powers_of_two():
    assert [measured_rows(n) for n in (1, 2, 3, 4, 5, 9, 16)] == [1, 2, 4, 4, 8, 16, 16]


def test_times_are_medians_measured_once_and_kept_between_processes(cache, monkeypatch):
    prepared = []

    def prepare(rows):
        prepared.append(rows)
        return (lambda: time.sleep(0.001)), (lambda: time.sleep(0.02))

    first = fused_times("weight", 3, CPU, prepare)
    assert 0.001 <= first.fused_s < first.decoded_s and first.decoded_s >= 0.02
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
