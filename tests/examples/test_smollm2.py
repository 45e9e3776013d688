"""A trained model predicts from packed K and V: SmolLM2, from its package, with no network.

It is loaded once for all tests, which takes longer than what they do with it.
"""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from textgen import smollm
from transformers import DynamicCache

from bitslab.integrations.transformers import KVCompCache

SHORT = "--tokens 384 --prompt-tokens 256 --no-peers --device cpu".split()
PROMPT, TOKENS, BLOCK = 256, 448, 64

pytestmark = pytest.mark.usefixtures("one_thread", "no_network")

loaded_model = functools.cache(smollm.load_model)


@functools.cache
def loaded_tokenizer() -> Any:
    return smollm.load_tokenizer()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def model_and_text() -> tuple[Any, torch.Tensor]:
    """Return the model and text."""
    model = loaded_model(torch.float32, torch.device("cpu"))
    model.set_attn_implementation("bitslab")
    return model, smollm.text_ids(loaded_tokenizer(), TOKENS)


@torch.no_grad()
def predictions(cache: Any, *, prompt: int = PROMPT, end: int = TOKENS) -> torch.Tensor:
    """Return logarithms of probabilities of each token behind a prompt, a block at a time."""
    model, ids = model_and_text()
    found = [model(ids[:, :prompt], past_key_values=cache, logits_to_keep=1).logits[0]]
    for begin in range(prompt, end, BLOCK):
        found.append(model(ids[:, begin : begin + BLOCK], past_key_values=cache).logits[0])
    return torch.cat(found)[:-1].log_softmax(-1)


def test_a_text_is_predicted_from_packed_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = importlib.import_module("long_context")
    monkeypatch.setattr(script, "load_model", loaded_model)
    monkeypatch.setattr(script, "load_tokenizer", loaded_tokenizer)
    json_file, picture = tmp_path / "scores.json", tmp_path / "error.svg"
    options = ["--error", "0.1", "--json", str(json_file), "--plot", str(picture)]
    assert script.main([*SHORT, *options]) == 0
    report = json.loads(json_file.read_text())
    plain, ours = report["runs"]
    assert plain["cache"] == "plain" and plain["KL to plain"] == 0 and plain["bits"] == 16
    assert ours["cache"] == "KVCompCache, error 0.1"
    assert ours["tokens"] == plain["tokens"] == 384 - 256
    assert ours["ratio"] > 6 and ours["bits"] == pytest.approx(16 / ours["ratio"])
    assert 0 < ours["KL to plain"] < 0.04 and ours["same top token %"] > 90
    assert ours["perplexity"] == pytest.approx(plain["perplexity"], rel=0.05)
    printed = capsys.readouterr()
    assert "128 tokens behind a prompt of 256" in printed.out
    for row in (plain, ours):
        assert f"{row['KL to plain']:.4f}" in printed.out
    assert "KVCompCache, error 0.1" in picture.read_text()
    assert not printed.err  # no bar of the model's loading


def test_predictions_are_near_the_plain_models() -> None:
    model, ids = model_and_text()
    plain = predictions(DynamicCache(config=model.config))
    cache = KVCompCache(model.config, error=0.04, window=BLOCK, block_tokens=BLOCK)
    ahead = predictions(cache)
    stats = cache.stats()
    assert not stats["lossless"]
    assert stats["packed_passes"] + stats["dense_passes"] == 30 * (TOKENS - PROMPT) // BLOCK
    assert all(0 < measured <= 0.04 for measured in stats["errors"].values())
    # The model computes in float32, whose bytes are twice those that ratios are of.
    assert stats["packed_ratio"] / 2 >= 4.5
    divergence = float((plain.exp() * (plain - ahead)).sum(-1).mean())
    assert 0 < divergence <= 0.015
    same = (plain.argmax(-1) == ahead.argmax(-1)).float().mean()
    assert float(same) >= 0.92
    came = ids[0, PROMPT:TOKENS, None]
    loss, plain_loss = (-float(x.gather(1, came).mean()) for x in (ahead, plain))
    assert loss == pytest.approx(plain_loss, abs=0.03)
    with torch.no_grad():  # as generation reads it
        model(ids[:, -1:], past_key_values=cache)
    assert cache.stats()["packed_passes"] == stats["packed_passes"] + 30


def test_without_error_tokens_are_the_plain_ones() -> None:
    model, ids = model_and_text()
    prompt = ids[:, : PROMPT - 8]
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    kept = DynamicCache(config=model.config)
    plain = model.generate(prompt, past_key_values=kept, **options)
    cache = KVCompCache(model.config, error=0, window=BLOCK, block_tokens=16)
    assert torch.equal(model.generate(prompt, past_key_values=cache, **options), plain)
    stats = cache.stats()
    assert len(stats["lossless"]) == 30
    assert stats["packed_tokens"] == PROMPT - BLOCK  # 16 of them behind the prompt's pass
    # Not one bit of the history differs.
    layers: list[tuple[Any, Any]] = list(zip(cache.layers, kept.layers, strict=True))
    for layer, plain_layer in layers:
        keys, values = (history.decode() for history in layer.histories)
        assert torch.equal(keys, plain_layer.keys)
        assert torch.equal(values, plain_layer.values)
