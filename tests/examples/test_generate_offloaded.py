"""Text is generated offline with every way of keeping weights and cache, with the same tokens."""

from __future__ import annotations

import gc
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from common.memory import MemoryPeak
from textgen.measure import Clock
from textgen.models import RANDOM, SIZES, write_random_model, written_prompt

from bitslab.integrations.transformers import CompressedCache
from tests.forked import run_forked

from .conftest import ROOT

TINY = "--size tiny --prompt-tokens 150 --new-tokens 24 --window 16 --block-tokens 64".split()


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def script() -> Any:
    return importlib.import_module("generate_offloaded")


CASES: dict[str, list[str]] = {
    "llama": ["--batch", "3"],
    "qwen3, float32": ["--model", "qwen3", "--dtype", "float32"],
    "gemma, packed": ["--model", "gemma", "--weights", "packed", "--no-offload"],
    "opt, accelerate": ["--model", "opt", "--weights", "offload", "--cache", "dynamic"],
    "plain weights": ["--weights", "device"],
    "plain cache": ["--cache", "dynamic", "--keep", "0.5"],
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_tokens_are_those_of_the_plain_run(script: Any, train: Any, options: list[str]) -> None:
    status, report = train(script, *TINY, *options)
    assert status == 0
    plain, run = report["runs"]
    assert (plain["weights"], plain["cache"]) == ("device", "dynamic")
    assert run["tokens_equal_plain"] is True and plain["tokens_equal_plain"] is None
    assert run["tokens"] == plain["tokens"]
    assert len(run["tokens"]) == report["batch"] and len(run["tokens"][0]) == 24
    for one in report["runs"]:
        assert one["prefill_seconds"] > 0 and one["token_seconds"] > 0 and one["load_seconds"] > 0
        assert one["peak_host_bytes"] >= 0 and one["peak_device_bytes"] == 0
    if run["cache"] == "compressed":
        assert [layer["name"] for layer in run["cache_layers"]] == ["layer 0", "layer 1"]
        assert all(layer["ratio"] > 1.1 for layer in run["cache_layers"])
        crosses = "--no-offload" not in options
        assert (run["up_bytes_per_token"]["cache"] > 0) == crosses
    else:
        assert run["cache_layers"] == []
    if run["weights"] in ("compressed", "packed"):
        assert all(unit["raw_bytes"] >= unit["packed_bytes"] > 0 for unit in run["weight_units"])
        crosses = run["weights"] == "compressed"
        assert (run["up_bytes_per_token"]["weights"] > 0) == crosses


def test_only_new_blocks_cross_to_the_host(script: Any, train: Any) -> None:
    options = [*TINY, "--new-tokens", "129", "--weights", "device"]
    _, report = train(script, *options)
    run = report["runs"][1]
    raw = 2 * 2 * 2 * 32 * 2  # layers, keys and values, heads, head_dim, bytes
    # Two blocks of 64 in 128 passes: one token's bytes for each.
    assert 0.5 * raw < run["down_bytes_per_token"]["cache"] < raw
    assert run["up_bytes_per_token"]["cache"] > run["down_bytes_per_token"]["cache"]


def test_weights_on_disk(script: Any, train: Any, tmp_path: Path) -> None:
    file = tmp_path / "packed.safetensors"
    status, report = train(script, *TINY, "--disk", str(file), "--no-plain")
    assert status == 0 and file.is_file()
    assert len(report["runs"]) == 1 and report["runs"][0]["tokens_equal_plain"] is None
    with pytest.raises(SystemExit):
        script.main([*TINY, "--device", "cpu", "--disk", str(file)])


@pytest.mark.parametrize("error", ["0", "0.1"])
def test_quantised_cache(
    script: Any, train: Any, capsys: pytest.CaptureFixture[str], error: str
) -> None:
    options = ["--cache", "kvcomp", "--weights", "device", "--error", error]
    status, report = train(script, *TINY, *options)
    assert status == 0  # tokens may be others than the plain run's, which is no failure
    plain, run = report["runs"]
    printed = capsys.readouterr().out
    if error == "0":
        assert run["tokens_equal_plain"] is True
        assert "24 tokens are equal the plain run's" in printed
        return
    pairs = list(zip(plain["tokens"][0], run["tokens"][0], strict=True))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    assert f"{same} of 24 tokens are the plain run's, until lines part" in printed
    assert all(layer["ratio"] > 3 for layer in run["cache_layers"])
    assert run["up_bytes_per_token"]["cache"] > 0


def test_plain_run_alone(script: Any, train: Any) -> None:
    status, report = train(script, *TINY, "--weights", "device", "--cache", "dynamic")
    assert status == 0 and len(report["runs"]) == 1


def test_table_shows_what_the_json_says(
    script: Any, train: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = train(script, *TINY, "--batch", "5")
    out = capsys.readouterr().out
    assert "llama tiny, bfloat16; 5 x 150 tokens, 24 new ones; on cpu" in out
    assert "line 3: " + " ".join(map(str, report["runs"][1]["tokens"][3][:16])) in out
    assert "and 1 more lines" in out
    assert "120 tokens are equal the plain run's" in out
    assert "model.layers.1" in out and "layer 1" in out
    assert "compressed, compressed" in out and "device, dynamic" in out


def test_a_token_that_differs_is_reported(
    script: Any, train: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = CompressedCache.update

    def update(self: Any, keys: Any, values: Any, layer: int, *rest: Any, **more: Any) -> Any:
        keys, values = honest(self, keys, values, layer, *rest, **more)
        return keys, -values

    monkeypatch.setattr(CompressedCache, "update", update)
    status, report = train(script, *TINY)
    assert status == 1 and report["runs"][1]["tokens_equal_plain"] is False
    assert "24 tokens are DIFFERENT FROM the plain run's" in capsys.readouterr().out


def test_model_of_the_caller_with_a_tokenizer(
    script: Any, train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "model"
    write_random_model("llama", SIZES["tiny"], torch.bfloat16, 64, 0, folder)
    words = {word: i for i, word in enumerate(["<s>", "the", "link", "is", "slow"])}
    words |= {f"w{i}": i for i in range(len(words), 512)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<s>")
    tokenizer.save_pretrained(folder)
    options = ["--model", str(folder), "--prompt", "the link is slow", "is", "--new-tokens", "6"]
    status, report = train(script, *options)
    assert status == 0 and (report["batch"], report["prompt_tokens"]) == (2, 4)
    assert "line 1: '" in capsys.readouterr().out
    prompt = written_prompt(tokenizer, ["the link is slow", "is"])
    assert prompt.mask.tolist() == [[1, 1, 1, 1], [0, 0, 0, 1]]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--cache", "offloaded"], "argument --cache: offloaded: transformers' offloaded cache"),
        (["--error", "2"], "argument --error: 2, accepted are numbers from 0 to 1"),
        (["--prompt", "a"], "argument --prompt: the random llama has no tokenizer"),
        (["--weights", "packed", "--keep", "0.5"], "argument --keep: is for --weights compressed"),
        (["--keep", "2"], "argument --keep: 2, accepted are numbers from 0 to 1"),
        (["--keep", "all"], "argument --keep: all, accepted are numbers from 0 to 1"),
        (["--new-tokens", "0"], "argument --new-tokens: 0, accepted are numbers from 1 on"),
        (["--device", "abc"], "argument --device: abc, accepted are cpu and cuda"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_are_refused(script: Any, options: list[str], text: str, refused: Any) -> None:
    refused(script.main, ["--device", "cpu", *options], text)


def test_model_that_is_not_there(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert script.main(["--model", str(tmp_path / "empty"), "--device", "cpu"]) == 2
    assert f"--model {tmp_path / 'empty'}: " in capsys.readouterr().err


def test_help_teaches() -> None:
    done = run_forked([ROOT / "examples" / "generate_offloaded.py", "--help"])
    assert done.returncode == 0, done.stderr
    for word in ("BitslabConfig", "CompressedCache", "compressed", "offloaded", "examples:"):
        assert word in done.stdout
    for name in (*RANDOM, *SIZES):
        assert name in done.stdout


def test_json_to_the_output(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status = script.main([*TINY, "--no-plain", "--device", "cpu", "--json", "-"])
    assert status == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["new_tokens"] == 24


def test_clock_and_memory() -> None:
    calls: list[int] = []
    clock = Clock(calls.append)
    for _ in range(2):
        clock.put(None)
    assert [clock.token_seconds] == [None] and clock.prefill_seconds >= 0
    clock.put(None)
    clock.end()
    assert calls == [0, 1, 2] and clock.token_seconds is not None
    gc.collect()  # what is freed meanwhile would be taken off
    peak = MemoryPeak(torch.device("cpu"))
    with peak:
        taken = torch.ones(1 << 27, dtype=torch.uint8)
    assert peak.host_bytes >= taken.nbytes // 2
