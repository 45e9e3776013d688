"""After an error in a forward pass all layers are as they were, and a retry is undisturbed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from bitslab import BitslabError, CorruptedDataError
from bitslab.integrations.transformers import CompressedCache, HeavyHitterSelector, KVCompCache
from bitslab.integrations.transformers.attention import attention
from bitslab.kvcache import HistoryReader, PackedAttention, PackedHistory
from tests.integrations.transformers.models import model_of, prompt_of
from tests.integrations.transformers.test_kvcomp_cache import (
    Module,
    attend,
    config,
    feed,
    normal,
    prompted,
    run,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {"window": 16, "block_tokens": 16}
CACHES: dict[str, Callable[[Any], Any]] = {
    "kvcomp": lambda config: KVCompCache(config, error=0.3, **SIZES),
    "kvcomp-lossless": lambda config: KVCompCache(config, error=0, **SIZES),
    "compressed": lambda config: CompressedCache(config, **SIZES),
}
READS = (HistoryReader, "read")
ATTENDS = (PackedAttention, "attend")


def bitslab_model() -> Any:
    model = copy.deepcopy(model_of("llama"))
    model.set_attn_implementation("bitslab")
    return model


def held(cache: Any) -> list[torch.Tensor]:
    return [t.clone() for layer in cache.layers for t in (layer.keys, layer.values)]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


def failing(
    patch: pytest.MonkeyPatch, where: tuple[type, str], nth: int, error: type[BaseException]
) -> list[int]:
    """Let the n-th call of a method fail; return the calls there were, as a list that grows."""
    kind, name = where
    plain, calls = getattr(kind, name), list[int]()

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls) + 1)
        if calls[-1] == nth:
            raise error("no memory")
        return plain(self, *args, **kwargs)

    patch.setattr(kind, name, fails)
    return calls


def step(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids, past_key_values=cache).logits
    return found


@pytest.mark.drawn(8)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    ("kind", "where", "new"),
    [
        ("kvcomp", ATTENDS, 1),
        ("kvcomp", READS, 100),
        ("kvcomp-lossless", READS, 100),
        ("compressed", READS, 100),
    ],
    ids=["a-token", "a-chunk", "a-chunk-without-loss", "a-chunk-compressed"],
)
def test_an_error_while_tokens_are_attended_to_undoes_the_pass(
    kind: str,
    where: tuple[type, str],
    new: int,
    nth: int,
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = bitslab_model(), prompt_of(batch=1, length=260)
    cache, plain = CACHES[kind](model.config), CACHES[kind](model.config)
    if kind != "kvcomp":  # joined by a kernel where nothing is kept in front
        monkeypatch.setattr("bitslab.kvcache.TokenJoin.join", lambda *_: None)
    for each in (cache, plain):
        step(model, each, ids[:, :100])
        step(model, each, ids[:, 100:101])
    before, chunk = held(cache), ids[:, 101 : 101 + new]
    with monkeypatch.context() as patch:
        calls = failing(patch, where, nth, error)
        with pytest.raises(error):
            step(model, cache, chunk)
    assert len(calls) == nth
    assert [layer.get_seq_length() for layer in cache.layers] == [101] * len(cache.layers)
    assert same(held(cache), before)
    for more in (chunk, ids[:, 201:202], ids[:, 202:203]):
        assert torch.equal(step(model, cache, more), step(model, plain, more))
    assert same(held(cache), held(plain))


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("kind", CACHES)
def test_an_error_of_the_attention_to_decoded_tokens_undoes_the_pass(
    kind: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = bitslab_model(), prompt_of(batch=1, length=260)
    cache, plain = CACHES[kind](model.config), CACHES[kind](model.config)
    for each in (cache, plain):
        step(model, each, ids[:, :100])
    before, calls = held(cache), 0
    sdpa = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise torch.OutOfMemoryError("no memory")
        return sdpa(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setitem(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS, "sdpa", fails)
        with pytest.raises(torch.OutOfMemoryError):
            step(model, cache, ids[:, 100:200])
    assert calls == nth
    assert same(held(cache), before)
    other = copy.deepcopy(cache)
    for each in (cache, other):
        assert torch.equal(
            step(model, each, ids[:, 100:200]),
            step(model, copy.deepcopy(plain), ids[:, 100:200]),
        )


@pytest.mark.parametrize("layer", [0, 1])
def test_a_handle_that_is_read_late_undoes_the_layers_behind_it_too(
    layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = prompted()
    before = held(cache)
    handles = feed(cache, 1, seed=50)
    with monkeypatch.context() as patch:
        failing(patch, READS, 1, torch.OutOfMemoryError)
        with pytest.raises(torch.OutOfMemoryError):
            handles[layer][0] + 1
    assert same(held(cache), before)
    with pytest.raises(BitslabError, match="K/V handle"):
        handles[1 - layer][0] + 1
    assert same(held(cache), before)


def test_handles_of_an_earlier_pass_undo_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = prompted()
    old = feed(cache, 1, seed=50)
    feed(cache, 1, seed=60)
    before = held(cache)
    failing(monkeypatch, READS, 1, torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        old[0][0] + 1
    monkeypatch.undo()
    assert same(held(cache), before)
    attend(old[0])  # there are its tokens yet


def test_a_damaged_tile_in_attention_undoes_the_pass() -> None:
    model, ids = bitslab_model(), prompt_of(batch=1, length=140)
    cache = CACHES["kvcomp"](model.config)
    step(model, cache, ids[:, :100])
    step(model, cache, ids[:, 100:101])
    words = cache.layers[1].histories[0].words.fetch()
    words[3:40] = -1
    with pytest.raises(CorruptedDataError):
        step(model, cache, ids[:, 101:102])
    assert [layer.get_seq_length() for layer in cache.layers] == [101] * len(cache.layers)


@pytest.mark.parametrize("change", ["reset", "crop", "reorder"])
def test_a_handle_is_refused_after_a_change_of_its_tokens(change: str) -> None:
    cache = prompted()
    handles = feed(cache, 1, seed=50)[0]
    if change == "reset":
        cache.reset()
    elif change == "crop":
        cache.crop(-50)
    else:
        cache.reorder_cache(torch.tensor([1, 0]))
    before = [layer.get_seq_length() for layer in cache.layers]
    for read in (lambda: attend(handles), lambda: handles[0] + 1, lambda: handles[1].dense()):
        with pytest.raises(BitslabError, match="K/V handle: the cache was reset, or tokens of it"):
            read()
    assert [layer.get_seq_length() for layer in cache.layers] == before
    run(cache, 40)


@pytest.mark.parametrize("nth", [1, 2])
def test_an_error_in_the_first_prompt_forgets_what_was_learnt(
    nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache: Any = KVCompCache(config("bitslab"), error=0.3, **SIZES)
    calls = failing(monkeypatch, (PackedHistory, "pack"), nth, BitslabError)
    with pytest.raises(BitslabError, match="no memory"):
        run(cache, 100)
    monkeypatch.undo()
    assert len(calls) == nth
    assert not any(layer.get_seq_length() for layer in cache.layers)
    assert all(layer.plans.learns for layer in cache.layers)
    k = normal(1, 3, 40, 32)  # of another model
    cache.update(k, k, 0)


@pytest.mark.parametrize("new", [1, 40])
@pytest.mark.parametrize("implementation", ["bitslab", "sdpa"])
def test_tokens_that_were_not_packed_are_not_after_an_error(
    implementation: str, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer packs those of a pass in the next one, which can fail."""
    first = KVCompCache(config(implementation), error=0.3, **SIZES)
    run(first, 100)
    for i in range(11 if new == 1 else 3):
        run(first, 1, seed=10 + i)
    failed, nth = 0, 1
    while True:
        cache = copy.deepcopy(first)
        before = held(cache)
        with monkeypatch.context() as patch:
            calls = failing(patch, (PackedHistory, "pack"), nth, BitslabError)
            try:
                for i in range(8 if new == 1 else 2):
                    before = held(cache)
                    run(cache, new, seed=50 + i)
            except BitslabError:
                assert same(held(cache), before), nth
                failed += 1
            else:
                break
        assert len(calls) == nth
        run(cache, new, seed=70)
        nth += 1
    assert failed >= 4


def test_memory_that_is_kept_for_an_undo_is_counted_and_given_back() -> None:
    cache = prompted()
    kept = 0
    for i in range(40):
        run(cache, 1, seed=i)
        of_layers = sum(layer.kept_bytes for layer in cache.layers)
        token = 2 * 2 * 16 * 4 * 2  # of K and V, in float32
        assert of_layers <= len(cache.layers) * 2 * token * (16 + 3 * 16)
        kept = max(kept, of_layers)
    assert kept > 0
    cache.crop(-1)
    assert not any(layer.kept_bytes for layer in cache.layers)


# What is attended to


@pytest.mark.drawn(8)
@pytest.mark.parametrize("asked", [False, True], ids=["", "length-asked"])
@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("kind", CACHES)
def test_a_capture_that_begins_within_a_pass_undoes_it_afterwards(
    kind: str, first: int, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came before in the pass cannot be put back within the capture; nor is it packed."""
    cache, plain = (CACHES[kind](transformers.LlamaConfig(num_hidden_layers=3)) for _ in range(2))

    def update(cache: Any, layer: int, n: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * seed + layer)
        k = torch.randn(1, 32, n, 128, generator=generator)
        keys: torch.Tensor = cache.update(k, k + 1, layer)[0]
        return keys

    for layer in range(3):
        update(cache, layer, 40, 0)
        update(plain, layer, 40, 0)
    for layer in range(first):
        update(cache, layer, 1, 1)
    with monkeypatch.context() as captured:
        captured.setattr(torch.Tensor, "is_cuda", True)
        captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(BitslabError, match="a CUDA graph is being captured"):
            update(cache, first, 1, 1)
    if asked:
        assert [cache.get_seq_length(layer) for layer in range(3)] == [40] * 3
    for layer in range(3):
        assert torch.equal(update(cache, layer, 1, 2), update(plain, layer, 1, 2))


def sparse(kind: str) -> Any:
    name = {"deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa"}[kind]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        eos_token_id=None,
        pad_token_id=0,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        index_topk=16,
        index_n_heads=2,
        index_head_dim=16,
        first_k_dense_replace=2,
        n_routed_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        n_group=1,
        topk_group=1,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_models_with_a_sparse_indexer_are_refused(kind: str) -> None:
    model, ids = sparse(kind), prompt_of(batch=1, length=60)
    cache, plain = CACHES["kvcomp-lossless"](model.config), CACHES["compressed"](model.config)
    model.set_attn_implementation("bitslab")
    for past in (cache, None):
        with pytest.raises(BitslabError, match=r"^indices: .*set_attn_implementation\(\"sdpa\"\)"):
            step(model, past, ids)
    cache.reset()
    model.set_attn_implementation("sdpa")
    for new in (ids[:, :50], ids[:, 50:51]):
        assert torch.equal(step(model, cache, new), step(model, plain, new))
    selector = HeavyHitterSelector(0.5, 4)
    attached = selector.attached(model)
    with attached, pytest.raises(BitslabError, match="^indices: .* no selector serves"):
        step(model, CompressedCache(model.config, select=selector, **SIZES), ids)


@pytest.mark.parametrize(
    ("name", "way"), [("indices", "sdpa"), ("block_indices", "sdpa"), ("sinks", "eager")]
)
def test_arguments_that_are_not_served(name: str, way: str) -> None:
    cache = prompted()
    before = held(cache)
    found = feed(cache, 1, seed=50)[0]
    given: dict[str, Any] = {name: torch.zeros(1)}
    with pytest.raises(BitslabError, match=f'^{name}: Module .*set_attn_implementation."{way}"'):
        attend(found, **given)
    assert same(held(cache), before)
    query, k = normal(2, 4, 1, 16), normal(2, 2, 5, 16)
    with pytest.raises(BitslabError, match=f"^{name}: "):
        attention(Module(), query, k, k, None, **{name: torch.zeros(1)})
    options = {name: None, "position_ids": torch.zeros(1), "cu_seq_lens_q": torch.zeros(1)}
    plain = attention(Module(), query, k, k, None)[0]
    assert torch.equal(attention(Module(), query, k, k, None, **options)[0], plain)
