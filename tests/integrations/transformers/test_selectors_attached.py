"""Attaching selectors to models and giving these back, and bad input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from bitslab.errors import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.integrations.transformers import (
    CompressedCache,
    HeavyHitterSelector,
    InfiniGenSelector,
)
from bitslab.integrations.transformers.selectors.attention import PREFIX
from bitslab.integrations.transformers.selectors.queries import query_of
from bitslab.kvcache import PartialKeys
from tests.integrations.transformers.models import SMALL, config_of, model_of, prompt_of
from tests.integrations.transformers.test_selectors import (
    FUSED,
    generate,
    infinigen,
    layers_of,
    padded,
    selected,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_model_is_given_back_as_it_was() -> None:
    model = copy.deepcopy(model_of("gemma2"))
    before = {name: dict(module._forward_pre_hooks) for name, module in model.named_modules()}
    attention = model.config._attn_implementation
    attachment = HeavyHitterSelector(0.5, 4).attached(model)
    assert model.config._attn_implementation == PREFIX + attention
    with pytest.raises(ArgumentError, match="attached to a selector already"):
        HeavyHitterSelector(0.5, 4).attached(model)
    attachment.detach()
    attachment.detach()
    assert model.config._attn_implementation == attention
    assert before == {n: dict(m._forward_pre_hooks) for n, m in model.named_modules()}
    with pytest.raises(ZeroDivisionError), HeavyHitterSelector(0.5, 4).attached(model):
        raise ZeroDivisionError
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_other_caches_are_served_as_before(name: str) -> None:
    model = model_of(name)
    prompt, mask = padded()
    expected = generate(model, None, prompt, attention_mask=mask)
    with HeavyHitterSelector(0.5, 4).attached(model):
        assert torch.equal(generate(model, None, prompt, attention_mask=mask), expected)
        cache = CompressedCache(model.config, **SMALL)
        assert torch.equal(generate(model, cache, prompt, attention_mask=mask), expected)


def test_a_layer_is_scored_by_the_query_that_the_input_of_the_one_before_it_makes() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config_of("llama", num_hidden_layers=3)).eval()
    prompt = prompt_of()
    selector = InfiniGenSelector.fit(model, prompt, budget=0.3)
    attention = [layer.self_attn for layer in model.model.layers]
    trace: list[str] = []
    inputs: dict[int, tuple[torch.Tensor, Any]] = {}
    queries: dict[int, torch.Tensor] = {}
    make = selector.scores

    def watched(layer: int) -> Any:
        scores: Any = make(layer)
        speculate = scores.speculate

        def reported(query: torch.Tensor, *others: Any) -> None:
            trace.append(f"score {layer}")
            queries[layer] = query
            speculate(query, *others)

        scores.speculate = reported
        return scores

    def entered(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        trace.append(f"enter {module.layer_idx}")
        inputs[module.layer_idx] = kwargs["hidden_states"], kwargs["position_embeddings"]

    selector.scores = watched  # type: ignore[method-assign]
    for module in attention:
        module.register_forward_pre_hook(entered, with_kwargs=True)
    cache = CompressedCache(model.config, select=selector, **SMALL)
    with torch.no_grad(), selector.attached(model):
        model(prompt[:, :-1], past_key_values=cache)
        trace.clear()
        model(prompt[:, -1:], past_key_values=cache)
        # The first layer has none before it.
        assert trace == ["enter 0", "score 0", "score 1", "enter 1", "score 2", "enter 2"]
        for layer, before in ((0, 0), (1, 0), (2, 1)):
            assert torch.equal(queries[layer], query_of(attention[layer], *inputs[before]))
        for layer in (1, 2):
            own = query_of(attention[layer], *inputs[layer])
            assert not torch.allclose(queries[layer], own)


def test_a_model_that_is_not_attached() -> None:
    cache = CompressedCache(model_of("llama").config, select=HeavyHitterSelector(0.5), **SMALL)
    message = r"seen 0 of 50 tokens: run the model within `with selector.attached\(model\):`"
    with pytest.raises(BitslabError, match=message):
        generate(model_of("llama"), cache, prompt_of())


def test_a_forward_pass_that_failed() -> None:
    model = copy.deepcopy(model_of("llama"))
    selector = HeavyHitterSelector(0.5, 4)
    cache = CompressedCache(model.config, select=selector, **SMALL)
    prompt = prompt_of()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with torch.no_grad(), selector.attached(model):
        model(prompt, past_key_values=cache)
        hook = model.model.layers[1].self_attn.k_proj.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(prompt[:, :1], past_key_values=cache)
        hook.remove()
        for layer in layers_of(cache):
            layer.keep_first(50)
        model(prompt[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 51


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heavy": 0}, "heavy: 0, accepted are numbers from 1"),
        ({"heavy": 1.5}, "heavy: 1.5, accepted are shares above 0 and up to 1"),
        ({"heavy": "all"}, "heavy: expected a number, got 'all'"),
        ({"recent": 0}, "recent: 0, accepted are numbers from 1"),
        ({"recent": 1.5}, "recent: expected an int, got 1.5"),
        ({"prompt_queries": -1}, "prompt_queries: -1, accepted are numbers from 1"),
    ],
)
def test_bad_options_of_heavy_hitters(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        HeavyHitterSelector(**options)


@pytest.mark.parametrize(
    ("skews", "options", "message"),
    [
        ({}, {}, "skews: expected a mapping"),
        (3, {}, "skews: expected a mapping"),
        ({0: torch.zeros(4, 4)}, {}, r"skews: of layer 0, expected \[heads, D, D\]"),
        ({0: torch.zeros(1, 4, 3)}, {}, r"skews: of layer 0, shape \[1, 4, 3\]"),
        (None, {"partial": 0}, "partial: 0, accepted are shares"),
        (None, {"budget": 2}, "budget: 2, accepted are shares"),
        (None, {"alpha": -1}, "alpha: -1, accepted are numbers above 0 and None"),
        (None, {"alpha": "4"}, "alpha: expected a number or None"),
    ],
)
def test_bad_options_of_infinigen(skews: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        InfiniGenSelector({0: torch.eye(4)[None]} if skews is None else skews, **options)


@pytest.mark.parametrize("name", FUSED)
def test_infinigen_needs_query_projections(name: str) -> None:
    with pytest.raises(ArgumentError, match="no q_proj; HeavyHitterSelector serves any model"):
        infinigen(name)


def test_queries_that_are_computed_otherwise() -> None:
    model = copy.deepcopy(model_of("llama"))
    for layer in model.model.layers:
        layer.self_attn.q_norm = torch.nn.LayerNorm(16)  # which the attention does not use
    with pytest.raises(ArgumentError, match="LlamaAttention cannot be computed from q_proj"):
        InfiniGenSelector.fit(model, prompt_of())
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (3, "sample_inputs: expected token ids"),
        ([], "sample_inputs: there are none"),
        (["text"], r"sample_inputs: expected token ids \[B, T\] or a mapping, got 'text'"),
        (torch.zeros(3), r"sample_inputs: shape \[3\]"),
        (torch.zeros(1, 0, dtype=torch.long), r"sample_inputs: shape \[1, 0\]"),
    ],
)
def test_bad_samples(samples: Any, message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        InfiniGenSelector.fit(model_of("llama"), samples)


def test_samples_may_be_several() -> None:
    once = infinigen("llama")
    inputs = [{"input_ids": part} for part in prompt_of(batch=2, length=64).split(1)]
    several = InfiniGenSelector.fit(model_of("llama"), inputs)
    for layer, skew in once.skews.items():
        # The signs of singular vectors are free.
        torch.testing.assert_close(skew.abs(), several.skews[layer].abs(), rtol=1e-2, atol=1e-3)


def test_a_selector_of_another_model() -> None:
    selector = infinigen("llama")
    with pytest.raises(ArgumentError, match=r"full-attention layers are \[0, 1\], those of the"):
        CompressedCache(config_of("llama", num_hidden_layers=3), select=selector)
    with pytest.raises(ArgumentError, match="has no q_proj"):
        selector.attached(model_of("phi3"))
    cache = CompressedCache(model_of("opt").config, select=selector, **SMALL)
    with (
        selector.attached(model_of("opt")),
        pytest.raises(ArgumentError, match="fitted to 2 K/V heads of 16, the model has 4 of 16"),
    ):
        generate(model_of("opt"), cache, prompt_of())


def test_models_that_cannot_be_served() -> None:
    selector = HeavyHitterSelector(0.5)
    both = T5ForConditionalGeneration(
        T5Config(vocab_size=8, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(ArgumentTypeError, match="model: expected a transformers model, got 'm'"):
        selector.attached("m")  # type: ignore[arg-type]
    for model in (torch.nn.Linear(2, 2), both):
        with pytest.raises(ArgumentError, match="model: .*accepted are decoder-only"):
            selector.attached(model)
    model = copy.deepcopy(model_of("llama"))
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ArgumentError, match="'flash_attention_2', accepted are sdpa and eager"):
        selector.attached(model)


def test_select_must_be_a_selector() -> None:
    with pytest.raises(ArgumentTypeError, match="select: expected a KVSelector"):
        CompressedCache(model_of("llama").config, select="infinigen")  # type: ignore[arg-type]


def test_partial_keys_count_as_device_memory() -> None:
    _, cache = selected("llama", infinigen("llama"), prompt_of())
    scores = [layer.scores for layer in layers_of(cache)]
    assert all(isinstance(s, PartialKeys) and s.columns == 5 for s in scores)
    partial = sum(t.nbytes for s in scores for t in s.tensors())
    assert cache.stats()["device_bytes"] > partial > 0
