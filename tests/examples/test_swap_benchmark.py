"""benchmarks/swap.py counts what a CNN saves, by kind and codec, all metadata included."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
import torch

from bitslab.engine.codecs import ZvcCodec

from .conftest import ROOT


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("swap")


@pytest.fixture
def ratio(benchmark: Any) -> Any:
    return importlib.import_module("swap_ratio")


def test_saved_tensors_are_counted_by_kind(
    benchmark: Any, ratio: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    small = "--only ratio --models alexnet --epochs 1 --images 60 --batch-size 8 --json".split()
    assert benchmark.main(small) == 0
    printed = capsys.readouterr()
    tables = json.loads(printed.out)
    assert [title.split(", ")[1] for title in tables] == ["float32", "bfloat16"]
    assert printed.err.count("training 1 epochs") == 2
    for rows in tables.values():
        by_kind = {row["saved"]: row for row in rows}
        assert {"activations", "pool indices", "everything"} <= set(by_kind)
        for row in rows:
            assert row["best"] >= max(row[name] for name in ratio.CODECS)
        assert by_kind["activations"]["zvc+ibp"] > by_kind["activations"]["zvc"] > 1.2
        assert by_kind["pool indices"]["ibp-blob"] > 4


def test_sizes_have_all_metadata(ratio: Any) -> None:
    values = torch.randn(5000).relu()
    sizes = ratio.sizes_of(values)
    assert sizes["raw"] == 20000
    assert sizes["zvc"] == ZvcCodec().encode(values).nbytes
    assert sizes["best"] == min(sizes[name] for name in ("raw", *ratio.CODECS))
