"""Models with cross-attention: a cache for each kind of attention, or one alone."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from typing import Any

import pytest
import torch
import transformers
from transformers import Cache, DynamicCache, EncoderDecoderCache

from bitslab.integrations.transformers import CompressedCache
from tests.integrations.transformers.models import (
    SMALL,
    VOCABULARY,
    compressed,
    config_of,
    prompt_of,
)

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
MODELS["bart-one-layer"] = ("Bart", {**MODELS["bart"][1], "decoder_layers": 1})
#: Decoders that are given what another model has encoded: GPT-2 puts a cache for cross-attention
#: besides one that it is given, RemBERT and TrOCR do not.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}),
    "rembert": (
        "RemBertForCausalLM",
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "input_embedding_size": 32,
            "output_embedding_size": 32,
            "is_decoder": True,
        },
    ),
    "trocr": (
        "TrOCRForCausalLM",
        {
            "d_model": 32,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 48,
            "cross_attention_hidden_size": 32,
            "is_decoder": True,
        },
    ),
}
LAYERS = {"gpt2": "n_layer", "rembert": "num_hidden_layers", "trocr": "decoder_layers"}


@functools.cache
def model_of(name: str) -> Any:
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**COMMON, **options, eos_token_id=None)
    with torch.random.fork_rng(devices=[]):
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


@pytest.mark.drawn(4)
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


@pytest.mark.drawn(4)
@pytest.mark.parametrize("beams", [1, 3], ids=["greedy", "beam"])
@pytest.mark.parametrize("name", MODELS)
def test_one_cache_alone_keeps_self_attention_only_and_logits_are_the_same(
    name: str, beams: int
) -> None:
    cache = compressed(model_of(name).config, **SMALL)
    expected = run(name, None, beams)
    for _ in range(2):
        found = run(name, cache, beams)
        assert torch.equal(found.sequences, expected.sequences)
        assert all(map(torch.equal, found.logits, expected.logits))
        assert cache.get_seq_length() == NEW
        assert cache.stats()["tokens"] == NEW and cache.stats()["packed_tokens"] > 0
        cache.reset()


@pytest.mark.parametrize("alone", [False, True], ids=["pair", "alone"])
@pytest.mark.parametrize("name", ["t5-one-layer", "bart-one-layer"])
def test_no_token_is_lost_behind_masks_that_a_user_makes(name: str, alone: bool) -> None:
    """Nothing tells the cache where a forward pass of one layer ends and the next one begins."""
    model = model_of(name)
    ours = compressed(model.config, **SMALL)
    plain = [DynamicCache(config=model.config) for _ in range(3)]
    with torch.no_grad():
        encoded = model.get_encoder()(prompt_of(batch=2))
        assert_steps_agree(
            model,
            ours if alone else EncoderDecoderCache(ours, plain[0]),
            EncoderDecoderCache(plain[1], plain[2]),
            mask="decoder_attention_mask",
            tokens="decoder_input_ids",
            encoder_outputs=encoded,
        )
    assert ours.get_seq_length() == 41 and ours.stats()["packed_tokens"] > 0


@pytest.mark.drawn(6)
@pytest.mark.parametrize("across", [False, True], ids=["self-attention", "cross-attention"])
@pytest.mark.parametrize("layers", [1, 2], ids=["one-layer", "two-layers"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_that_is_given_a_cache_alone(name: str, layers: int, across: bool) -> None:
    model = decoder_of(name, layers)
    ours = compressed(model.config, **SMALL)
    plain: Cache = DynamicCache(config=model.config)
    if name != "gpt2":
        plain = EncoderDecoderCache(plain, DynamicCache(config=model.config))
    given = {"encoder_hidden_states": torch.randn(2, 9, 32)} if across else {}
    with torch.no_grad():
        assert_steps_agree(model, ours, plain, mask="attention_mask", tokens="input_ids", **given)
    assert ours.get_seq_length() == 41 and ours.stats()["packed_tokens"] > 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_of_one_layer_and_masks_that_a_user_makes(name: str) -> None:
    size = "n_layer" if name == "gpt2" else "num_hidden_layers"
    config = config_of(name, **{size: 1})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ours = compressed(config, **SMALL)
    with torch.no_grad():
        assert_steps_agree(
            model, ours, DynamicCache(config=config), mask="attention_mask", tokens="input_ids"
        )
    assert ours.get_seq_length() == 41 and ours.stats()["packed_tokens"] > 0


def test_what_is_encoded_may_change_from_pass_to_pass() -> None:
    """As where GPT-2 makes a new cache for cross-attention in each."""
    model = decoder_of("gpt2", 1)
    cache, plain = compressed(model.config, **SMALL), DynamicCache(config=model.config)
    for tokens in (prompt_of(), prompt_of(length=3), prompt_of(length=30)):
        encoded = torch.randn(1, 9, 32)
        with torch.no_grad():
            found, expected = (
                model(tokens, encoder_hidden_states=encoded, past_key_values=past).logits
                for past in (cache, plain)
            )
        assert torch.equal(found, expected)
    assert cache.stats()["packed_tokens"] > 50


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))],
    ids=["deepcopy", "pickle"],
)
def test_copies_go_on_alone(copied: Any) -> None:
    model = decoder_of("rembert", 1)
    encoded, tokens = torch.randn(1, 9, 32), prompt_of()
    cache = compressed(model.config, **SMALL)
    with torch.no_grad():
        model(tokens, encoder_hidden_states=encoded, past_key_values=cache)
        found, expected = (
            model(tokens[:, :1], encoder_hidden_states=encoded, past_key_values=past).logits
            for past in (copied(cache), cache)
        )
    assert torch.equal(found, expected)


def test_nothing_of_a_cache_alone_is_handed_to_two() -> None:
    """Whatever methods `EncoderDecoderCache` has in the transformers that is installed."""
    for name, method in vars(EncoderDecoderCache).items():
        if callable(method) or isinstance(method, property):
            found = inspect.getattr_static(CompressedCache, name)
            assert found is not method or name == "check_dynamic_cache", name


@functools.cache
def decoder_of(name: str, layers: int) -> Any:
    kind, options = DECODERS[name]
    model_class = getattr(transformers, kind)
    config = model_class.config_class(
        vocab_size=VOCABULARY, add_cross_attention=True, **{**options, LAYERS[name]: layers}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model_class(config).eval()


def assert_steps_agree(
    model: Any, ours: Any, plain: Any, *, mask: str, tokens: str, **given: Any
) -> None:
    """Run a prompt and steps, with 4-D masks, and compare logits bit for bit."""
    prompt = prompt_of(batch=2)
    done = 0
    for n in (30, 1, 1, 4, 1, 1, 2, 1):
        there = torch.arange(done + n) <= torch.arange(done, done + n)[:, None]
        allowed = torch.zeros(2, 1, n, done + n).masked_fill(~there, torch.finfo().min)
        found, expected = (
            model(
                **{tokens: prompt[:, done : done + n], mask: allowed},
                **given,
                past_key_values=past,
                use_cache=True,
            ).logits
            for past in (ours, plain)
        )
        assert torch.equal(found, expected), done
        done += n
