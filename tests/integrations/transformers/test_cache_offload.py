"""Caches of which a share lies in host memory: the same bits and tokens wherever words lie."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock
from weakref import ref

import pytest
import torch

from bitslab.engine.kernels.cuda.join import JoinKernels
from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.integrations.transformers import (
    CompressedCache,
    HeavyHitterSelector,
    KVCompCache,
    layer_histories,
)
from bitslab.integrations.transformers.cache_layer import CompressedLayer
from bitslab.kvcache import HistoryReader, PackedHistory, fetching, reader, words
from bitslab.kvcache.link import Streams
from bitslab.kvcache.packed_tokens import PackedTokens
from bitslab.kvcache.words import DeviceWords, HostWords
from tests.integrations.transformers.models import SMALL, config_of, dynamic, model_of, prompt_of
from tests.integrations.transformers.test_kvcomp_staged import Pass, changed, gpu_path  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, HEADS, DIM = 6, 2, 16
SHARES: list[Any] = [True, False, 0.5, 0.2]
KINDS: dict[str, Any] = {"lossless": CompressedCache, "kvcomp": KVCompCache}
#: 16 tokens are the least block of tiles.
OPTIONS: dict[str, dict[str, Any]] = {
    "lossless": SMALL,
    "kvcomp": {"error": 0.3, "window": 16, "block_tokens": 16, "sinks": 2},
}


def cache_of(kind: str, offload: Any, **options: Any) -> Any:
    config = config_of("llama", num_hidden_layers=LAYERS)
    return KINDS[kind](config, offload=offload, **{**OPTIONS[kind], **options})


def feed(cache: Any, n: int, seed: int = 0, batch: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for layer in range(LAYERS):
        k, v = (torch.randn(batch, HEADS, n, DIM, generator=generator) for _ in "kv")
        found += [t.clone() for t in cache.update(k, v, layer)]
    return found


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("share", "hosted"),
    [
        (True, [0, 1, 2, 3, 4, 5]),
        (False, []),
        (0.5, [1, 3, 5]),
        (0.2, [5]),
        ("auto", [0, 1, 2, 3, 4, 5]),
    ],
    ids=str,
)
def test_stats_say_where_words_lie(kind: str, share: Any, hosted: list[int]) -> None:
    cache = cache_of(kind, share, device="cpu")
    assert cache.stats()["host_layers"] == hosted
    assert cache.stats()["offload"] == len(hosted) / LAYERS
    feed(cache, 200)
    stats = cache.stats()
    sizes = [4 * sum(h.words.n_words for h in layer.histories) for layer in cache.layers]
    assert stats["packed_host_bytes"] == sum(sizes[i] for i in hosted)
    assert stats["packed_device_bytes"] == sum(sizes) - stats["packed_host_bytes"]
    assert stats["offload"] == pytest.approx(stats["packed_host_bytes"] / sum(sizes))
    assert (stats["host_bytes"] >= stats["packed_host_bytes"]) and bool(stats["host_bytes"]) == (
        bool(hosted)
    )
    assert stats["device_bytes"] > stats["packed_device_bytes"]
    assert stats["moved_to_host_bytes"] == stats["packed_host_bytes"]
    before = stats["moved_to_device_bytes"]
    feed(cache, 1, seed=1)
    moved = cache.stats()["moved_to_device_bytes"] - before
    assert moved == stats["packed_host_bytes"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("share", "error"),
    [(1.5, ArgumentError), (-1, ArgumentError), ("cpu", ArgumentError), (None, ArgumentTypeError)],
    ids=str,
)
def test_shares_out_of_range_are_refused(kind: str, share: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="offload: "):
        cache_of(kind, share)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "top_k": 20},
    "beam": {"num_beams": 3},
    "prompt-lookup": {"prompt_lookup_num_tokens": 4},
    "assisted": {},
    "chunked-prefill": {"prefill_chunk_size": 13},
}


#: An assistant with layers of a sliding window fails in transformers itself.
CASES = [
    (name, mode)
    for name in ("llama", "gemma2")
    for mode in MODES
    if (name, mode) != ("gemma2", "assisted")
]


@pytest.mark.drawn(5)
@pytest.mark.parametrize("share", [0.5, "auto"], ids=str)
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_tokens_are_those_of_the_plain_cache(name: str, mode: str, share: Any) -> None:
    model = model_of(name)
    options = {"do_sample": False, **MODES[mode], "max_new_tokens": 30}
    if mode == "assisted":
        options["assistant_model"] = model_of(name, 1)
    found = []
    for past in (dynamic(model.config), CompressedCache(model.config, offload=share, **SMALL)):
        torch.manual_seed(0)
        found.append(model.generate(prompt_of(), past_key_values=past, **options))
    assert torch.equal(*found)
    assert past.stats()["packed_tokens"] > 30


@pytest.mark.drawn(2)
@pytest.mark.parametrize("share", [0.5, 0.2], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_change_is_that_of_the_whole_on_the_host(kind: str, share: float) -> None:
    """And of copies, which go on as the cache that they are of."""
    caches = [cache_of(kind, True), cache_of(kind, share)]
    changes: list[Any] = [
        lambda cache: cache.crop(-3),
        lambda cache: cache.crop(-70),
        lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices([3, 0]),
        lambda cache: cache.batch_select_indices([0, 0]),
    ]
    for cache in caches:
        feed(cache, 150)
    for i, change in enumerate(changes):
        for cache in caches:
            change(cache)
        batch = caches[0].layers[0].batch
        assert same(*(feed(cache, 20, i, batch) for cache in caches))
        for twin in (copy.deepcopy(caches[1]), pickle.loads(pickle.dumps(caches[1]))):
            assert twin.stats()["host_layers"] == caches[1].stats()["host_layers"]
            assert same(feed(twin, 1, 99, batch), feed(copy.deepcopy(caches[0]), 1, 99, batch))
    for cache in caches:
        cache.reset()
    assert same(*(feed(cache, 60) for cache in caches))


def without_join(layer: CompressedLayer, state: dict[str, Any]) -> dict[str, Any]:
    del state["_join"]
    return state


def of_both(history: PackedHistory, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a history that owned its unpacked tokens, and joined none."""
    unpacked = state.pop("unpacked").__getstate__()
    names = ("_kind", "_sinks", "head", "tail")
    return {**state, **{name: unpacked[name] for name in names}}


def with_list_of_blocks(packed: PackedTokens, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "_in_flight": []}


#: Makes states of a version before tokens were joined.
BEFORE: dict[type, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    CompressedLayer: without_join,
    PackedHistory: of_both,
    PackedTokens: with_list_of_blocks,
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))],
    ids=["copy", "pickle"],
)
def test_states_from_before_tokens_were_joined_go_on(
    kind: str, copied: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, empty = cache_of(kind, 0.5), cache_of(kind, 0.5)
    feed(cache, 150)
    with monkeypatch.context() as patch:
        for cls, before in BEFORE.items():
            now = getattr(cls, "__getstate__", vars)  # Python 3.10 has no default

            def earlier(made: Any, now: Any = now, before: Any = before) -> dict[str, Any]:
                state: dict[str, Any] = before(made, dict(now(made)))
                return state

            patch.setattr(cls, "__getstate__", earlier, raising=False)
        twin, twin_of_empty = copied(cache), copied(empty)
    for step in range(40):
        assert same(feed(twin, 1, step), feed(cache, 1, step))
    for past in (twin, cache):
        past.crop(-60)
        past.reorder_cache(torch.tensor([1, 0]))
    assert same(feed(twin, 30, 99), feed(cache, 30, 99))
    assert same(feed(twin_of_empty, 150), feed(empty, 150))


def test_a_selector_gathers_from_both() -> None:
    model = model_of("llama")
    found = []
    for share in (True, 0.5):
        selector = HeavyHitterSelector(heavy=0.5, recent=8)
        cache = CompressedCache(model.config, offload=share, select=selector, **SMALL)
        with selector.attached(model):
            found.append(
                model.generate(
                    prompt_of(), past_key_values=cache, max_new_tokens=20, do_sample=False
                )
            )
        assert 0.4 < cache.stats()["selected"] < 0.9
    assert torch.equal(*found)


# On the code path of a GPU, where words cross


@pytest.fixture
def crossing(gpu_path: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Readers of the CPU have streams from the beginning."""
    start = HistoryReader._start

    def with_streams(made: HistoryReader) -> None:
        made.link.streams = Streams(made.device, made.link)
        start(made)

    monkeypatch.setattr(HistoryReader, "_start", with_streams)
    monkeypatch.setattr(reader, "SLAB_BYTES", 1 << 16)


@pytest.fixture(params=[True, False], ids=["joined", "decoded first"])
def joined(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether rows are such as the kernel that joins tokens knows; others are decoded first."""
    if not request.param:
        monkeypatch.setattr(JoinKernels, "serves", lambda layout, token_bytes: False)
    return bool(request.param)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("share", SHARES, ids=str)
def test_lossless_layers_are_decoded_wherever_they_lie(
    share: Any, joined: bool, crossing: None
) -> None:
    cache, plain = cache_of("lossless", share), dynamic(config_of("llama", num_hidden_layers=6))
    for step in range(90):
        n = 150 if not step else 1
        assert same(feed(cache, n, step), feed(plain, n, step))
        if step == 40:
            for past in (cache, plain):
                past.crop(-60)
                past.reorder_cache(torch.tensor([1, 0]))
    stores = {type(layer.histories[0].words) for layer in cache.layers}
    assert stores == {
        *([HostWords] if share else []),
        *([DeviceWords] if share in (False, 0.5, 0.2) else []),
    }


@pytest.mark.drawn(4)
@pytest.mark.parametrize("share", SHARES, ids=str)
def test_buffers_hold_two_packed_layers(share: Any, joined: bool, crossing: None) -> None:
    """Where words cross; and one unpacked, where those are decoded before `update` asks for them.

    Another one is what `update` returns.
    """
    cache = cache_of("lossless", share, window=16, block_tokens=64)
    for step in range(20):
        feed(cache, 1000 if not step else 1, step)
    stats = cache.stats()
    packed = (stats["packed_host_bytes"] + stats["packed_device_bytes"]) / LAYERS
    least = 0 if joined else stats["packed_raw_bytes"] / LAYERS
    least += 2 * packed if share else 0
    (made,) = cache._histories.readers.values()
    ids = sum(t.nbytes for kept in (made._ids, made._current_ids) for t in kept.values())
    assert 0.99 * least < stats["buffer_bytes"] - ids + 1 < 1.13 * least + 4096


@pytest.mark.drawn(1)
@pytest.mark.parametrize("share", [0.5, 0.2], ids=str)
def test_attention_reads_tiles_wherever_they_lie(share: float, crossing: None) -> None:
    found = []
    for each in (False, share):
        cache = cache_of("kvcomp", each)
        cache._hands._config._attn_implementation = "bitslab"
        passes = Pass(cache)
        changed(passes)
        found.append(passes.outputs)
        assert not cache.stats()["dense_passes"]
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("share", [True, 0.5, False], ids=str)
def test_buffers_of_decoded_tokens_go_once_all_layers_read_tiles(
    share: Any, crossing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt in chunks decodes one layer's history each time, and tokens behind it none."""
    cache = cache_of("kvcomp", share)
    cache._hands._config._attn_implementation = "bitslab"
    passes = Pass(cache)
    passes.run(200)
    (made,) = cache._histories.readers.values()
    for times in (1, 2):
        passes.run(40)  # too many queries for the kernels of tiles
        assert cache.stats()["dense_passes"] == times * LAYERS
        decoded = sum(buffer.nbytes for buffer in made._tokens)
        assert decoded > cache.stats()["packed_raw_bytes"] / LAYERS
        before = made.buffer_bytes
        decodes = Mock(wraps=made._decode)
        monkeypatch.setattr(made, "_decode", decodes)
        passes.run(1)
        assert decodes.call_count == 0, "what comes next was guessed to be decoded"
        assert sum(buffer.nbytes for buffer in made._tokens) == 0
        assert made.buffer_bytes < before / 4


@pytest.mark.parametrize("kind", KINDS)
def test_words_of_the_next_host_layer_cross_while_others_compute(
    kind: str, crossing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once a pass, and before the layer in front of it is read."""
    cache = cache_of(kind, 0.5)
    passes = Pass(cache)
    if kind == "kvcomp":
        cache._hands._config._attn_implementation = "bitslab"

    def run(n: int = 1) -> None:
        if kind == "kvcomp":
            passes.run(n)
        else:
            feed(cache, n)

    run(100)
    for _ in range(3):
        run()
    log: list[Any] = []
    of = {id(h): i for i, layer in enumerate(cache.layers) for h in layer.histories}
    copy_words, update = HistoryReader._copy, type(cache).append_to

    def logged_copy(made: Any, histories: Any, *, each: bool) -> Any:
        log.append(("copy", of[id(histories[0])]))
        return copy_words(made, histories, each=each)

    def logged_update(self: Any, layer: int, *tokens: Any) -> Any:
        log.append(("update", layer))
        return update(self, layer, *tokens)

    monkeypatch.setattr(HistoryReader, "_copy", logged_copy)
    monkeypatch.setattr(type(cache), "append_to", logged_update)
    run()
    run()
    copies = [layer for what, layer in log if what == "copy"]
    assert sorted(copies) == [1, 1, 3, 3, 5, 5]
    second = [i for i, each in enumerate(log) if each == ("update", 0)][1]
    for layer in (1, 3, 5):
        used = log.index(("update", layer), second)
        copied = max(i for i in range(used) if log[i] == ("copy", layer))
        assert len([1 for what, _ in log[copied:used] if what == "update"]) >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_auto_moves_layers_to_the_device(
    kind: str, crossing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By measured times: a link that takes longer than computing, until both take as long."""
    layer_s, compute_s = 1e-3, 2.6e-3
    now = [0.0]
    cache, whole = cache_of(kind, "auto"), cache_of(kind, True)
    balance = cache._histories.placement.balance
    monkeypatch.setattr(balance, "_clock", lambda: now[0])
    monkeypatch.setattr(layer_histories, "crossing_seconds", lambda device, nbytes: layer_s / 2)
    monkeypatch.setattr(layer_histories, "free_bytes", lambda device: 1 << 30)
    for step in range(60):
        n = 150 if not step else 1
        assert same(feed(cache, n, step), feed(whole, n, step))
        now[0] += max(compute_s, len(cache.stats()["host_layers"]) * layer_s)
    stats = cache.stats()
    assert len(stats["host_layers"]) == 2
    assert 0.25 < stats["offload"] < 0.4
    assert stats["packed_device_bytes"] > stats["packed_host_bytes"] > 0
    reader_of = next(iter(cache._histories.readers.values()))
    histories = [h for layer in cache.layers for h in layer.histories]
    there = sum(piece.nbytes for h in histories for piece in getattr(h.words, "_pieces", []))
    assert there >= stats["packed_host_bytes"]
    assert reader_of.arena._taken_bytes >= there


def test_auto_keeps_layers_where_they_are_without_memory_for_them(
    crossing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    cache, whole = cache_of("lossless", "auto"), cache_of("lossless", True)
    monkeypatch.setattr(cache._histories.placement.balance, "_clock", lambda: now[0])
    monkeypatch.setattr(layer_histories, "crossing_seconds", lambda device, nbytes: 1.0)
    monkeypatch.setattr(layer_histories, "free_bytes", lambda device: 1 << 30)

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError("none")

    with monkeypatch.context() as patch:
        patch.setattr(DeviceWords, "append", no_memory)
        for step in range(30):
            n = 150 if not step else 1
            assert same(feed(cache, n, step), feed(whole, n, step))
            now[0] += 12.0
    assert cache.stats()["host_layers"] == [*range(LAYERS)]
    feed(cache, 1)


def test_a_layer_for_which_there_is_no_memory_is_tried_once_in_many_tokens(
    crossing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, tried = [0.0], []
    cache = cache_of("lossless", "auto")
    monkeypatch.setattr(cache._histories.placement.balance, "_clock", lambda: now[0])
    monkeypatch.setattr(layer_histories, "crossing_seconds", lambda device, nbytes: 1.0)
    monkeypatch.setattr(layer_histories, "free_bytes", lambda device: 1 << 30)

    def no_memory(*_: Any, **__: Any) -> None:
        tried.append(step)
        raise torch.cuda.OutOfMemoryError("none")

    monkeypatch.setattr(DeviceWords, "append", no_memory)
    for step in range(60):
        feed(cache, 150 if not step else 1, step)
        now[0] += 12.0
    assert len(tried) == 1


@pytest.mark.parametrize("to_host", [True, False], ids=["to-host", "to-device"])
def test_a_layer_moves_where_the_device_has_no_memory_left(
    to_host: bool, crossing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the host; and it remains there whole, K and V, where it cannot move."""
    cache, plain = (
        cache_of("lossless", to_host is False),
        dynamic(config_of("llama", num_hidden_layers=6)),
    )
    assert same(feed(cache, 150), feed(plain, 150))
    histories = cache.layers[3].histories
    revisions = [history.packed.revision for history in histories]

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError("none")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", no_memory)
        if not to_host:
            patch.setattr(words, "grown", no_memory)
        assert cache._histories.move(3, histories, on_host=to_host) is to_host
    assert {type(history.words) for history in histories} == {HostWords}
    for history, before in zip(histories, revisions, strict=True):
        assert (history.packed.revision is before) is not to_host
    cache._next_hosted = cache._histories.placement.next_hosted()
    for step in range(3):
        assert same(feed(cache, 1, step), feed(plain, 1, step))


def test_a_layer_that_has_moved_leaves_no_host_memory(crossing: None) -> None:
    """Words of it may have crossed ahead of the next pass."""
    cache = cache_of("lossless", True)
    for step in range(2):
        feed(cache, 150, step)
    made = next(iter(cache._histories.readers.values()))
    ahead = [i for i in range(LAYERS) if fetching.holding(made._words, cache.layers[i].histories)]
    assert ahead
    for layer in ahead:
        histories = cache.layers[layer].histories
        pieces = [ref(piece) for history in histories for piece in history.words._pieces]
        assert pieces
        assert cache._histories.move(layer, histories, on_host=False)
        assert not any(piece() is not None for piece in pieces)


@pytest.mark.parametrize("share", ["auto", 0.5], ids=str)
def test_the_link_is_measured_before_words_cross_it(
    share: Any, crossing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and only where that is needed; beside other copies it would seem slower."""
    measured: list[int] = []
    cache: Any = None

    def logged(device: torch.device, nbytes: float) -> float:
        crossed = [] if cache is None else [cache.stats()["moved_to_host_bytes"]]
        measured.append(sum(crossed))
        return 1.0

    monkeypatch.setattr(layer_histories, "crossing_seconds", logged)
    for device in ("cpu", None):
        cache = None
        cache = cache_of("lossless", share, device=device)
        feed(cache, 150)
        assert cache.stats()["moved_to_host_bytes"]
        assert measured == ([0] if share == "auto" else [])
        measured.clear()


def test_bad_k_and_v_are_refused_with_auto_as_without() -> None:
    found = []
    for share in (True, "auto"):
        cache, errors = cache_of("lossless", share, device=None), []
        k = torch.zeros(1, HEADS, 3, DIM)
        for keys, values in [("x", k), *[(k, k[..., 0])] * 8]:
            with pytest.raises((ArgumentError, ArgumentTypeError)) as caught:
                cache.update(keys, values, 0)
            errors.append((type(caught.value), str(caught.value)))
        found.append(errors)
        feed(cache, 3)
    assert found[0] == found[1]
