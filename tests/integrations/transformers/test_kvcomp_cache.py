"""KVCompCache: options, changes, what cannot be tiles, and the attention function."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers

from bitslab import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.integrations.transformers import KVCompCache
from bitslab.integrations.transformers.attention import attention
from bitslab.integrations.transformers.handles import KVHandle
from bitslab.kvcache import PackedHistory, learning
from tests.integrations.transformers.models import config_of, dynamic, model_of, prompt_of

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, QUERY_HEADS, DIM, BATCH = 2, 4, 16, 2
STEPS: dict[str, Any] = {"granularity": "channel", "key_scale": 0.1, "value_scale": 0.1}
SIZES: dict[str, Any] = {"window": 16, "block_tokens": 16}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def config(attention: str = "sdpa") -> Any:
    found = config_of("llama")
    found._attn_implementation = attention
    return found


def feed(cache: Any, n: int, seed: int = 0, batch: int = BATCH, dim: int = DIM) -> list[Any]:
    """Append to all layers; return what updates returned."""
    found = []
    for layer in range(len(cache.layers)):
        k, v = (normal(batch, HEADS, n, dim, seed=seed + 2 * layer + i) for i in (0, 1))
        found.append(cache.update(k, v, layer))
    return found


class Module(torch.nn.Module):
    """What attention asks of an attention module."""

    num_key_value_groups = QUERY_HEADS // HEADS
    is_causal = True
    training = False


def attend(
    found: Any, seed: int = 0, mask: Any = None, n: int | None = None, **options: Any
) -> Any:
    """Attend to what an update returned."""
    keys, values = found
    query = normal(keys.shape[0], QUERY_HEADS, n or 1, keys.shape[3], seed=100 + seed)
    return attention(Module(), query, keys, values, mask, scaling=0.3, **options)[0]


def run(cache: Any, n: int, seed: int = 0, batch: int = BATCH, **options: Any) -> list[Any]:
    """Append to all layers and attend to each, as a model does; return the outputs."""
    found = []
    for layer in range(len(cache.layers)):
        k, v = (normal(batch, HEADS, n, DIM, seed=seed + 2 * layer + i) for i in (0, 1))
        found.append(attend(cache.update(k, v, layer), n=n, **options))
    return found


def causal(n: int, length: int) -> torch.Tensor:
    """Return the mask of the last n tokens."""
    return torch.ones(n, length, dtype=torch.bool).tril(length - n)[None, None]


def prompted(n: int = 100, **options: Any) -> Any:
    """Return a cache whose prompt was attended to and is packed."""
    cache: Any = KVCompCache(config("bitslab"), **{"error": 0.3, **SIZES, **options})
    run(cache, n)
    for layer in cache.layers:
        layer.settle()
    return cache


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "error-negative": ({"error": -0.1}, "error: -0.1, accepted are 0 to 1"),
    "error-large": ({"error": 1.5}, "error: 1.5"),
    "error-nan": ({"error": float("nan")}, "error: nan"),
    "error-text": ({"error": "small"}, "error: expected a number"),
    "error-bool": ({"error": True}, "error: expected a number"),
    "key-scale-zero": ({"key_scale": 0.0}, "key_scale: 0.0, accepted are numbers above 0"),
    "value-scale-infinite": ({"value_scale": float("inf")}, "value_scale: inf"),
    "one-scale-alone": ({"error": 0, "key_scale": 1.0}, "error: 0 keeps all tokens lossless"),
    "granularity": ({"granularity": "row"}, "granularity: 'row', accepted are 'weighted'"),
    "granularity-none": ({"granularity": None}, "granularity: None"),
    "coder": ({"coder": "rans"}, "coder: 'rans', accepted are 'huffman', 'fixed', 'lossless'"),
    "sinks": ({"sinks": -1}, "sinks: -1"),
    "sinks-float": ({"sinks": 1.5}, "sinks: expected an int"),
    "window": ({"window": -1}, "window: -1"),
    "block": ({"block_tokens": 48}, "block_tokens: 48"),
    "block-small": ({"block_tokens": 8}, "block_tokens: 8, accepted are powers of two from 16"),
    "offload": ({"offload": 1.5}, "offload: 1.5, accepted are True, False, shares"),
    "sm-budget": ({"sm_budget": 0}, "sm_budget: 0"),
    "device": ({"device": "meta"}, "device"),
}


@pytest.mark.parametrize(("options", "text"), OPTIONS.values(), ids=OPTIONS)
def test_options_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=text):
        KVCompCache(config(), **options)


def test_the_config_is_checked() -> None:
    with pytest.raises(ArgumentTypeError, match="config: expected a transformers config"):
        KVCompCache({})  # type: ignore[arg-type]


@pytest.mark.parametrize("granularity", ["weighted", "block", "channel", "token"])
@pytest.mark.parametrize("coder", ["huffman", "fixed"])
@pytest.mark.parametrize("implementation", ["bitslab", "sdpa"])
def test_every_way_to_quantise(granularity: str, coder: str, implementation: str) -> None:
    error = 0.2 if implementation == "bitslab" else 0.1
    cache: Any = KVCompCache(
        config(implementation), error=error, granularity=granularity, coder=coder, **SIZES
    )
    plain = dynamic(config())
    for each in (cache, plain):
        run(each, 150)
    ours, theirs = (run(each, 1, seed=50) for each in (cache, plain))
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() < 0.45 * other.norm()
    stats = cache.stats()
    fused = implementation == "bitslab" and granularity == "weighted"
    assert (stats["packed_passes"] > 0) == fused and (stats["dense_passes"] > 0) != fused
    assert stats["packed_tokens"] == 128 and stats["packed_ratio"] > 2
    assert set(stats["errors"]) == ({0, 1} if implementation == "bitslab" else set())
    assert all(0.05 < measured <= error for measured in stats["errors"].values())


def test_layers_pack_their_blocks_in_turns() -> None:
    four = config_of("llama", num_hidden_layers=4)
    four._attn_implementation = "bitslab"
    cache: Any = KVCompCache(four, key_scale=1.0, value_scale=1.0, error=0.3, **SIZES)
    run(cache, 100)
    run(cache, 1)
    after_prompt = [layer.packed_tokens for layer in cache.layers]
    assert after_prompt == [80] * 4  # 4 sinks, a window of 16
    at_once, packed = [], after_prompt
    for step in range(2 * 16):
        run(cache, 1, seed=1000 + 100 * step)
        before, packed = packed, [layer.packed_tokens for layer in cache.layers]
        at_once.append(sum(now > then for then, now in zip(before, packed, strict=True)))
        for layer in cache.layers:  # no more waits than in the last layer that has its turn
            assert 16 <= layer.histories[0].unpacked.tail.length < 16 + 2 * 16
    assert sum(at_once) >= 4 and max(at_once) == 1


def test_steps_by_hand_are_taken() -> None:
    fine, coarse = (
        prompted(key_scale=scale, value_scale=scale, granularity="weighted") for scale in (0.3, 1.5)
    )
    assert coarse.stats()["packed_bytes"] < fine.stats()["packed_bytes"]
    assert coarse.stats()["errors"][0] > 2 * fine.stats()["errors"][0]
    for layer in coarse.layers:
        assert [h.segments[0].codec.plan.scale for h in layer.histories] == [1.5, 1.5]


def test_a_layer_that_misses_the_error_is_lossless() -> None:
    cache, plain = prompted(error=1e-6), dynamic(config())
    feed(plain, 100)
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
    stats = cache.stats()
    assert stats["packed_tokens"] == 80 and not stats["errors"]
    assert "no steps kept the error of attention under 1e-06" in stats["lossless"][0]
    for one, other in zip(run(cache, 1, seed=50), run(plain, 1, seed=50), strict=True):
        assert torch.equal(one, other)


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "head-dim": ({"k": 24, "v": 24}, "head_dim 24: tiles have multiples of 16"),
    "values-narrower": ({"k": 32, "v": 16}, "head_dim 32 of K and 16 of V"),
    "float64": ({"dtype": torch.float64}, "dtype torch.float64"),
    "another": ({"other": torch.bfloat16}, "dtype torch.float32 and torch.bfloat16"),
}


@pytest.mark.parametrize(("kind", "text"), UNFIT.values(), ids=UNFIT)
@pytest.mark.parametrize("implementation", ["bitslab", "sdpa"])
def test_k_and_v_that_cannot_be_tiles_are_lossless(
    kind: dict[str, Any], text: str, implementation: str
) -> None:
    cache: Any = KVCompCache(config(implementation), **SIZES)
    dtype = kind.get("dtype", torch.float32)
    k = normal(1, HEADS, 100, kind.get("k", DIM)).to(dtype)
    v = normal(1, HEADS, 100, kind.get("v", DIM), seed=1).to(kind.get("other", dtype))
    for _ in range(2):
        keys, values = cache.update(k, v, 0)
    assert type(keys) is torch.Tensor
    assert torch.equal(keys, torch.cat([k, k], dim=2)) and torch.equal(values[:, :, 100:], v)
    assert text in cache.stats()["lossless"][0]
    cache.reset()  # the next model's may
    feed(cache, 60)
    assert not cache.stats()["lossless"]


def test_no_value_is_quantised_twice() -> None:
    """Whatever changes, tokens are those of a cache that went straight on."""
    cache, whole = prompted(), prompted()
    for each in (cache, whole):
        run(each, 40, seed=50, mask=causal(40, 140))
    kept = whole.layers[0].keys.clone(), whole.layers[1].values.clone()
    cache.crop(-77)
    assert torch.equal(cache.layers[0].keys, kept[0][:, :, :63])
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
    cache.batch_select_indices(torch.tensor([2]))
    assert torch.equal(cache.layers[0].keys, kept[0][:1, :, :63])
    for seed in (60, 70):
        length = cache.get_seq_length() + 60
        run(cache, 60, seed=seed, batch=1, mask=causal(60, length))
    cache.crop(-3)
    for layer, tokens in ((cache.layers[0].keys, kept[0]), (cache.layers[1].values, kept[1])):
        assert torch.equal(layer[:, :, :63], tokens[:1, :, :63])
    assert cache.get_seq_length() == 63 + 117


def test_attention_to_a_cut_history_is_that_to_its_decoded_tokens() -> None:
    """Blocks behind a cut, and K and V that are packed up to another token."""
    cache = prompted()
    cache.crop(-40)
    run(cache, 90, seed=50, mask=causal(90, 150))
    keys = cache.layers[0].histories[0]
    assert [segment.cut_tokens for segment in keys.segments] == [8, 0]
    cache.layers[0].settle()
    values = cache.layers[0].histories[1]
    values._window = 0
    values.pack()
    assert values.packed_tokens > keys.packed_tokens
    [found, _] = feed(cache, 3, seed=70)
    dense = [history.decode() for history in cache.layers[0].histories]
    mask = causal(3, dense[0].shape[2])
    query = normal(BATCH, QUERY_HEADS, 3, DIM, seed=100)
    expected = attention(Module(), query, dense[0], dense[1], mask, scaling=0.3)[0]
    layer = cache.layers[0]
    packed = layer.attend_packed(query, None, {"scaling": 0.3})
    assert torch.allclose(packed, expected, atol=1e-5)
    assert torch.allclose(attend(found, mask=mask, n=3), expected, atol=1e-5)


@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (2.0, False), (None, True)])
def test_softcap_and_sinks_are_those_of_eager_attention(softcap: float | None, sinks: bool) -> None:
    """Packed and decoded; SDPA has neither."""
    module = model_of("gemma2").model.layers[1].self_attn
    if sinks:
        from transformers.models.gpt_oss import modeling_gpt_oss

        module = modeling_gpt_oss.GptOssAttention.__new__(modeling_gpt_oss.GptOssAttention)
        torch.nn.Module.__init__(module)
        module.num_key_value_groups, module.training = 2, False
        module.sinks = torch.nn.Parameter(normal(QUERY_HEADS, seed=9), requires_grad=False)
    cache = prompted()
    [found, _] = feed(cache, 1, seed=50)
    options: dict[str, Any] = {"scaling": 0.3, "softcap": softcap}
    if sinks:
        options["s_aux"] = module.sinks
    query = 3 * normal(BATCH, QUERY_HEADS, 1, DIM, seed=100)
    packed, _ = attention(module, query, found[0], found[1], None, **options)
    assert cache.stats()["packed_passes"] == 1
    dense = [t.dense() for t in found]
    expected, _ = attention(module, query, dense[0], dense[1], None, **options)
    assert torch.allclose(packed, expected, atol=1e-5)
    plain, _ = attention(Module(), query, dense[0], dense[1], None, scaling=0.3)
    assert torch.allclose(plain, expected, atol=1e-5) == (softcap is None and not sinks)


def test_what_kernels_do_not_serve_is_decoded_first() -> None:
    cache = prompted()
    length = 101
    cases: dict[str, dict[str, Any]] = {
        "mask": {"mask": torch.rand(BATCH, 1, 1, length) > 0.3},
        "added": {"mask": torch.randn(BATCH, 1, 1, length)},
        "window": {"sliding_window": 50},
        "dropout": {"dropout": 1e-9},
    }
    for i, options in enumerate(cases.values()):
        [found, _] = feed(cache, 1, seed=50)
        attend(found, **options)
        assert cache.stats()["dense_passes"] == i + 1
        cache.crop(-1)
    assert cache.stats()["packed_passes"] == 0
    k, v = (normal(BATCH, HEADS, 1, DIM, seed=i).requires_grad_() for i in range(2))
    attend(cache.update(k, v, 0)).sum().backward()
    assert k.grad is not None and v.grad is not None
    assert cache.stats()["dense_passes"] == len(cases) + 1


def test_a_handle_is_a_tensor_of_its_values() -> None:
    cache = prompted()
    [(keys, values), _] = feed(cache, 2, seed=50)
    assert isinstance(keys, KVHandle) and isinstance(keys, torch.Tensor)
    assert keys.shape == (BATCH, HEADS, 102, DIM) and keys.dtype == torch.float32
    assert (
        keys.size(2) == 102 and keys.dim() == 4 and len(keys) == BATCH and keys.device.type == "cpu"
    )
    assert "KVHandle" in repr(keys) and cache.stats()["dense_passes"] == 0
    expected = cache.layers[0].keys
    assert torch.equal(keys[:, :, 5:], expected[:, :, 5:])
    assert torch.equal(keys.transpose(1, 2), expected.transpose(1, 2))
    assert torch.equal(values @ values.mT, cache.layers[0].values @ cache.layers[0].values.mT)
    assert torch.equal(torch.cat([keys, keys]), torch.cat([expected, expected]))
    assert torch.equal(copy.deepcopy(keys), expected)
    assert torch.equal(pickle.loads(pickle.dumps(keys)), expected)
    assert cache.stats()["dense_passes"] == 1  # decoded once


def test_handles_that_nobody_attends_to_are_packed() -> None:
    """Steps are by range then, as no queries were seen."""
    cache: Any = KVCompCache(config("bitslab"), **SIZES)
    feed(cache, 100)
    feed(cache, 1, seed=50)
    stats = cache.stats()
    assert stats["packed_tokens"] == 80 and not stats["errors"] and not stats["lossless"]


@pytest.mark.parametrize("n", [0, 1, 3, 19, 30])
def test_short_prompts(n: int) -> None:
    """None, and such as are shorter than sinks, window and a block."""
    cache, plain = KVCompCache(config("bitslab"), **SIZES), dynamic(config())
    for each in (cache, plain):
        feed(each, n)
    for seed in range(3):
        for one, other in zip(run(cache, 1, seed), run(plain, 1, seed), strict=True):
            assert torch.equal(one, other)
    assert cache.get_seq_length() == n + 3


def test_a_batch_of_none() -> None:
    cache: Any = KVCompCache(config("bitslab"), **SIZES)
    for n in (100, 1, 100):
        for keys, values in feed(cache, n, batch=0):
            assert (keys @ values.mT).shape[:2] == (0, HEADS)
    assert cache.stats()["packed_tokens"] == 0


@pytest.mark.parametrize("implementation", ["bitslab", "sdpa"])
def test_values_that_are_not_finite_come_back(implementation: str) -> None:
    cache: Any = KVCompCache(config(implementation), error=0.3, **SIZES)
    k, v = (normal(1, HEADS, 100, DIM, seed=i) for i in (0, 1))
    k[0, 0, 30, 3], k[0, 1, 31, 4], v[0, 0, 40, 5] = float("nan"), float("inf"), float("-inf")
    k[:, :, :, 7] = 1.5  # a constant channel
    k[0, 0, 50, 8] = 3e38
    attend(cache.update(k, v, 0), n=100)
    cache.layers[0].settle()
    assert cache.layers[0].packed_tokens == 80
    keys, values = cache.layers[0].keys, cache.layers[0].values
    finite = k.isfinite()
    assert torch.equal(keys.isfinite(), finite) and torch.equal(values.isfinite(), v.isfinite())
    assert keys[0, 0, 30, 3].isnan() and keys[0, 1, 31, 4] == float("inf")
    assert values[0, 0, 40, 5] == float("-inf")
    lossless = cache.stats()["lossless"]
    # Steps by range need no finite error of attention.
    assert ("a NaN or an infinity" in lossless[0]) if implementation == "bitslab" else not lossless


@pytest.mark.parametrize("shape", ["heads", "dim", "batch", "dtype"])
def test_k_and_v_of_another_model_are_refused(shape: str) -> None:
    cache = prompted()
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    sizes = {"batch": BATCH, "heads": HEADS, "dim": DIM}
    if shape != "dtype":
        sizes[shape] *= 2
    k = normal(sizes["batch"], sizes["heads"], 1, sizes["dim"])
    k = k.bfloat16() if shape == "dtype" else k
    with pytest.raises(BitslabError, match="the cache holds"):
        cache.update(k, k, 0)
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    run(cache, 1, seed=50)


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("implementation", ["bitslab", "sdpa"])
def test_memory_that_runs_out_while_a_prompt_is_packed(
    implementation: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers hold what they held before the forward pass, and the cache goes on."""
    cache: Any = KVCompCache(config(implementation), error=0.3, **SIZES)
    run(cache, 30)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    plain, calls = PackedHistory.pack, 0

    def fail(history: PackedHistory) -> None:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise BitslabError("no memory")
        plain(history)

    monkeypatch.setattr(PackedHistory, "pack", fail)
    chunks = ((90, 120), (1, 121))  # the last layer packs in the next pass, as a rule
    with pytest.raises(BitslabError, match="no memory"):
        for n, length in chunks:
            if cache.get_seq_length() > 30:
                before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
            run(cache, n, seed=50, mask=causal(n, length))
    monkeypatch.undo()
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
    for _ in range(2):
        length = cache.get_seq_length() + 100
        run(cache, 100, seed=60, mask=causal(100, length))
    assert cache.stats()["packed_tokens"] > 100


def test_export_is_refused_by_name() -> None:
    cache = KVCompCache(config(), **SIZES)
    found = torch.utils._pytree.tree_map(lambda t: t + 1, {"past": cache, "x": torch.zeros(1)})
    assert found["past"] is cache


def test_the_attention_function_serves_any_cache() -> None:
    model, prompt = copy.deepcopy(model_of("llama")), prompt_of(batch=2)
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)
    model.set_attn_implementation("bitslab")
    model.set_attn_implementation("bitslab")  # a second time
    for cache in (
        None,
        transformers.DynamicCache(config=model.config),
        transformers.StaticCache(config=model.config, max_cache_len=80),
    ):
        found = model.generate(prompt, past_key_values=cache, max_new_tokens=8, do_sample=False)
        assert torch.equal(found, expected)


def test_encoder_decoder_caches() -> None:
    t5: Any = transformers.BartConfig(
        vocab_size=96,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        pad_token_id=0,
        eos_token_id=None,
        forced_eos_token_id=None,
        decoder_start_token_id=1,
    )
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(t5).eval()
    model.set_attn_implementation("bitslab")
    options: dict[str, Any] = {"max_new_tokens": 60, "min_new_tokens": 60, "do_sample": False}
    ours = KVCompCache(model.config, error=0.1, **SIZES)
    both = transformers.EncoderDecoderCache(ours, transformers.DynamicCache(config=model.config))
    found = model.generate(prompt_of(), past_key_values=both, **options)
    assert found.shape[1] == 61 and ours.stats()["packed_tokens"] == 32
    assert ours.stats()["packed_passes"] > 0


def test_codecs_that_are_learnt_once_are_kept() -> None:
    cache = prompted()
    first = [history.segments[0].codec for history in cache.layers[0].histories]
    run(cache, 60, seed=50, mask=causal(60, 160))
    cache.layers[0].settle()
    assert cache.layers[0].packed_tokens == 128
    now = [history.segments[-1].codec for history in cache.layers[0].histories]
    assert all(one is other for one, other in zip(first, now, strict=True))


def test_stats_decode_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = prompted()
    decoded = []
    monkeypatch.setattr(PackedHistory, "decode", lambda self: decoded.append(self))
    before = cache.stats()
    assert before["tokens"] == 100
    assert cache.stats()["moved_to_device_bytes"] == before["moved_to_device_bytes"]
    assert not decoded


LEARNT: dict[str, tuple[int, Any]] = {
    "later": (1 << 30, None),
    "where-many-wait": (0, None),
    "after-a-crop": (1 << 30, lambda cache: cache.crop(-3)),
    "after-a-copy": (1 << 30, lambda cache: pickle.loads(pickle.dumps(copy.deepcopy(cache)))),
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("most_bytes", "change"), LEARNT.values(), ids=LEARNT)
@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "next-update"])
def test_codecs_are_the_same_whenever_they_are_learnt(
    most_bytes: int, change: Any, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "MOST_BYTES", most_bytes)
    found = []
    for puts_off in (False, True):
        cache: Any = KVCompCache(
            config_of("llama", num_hidden_layers=5, _attn_implementation="bitslab"),
            **{"error": 0.3, **SIZES},
        )
        for i, layer in enumerate(cache.layers):
            layer.lazy_initialization(normal(BATCH, HEADS, 1, DIM), normal(BATCH, HEADS, 1, DIM))
            layer._reader.learning.puts_off = puts_off
            if not ahead:
                layer.attended = None
            assert (layer.attended is not None) == (ahead and i == 4)
        run(cache, 100)
        if puts_off:
            waits = [layer.waits for layer in cache.layers]
            behind = 5 if ahead else 2 if not most_bytes else 0
            assert waits == [False] * behind + [True] * (5 - behind)
        cache = (change and change(cache)) or cache
        outputs = run(cache, 1, seed=50)
        assert cache.stats()["packed_tokens"] == 80
        found.append((cache.stats()["errors"], cache.stats()["packed_bytes"], outputs))
    assert found[0][:2] == found[1][:2]
    for one, other in zip(found[0][2], found[1][2], strict=True):
        assert torch.equal(one, other)


def test_an_error_of_a_fit_is_raised_by_the_update_of_its_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache: Any = KVCompCache(config("bitslab"), **{"error": 0.3, **SIZES})
    for layer in cache.layers:
        layer.lazy_initialization(normal(BATCH, HEADS, 1, DIM), normal(BATCH, HEADS, 1, DIM))
        layer._reader.learning.puts_off = True
    with monkeypatch.context() as broken:
        broken.setattr(type(cache.layers[0].plans), "learn", lambda *_, **__: 1 / 0)
        run(cache, 100)  # its last layer tries
        with pytest.raises(ZeroDivisionError):
            run(cache, 1, seed=50)
    assert cache.get_seq_length() == 100 and not cache.stats()["packed_tokens"]
    run(cache, 1, seed=50)
    assert cache.get_seq_length() == 101
