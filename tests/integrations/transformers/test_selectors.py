"""Selectors: with everything chosen, DynamicCache's tokens; with less, what attention would say."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from bitslab.integrations.transformers import (
    CompressedCache,
    HeavyHitterSelector,
    InfiniGenSelector,
    KVSelector,
)
from bitslab.integrations.transformers.selectors import MAX_QUERIES
from bitslab.kvcache import HeavyScores, Selection
from tests.integrations.transformers.models import BASE, SMALL, model_of, prompt_of

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 20
PROJECTED = ["llama", "qwen3", "gemma2", "gemma3", "mistral", "opt", "mixtral"]
FUSED = ["phi3", "gpt-neox", "gpt2"]


class Everything(HeavyScores):
    """Chooses all tokens, and has them gathered one by one."""

    def choose(self, packed: int, group_tokens: int) -> Selection | None:
        batch, heads = self.sums.shape[:2]
        groups = torch.arange(packed // group_tokens, device=self.sums.device)
        groups = groups.expand(batch, heads, -1)
        return Selection(groups, group_tokens, packed) if packed else None


class EverythingSelector(HeavyHitterSelector):
    def scores(self, layer: int) -> HeavyScores:
        return Everything(1.0)


def infinigen(name: str, **options: Any) -> InfiniGenSelector:
    return InfiniGenSelector.fit(model_of(name), prompt_of(batch=2, length=64), **options)


def generate(
    model: Any, cache: Any, prompt: torch.Tensor, mode: str = "greedy", **more: Any
) -> torch.Tensor:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
    options |= {
        "greedy": {},
        "sample": {"do_sample": True, "top_k": 20},
        "beam": {"num_beams": 3, "num_return_sequences": 2},
        "prompt-lookup": {"prompt_lookup_num_tokens": 4},
        "assisted": {},
        "chunked-prefill": {"prefill_chunk_size": 13},
    }[mode]
    if mode == "assisted":
        options["assistant_model"] = model_of("llama", seed=1)
    torch.manual_seed(0)
    found: torch.Tensor = model.generate(prompt, past_key_values=cache, **{**options, **more})
    return found


def selected(
    name: str, selector: KVSelector, prompt: torch.Tensor, mode: str = "greedy", **more: Any
) -> tuple[torch.Tensor, CompressedCache]:
    model = model_of(name)
    cache = CompressedCache(model.config, select=selector, **SMALL)
    with selector.attached(model):
        return generate(model, cache, prompt, mode, **more), cache


def padded(batch: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    prompt = prompt_of(batch=batch)
    mask = torch.ones_like(prompt)
    mask[0, :17] = mask[2, :3] = 0
    prompt[mask == 0] = 0
    return prompt, mask


def layers_of(cache: Any) -> list[Any]:
    """Return the layers of a cache, of whatever kinds."""
    return list(cache.layers)


# Everything chosen


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "greedy") for name in (*PROJECTED, *FUSED)]
    + [(n, m) for n in ("llama", "gemma2") for m in ("beam", "prompt-lookup", "chunked-prefill")]
    + [("llama", "sample"), ("llama", "assisted")],
)
def test_everything_gathered_gives_the_plain_tokens(name: str, mode: str) -> None:
    prompt = prompt_of()
    expected = generate(model_of(name), None, prompt, mode)
    found, cache = selected(name, EverythingSelector(1.0, 4), prompt, mode)
    assert torch.equal(found, expected)
    assert cache.stats()["selected"] == 1.0


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt", "gemma2"])
def test_everything_gathered_with_left_padding(name: str) -> None:
    prompt, mask = padded()
    expected = generate(model_of(name), None, prompt, attention_mask=mask)
    found, _ = selected(name, EverythingSelector(1.0, 4), prompt, attention_mask=mask)
    assert torch.equal(found, expected)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("mode", ["greedy", "beam"])
@pytest.mark.parametrize("kind", ["heavy", "infinigen"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "opt", "gemma2"])
def test_a_budget_of_all_gives_the_plain_tokens(name: str, kind: str, mode: str) -> None:
    selector: KVSelector = HeavyHitterSelector(1.0, 4)
    if kind == "infinigen":
        selector = infinigen(name, budget=1.0, alpha=None)
    prompt = prompt_of()
    found, _ = selected(name, selector, prompt, mode)
    assert torch.equal(found, generate(model_of(name), None, prompt, mode))


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "gemma2"])
def test_k_and_v_gathered_have_the_plain_bits(name: str) -> None:
    prompt = prompt_of(batch=2)
    plain = DynamicCache(config=model_of(name).config)
    generate(model_of(name), plain, prompt)
    _, cache = selected(name, EverythingSelector(1.0, 4), prompt)
    for ours, theirs in zip(layers_of(cache), layers_of(plain), strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize("name", ["llama", "opt", "gemma2"])
def test_models_with_eager_attention(name: str) -> None:
    model = copy.deepcopy(model_of(name))
    model.set_attn_implementation("eager")
    prompt, mask = padded()
    selector = EverythingSelector(1.0, 4)
    cache = CompressedCache(model.config, select=selector, **SMALL)
    expected = generate(model, None, prompt, attention_mask=mask)
    with selector.attached(model):
        found = generate(model, cache, prompt, attention_mask=mask)
    assert torch.equal(found, expected)


# Less chosen


class Recording(HeavyScores):
    """Remembers what was chosen."""

    chosen: Selection | None = None

    def choose(self, packed: int, group_tokens: int) -> Selection | None:
        self.chosen = super().choose(packed, group_tokens)
        return self.chosen


class RecordingSelector(HeavyHitterSelector):
    def scores(self, layer: int) -> HeavyScores:
        return Recording(self.heavy)


@pytest.mark.drawn(10)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "opt", "gemma2", "gpt-neox", "gpt-oss"])
@pytest.mark.parametrize("queries", [1, 5])
def test_attention_to_less_is_attention_with_the_others_masked(
    name: str, attention: str, queries: int
) -> None:
    if attention == "sdpa" and name in ("gemma2", "gpt-oss"):
        attention = "eager"  # they have no other
    model = gpt_oss() if name == "gpt-oss" else copy.deepcopy(model_of(name))
    model.set_attn_implementation(attention)
    prompt, mask = padded()
    more = prompt_of(batch=3, length=queries, seed=7)
    mask = torch.cat([mask, torch.ones_like(more)], dim=1)
    selector = RecordingSelector(0.4, 4)
    cache = CompressedCache(model.config, select=selector, **SMALL)
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt, attention_mask=mask[:, :-queries], past_key_values=plain)
        with selector.attached(model):
            model(prompt, attention_mask=mask[:, :-queries], past_key_values=cache)
            found = model(more, attention_mask=mask, past_key_values=cache, output_attentions=True)
        chosen = {
            i: layer.scores.chosen
            for i, layer in enumerate(layers_of(cache))
            if hasattr(layer, "scores")
        }
        assert chosen and all(c is not None for c in chosen.values())
        hooks = [
            module.register_forward_pre_hook(masked(chosen[module.layer_idx]), with_kwargs=True)
            for module in model.modules()
            if getattr(module, "layer_idx", None) in chosen and hasattr(module, "config")
        ]
        expected = model(more, attention_mask=mask, past_key_values=plain, output_attentions=True)
        for hook in hooks:
            hook.remove()
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    if attention == "eager":
        for ours, theirs in zip(found.attentions, expected.attentions, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def gpt_oss() -> Any:
    """Return a model whose attention has sinks."""
    options: dict[str, Any] = {
        **BASE,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    config = transformers.GptOssConfig(**options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.GptOssForCausalLM(config).eval()


def masked(chosen: Selection) -> Any:
    """Return a hook that forbids a layer's attention the packed tokens that were not chosen."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs["attention_mask"]
        heads = module.config.num_attention_heads
        batch, _, queries, total = mask.shape
        allowed = torch.zeros(batch, chosen.groups.shape[1], total, dtype=torch.bool)
        allowed[..., chosen.packed :] = True
        allowed.scatter_(2, chosen.positions(), True)
        allowed = allowed.repeat_interleave(heads // allowed.shape[1], dim=1)[:, :, None]
        if mask.dtype == torch.bool:
            mask = mask & allowed
        else:
            mask = mask.masked_fill(~allowed, torch.finfo(mask.dtype).min)
        return args, {**kwargs, "attention_mask": mask}

    return hook


@pytest.mark.drawn(4)
@pytest.mark.parametrize("kind", ["heavy", "infinigen"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "opt", "gemma3"])
def test_only_chosen_tokens_are_moved(name: str, kind: str) -> None:
    prompt = prompt_of(batch=2, length=100)
    full = CompressedCache(model_of(name).config, **SMALL)
    generate(model_of(name), full, prompt)
    selector: KVSelector = HeavyHitterSelector(0.2, 4)
    if kind == "infinigen":
        selector = infinigen(name, budget=0.2, alpha=None)
    _, cache = selected(name, selector, prompt)
    stats = cache.stats()
    assert stats["tokens"] == full.stats()["tokens"]
    assert 0.2 <= stats["selected"] < 0.23  # whole rows
    ratio = stats["moved_to_device_bytes"] / full.stats()["moved_to_device_bytes"]
    assert 0.18 < ratio < 0.25


def test_heavy_may_be_a_number_of_tokens() -> None:
    _, cache = selected("llama", HeavyHitterSelector(8, 4), prompt_of(length=100))
    stats = cache.stats()
    assert 8 / stats["packed_tokens"] <= stats["selected"] < 10 / (100 - 16)


def test_recent_widens_the_window() -> None:
    _, cache = selected("llama", HeavyHitterSelector(0.5, 30), prompt_of())
    stats = cache.stats()
    assert stats["tokens"] - stats["packed_tokens"] >= 30


@pytest.mark.parametrize("prompt_queries", [None, 6])
def test_sums_are_those_of_eager_attention(prompt_queries: int | None) -> None:
    model = copy.deepcopy(model_of("llama"))
    model.set_attn_implementation("eager")
    prompt, mask = padded()
    with torch.no_grad():
        weights = model(prompt, attention_mask=mask, output_attentions=True).attentions
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        selector = HeavyHitterSelector(0.5, 4, prompt_queries=prompt_queries)
        cache = CompressedCache(model.config, select=selector, **SMALL)
        with torch.no_grad(), selector.attached(model):
            model(prompt, attention_mask=mask, past_key_values=cache)
        first = 17 if prompt_queries is None else -prompt_queries  # those of padding mean nothing
        for layer, each in zip(layers_of(cache), weights, strict=True):
            if prompt_queries is None:
                found, each = layer.scores.sums[1], each[1]
                torch.testing.assert_close(found, each.unflatten(0, (2, 2)).sum((1, 2)))
            else:
                expected = each[:, :, first:].unflatten(1, (2, 2)).sum((2, 3))
                torch.testing.assert_close(layer.scores.sums, expected)


# Needles


def calm(name: str) -> Any:
    """Return a model whose layers change the residual stream little, as those of real models."""
    model = copy.deepcopy(model_of(name))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if any(n in parameter_name for n in ("o_proj", "out_proj", "down_proj", "fc2")):
                parameter *= 0.05
    return model


class Planting(CompressedCache):
    """Puts a key where the prompt has none, at a place of each layer."""

    needles: dict[int, torch.Tensor] = {}
    place = 0

    def update(self, key_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layer = args[1]
        if key_states.shape[2] > self.place and layer in self.needles:
            key_states = key_states.clone()
            key_states[:, :, self.place] = self.needles[layer]
        return super().update(key_states, *args, **kwargs)


class QueriesSelector(HeavyHitterSelector):
    """Remembers the queries of each layer."""

    def __init__(self) -> None:
        super().__init__(1.0, 4)
        self.queries: dict[int, torch.Tensor] = {}

    def observe(self, attended: Any, module: Any, query: torch.Tensor, *args: Any) -> None:
        self.queries[module.layer_idx] = query[:, :, -1]
        super().observe(attended, module, query, *args)


# The prompt's queries that are to find OPT's needle as well point elsewhere, by their positions.
@pytest.mark.parametrize(
    ("name", "kind"),
    [(n, k) for n in ("llama", "qwen3", "opt") for k in ("infinigen", "alpha")]
    + [("llama", "heavy"), ("qwen3", "heavy")],
)
def test_a_needle_is_found(name: str, kind: str) -> None:
    model = calm(name)
    prompt = prompt_of(batch=2, length=80)
    heads = 4 if name == "opt" else 2

    def run(selector: KVSelector, needles: dict[int, torch.Tensor]) -> CompressedCache:
        cache = Planting(model.config, select=selector, **SMALL)
        cache.needles, cache.place = needles, 21
        with torch.no_grad(), selector.attached(model):
            model(prompt[:, :-1], past_key_values=cache)
            model(prompt[:, -1:], past_key_values=cache)
        return cache

    watching = QueriesSelector()
    run(watching, {})
    needles = {
        layer: 8 * query.unflatten(1, (heads, -1)).mean(2)
        for layer, query in watching.queries.items()
    }
    found: dict[int, Selection] = {}
    if kind == "heavy":
        selector: KVSelector = HeavyHitterSelector(0.06, 4)
    else:
        alpha = 4.0 if kind == "alpha" else None
        selector = InfiniGenSelector.fit(model, prompt, budget=0.06, alpha=alpha, partial=0.5)
    make = selector.scores

    def remembering(layer: int) -> Any:
        scores = make(layer)
        choose = scores.choose

        def remember(packed: int, group_tokens: int) -> Selection | None:
            chosen = choose(packed, group_tokens)
            if chosen is not None:
                found[layer] = chosen
            return chosen

        scores.choose = remember  # type: ignore[method-assign]
        return scores

    selector.scores = remembering  # type: ignore[method-assign]
    run(selector, needles)
    assert sorted(found) == [0, 1]
    for chosen in found.values():
        assert (chosen.positions() == 21).any(-1).all()


# Caches with selectors


@pytest.mark.parametrize("kind", ["heavy", "infinigen"])
def test_copies_and_pickles_go_on_alike(kind: str) -> None:
    model = model_of("llama")
    selector: KVSelector = HeavyHitterSelector(0.3, 4)
    if kind == "infinigen":
        selector = infinigen("llama", budget=0.3)
    first, cache = selected("llama", selector, prompt_of(length=80))
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache]
    with selector.attached(model):
        found = [generate(model, each, first) for each in copies]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])


@pytest.mark.parametrize("kind", ["heavy", "infinigen"])
def test_modes_with_less_run_through(kind: str) -> None:
    selector: KVSelector = HeavyHitterSelector(0.3, 4, prompt_queries=8)
    if kind == "infinigen":
        selector = infinigen("llama", budget=0.3)
    prompt, mask = padded()
    for mode in ("beam", "chunked-prefill"):
        found, cache = selected("llama", selector, prompt, mode, attention_mask=mask)
        assert found.shape[1] == prompt.shape[1] + NEW and cache.stats()["selected"] < 1
    found, cache = selected("llama", selector, prompt[1:2], "prompt-lookup")
    assert cache.stats()["selected"] < 1
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.crop(-10)
    with selector.attached(model_of("llama")):
        generate(model_of("llama"), cache, found.repeat(2, 1))


@pytest.mark.parametrize("kind", ["heavy", "infinigen"])
def test_going_on_from_inference_mode(kind: str) -> None:
    model = model_of("llama")
    selector: KVSelector = HeavyHitterSelector(0.3, 4)
    if kind == "infinigen":
        selector = infinigen("llama", budget=0.3)
    found = []
    for mode in (torch.inference_mode, torch.no_grad):
        cache = CompressedCache(model.config, select=selector, **SMALL)
        with selector.attached(model):
            with mode():
                model(prompt_of(), past_key_values=cache)
            found.append(generate(model, cache, prompt_of(length=60)))
    assert torch.equal(*found)


def test_reset_and_another_batch() -> None:
    selector = infinigen("llama", budget=0.3)
    first, cache = selected("llama", selector, prompt_of(length=80))
    cache.reset()
    with selector.attached(model_of("llama")):
        prompt = prompt_of(batch=2, seed=3)
        again = generate(model_of("llama"), cache, prompt)
        fresh = CompressedCache(model_of("llama").config, select=selector, **SMALL)
        assert torch.equal(again, generate(model_of("llama"), fresh, prompt))


def test_bfloat16() -> None:
    model = copy.deepcopy(model_of("llama")).bfloat16()
    prompt = prompt_of(batch=2)
    selector = InfiniGenSelector.fit(model, prompt, budget=0.3)
    for select in (selector, HeavyHitterSelector(0.3, 4), EverythingSelector(1.0, 4)):
        cache = CompressedCache(model.config, select=select, **SMALL)
        with select.attached(model):
            found = generate(model, cache, prompt)
    assert torch.equal(found, generate(model, None, prompt))


def test_prompts_attend_to_everything() -> None:
    selector = HeavyHitterSelector(0.1, 4)
    model = model_of("llama")
    cache = CompressedCache(model.config, select=selector, **SMALL)
    prompt = prompt_of(length=60)
    with torch.no_grad(), selector.attached(model):
        model(prompt, past_key_values=cache)
        found = model(prompt_of(length=MAX_QUERIES + 1, seed=2), past_key_values=cache).logits
    assert cache.stats()["selected"] == 1.0
    whole = torch.cat([prompt, prompt_of(length=MAX_QUERIES + 1, seed=2)], dim=1)
    with torch.no_grad():
        expected = model(whole).logits[:, 60:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("kind", ["everything", "heavy", "infinigen", "alpha"])
def test_on_a_gpu(kind: str, offload: bool) -> None:
    model = copy.deepcopy(model_of("llama")).bfloat16().cuda()
    prompt, mask = (t.cuda() for t in padded())
    expected = generate(model, None, prompt, attention_mask=mask)
    selector: KVSelector = EverythingSelector(1.0, 4)
    if kind == "heavy":
        selector = HeavyHitterSelector(0.3, 4)
    elif kind != "everything":
        alpha = 4.0 if kind == "alpha" else None
        selector = InfiniGenSelector.fit(model, prompt[1:2], budget=0.3, alpha=alpha)
    found, shares = [], []
    for _ in range(2):
        cache = CompressedCache(model.config, select=selector, offload=offload, **SMALL)
        with selector.attached(model):
            found.append(generate(model, cache, prompt, attention_mask=mask))
        shares.append(cache.stats()["selected"])
    assert torch.equal(*found)
    if kind == "everything":
        assert torch.equal(found[0], expected)
    else:
        assert max(shares) < 0.45


@pytest.mark.gpu
@pytest.mark.parametrize("length", [50, 9], ids=["packed-prompt", "short-prompt"])
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("kind", ["heavy", "infinigen", "alpha"])
def test_speed_of_the_gpu_changes_nothing(
    kind: str, offload: bool, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(model_of("llama")).bfloat16().cuda()
    prompt = prompt_of(batch=2, length=length).cuda()
    selector: KVSelector = HeavyHitterSelector(0.3, 4)
    if kind != "heavy":
        alpha = 4.0 if kind == "alpha" else None
        samples = prompt_of(2, 64).cuda()
        selector = InfiniGenSelector.fit(model, samples, budget=0.3, alpha=alpha)

    def in_time(event: torch.cuda.Event) -> bool:
        event.synchronize()
        return True

    found = []
    for query in (in_time, lambda event: False):
        cache = CompressedCache(model.config, select=selector, offload=offload, **SMALL)
        with monkeypatch.context() as patch, selector.attached(model):
            patch.setattr(torch.cuda.Event, "query", query)
            tokens = generate(model, cache, prompt, max_new_tokens=40, min_new_tokens=40)
        stats = cache.stats()
        assert stats["packed_tokens"] > length
        found.append((tokens.tolist(), stats["packed_tokens"], stats["selected"]))
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["heavy", "infinigen"])
def test_copies_on_a_gpu_go_on_alike(kind: str) -> None:
    model = copy.deepcopy(model_of("llama")).bfloat16().cuda()
    selector: KVSelector = HeavyHitterSelector(0.3, 4)
    if kind != "heavy":
        selector = InfiniGenSelector.fit(model, prompt_of(2, 64).cuda(), budget=0.3, alpha=None)
    with selector.attached(model):
        for new in range(2, 12):
            cache = CompressedCache(model.config, select=selector, **SMALL)
            prompt = prompt_of(length=50).cuda()
            first = generate(model, cache, prompt, max_new_tokens=new, min_new_tokens=new)
            other = copy.deepcopy(cache)
            assert torch.equal(generate(model, cache, first), generate(model, other, first)), new
            assert cache.stats()["selected"] == other.stats()["selected"], new
