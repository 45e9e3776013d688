"""generate() with a KVCompCache: DynamicCache's tokens for the K and V that it returns."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch

from bitslab.integrations.transformers import KVCompCache
from bitslab.kvcache import PackedAttention
from tests.integrations.transformers.models import (
    CONFIGS,
    SMALL,
    UNUSUAL,
    cache_traits,
    config_of,
    dynamic,
    model_of,
    prompt_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 24
#: After a prompt of this length the tail has just a window, and NEW tokens more are not packed.
PROMPT, WINDOW, BLOCK = 4 + 64 + 32 + 1, 32, 64
SIZES: dict[str, Any] = {"window": WINDOW, "block_tokens": BLOCK}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "top_k": 20},
    "beam": {"num_beams": 3, "num_return_sequences": 2},
    "prompt-lookup": {"prompt_lookup_num_tokens": 4},
    "assisted": {},
    "chunked-prefill": {"prefill_chunk_size": 13},
}


@functools.cache
def attended_model(name: str, attention: str = "bitslab") -> Any:
    """Return a model with an attention function of this name, or its own."""
    model = copy.deepcopy(model_of(name))
    if attention != "own":
        model.set_attn_implementation(attention)
    return model


def kvcomp(config: Any, **options: Any) -> Any:
    return KVCompCache(config, **options)


def generate(model: Any, name: str, mode: str, cache: Any, prompt: Any, **more: Any) -> Any:
    options = {"do_sample": False, **MODES[mode], **more}
    if mode == "assisted":
        options["assistant_model"] = model_of(name, seed=1)
    torch.manual_seed(0)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, **options}
    return model.generate(prompt, past_key_values=cache, **options)


def filled(model: Any, prompt: torch.Tensor, mask: Any = None, **options: Any) -> tuple[Any, Any]:
    """Return a cache with the K and V of all tokens but the last, and a plain one of its bits."""
    cache = kvcomp(model.config, **{"error": 0.3, **SIZES, **options})
    with torch.no_grad():
        given = None if mask is None else mask[:, :-1]
        model(prompt[:, :-1], attention_mask=given, past_key_values=cache)
    plain = dynamic(model.config)
    for i, (ours, theirs) in enumerate(zip(cache.layers, plain.layers, strict=True)):
        if hasattr(ours, "settle"):
            ours.settle()
            plain.update(ours.keys, ours.values, i)
        elif getattr(ours, "keys", None) is not None:
            for name, value in vars(ours).items():
                setattr(theirs, name, copy.copy(value))
    return cache, plain


@pytest.mark.drawn(5)
@pytest.mark.pairwise(name=cache_traits)
@pytest.mark.parametrize("attention", ["bitslab", "own"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGS)
def test_without_error_tokens_and_bits_equal_the_plain_run(
    name: str, mode: str, attention: str
) -> None:
    model = attended_model(name, attention)
    plain, cache = dynamic(model.config), kvcomp(model.config, error=0, **SMALL)
    prompt = prompt_of()
    expected = generate(model_of(name), name, mode, plain, prompt)
    assert torch.equal(generate(model, name, mode, cache, prompt), expected)
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    stats = cache.stats()
    assert stats["packed_tokens"] >= prompt.shape[1] and stats["packed_passes"] == 0
    assert set(stats["lossless"].values()) == {"error 0"}


@pytest.mark.drawn(4)
@pytest.mark.pairwise(name=cache_traits)
@pytest.mark.parametrize("attention", ["bitslab", "own"])
@pytest.mark.parametrize("mode", ["greedy", "sample", "beam"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_the_k_and_v_that_are_kept(
    name: str, mode: str, attention: str
) -> None:
    """A plain cache of the decoded bits gives the same, in every way to go on."""
    model, prompt = attended_model(name, attention), prompt_of(length=PROMPT)
    options = {} if attention == "bitslab" else {"key_scale": 0.2, "value_scale": 0.2}
    cache, plain = filled(model, prompt, granularity="weighted", **options)
    if mode == "beam":
        for each in (cache, plain):
            each.batch_repeat_interleave(3)
    expected = generate(model, name, mode, plain, prompt)
    assert torch.equal(generate(model, name, mode, cache, prompt), expected)
    stats = cache.stats()
    assert stats["packed_tokens"] == 64
    assert (stats["packed_passes"] > 0) == (attention == "bitslab")
    assert (stats["dense_passes"] > 0) == (attention == "own")


@pytest.mark.drawn(4)
@pytest.mark.parametrize("attention", ["bitslab", "own"])
@pytest.mark.parametrize("mode", ["prompt-lookup", "assisted"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "gpt2"])
def test_tokens_that_are_guessed_and_removed_change_nothing(
    name: str, mode: str, attention: str
) -> None:
    model, prompt = attended_model(name, attention), prompt_of(length=PROMPT)
    steps = {"granularity": "channel", "key_scale": 0.1, "value_scale": 0.1}
    cache, greedy = (kvcomp(model.config, **steps, **SIZES) for _ in range(2))
    expected = generate(model, name, "greedy", greedy, prompt)
    assert torch.equal(generate(model, name, mode, cache, prompt), expected)
    assert cache.stats()["packed_tokens"] == greedy.stats()["packed_tokens"] == 64


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("mode", ["greedy", "chunked-prefill", "beam", "prompt-lookup"])
def test_what_is_packed_on_the_way_is_attended_to(
    name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention to tiles and to decoded tokens: the same codecs, and the same tokens."""
    model, prompt = attended_model(name), prompt_of(length=60)
    sizes = {"window": 16, "block_tokens": 16, "error": 0.2}
    packed, dense = (kvcomp(model.config, **sizes) for _ in range(2))
    found = generate(model, name, mode, packed, prompt)
    monkeypatch.setattr(PackedAttention, "serves", lambda *_: False)
    assert torch.equal(generate(model, name, mode, dense, prompt), found)
    for ours, theirs in zip(packed.layers, dense.layers, strict=True):
        assert torch.allclose(ours.keys, theirs.keys, atol=1e-3)
    assert packed.stats()["packed_passes"] and not packed.stats()["dense_passes"]
    assert dense.stats()["dense_passes"] and not dense.stats()["packed_passes"]
    assert packed.stats()["packed_tokens"] == dense.stats()["packed_tokens"] > 32


@pytest.mark.drawn(3)
@pytest.mark.parametrize("mode", ["greedy", "beam"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_left_padding(name: str, mode: str) -> None:
    model, prompt = attended_model(name), prompt_of(batch=3, length=PROMPT)
    mask = torch.ones_like(prompt)
    mask[0, :17] = mask[2, :3] = 0
    prompt[mask == 0] = 0
    cache, plain = filled(model, prompt, mask)
    options: dict[str, Any] = {"attention_mask": mask}
    if mode == "beam":
        for each in (cache, plain):
            each.batch_repeat_interleave(3)
    expected = generate(model, name, mode, plain, prompt, **options)
    assert torch.equal(generate(model, name, mode, cache, prompt, **options), expected)
    stats = cache.stats()
    assert stats["packed_passes"] > 0 and not stats["dense_passes"]


def test_padding_is_known_where_layers_get_copies_of_the_mask() -> None:
    """As accelerate gives those of another GPU."""
    model, prompt = copy.deepcopy(attended_model("llama")), prompt_of(batch=2, length=PROMPT)
    mask = torch.ones_like(prompt)
    mask[0, :17] = 0
    prompt[mask == 0] = 0
    cache, plain = filled(model, prompt, mask)
    expected = generate(model, "llama", "greedy", plain, prompt, attention_mask=mask)
    copied = []

    def copy_mask(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        given = kwargs["attention_mask"]
        if given is not None:
            copied.append(given.clone())
            kwargs = kwargs | {"attention_mask": copied[-1]}
        return args, kwargs

    for layer in model.model.layers[1:]:
        layer.register_forward_pre_hook(copy_mask, with_kwargs=True)
    found = generate(model, "llama", "greedy", cache, prompt, attention_mask=mask)
    assert torch.equal(found, expected)
    assert copied and not cache.stats()["dense_passes"]


def test_a_mask_that_is_like_no_padded_one_is_attended_to_decoded() -> None:
    model, prompt = attended_model("llama"), prompt_of(batch=2, length=PROMPT)
    cache, plain = filled(model, prompt)
    allowed = torch.ones(2, 1, 1, PROMPT, dtype=torch.bool)
    allowed[:, :, :, 20:30] = False
    step = {"attention_mask": allowed, "position_ids": torch.full((2, 1), PROMPT - 1)}
    with torch.no_grad():
        found, expected = (
            model(prompt[:, -1:], past_key_values=each, **step).logits for each in (cache, plain)
        )
    assert torch.allclose(found, expected, atol=1e-4)
    assert cache.stats()["dense_passes"]


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_layers_of_further_kinds(name: str, offload: bool) -> None:
    model = attended_model(name)
    cache = kvcomp(model.config, error=0.2, window=8, block_tokens=16, offload=offload)
    found = generate(model, name, "greedy", cache, prompt_of(batch=2))
    assert found.shape == (2, 50 + NEW)
    stats = cache.stats()
    assert stats["packed_tokens"] >= 32
    # K of 24 channels and V of 12 cannot be tiles.
    assert bool(stats["lossless"]) == (name == "deepseek")
    assert bool(stats["packed_passes"]) == (name != "deepseek")


def test_copies_go_their_own_ways() -> None:
    model, prompt = attended_model("llama"), prompt_of(length=PROMPT)
    cache, plain = filled(model, prompt)
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    for seed, each in enumerate([*copies, cache]):
        more = torch.cat([prompt, prompt_of(length=20, seed=seed + 1)], dim=1)
        reference = copy.deepcopy(plain)
        expected = generate(
            model, "llama", "greedy", reference, more, max_new_tokens=8, min_new_tokens=8
        )
        found = generate(model, "llama", "greedy", each, more, max_new_tokens=8, min_new_tokens=8)
        assert torch.equal(found, expected)
        assert each.stats()["packed_passes"] > 0


def test_a_copy_follows_the_attention_of_the_model() -> None:
    model = copy.deepcopy(attended_model("llama"))
    cache, plain = filled(model, prompt_of(length=PROMPT))
    other = copy.deepcopy(cache)
    model.set_attn_implementation("sdpa")
    prompt = prompt_of(length=PROMPT)
    expected = generate(model, "llama", "greedy", plain, prompt)
    assert torch.equal(generate(model, "llama", "greedy", other, prompt), expected)
    assert other.stats()["packed_passes"] == 0 and other.stats()["dense_passes"] > 0


def test_reset_and_reuse() -> None:
    model = attended_model("llama")
    cache = kvcomp(model.config, error=0.2, window=16, block_tokens=16)
    for seed, batch in enumerate((2, 1)):
        prompt = prompt_of(batch=batch, seed=seed)
        fresh = kvcomp(model.config, error=0.2, window=16, block_tokens=16)
        expected = generate(model, "llama", "greedy", fresh, prompt)
        assert torch.equal(generate(model, "llama", "greedy", cache, prompt), expected)
        cache.reset()
        assert cache.get_seq_length() == 0 and not cache.stats()["errors"]


@pytest.mark.parametrize("attention", ["bitslab", "sdpa"])
def test_a_prompt_attends_to_itself_as_it_came(attention: str) -> None:
    model, prompt = attended_model("llama", attention), prompt_of(batch=2, length=200)
    cache = kvcomp(model.config, error=0.1, **SIZES)
    with torch.no_grad():
        found = model(prompt, past_key_values=cache).logits
        assert torch.equal(found, model_of("llama")(prompt).logits)
        later = model(prompt[:, :1], past_key_values=cache).logits
    assert cache.stats()["packed_tokens"] == 128
    with torch.no_grad():
        plain = model_of("llama")(torch.cat([prompt, prompt[:, :1]], dim=1)).logits[:, -1:]
    assert 0 < (later - plain).norm() / plain.norm() < 0.5


def test_hybrid_layers_are_transformers_own() -> None:
    config = config_of("llama", layer_types=["hybrid", "full_attention"])
    kinds = [type(layer).__name__ for layer in kvcomp(config).layers]
    assert kinds == ["LinearAttentionAndFullAttentionLayer", "KVCompLayer"]


def test_bfloat16() -> None:
    model = copy.deepcopy(attended_model("llama")).bfloat16()
    cache, plain = filled(model, prompt_of(batch=2, length=PROMPT))
    with torch.no_grad():
        token = prompt_of(batch=2, length=PROMPT)[:, -1:]
        found = model(token, past_key_values=cache).logits.float()
        expected = model(token, past_key_values=plain).logits.float()
    assert (found - expected).norm() < 0.02 * expected.norm()
    assert cache.stats()["packed_passes"] == 2
