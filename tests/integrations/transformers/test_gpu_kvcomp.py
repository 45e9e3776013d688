"""KVCompCache on a GPU: attention to the K and V that it keeps, read where they are packed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from bitslab.integrations.transformers import HeavyHitterSelector, KVCompCache
from bitslab.kvcache import PackedAttention
from tests.integrations.transformers.models import dynamic, model_of, prompt_of

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

SIZES: dict[str, Any] = {"window": 32, "block_tokens": 64}
PROMPT = 4 + 64 + 32 + 1


def on_gpu(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model: Any = copy.deepcopy(model_of(name)).to("cuda", dtype)
    model.set_attn_implementation("bitslab")
    return model


def kvcomp(config: Any, **options: Any) -> Any:
    return KVCompCache(config, **{**SIZES, **options})


def settled(cache: Any) -> None:
    """Pack what is due, and wait for it."""
    for layer in cache.layers:
        layer.settle()
        layer._reader.finish_packing()
        for history in layer.histories:
            while history.packs:  # a single block, which no queue has
                history.pack_on(wait=True)


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gpt2"])
def test_logits_are_those_of_the_k_and_v_that_are_kept(name: str, offload: bool) -> None:
    """Within what products of the matrix instruction differ by; a plain cache has them decoded."""
    model, prompt = on_gpu(name), prompt_of(batch=2, length=PROMPT).cuda()
    mask = torch.ones_like(prompt)
    mask[0, :17] = 0
    cache, plain = kvcomp(model.config, error=0.3, offload=offload), dynamic(model.config)
    with torch.no_grad():
        model(prompt[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
    settled(cache)
    assert {layer.packed_tokens for layer in cache.layers} == {64}
    for i, layer in enumerate(cache.layers):
        plain.update(layer.keys, layer.values, i)
    steps = prompt_of(batch=2, length=20, seed=5).cuda()
    found: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        for t in range(steps.shape[1]):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1) if t else mask
            for each, logits in zip((cache, plain), found, strict=True):
                step = model(steps[:, t : t + 1], attention_mask=mask, past_key_values=each)
                logits.append(step.logits)
    packed, dense = (torch.stack(each) for each in found)
    assert (packed - dense).norm() < 0.01 * dense.norm()
    stats = cache.stats()
    assert stats["packed_passes"] == 40 and not stats["dense_passes"]


def test_codecs_are_the_same_whenever_they_are_learnt() -> None:
    """On a stream beside that of the model, and in the next update on the model's own."""
    model, prompt = on_gpu("llama", torch.bfloat16), prompt_of(batch=2, length=1000).cuda()
    found = []
    for later in (True, False):
        cache = kvcomp(model.config, error=0.1)
        with torch.no_grad():
            model(prompt[:, :1], past_key_values=cache)  # opens the histories
            cache.reset()
            for layer in cache.layers:
                layer._reader.learning.puts_off = later
            model(prompt, past_key_values=cache)
            first = cache.stats()["errors"]
            model(prompt[:, :1], past_key_values=cache)
        settled(cache)
        assert set(first) <= set(cache.stats()["errors"]) == {0, 1}
        found.append([layer.plans.measured for layer in cache.layers])
        assert all(0.08 < each.error <= 0.1 for each in found[-1])
    for one, other in zip(*found, strict=True):
        assert one.key_scale == pytest.approx(other.key_scale, rel=1e-3)
        assert one.value_scale == pytest.approx(other.value_scale, rel=1e-3)
        assert one.key_bits == pytest.approx(other.key_bits, rel=1e-3)


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_attention_to_tiles_is_that_to_decoded_tokens(
    dtype: torch.dtype, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = on_gpu("llama", dtype), prompt_of(batch=2, length=400).cuda()
    caches = [kvcomp(model.config, error=0.2, offload=offload) for _ in range(2)]
    steps = prompt_of(batch=2, length=100, seed=5).cuda()
    found: list[list[torch.Tensor]] = []
    for cache in caches:
        found.append([])
        with torch.no_grad():
            model(prompt, past_key_values=cache)
            settled(cache)
            for t in range(steps.shape[1]):
                logits = model(steps[:, t : t + 1], past_key_values=cache).logits
                found[-1].append(logits.float())
        monkeypatch.setattr(PackedAttention, "serves", lambda *_: False)
    packed, dense = (torch.stack(each) for each in found)
    assert (packed - dense).norm() < (0.05 if dtype is not torch.float32 else 0.02) * dense.norm()
    assert caches[0].stats()["packed_passes"] == caches[1].stats()["dense_passes"] == 200


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_lossless_tiles_are_attended_to_and_keep_all_bits(
    dtype: torch.dtype, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = on_gpu("llama", dtype), prompt_of(batch=2, length=400).cuda()
    caches = [kvcomp(model.config, coder="lossless", offload=offload) for _ in range(2)]
    plain = dynamic(model.config)
    steps = prompt_of(batch=2, length=100, seed=5).cuda()
    found: list[torch.Tensor] = []
    for cache in caches:
        logits = []
        with torch.no_grad():
            model(prompt, past_key_values=cache)
            model(steps[:, :1], past_key_values=cache)
            settled(cache)
            for t in range(1, steps.shape[1]):
                logits.append(model(steps[:, t : t + 1], past_key_values=cache).logits.float())
        settled(cache)
        found.append(torch.stack(logits))
        monkeypatch.setattr(PackedAttention, "serves", lambda *_: False)
    with torch.no_grad():
        model(prompt, past_key_values=plain)
    assert (found[0] - found[1]).norm() < 0.03 * found[1].norm()
    packed, dense = (cache.stats() for cache in caches)
    # Codecs are fitted to a sample that is copied meanwhile: a first step may come before.
    assert packed["packed_passes"] >= 196 and dense["dense_passes"] >= 196
    assert packed["packed_tokens"] > 400 and not packed["dense_passes"]
    for cache in caches:
        for ours, theirs in zip(cache.layers, plain.layers, strict=True):
            for one, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                assert torch.equal(one[:, :, :400].view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("coder", ["huffman", "lossless"])
def test_words_cross_once_in_each_step(coder: str) -> None:
    """Those of the next layer while this one computes: none is fetched twice."""
    model, prompt = on_gpu("llama", torch.bfloat16), prompt_of(length=400).cuda()
    cache = kvcomp(model.config, error=0.2, coder=coder)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
        settled(cache)
        for _ in range(3):
            model(prompt[:, :1], past_key_values=cache)
        words = sum(4 * h.words.n_words for layer in cache.layers for h in layer.histories)
        before = cache.stats()["moved_to_device_bytes"]
        for _ in range(4):
            model(prompt[:, :1], past_key_values=cache)
        moved = cache.stats()["moved_to_device_bytes"] - before
    assert moved == 4 * words
    assert cache.stats()["packed_passes"] == 14


def test_the_same_bytes_as_on_the_cpu() -> None:
    """Steps by hand and by range need no queries: codecs are those of a sample."""
    steps = {"granularity": "channel", "key_scale": 0.2, "value_scale": 0.2}
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(2, 2, 300, 16, generator=generator).bfloat16() for _ in range(2)]
    found = []
    for device in ("cpu", "cuda"):
        cache = kvcomp(model_of("llama").config, **steps)
        k, v = (t.to(device) for t in tokens)
        cache.update(k, v, 0)
        cache.layers[0]._reader.finish_packing()
        assert cache.layers[0].packed_tokens == 256
        found.append([t.cpu() for t in (cache.layers[0].keys, cache.layers[0].values)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_memory_while_decoding() -> None:
    """No dense K and V of the history: less than half of what a plain cache takes."""
    model = on_gpu("llama", torch.bfloat16)
    prompt = prompt_of(batch=8, length=200).cuda()
    cache: Any = kvcomp(model.config, error=0.3, offload=False)
    k, v = (torch.randn(8, 2, 16_384, 16, device="cuda").bfloat16() for _ in range(2))
    raw = 2 * (k.nbytes + v.nbytes)
    del prompt
    from bitslab.integrations.transformers.attention import attention

    module = model.model.layers[0].self_attn
    query = torch.randn(8, 4, 1, 16, device="cuda").bfloat16()
    for i in range(2):
        keys, values = cache.update(k, v, i)
        attention(module, query.expand(-1, -1, 64, -1), keys, values, None)
        del keys, values
    settled(cache)
    one = torch.randn(8, 2, 1, 16, device="cuda").bfloat16()
    del k, v
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    there = torch.cuda.memory_allocated()
    for _ in range(3):
        for i in range(2):
            keys, values = cache.update(one, one, i)
            attention(module, query, keys, values, None)
    torch.cuda.synchronize()
    assert cache.stats()["packed_passes"] == 6
    assert torch.cuda.max_memory_allocated() - there < raw / 8


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_sequences_that_remain_are_copied_as_they_are_packed(offload: bool) -> None:
    model, prompt = on_gpu("llama"), prompt_of(batch=6, length=300).cuda()
    cache = kvcomp(model.config, error=0.3, offload=offload)
    with torch.no_grad():
        model(prompt[:, :-1], past_key_values=cache)
        settled(cache)
        model(prompt[:, -1:], past_key_values=cache)  # the next layers' words are under way
        kept = [(layer.keys, layer.values) for layer in cache.layers]
        words = [history.words.n_words for layer in cache.layers for history in layer.histories]
        cache.batch_select_indices(torch.tensor([5, 1]))
        for layer, (keys, values) in zip(cache.layers, kept, strict=True):
            assert torch.equal(layer.keys, keys[[5, 1]])
            assert torch.equal(layer.values, values[[5, 1]])
        left = [history.words.n_words for layer in cache.layers for history in layer.histories]
        assert all(0 < now < 0.4 * before for now, before in zip(left, words, strict=True))
        for step in prompt_of(batch=2, length=80, seed=5).cuda().split(1, dim=1):
            logits = model(step, past_key_values=cache).logits
    assert logits.isfinite().all()
    settled(cache)
    for layer, (keys, values) in zip(cache.layers, kept, strict=True):
        packed = 4 + 64 * ((299 - 4 - 32) // 64)
        assert torch.equal(layer.keys[:, :, :packed], keys[[5, 1], :, :packed])
        assert torch.equal(layer.values[:, :, :packed], values[[5, 1], :, :packed])


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_whole_tiles_are_chosen(offload: bool) -> None:
    model: Any = copy.deepcopy(model_of("llama")).to("cuda", torch.bfloat16)
    selector = HeavyHitterSelector(0.4, 4)
    cache = kvcomp(model.config, offload=offload, select=selector, block_tokens=16)
    prompt = prompt_of(batch=2, length=400).cuda()
    with torch.no_grad(), selector.attached(model):
        model.generate(prompt, past_key_values=cache, max_new_tokens=30, do_sample=False)
    assert 0.3 < cache.stats()["selected"] < 0.6
    layer = cache.layers[0]
    chosen = layer._gather()
    positions = chosen.selection.positions()
    assert chosen.selection.first == 4 and chosen.selection.group_tokens == 16
    for tokens, every in zip(chosen.gathered.get(), (layer.keys, layer.values), strict=True):
        index = positions[:, :, 4:, None].expand(-1, -1, -1, tokens.shape[3])
        assert torch.equal(tokens[:, :, : index.shape[2]], every.gather(2, index))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("error", [0.0, 0.3], ids=["lossless", "quantised"])
def test_layers_on_two_gpus_with_padding(error: float, offload: bool) -> None:
    """Masks are copied to the second GPU; its layers read tiles, and logits are those of one."""
    from accelerate import dispatch_model

    one, two = on_gpu("llama"), on_gpu("llama")
    dispatch_model(
        two,
        {
            "model.embed_tokens": 0,
            "model.rotary_emb": 0,
            "model.layers.0": 0,
            "model.layers.1": 1,
            "model.norm": 1,
            "lm_head": 1,
        },
    )
    assert next(two.model.layers[1].parameters()).device == torch.device("cuda", 1)
    prompt, steps = prompt_of(batch=2, length=PROMPT).cuda(), prompt_of(batch=2, length=90).cuda()
    found: list[list[torch.Tensor]] = []
    for model in (one, two):
        cache = kvcomp(model.config, error=error, offload=offload)
        mask = torch.ones_like(prompt)
        mask[0, :17] = 0
        with torch.no_grad():
            model(prompt[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
            settled(cache)
            found.append([])
            for t in range(steps.shape[1]):
                mask = torch.nn.functional.pad(mask, (0, 1), value=1) if t else mask
                step = steps[:, t : t + 1]
                logits = model(step, attention_mask=mask, past_key_values=cache).logits
                found[-1].append(logits.cpu())
        devices = [layer.histories[0].device.index for layer in cache.layers]
        assert devices == ([0, 0] if model is one else [0, 1])
        if error:
            assert cache.stats()["packed_passes"] == 2 * 90 and not cache.stats()["dense_passes"]
    here, there = (torch.stack(each) for each in found)
    assert (here - there).norm() < (0.02 if error else 1e-4) * here.norm()
