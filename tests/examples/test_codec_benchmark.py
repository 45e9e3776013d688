"""benchmarks/codec.py --only published counts bits and sizes as the IBP paper does."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

import bitslab

from .conftest import ROOT


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Any:
    """Import the part of the benchmark."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("codec_published")


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_leading_zeros_are_those_of_the_binary_form(published: Any, dtype: Any) -> None:
    bits = 8 * np.dtype(dtype).itemsize
    words = np.array([0, 1, 2, 255, 256, (1 << bits) - 1, 1 << (bits - 1)], dtype)
    expected = [bits - int(word).bit_length() for word in words]
    assert published.leading_zeros(words).tolist() == expected


def test_plain_packing_removes_the_high_zeros_of_all_values(published: Any) -> None:
    words = np.array([[1, 255], [3, 16]], np.uint32)
    assert published.bits_removed(words) == 100 * 24 / 32
    # Column 0 of the group needs 2 bits, column 1 needs 8.
    assert published.bits_removed(words, 2) == 100 * (30 + 24) / 64
    # Alone, the rows need 1 and 8, and 2 and 5.
    assert published.bits_removed(words, 1) == 100 * (31 + 24 + 30 + 27) / 128


def test_bits_are_invariant_where_enough_rows_agree(published: Any) -> None:
    words = np.zeros((10, 1), np.uint32)
    words[:2] = 0b1  # 8 of 10 rows have a 0
    words[:3] |= 0b10  # 7 of 10
    words[:9] |= 0b100  # 9 of 10 have a 1
    assert published.invariant_bits(words) == 100 * 31 / 32
    assert published.invariant_bits(words, 0.9) == 100 * 30 / 32


def test_shares_and_clusters_are_measured_by_their_bytes(published: Any) -> None:
    rows = torch.randn(400, 16) * 0.02
    shares = published.share_row("drawn", rows)
    packed = published.published_codec(rows).packed_bytes(rows)
    assert shares["100 %"] == rows.nbytes / int(packed.sum()) > shares["1 %"] >= 1
    one = bitslab.InvariantCodec.fit(rows, chunk_bytes=4, **published.PUBLISHED)
    whole = bitslab.compress(rows, one)
    clusters = published.cluster_row("drawn", rows)
    assert clusters["1 allowed"] == pytest.approx(100 * (1 - whole.nbytes / whole.raw_nbytes))
    assert 1 <= clusters["used of 256"] <= 256


def test_a_cache_holds_more_packed_rows(published: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "GRAPH_ROWS", 1000)
    rows = torch.zeros(50, 256)
    rows[:, 0] = torch.arange(50)  # a packed row has few bytes beside its codes
    held = published.cache_row("Citeseer", rows)
    assert held["raw rows"] == 10
    assert held["best plan, rows"] >= held["published, rows"] >= 10 * held["raw rows"]
    assert held["published, times"] == held["published, rows"] / 10
