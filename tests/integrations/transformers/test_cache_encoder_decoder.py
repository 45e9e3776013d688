"""Encoder-decoder models: a cache for each kind of attention, and one for both is refused."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache

from bitslab import ArgumentError
from tests.integrations.transformers.models import SMALL, VOCABULARY, compressed, prompt_of

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 20
COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "decoder_start_token_id": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}),
    "t5-one-layer": (
        "T5",
        {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2},
    ),
    "bart": (
        "Bart",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 128,
            "init_std": 0.3,
            "forced_eos_token_id": None,
        },
    ),
}


@functools.cache
def model_of(name: str) -> Any:
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**COMMON, **options, eos_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()


def run(name: str, cache: Any, beams: int = 1) -> Any:
    return model_of(name).generate(
        prompt_of(batch=2),
        past_key_values=cache,
        max_new_tokens=NEW,
        do_sample=False,
        num_beams=beams,
        output_logits=True,
        return_dict_in_generate=True,
    )


@pytest.mark.parametrize("beams", [1, 3], ids=["greedy", "beam"])
@pytest.mark.parametrize("both", [False, True], ids=["decoder", "decoder-and-encoder"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_without_a_cache_of_ours(name: str, both: bool, beams: int) -> None:
    config = model_of(name).config
    ours = compressed(config, **SMALL)
    across: Any = compressed(config, **SMALL) if both else DynamicCache(config=config)
    found = run(name, EncoderDecoderCache(ours, across), beams)
    expected = run(name, None, beams)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(map(torch.equal, found.logits, expected.logits))
    assert ours.stats()["packed_tokens"] > 0
    assert not both or across.stats()["packed_tokens"] > 0


@pytest.mark.parametrize("name", MODELS)
def test_one_cache_for_both_kinds_of_attention_is_refused(name: str) -> None:
    cache = compressed(model_of(name).config, **SMALL)
    line = "EncoderDecoderCache(CompressedCache(model.config), DynamicCache(config=model.config))"
    for _ in range(2):
        with pytest.raises(ArgumentError, match=re.escape(line)):
            run(name, cache)
        assert cache.get_seq_length() == 0
    found = run(name, EncoderDecoderCache(cache, DynamicCache(config=model_of(name).config)))
    assert all(map(torch.equal, found.logits, run(name, None).logits))


def test_a_decoder_that_makes_the_second_cache_itself() -> None:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=1
    )
    config.add_cross_attention = True
    model: Any = transformers.GPT2LMHeadModel(config).eval()
    encoded = torch.randn(1, 9, 32)
    cache, plain = compressed(config, **SMALL), DynamicCache(config=config)
    for tokens in (prompt_of(), prompt_of(length=3), prompt_of(length=30)):
        with torch.no_grad():
            found, expected = (
                model(tokens, encoder_hidden_states=encoded, past_key_values=past).logits
                for past in (cache, plain)
            )
        assert torch.equal(found, expected)
    assert cache.stats()["packed_tokens"] > 50
