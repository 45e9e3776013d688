"""benchmarks/llm.py measures every way that this machine can run, with equal tokens."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import ROOT

SMALL = "--size tiny --prompt-tokens 200 --batch 2 --new-tokens 4 --repetitions 1 --device cpu"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import the script; compute with one thread, and with no network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module("llm")
    torch.set_num_threads(n)


def test_benchmark_measures_all_ways(
    benchmark: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    out = tmp_path / "llm.md"
    command = ["llm.py", "--only", "weights", "cache", *SMALL.split(), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    assert benchmark.main() == 0
    text = out.read_text()
    told = capsys.readouterr()
    assert text in told.out + "\n"
    assert "llama tiny (2 layers), bfloat16, 2 x 200 tokens, 4 new ones, on cpu" in text
    for way in ("plain, on the device", "accelerate cpu_offload", "packed, streamed"):
        assert text.count(f"| {way} ") == 2  # generation, and single passes
    assert text.count("| raw, streamed ") == 1
    assert "CompressedCache, host" in text and "CompressedCache, device" in text
    assert text.count(" equal ") == 7 and "DIFFER" not in text
    assert "left out: transformers' offloaded: it needs a GPU" in told.err


def test_a_cpu_gets_a_part_of_the_workload(benchmark: Any) -> None:
    parser = benchmark.make_parser()
    there = benchmark.scaled(parser, ["--device", "cpu"])
    assert (there.batch, there.prompt_tokens, there.new_tokens) == (4, 192, 13)
    asked = ["--device", "cpu", "--scale", "1", "--batch", "20"]
    there = benchmark.scaled(parser, asked)
    assert (there.batch, there.prompt_tokens, there.new_tokens) == (20, 1920, 128)
    there = benchmark.scaled(parser, ["--device", "cpu", "--new-tokens", "5"])
    assert (there.prompt_tokens, there.new_tokens) == (1920, 5)


@pytest.mark.parametrize(
    "options", [["--batch", "0"], ["--repetitions", "0"], ["--scale", "0"], ["--layers", "-1"]]
)
def test_numbers_that_are_refused(
    benchmark: Any, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark.scaled(benchmark.make_parser(), options)
    assert f"argument {options[0]}: {options[1]}, accepted are numbers" in capsys.readouterr().err
