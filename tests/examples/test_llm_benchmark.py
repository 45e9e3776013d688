"""benchmarks/llm.py measures every way that this machine can run, with equal tokens."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import re
import runpy
import sys
from dataclasses import asdict
from pathlib import Path
from subprocess import PIPE, CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bitslab.errors import ArgumentError

from .conftest import ROOT

SMALL = "--size tiny --prompt-tokens 200 --batch 2 --new-tokens 4 --slow-tokens 3 "
SMALL += "--repetitions 1 --device cpu"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Any:
    """Import the script; compute with one thread, and with no network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("llm")


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
    printed = capsys.readouterr()
    assert text in printed.out + "\n"
    assert (
        "llama tiny (2 layers, 2 K/V heads), bfloat16, 2 x 200 tokens, 4 new ones, on cpu" in text
    )
    for way in ("plain, on the device", "accelerate cpu_offload", "packed, streamed"):
        assert text.count(f"| {way} ") == 2  # generation, and single passes
    assert text.count("| raw, streamed ") == 1
    for where in ("host", "half on the host", "auto", "device"):
        assert f"| CompressedCache, {where} " in text
    assert text.count(" equal ") == 9 and "DIFFER" not in text
    generated = text[: text.index("Weights: one forward pass")]
    tokens = re.findall(r"^\| (\S+).*?\| (\d)  +\|", generated, flags=re.MULTILINE)
    assert tokens == [("plain,", "4"), ("accelerate", "3"), ("packed,", "4"), ("packed,", "4")]
    assert printed.err.count("packed, streamed: ") == 2  # as soon as the rows are there
    assert "left out: transformers' offloaded: it needs a GPU" in printed.err


def test_flexgen_and_infinigen_of_the_paper_are_measured(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["llm.py", "--only", "published", "--json", "--model", "opt", *SMALL.split()]
    monkeypatch.setattr(sys, "argv", command)
    assert benchmark.main() == 0
    printed = capsys.readouterr()
    flexgen, infinigen = json.loads(printed.out).values()
    raw, packed = flexgen
    assert 1.2 * packed["moved MB a pass"] < raw["moved MB a pass"]
    assert packed["times as fast as raw"] == pytest.approx(raw["latency s"] / packed["latency s"])
    assert [row["way"] for row in infinigen] == [
        "DynamicCache",
        "all tokens, packed",
        "chosen tokens, packed",
    ]
    plain, every, chosen = infinigen
    assert plain["equal tokens %"] == every["equal tokens %"] == every["of the tokens"] * 100 == 100
    assert chosen["of the tokens"] < 0.5
    assert chosen["up MB/token"] < every["up MB/token"]
    assert "left out: transformers' offloaded: it needs a GPU" in printed.err


def test_loading_stands_beside_a_plain_load(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["llm.py", "--only", "loading", "--json", *SMALL.split()]
    monkeypatch.setattr(sys, "argv", command)
    assert benchmark.main() == 0
    ((title, rows),) = json.loads(capsys.readouterr().out).items()
    assert title == "Loading: llama tiny (2 layers), bfloat16, on cpu"
    assert [row["way"] for row in rows] == [
        "offload_compressed, from host memory",
        "from_pretrained",
    ]
    for row in rows:
        assert 1.2 * row["packed MB"] < row["raw MB"]
        ratio = row["seconds"] / row["peer seconds"]
        assert row["times the peer's time"] == pytest.approx(ratio)


def test_page_locking_is_measured_beside_one_thread(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = importlib.import_module("page_locking")
    command = ["page_locking.py", "--gib", "0.03", "--repetitions", "1", "--threads", "1", "3"]
    monkeypatch.setattr(sys, "argv", [*command, "--json"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main() == 0
    ((_, rows),) = json.loads(capsys.readouterr().out).items()
    found = [(row["memory"], row["way"], row["threads"]) for row in rows]
    assert found == [(kind, "taken", n) for kind in script.KINDS for n in (1, 3)]
    single = [row["times faster than the peer"] for row in rows if row["threads"] == 1]
    assert single == [1.0] * len(script.KINDS)


class Processes:
    """Runs scripts of the benchmarks here, where a process would import transformers anew.

    Parameters
    ----------
    monkeypatch : pytest.MonkeyPatch
        What a script finds and changes is as before in the end.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.commands: list[list[str]] = []

    def run(self, command: list[str], **options: Any) -> CompletedProcess[str]:
        """Run a command as `subprocess.run` does that keeps what is printed."""
        assert options == {"stdout": PIPE, "text": True, "check": False}
        self.commands.append(command)
        printed = io.StringIO()
        attention = torch.backends.cuda.cudnn_sdp_enabled()
        with self._monkeypatch.context() as patch, contextlib.redirect_stdout(printed):
            patch.setattr(sys, "argv", command[1:])
            # The script itself finds what the examples share.
            patch.setattr(sys, "path", [p for p in sys.path if p != str(ROOT / "examples")])
            for name in [name for name in sys.modules if name.split(".")[0] == "common"]:
                patch.delitem(sys.modules, name)
            patch.setattr(os, "_exit", sys.exit)
            try:
                runpy.run_path(command[1], run_name="__main__")
            except SystemExit as end:
                return CompletedProcess(command, int(end.code or 0), printed.getvalue())
            finally:
                torch.backends.cuda.enable_cudnn_sdp(attention)
        raise AssertionError(f"{command[1]}: did not end its process")


def test_prompts_are_measured_request_by_request_in_a_process_of_their_own(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = importlib.import_module("llm_prompt")
    processes = Processes(monkeypatch)
    monkeypatch.setattr(prompts.subprocess, "run", processes.run)
    case = prompts.Case(1, 64, 2, 1, 96, batch=2, tokens=300, first=1.5, second=1.25)
    monkeypatch.setattr(prompts, "scaled_to_cpu", lambda _: case)
    command = "llm.py --only prompt --prompt-cases 8k --prompt-modes host --device cpu --json"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--repetitions", "1"])
    assert benchmark.main() == 0
    ((python, script, given),) = processes.commands
    assert (python, script) == (sys.executable, prompts.__file__)
    assert json.loads(given)["case"] == asdict(case)
    rows, facts = json.loads(capsys.readouterr().out).values()
    assert [(row["request"], row["asked"]) for row in rows] == [
        ("first", 1.5),
        ("second", 1.25),
        ("later", 1.25),
    ]
    for row in rows:
        assert row["times"] == pytest.approx(row["prompt ms"] / row["DynamicCache ms"])
        assert row["ratio"] > 1.2 and 0 < row["host ms"] <= row["prompt ms"]
    [process] = facts
    assert process["case"] == "8k" and process["gc"] == "/".join(map(str, gc.get_threshold()))


def test_a_process_that_fails_ends_the_benchmark(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = importlib.import_module("llm_prompt")
    monkeypatch.setattr(
        prompts.subprocess, "run", lambda command, **_: CompletedProcess(command, 3, "")
    )
    with pytest.raises(SystemExit, match="host: its process ended with 3"):
        prompts._in_process(prompts.CASES["8k"], "host", 1, torch.device("cpu"))


def test_prompts_whose_tokens_differ_end_the_benchmark(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = importlib.import_module("llm_prompt")
    monkeypatch.setattr(
        prompts.CompressedCache, "update", lambda self, k, v, *_: (k, torch.zeros_like(v))
    )
    case = prompts.Case(1, 64, 2, 1, 96, batch=2, tokens=300, first=1.5, second=1.25)
    with pytest.raises(SystemExit, match="CompressedCache, host: tokens differ"):
        prompts.measure(case, "host", 1, torch.device("cpu"))


def test_a_cpu_gets_a_part_of_the_workload(benchmark: Any) -> None:
    parser = benchmark.make_parser()
    there = benchmark.scaled(parser, ["--device", "cpu"])
    assert (there.batch, there.prompt_tokens, there.new_tokens) == (4, 192, 13)
    asked = ["--device", "cpu", "--scale", "1", "--batch", "20"]
    there = benchmark.scaled(parser, asked)
    assert (there.batch, there.prompt_tokens, there.new_tokens) == (20, 1920, 128)
    there = benchmark.scaled(parser, ["--device", "cpu", "--new-tokens", "5"])
    assert (there.prompt_tokens, there.new_tokens, there.slow_tokens) == (1920, 5, 5)
    there = benchmark.scaled(parser, ["--device", "cpu", "--scale", "1", "--slow-tokens", "1"])
    assert (there.new_tokens, there.slow_tokens) == (128, 3)


class DFloat11:
    """A stand-in for the package, with its files and names; it packs nothing.

    Parameters
    ----------
    flips : int
        Exclusive-ored with the bits of a layer's first weight.
    """

    def __init__(self, flips: int = 0) -> None:
        self.DFloat11Model = SimpleNamespace(from_pretrained=self._load)
        self._flips = flips
        self._linear: dict[str, list[str]] = {}
        self.packed: list[str] = []

    def compress_model(
        self,
        model: torch.nn.Module,
        pattern_dict: dict[str, list[str]],
        save_path: str,
        save_single_file: bool,
        check_correctness: bool,
    ) -> None:
        assert save_single_file and not check_correctness  # which takes a GPU
        self._linear = pattern_dict
        for name, parts in self._matching(model):
            module: Any = model.get_submodule(name)
            weights = [module.get_submodule(part).weight.flatten() for part in parts]
            module.register_buffer("packed", torch.cat(weights).view(torch.int16))
            module.packed[0] ^= self._flips
            for part in parts:
                del module.get_submodule(part).weight
            self.packed.append(name)
        save_file(model.state_dict(), Path(save_path) / "model.safetensors")

    def _load(self, folder: str, device: str, bfloat16_model: torch.nn.Module) -> Any:
        tensors: dict[str, torch.Tensor] = {}
        for file in Path(folder).glob("*.safetensors"):
            tensors |= load_file(file)
        for name, parts in self._matching(bfloat16_model):
            linear: list[Any] = [bfloat16_model.get_submodule(f"{name}.{part}") for part in parts]
            packed = tensors.pop(f"{name}.packed").view(torch.bfloat16)
            weights = packed.split([module.weight.numel() for module in linear])
            for module, weight in zip(linear, weights, strict=True):
                shape = module.weight.shape
                del module.weight
                module.weight = weight.view(shape)
        assert not bfloat16_model.load_state_dict(tensors, strict=False).unexpected_keys
        return bfloat16_model.to(device)

    def _matching(self, model: torch.nn.Module) -> list[tuple[str, list[str]]]:
        return [
            (name, parts)
            for name, _ in model.named_modules()
            for pattern, parts in self._linear.items()
            if re.fullmatch(pattern, name)
        ]


@pytest.mark.parametrize("heads, values", [([], 2), (["--kv-heads", "1"], 1)])
def test_heads_of_keys_and_values_can_be_chosen(made: Any, heads: list[str], values: int) -> None:
    with made(*heads) as work:
        assert work.shape.kv_heads == values and f" {values} K/V heads)" in work.title
        config = transformers.AutoConfig.from_pretrained(work.folder)
    assert config.num_key_value_heads == values


@pytest.mark.parametrize("options", [["--kv-heads", "3"], ["--kv-heads", "2", "--model", "opt"]])
def test_heads_that_a_model_cannot_have_are_refused(
    benchmark: Any, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark.scaled(benchmark.make_parser(), ["--size", "tiny", *options])
    said = f"argument --kv-heads: {options[1]} with {'opt' if len(options) > 2 else 'llama'} tiny"
    assert said in capsys.readouterr().err


@pytest.fixture
def peers(benchmark: Any) -> Any:
    return importlib.import_module("llm_peers")


@pytest.fixture
def made(benchmark: Any) -> Any:
    """Return a function that makes the workload of a command line, in a context."""
    workload = importlib.import_module("llm_workload").workload

    def make(*options: str) -> Any:
        arguments = benchmark.scaled(benchmark.make_parser(), [*SMALL.split(), *options])
        return workload(arguments, benchmark.Steps())

    return make


@pytest.mark.parametrize("flips, values", [(0, "equal"), (1 << 14, "DIFFER")])
@pytest.mark.parametrize("model", ["llama", "opt"])
def test_dfloat11_packs_one_layer_and_gives_it_to_all(
    peers: Any, made: Any, model: str, flips: int, values: str
) -> None:
    package = DFloat11(flips)
    with made("--model", model, "--layers", "3") as work:
        row = peers.dfloat11_row(work, package)
    assert row["values"] == values and row["pass ms"] > 0
    assert [name.rpartition(".")[2] for name in package.packed] == ["0"]


@pytest.mark.parametrize(
    "options, said", [(["--dtype", "float32"], "--dtype: float32"), ([], "--size: tiny")]
)
def test_what_dfloat11_is_not_measured_with(
    peers: Any, made: Any, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.setattr(peers, "MOST_DFLOAT11_VALUES", 1000)
    with made(*options) as work, pytest.raises(ArgumentError, match=said):
        peers.dfloat11_row(work, DFloat11())


def test_a_peer_that_fails_is_left_out(
    peers: Any,
    made: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", None)
    monkeypatch.setitem(sys.modules, "dfloat11", SimpleNamespace())
    with made() as work:
        assert peers.run(work, 1e9) == []
        printed = capsys.readouterr().err
        assert "left out: nvCOMP: " in printed and "left out: DFloat11: AttributeError(" in printed
        assert "Traceback" in printed
        monkeypatch.setitem(sys.modules, "dfloat11", DFloat11())
        (row,) = peers.run(work, 1e9)
    assert row["way"].startswith("DFloat11") and row["values"] == "equal"


@pytest.mark.parametrize(
    "options", [["--batch", "0"], ["--repetitions", "0"], ["--scale", "0"], ["--layers", "-1"]]
)
def test_numbers_that_are_refused(
    benchmark: Any, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark.scaled(benchmark.make_parser(), options)
    assert f"argument {options[0]}: {options[1]}, accepted are numbers" in capsys.readouterr().err
