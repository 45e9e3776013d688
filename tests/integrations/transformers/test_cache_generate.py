"""generate() with a CompressedCache gives the tokens that it gives without one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from tests.integrations.transformers.models import (
    CONFIGS,
    SMALL,
    UNUSUAL,
    cache_traits,
    compressed,
    config_of,
    dynamic,
    model_of,
    prompt_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 24
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "top_k": 20},
    "beam": {"num_beams": 3, "num_return_sequences": 2},
    "prompt-lookup": {"prompt_lookup_num_tokens": 4},
    "assisted": {},
    "chunked-prefill": {"prefill_chunk_size": 13},
}


def generate(name: str, mode: str, cache: Any, prompt: torch.Tensor, **more: Any) -> torch.Tensor:
    options = {"do_sample": False, **MODES[mode], **more}
    if mode == "assisted":
        options["assistant_model"] = model_of(name, seed=1)
    torch.manual_seed(0)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, **options}
    tokens: torch.Tensor = model_of(name).generate(prompt, past_key_values=cache, **options)
    return tokens


def assert_equal_caches(cache: Any, plain: Any) -> None:
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


@pytest.mark.drawn(6)
@pytest.mark.pairwise(name=cache_traits)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_bits_equal_the_plain_run(name: str, mode: str) -> None:
    config = model_of(name).config
    plain, cache = dynamic(config), compressed(config, **SMALL)
    prompt = prompt_of()
    expected = generate(name, mode, plain, prompt)
    assert torch.equal(generate(name, mode, cache, prompt), expected)
    assert_equal_caches(cache, plain)
    # Assisted modes may leave one token less behind; all modes have packed most of the others.
    assert cache.stats()["packed_tokens"] >= prompt.shape[1]


@pytest.mark.parametrize("name", UNUSUAL)
def test_layers_of_further_kinds(name: str) -> None:
    config = model_of(name).config
    cache = compressed(config, **SMALL)
    found = generate(name, "greedy", cache, prompt_of(batch=2))
    assert torch.equal(found, generate(name, "greedy", dynamic(config), prompt_of(batch=2)))
    kinds = [type(layer).__name__ for layer in cache.layers]
    assert (
        kinds
        == {
            "qwen3-next": ["LinearAttentionLayer", "CompressedLayer"],
            "gemma3n": [
                "DynamicSlidingWindowLayer",
                "CompressedLayer",
                "DynamicSlidingWindowLayer",
                "DummyLayer",
            ],
            "deepseek": ["CompressedLayer"] * 2,
        }[name]
    )
    assert cache.stats()["packed_tokens"] >= 50


def test_hybrid_layers_are_transformers_own() -> None:
    config = config_of("llama", layer_types=["hybrid", "full_attention"])
    plain, cache = dynamic(config), compressed(config, **SMALL)
    kinds = [type(layer).__name__ for layer in cache.layers]
    assert kinds == [type(plain.layers[0]).__name__, "CompressedLayer"]
    assert kinds[0] == "LinearAttentionAndFullAttentionLayer"


@pytest.mark.drawn(6)
@pytest.mark.pairwise(name=cache_traits)
@pytest.mark.parametrize("mode", ["greedy", "sample", "beam"])
@pytest.mark.parametrize("name", CONFIGS)
def test_left_padding(name: str, mode: str) -> None:
    prompt = prompt_of(batch=3)
    mask = torch.ones_like(prompt)
    mask[0, :17] = mask[2, :3] = 0
    prompt[mask == 0] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12}
    expected = generate(name, mode, None, prompt, **options)
    # Both places, with no more runs: sampling takes what greedy and beam search leave out.
    cache = compressed(model_of(name).config, offload=mode != "sample", **SMALL)
    assert torch.equal(generate(name, mode, cache, prompt, **options), expected)
    assert cache.stats()["packed_tokens"] >= prompt.shape[1]


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_going_on_from_a_cache(name: str) -> None:
    cache = compressed(model_of(name).config, **SMALL)
    first = generate(name, "greedy", cache, prompt_of())
    more = torch.cat([first, prompt_of(length=20, seed=1)], dim=1)
    expected = generate(name, "greedy", None, more)
    assert torch.equal(generate(name, "greedy", cache, more), expected)


def test_going_on_from_a_cache_that_was_filled_in_inference_mode() -> None:
    cache, prompt = compressed(model_of("llama").config, **SMALL), prompt_of()
    with torch.inference_mode():
        model_of("llama")(prompt, past_key_values=cache)
    more = torch.cat([prompt, prompt_of(length=20, seed=1)], dim=1)
    expected = generate("llama", "greedy", None, more)
    assert torch.equal(generate("llama", "greedy", cache, more), expected)


def test_copies_go_their_own_ways() -> None:
    cache = compressed(model_of("llama").config, **SMALL)
    first = generate("llama", "greedy", cache, prompt_of())
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    for seed, each in enumerate([*copies, cache]):
        more = torch.cat([first, prompt_of(length=20, seed=seed + 1)], dim=1)
        expected = generate("llama", "greedy", None, more)
        assert torch.equal(generate("llama", "greedy", each, more), expected)


def test_reset_and_reuse() -> None:
    cache = compressed(model_of("llama").config, **SMALL)
    for seed, batch in enumerate((2, 1, 3)):
        prompt = prompt_of(batch=batch, seed=seed)
        expected = generate("llama", "greedy", None, prompt)
        assert torch.equal(generate("llama", "greedy", cache, prompt), expected)
        reserved = cache.stats()["reserved_bytes"]
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.stats()["reserved_bytes"] == reserved


def test_bfloat16() -> None:
    model = copy.deepcopy(model_of("llama")).bfloat16()
    prompt = prompt_of(batch=2)
    options = {"max_new_tokens": NEW, "do_sample": False}
    cache = compressed(model.config, **SMALL)
    found = model.generate(prompt, past_key_values=cache, **options)
    assert torch.equal(found, model.generate(prompt, **options))
    assert cache.stats()["moved_to_host_bytes"] > 0


def test_gradients_reach_the_new_tokens() -> None:
    model = copy.deepcopy(model_of("llama"))
    prompt = prompt_of()
    cache = compressed(model.config, **SMALL)
    for past in (cache, dynamic(model.config)):
        model.zero_grad()
        model(prompt, past_key_values=past).logits.square().sum().backward()
        gradient = model.model.layers[0].self_attn.k_proj.weight.grad
        if past is cache:
            found = gradient.clone()
    assert torch.equal(found, gradient)
    assert not cache.layers[0].keys.requires_grad
