"""benchmarks/swap.py counts what a CNN saves, and measures its steps in every way."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bitslab.engine.advisor import SwapLimits
from bitslab.engine.codecs import ZvcCodec

from .conftest import ROOT

LIMITS = SwapLimits(1 << 30, 3, 2)


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


def test_tensors_of_language_models_are_summed_by_kind(ratio: Any) -> None:
    llm = importlib.import_module("swap_llm")

    def saved(values: torch.Tensor, kind: str = "linear") -> Any:
        return ratio.Saved("layer", kind, values.shape, values.flatten())

    dense, mask = torch.randn(4096).bfloat16(), (torch.rand(4096) > 0.1).bfloat16()
    scores = torch.randn(2, 32, 32).masked_fill(torch.ones(32, 32).triu(1).bool(), -torch.inf)
    some = [
        saved(dense),
        saved(mask, "dropout mask"),
        saved(torch.randn(4096)),
        saved(dense.float()),
        saved(torch.zeros(4096)),
        saved(scores.softmax(-1).bfloat16()),
        saved(scores.softmax(-1)),
        saved(nn.functional.dropout(scores.softmax(-1), 0.1)),
        saved(torch.rand(2, 32, 32).gt(0.1).float()),
    ]
    named = llm.by_kind(some, torch.bfloat16, 32)
    assert [each.kind for each in named] == [
        "dense", "dropout mask", "linear", "cast", "linear", "softmax, bfloat16",
        "softmax, float32", "dropped softmax", "dropout mask",
    ]  # fmt: skip
    assert [each.kind for each in llm.by_kind(some[2:4], torch.float32, 32)] == ["dense", "dense"]
    rows = {row["saved"]: row for row in ratio.table(named, llm.KINDS)}
    assert rows["dense"]["MB"] == pytest.approx(8192e-6)
    assert 20 < rows["dense"]["best saves %"] < 40  # of normal values
    assert rows["casts of bfloat16 to float32"]["best saves %"] > 55
    assert rows["softmax, bfloat16"]["best saves %"] > 40  # half of it is zero
    assert rows["dropout masks"]["best saves %"] > 80
    assert rows["everything"]["MB"] == pytest.approx(sum(t.values.nbytes for t in some) / 1e6)


def test_steps_are_measured_in_every_way(
    benchmark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = (
        "--policies raw static none --select all --peers save_on_cpu torchtune --activations relu"
    )
    size = "--models alexnet --train-batch 32 --train-steps 1 --steps 3 --device cpu --json"
    assert benchmark.main(["--only", "train", *ways.split(), *size.split()]) == 0
    printed = capsys.readouterr()
    assert "left out: none (policy: 'none', accepted are" in printed.err
    rows, summary = json.loads(printed.out).values()
    by_way = {row["way"]: row for row in rows}
    assert list(by_way)[:3] == ["plain", "raw, all", "static, all"]
    assert {"save_on_cpu", "plain, at the end"} <= set(by_way)
    assert len({row["loss"] for row in rows}) == 1  # to the last bit
    raw, static, plain = (by_way[way] for way in ("raw, all", "static, all", "plain"))
    assert raw["out GB"] == raw["crossed out"] == static["out GB"]
    assert raw["crossed in"] <= raw["out GB"]  # what is read soon has not left yet
    assert 0 < static["crossed out"] < raw["crossed out"] and plain["out GB"] == 0
    assert raw["exposed"] == pytest.approx(raw["step"] - plain["step"])
    assert static["of raw"] == pytest.approx(static["exposed"] / raw["exposed"])
    assert [row["model"] for row in summary] == ["alexnet", "mean"]
    assert summary[0]["raw exposed"] == raw["exposed"]


def test_no_time_is_left(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--only train --seconds-limit 0 --policies raw --peers --device cpu --json"
    assert benchmark.main(options.split()) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == "{}" and printed.err.count("(--seconds-limit)") == 12


def test_decisions_are_compared_with_measured_times(benchmark: Any) -> None:
    decisions = importlib.import_module("swap_decisions")
    tensors = [torch.randn(1 << 18).relu(), torch.randn(1 << 17)]
    rows = [
        {
            "site": f"{i}",
            "nbytes": t.nbytes,
            "operation": "",
            "sparsity": 0.5,
            "ratio": {"zvc": 0.9},
            # Compute hides all of the first tensor's way, so that packing it never pays.
            "hidden_forward_s": 1.0,
            "hidden_backward_s": 1.0,
            "action": action,
            "codec": codec,
            "raw_s": 0.0,
            "packed_s": 1.0,
            "reason": "",
        }
        for i, (t, action, codec) in enumerate(
            zip(tensors, ("pack", "raw"), ("zvc", None), strict=True)
        )
    ]
    table, shares = decisions.compared(rows, tensors, lambda *given: (1.0, 1.0), LIMITS)
    assert [row["by times"] for row in table] == ["raw", "raw"]
    assert [row["agrees"] for row in table] == ["NO", "yes"]
    assert shares["sites"] == 2 and shares["agreement"] == 0.5
    assert shares["model error"] > 1  # 2 s for a megabyte
    with pytest.raises(ValueError, match="other tensors"):
        decisions.compared(rows, tensors[:1], lambda *given: (1.0, 1.0), LIMITS)


def test_time_of_kernels_that_overlap_counts_once(benchmark: Any) -> None:
    profile = importlib.import_module("swap_profile")
    spans = [(0.0, 4.0), (1.0, 2.0), (3.0, 6.0), (10.0, 11.0)]
    events = [SimpleNamespace(time_range=SimpleNamespace(start=a, end=b)) for a, b in spans]
    assert profile.busy_us(events) == 7.0


def test_a_way_that_fails_is_reported(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = importlib.import_module("swap_train")
    measure = train.measure

    def fails(job: Any, way: str, *more: Any) -> Any:
        if way == "raw":
            raise RuntimeError("out of luck")
        return measure(job, way, *more)

    monkeypatch.setattr(train, "measure", fails)
    options = "--only train --policies raw --peers --select all --activations relu --device cpu"
    size = "--models alexnet --train-batch 4 --train-steps 0 --steps 3 --json"
    assert benchmark.main([*options.split(), *size.split()]) == 1
    printed = capsys.readouterr()
    assert "FAILED: alexnet, relu: raw, all" in printed.err and "out of luck" in printed.err
    rows = next(iter(json.loads(printed.out).values()))
    assert [row["way"] for row in rows] == ["plain", "plain, at the end"]


@pytest.mark.gpu
def test_a_step_on_a_gpu(
    benchmark: Any, capsys: pytest.CaptureFixture[str], quick_measuring: None
) -> None:
    options = "--only train --activations relu --select all --device cuda --shape cifar --json"
    size = "--models alexnet --train-batch 256 --train-steps 2 --steps 3 --grid alexnet"
    assert benchmark.main([*options.split(), *size.split(), "--peers", "save_on_cpu"]) == 0
    tables = json.loads(capsys.readouterr().out)
    by_way = {row["way"]: row for row in next(iter(tables.values()))}
    assert set(by_way) >= {"plain", "raw, all", "static, all", "auto, all", "save_on_cpu"}
    raw, static = by_way["raw, all"], by_way["static, all"]
    assert 0 < raw["crossed in"] <= raw["crossed out"] == raw["out GB"] == static["out GB"]
    assert 0 < static["crossed out"] < raw["crossed out"] and raw["link"] > static["link"] > 0
    (profile,) = (rows for title, rows in tables.items() if "static, all: one step" in title)
    streams = [row for row in profile if row["stream"]]
    assert streams[0]["stream"] == "computes" and len(streams) > 1  # copies have their own
    assert any("figure 9" in title for title in tables)
