"""KVCompCache of lossless tiles: every bit of K and V, and attention that reads the tiles."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitslab.errors import ArgumentError
from bitslab.integrations.transformers import KVCompCache
from bitslab.integrations.transformers.kvcomp_layer import Padding
from bitslab.kvcache import PackedAttention
from tests.helpers import same_bits
from tests.integrations.transformers.models import dynamic, model_of, prompt_of
from tests.integrations.transformers.test_kvcomp_cache import causal, config
from tests.integrations.transformers.test_kvcomp_generate import MODES, generate

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {"window": 16, "block_tokens": 16}
LOSSLESS: dict[str, Any] = {"coder": "lossless", **SIZES}
HEADS, DIM = 2, 32


@functools.cache
def model_with(name: str, attention: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    model = copy.deepcopy(model_of(name)).to(dtype)
    if attention != "own":
        model.set_attn_implementation(attention)
    return model


def cache_of(model_config: Any, **options: Any) -> Any:
    return KVCompCache(model_config, **{**LOSSLESS, **options})


@pytest.mark.drawn(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_tokens_and_bits_are_those_of_the_plain_run(name: str, mode: str) -> None:
    """Decoded first: with an attention function of the model's own."""
    model = model_with(name, "own")
    plain, cache = dynamic(model.config), cache_of(model.config)
    expected = generate(model, name, mode, plain, prompt_of())
    assert torch.equal(generate(model, name, mode, cache, prompt_of()), expected)
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        assert same_bits(ours.keys, theirs.keys) and same_bits(ours.values, theirs.values)
    stats = cache.stats()
    assert stats["packed_tokens"] >= 32 and stats["dense_passes"] and not stats["packed_passes"]
    assert set(stats["lossless"].values()) == {"coder 'lossless'"} and not stats["errors"]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_attention_reads_tiles(
    name: str, offload: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = model_with(name, "bitslab", dtype), prompt_of(batch=2, length=120)
    packed, dense = (cache_of(model.config, offload=offload) for _ in range(2))
    found: list[torch.Tensor] = []
    for cache in (packed, dense):
        logits = []
        with torch.no_grad():
            model(prompt, past_key_values=cache)
            for token in prompt.split(1, dim=1)[:30]:
                logits.append(model(token, past_key_values=cache).logits.float())
        found.append(torch.cat(logits))
        monkeypatch.setattr(PackedAttention, "serves", lambda *_: False)
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 0.02
    assert packed.stats()["packed_passes"] and not packed.stats()["dense_passes"]
    assert dense.stats()["dense_passes"] and not dense.stats()["packed_passes"]
    first = [(cache.layers[-1].keys, cache.layers[-1].values) for cache in (packed, dense)]
    for one, other in zip(*first, strict=True):  # of the prompt, which attends to itself
        assert same_bits(one[:, :, :120], other[:, :, :120])


@pytest.mark.drawn(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_every_way_to_go_on_reads_tiles(name: str, mode: str) -> None:
    model, cache = model_with(name, "bitslab"), cache_of(model_with(name, "bitslab").config)
    assert generate(model, name, mode, cache, prompt_of(length=80)).shape == (
        2 if mode == "beam" else 1,
        104,
    )
    stats = cache.stats()
    assert stats["packed_tokens"] >= 48 and stats["packed_passes"]


#: Bits of NaNs of several kinds, an infinity, a zero and a subnormal.
SPECIAL = {
    torch.bfloat16: [0x7FC0, 0x7F81, -0x003B, -0x0080, -0x8000, 0x0001],
    torch.float16: [0x7E00, 0x7C01, -0x01AB, -0x0400, -0x8000, 0x0001],
}


def drawn(batch: int, n: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randn(DIM, generator=torch.Generator().manual_seed(0)))
    x = (torch.randn(batch, HEADS, n, DIM, generator=generator) * sizes).to(dtype)
    some = torch.rand(x.shape, generator=generator) < 0.002
    special = torch.tensor(SPECIAL[dtype], dtype=torch.int16)
    x.view(torch.int16)[some] = special.repeat(x.numel())[: int(some.sum())]
    return x


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 60)),
        st.tuples(st.just("crop"), st.integers(1, 50)),
        st.tuples(st.just("reorder"), st.integers(0, 5)),
        st.tuples(st.just("repeat"), st.just(2)),
        st.tuples(st.just("select"), st.integers(0, 5)),
        st.tuples(st.just("pickle"), st.just(0)),
    ),
    min_size=2,
    max_size=10,
)


@settings(max_examples=30)
@given(
    steps, st.integers(0, 1 << 20), st.booleans(), st.sampled_from([torch.bfloat16, torch.float16])
)
def test_whatever_changes_all_bits_remain(
    changes: list[tuple[str, int]], seed: int, offload: bool, dtype: torch.dtype
) -> None:
    cache, plain = cache_of(config("bitslab"), offload=offload), dynamic(config("bitslab"))
    batch = 2
    for number, (kind, value) in enumerate([("append", 70), *changes]):
        if kind == "append":
            for i in range(len(cache.layers)):
                first = seed + 100 * number + 2 * i
                new = [drawn(batch, value, first + k, dtype) for k in (0, 1)]
                for each in (cache, plain):
                    each.update(*(x.clone() for x in new), i)
            for layer in cache.layers:
                layer.settle()
            histories = [h for layer in cache.layers for h in layer.histories]
            assert number or all(h.segments for h in histories)
            assert all(s.codec is not None for h in histories for s in h.segments)
        elif kind == "crop" and value < plain.get_seq_length():
            cache.crop(-value)
            plain.crop(-value)
        elif kind in ("reorder", "select"):
            index = torch.tensor([value % batch] * (batch if kind == "reorder" else 1))
            for each in (cache, plain):
                each.reorder_cache(index) if kind == "reorder" else each.batch_select_indices(index)
            batch = len(index)
        elif kind == "repeat" and batch < 4:
            cache.batch_repeat_interleave(2)
            plain.batch_repeat_interleave(2)
            batch *= 2
        elif kind == "pickle":
            cache = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
        for ours, theirs in zip(cache.layers, plain.layers, strict=True):
            assert same_bits(ours.keys, theirs.keys) and same_bits(ours.values, theirs.values)


def test_codecs_are_learnt_later_and_without_queries() -> None:
    cache = cache_of(config("bitslab"))
    tokens = drawn(2, 70, 0)
    cache.update(tokens, tokens, 0)
    layer = cache.layers[0]
    assert layer.waits and layer.plans.learns
    learning = layer._reader.learning
    learning.puts_off = True
    layer.settle(later=True)
    assert layer.waits and not layer.packed_tokens and learning.nbytes == 2 * tokens.nbytes
    learning.advance()
    assert not layer.waits and not layer.plans.learns and layer.packed_tokens == 48
    for kind, history in zip("kv", layer.histories, strict=True):
        assert history.segments[0].codec is layer.plans.learnt(kind).codec
    assert layer._queries is None and same_bits(layer.keys, tokens)


def test_left_padding_and_cut_histories_are_attended_to() -> None:
    cache = cache_of(config("bitslab"))
    k, v = (drawn(2, 130, seed).nan_to_num(0, 0, 0) for seed in (0, 1))
    handle, _ = cache.update(k, v, 0)
    layer, padding = cache.layers[0], Padding(torch.tensor([0, 25], dtype=torch.int32), 25)
    handle.update.see(k[:, :, :3].repeat(1, 2, 1, 1), padding, {"scaling": 0.2})
    layer.settle()
    own = [history.unpacked.own_first.tokens for history in layer.histories]
    for kept, came in zip(own, (k, v), strict=True):
        assert same_bits(kept, torch.stack([came[0, :, :4], came[1, :, 25:29]]))
    cache.crop(-40)
    more = [drawn(2, 60, seed).nan_to_num(0, 0, 0) for seed in (2, 3)]
    keys, _ = cache.update(*more, 0)
    assert [s.cut_tokens for s in layer.histories[0].segments] == [10]
    query = torch.randn(2, 4, 3, DIM, generator=torch.Generator().manual_seed(4)).bfloat16()
    found = layer.attend_packed(query, padding, {"scaling": 0.2})
    dense = [torch.cat([x[:, :, :90], y], dim=2).float() for x, y in zip((k, v), more, strict=True)]
    dense = [x.repeat_interleave(2, dim=1) for x in dense]
    scores = query.float() @ dense[0].transpose(2, 3) * 0.2
    scores = scores.masked_fill(~causal(3, 150), -torch.inf)
    scores[1, ..., :25] = -torch.inf
    expected = (scores.softmax(-1) @ dense[1]).transpose(1, 2)
    assert float((found.float() - expected).norm() / expected.norm()) < 3e-3
    assert type(keys) is not torch.Tensor and layer.packed_passes == 1


def test_float32_keeps_lossless_rows_and_says_so() -> None:
    model, cache = model_with("llama", "bitslab", torch.float32), None
    cache = cache_of(model.config)
    plain = dynamic(model.config)
    expected = generate(model_of("llama"), "llama", "greedy", plain, prompt_of())
    assert torch.equal(generate(model, "llama", "greedy", cache, prompt_of()), expected)
    text = "dtype torch.float32: lossless tiles are bfloat16 or float16"
    assert set(cache.stats()["lossless"].values()) == {text}
    assert not cache.stats()["packed_passes"] and cache.stats()["packed_tokens"]


def test_tiles_take_two_thirds_and_rows_that_cannot_be_packed_are_raw() -> None:
    cache = cache_of(config("bitslab"), block_tokens=64)
    noise = torch.randint(-(1 << 15), 1 << 15, (2, HEADS, 2000, DIM)).short().view(torch.bfloat16)
    for i, tokens in enumerate((drawn(2, 2000, 0), noise)):
        cache.update(tokens, tokens, i)
        cache.layers[i].settle()
        assert same_bits(cache.layers[i].keys, tokens)
    packed = [layer.histories[0].packed for layer in cache.layers]
    share = 4 * packed[0].words.n_words / (2 * HEADS * DIM * 2 * packed[0].length)
    assert 0.6 < share < 0.72
    assert packed[1].segments[0].codec is None


REFUSED: list[dict[str, Any]] = [
    {"granularity": "channel"},
    {"key_scale": 1.0, "value_scale": 1.0},
    {"value_scale": 1.0},
]


@pytest.mark.parametrize("options", REFUSED, ids=str)
def test_steps_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="lossless tiles have no steps"):
        cache_of(config("bitslab"), **options)
