"""PackedHistory on a GPU: the same bits as on the CPU, and no waiting for the device."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch

from bitslab.engine.memory import arena, host_arena
from bitslab.kvcache import (
    CodecPlans,
    HistoryReader,
    PackedHistory,
    codecs_of_model,
    load_kernels,
    loading,
    packed_tokens,
    packing_queue,
    reader,
)

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "SLAB_BYTES", 1 << 20)


def pair(offload: bool) -> tuple[HistoryReader, list[PackedHistory]]:
    device = torch.device("cuda", torch.cuda.current_device())
    made = HistoryReader(device, offload=offload, sm_budget=64)
    return made, layer_of(made)


def layer_of(made: HistoryReader) -> list[PackedHistory]:
    plans = CodecPlans()
    return [
        PackedHistory(made.new_words(), plans, kind, window=16, block_tokens=32) for kind in "kv"
    ]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def assert_same(history: PackedHistory, tokens: torch.Tensor) -> None:
    assert torch.equal(history.decode(), tokens)


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [
        (torch.bfloat16, 128),
        (torch.bfloat16, 64),
        (torch.float32, 128),
        (torch.float16, 80),
        (torch.int8, 24),
    ],
    ids=str,
)
def test_every_operation(offload: bool, dtype: torch.dtype, dim: int) -> None:
    _, (history, _) = pair(offload)
    tokens = normal(2, 3, 700, dim, dtype=torch.float32)
    tokens = (tokens * 20).to(dtype)
    history.append(tokens[:, :, :500])
    for i in range(500, 700, 4):
        history.append(tokens[:, :, i : i + 4])
    torch.cuda.synchronize()
    for _ in range(3):  # what was in flight is moved, and the next blocks begin
        history.append(tokens[:, :, :0])
        history.words.link.packing.finish()
    assert history.packed_tokens >= 600
    assert_same(history, tokens)
    for twin in (copy.deepcopy(history), pickle.loads(pickle.dumps(history))):
        twin.append(tokens[:, :, :100])
        assert_same(twin, torch.cat([tokens, tokens[:, :, :100]], dim=-2))
    index = torch.tensor([1, 0, 1], device="cuda")
    history.reorder(index)
    history.append(tokens[index, :, :40])
    tokens = torch.cat([tokens[index], tokens[index, :, :40]], dim=-2)
    assert_same(history, tokens)
    history.repeat(2)
    tokens = tokens.repeat_interleave(2, dim=0)
    assert_same(history, tokens)
    history.crop(333)
    assert_same(history, tokens[:, :, :333])
    history.append(tokens[:, :, 333:])
    assert_same(history, tokens)
    history.select([2])
    assert_same(history, tokens[2:3])
    history.reset()
    history.append(tokens[:1, :1, :200])
    assert_same(history, tokens[:1, :1, :200])


def test_the_bytes_are_those_of_the_cpu() -> None:
    _, (on_gpu, _) = pair(offload=True)
    on_cpu = PackedHistory(
        HistoryReader(torch.device("cpu"), offload=True, sm_budget=None).new_words(),
        CodecPlans(),
        "k",
        window=16,
        block_tokens=32,
    )
    tokens = normal(2, 3, 500, 128)
    on_gpu.append(tokens)
    on_gpu.words.link.packing.finish()
    on_cpu.append(tokens.cpu())
    stores = [h.words.__getstate__() for h in (on_gpu, on_cpu)]
    kept = [store["words"] for store in stores]  # type: ignore[index]
    assert torch.equal(*kept)


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_steps_wait_for_nothing(offload: bool, no_waiting) -> None:
    """Two layers in turn, prefetched, as a model decodes; a block is packed every 32 steps."""
    made, first = pair(offload)
    second = layer_of(made)
    layers = [first, second]
    tokens = [normal(1, 4, 800, 128, seed=i) for i in range(4)]
    for layer, histories in enumerate(layers):
        for i, history in enumerate(histories):
            history.append(tokens[2 * layer + i][:, :, :600])

    def step(t: int) -> list[torch.Tensor]:
        found = []
        for layer, histories in enumerate(layers):
            parts = made.read(histories)
            for i, history in enumerate(histories):
                new = tokens[2 * layer + i][:, :, t : t + 1]
                found.append(torch.cat([*parts[i], history.tail, new], dim=-2))
            made.done(histories)
            for i, history in enumerate(histories):
                history.append(tokens[2 * layer + i][:, :, t : t + 1])
            made.prefetch(layers[1 - layer])
        return found

    for t in range(600, 700):
        step(t)
    before = first[0].packed_tokens
    with no_waiting():
        kept = [step(t) for t in range(700, 800)]
    assert first[0].packed_tokens > before
    for t, found in zip(range(700, 800), kept, strict=True):
        for one, all_tokens in zip(found, tokens, strict=True):
            assert torch.equal(one, all_tokens[:, :, : t + 1])


def test_a_stale_prefetch_is_dropped() -> None:
    made, histories = pair(offload=True)
    tokens = normal(3, 4, 600, 128)
    for history in histories:
        history.append(tokens)
    index = torch.tensor([2, 2, 0], device="cuda")
    for _ in range(20):
        made.finish_packing()
        made.prefetch(histories)
        for history in histories:
            history.crop(300)
            history.append(tokens[:, :, 300:])
            history.reorder(index)
        tokens = tokens[index]
        for history in histories:
            assert_same(history, tokens)


def test_memory_freed_during_a_prefetch() -> None:
    """Nothing that a fetch under way still reads is used for something else."""
    for seed in range(20):
        made, histories = pair(offload=True)
        for history in histories:
            history.append(normal(2, 8, 2000, 128, seed=seed))
        made.finish_packing()
        made.prefetch(histories)
        del made, histories, history
        for _ in range(8):
            torch.full((1 << 20,), -1, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()


def test_a_codec_is_fitted_again_on_the_way() -> None:
    _, (history, _) = pair(offload=True)
    tokens = torch.cat([normal(1, 8, 400, 128), 1e9 * normal(1, 8, 1000, 128, seed=1)], dim=-2)
    history.append(tokens[:, :, :400])
    for i in range(400, 1400, 2):
        history.append(tokens[:, :, i : i + 2])
        if i % 50 == 0:
            torch.cuda.synchronize()
    assert history.packed.refits >= 1
    assert_same(history, tokens)


def test_a_second_cache_uses_the_page_locked_memory_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena, "_arena", None)
    reserved: list[int] = []
    for seed in range(4):
        tokens = normal(2, 4, 2000, 128, seed=seed)
        made, histories = pair(offload=True)
        for history in histories:
            history.append(tokens)
        made.finish_packing()
        parts = [
            torch.cat([*part, history.tail], dim=-2)
            for part, history in zip(made.read(histories), histories, strict=True)
        ]
        made.done(histories)
        assert all(future.exception() is None for future, _ in made.arena._ahead)  # waits
        assert all(torch.equal(part, tokens) for part in parts)
        assert 0 < made.host_bytes(histories) <= host_arena().stats()["reserved_bytes"]
        reserved.append(host_arena().stats()["reserved_bytes"])
        torch.cuda.synchronize()
        del made, histories, history, parts
        gc.collect()
        assert host_arena().stats()["used_bytes"] == 0
    # The second one's pieces have other sizes; few of them find no room among the first one's.
    assert len(set(reserved[1:])) == 1 and reserved[1] <= 1.15 * reserved[0], reserved
    assert host_arena().trim() == reserved[1]


def test_memory_of_a_cache_that_is_gone_is_not_used_while_its_words_cross(
    monkeypatch: pytest.MonkeyPatch, held_stream: Any
) -> None:
    monkeypatch.setattr(arena, "_arena", None)
    tokens = normal(2, 4, 2000, 128)
    made, histories = pair(offload=True)
    for history in histories:
        history.append(tokens)
    made.finish_packing()
    for _ in range(2):  # both buffers are there, and the kernels loaded
        made.read(histories)
        made.done(histories)
    link = made.link
    assert link.streams is not None
    with held_stream(link.streams.copies.stream):
        made.prefetch(histories)
        del made, histories, history
        used = host_arena().stats()["used_bytes"]
        assert used > 0, "the copies have not begun"
    gc.collect()
    assert host_arena().stats()["used_bytes"] == 0


# Prompts


def layers_of(made: HistoryReader, n: int, kept: str | None, **options: Any) -> list[PackedHistory]:
    options = {"window": 16, "block_tokens": 32, **options}
    found = []
    for layer in range(n):
        codecs = None if kept is None else codecs_of_model(kept).of(layer, "k")
        words, plans = made.new_words(), CodecPlans()
        found.append(PackedHistory(words, plans, "k", kept=codecs, **options))
    return found


def prompt_and_steps(made: HistoryReader, histories: list[PackedHistory], seed: int) -> None:
    """Append a prompt and single tokens, pack everything, and compare."""
    tokens = [normal(1, 4, 1400, 128, seed=seed + i) for i in range(len(histories))]
    for history, each in zip(histories, tokens, strict=True):
        history.append(each[:, :, :1300])
    for t in range(1300, 1400):
        for history, each in zip(histories, tokens, strict=True):
            history.append(each[:, :, t : t + 1])
    made.finish_packing()
    for history, each in zip(histories, tokens, strict=True):
        assert history.packed_tokens > 1250
        assert_same(history, each)


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("kept", [False, True], ids=["sampled", "kept"])
def test_prompts_do_not_wait(
    offload: bool, kept: bool, run_ahead, no_waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for samples nor for codecs nor for sizes, while nothing that is queued runs."""
    monkeypatch.setattr(packing_queue, "LEAD", 0)  # codecs are fitted as soon as samples are there
    name = f"prompts, {offload}"
    made, _ = pair(offload)
    prompt_and_steps(made, layers_of(made, 3, name), seed=10)  # kernels are loaded, codecs left
    made, _ = pair(offload)
    histories = layers_of(made, 3, name if kept else None)
    tokens = [normal(1, 4, 1400, 128, seed=20 + i) for i in range(3)]

    def prompt() -> None:
        for history, each in zip(histories, tokens, strict=True):
            history.append(each[:, :, :1300])

    run_ahead(prompt)  # which synchronises at its end
    assert [history.packed_tokens for history in histories] == [0, 0, 0]
    assert [(history.samples, history.packs) for history in histories] == [(not kept, kept)] * 3
    with no_waiting():  # planning and moving what has come call nothing that waits
        made.link.packing.advance()
    torch.cuda.synchronize()
    with no_waiting():
        made.link.packing.advance()
    assert min(history.packed_tokens for history in histories) > 1250
    for history, each in zip(histories, tokens, strict=True):
        assert_same(history, each[:, :, :1300])


@pytest.mark.parametrize("kept", [False, True], ids=["sampled", "kept"])
def test_raw_tokens_of_prompts_are_bounded(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raw_bytes = 4 * 1300 * 128 * 2
    monkeypatch.setattr(packing_queue, "MOST_BYTES", 2 * raw_bytes)
    made, _ = pair(offload=True)
    if kept:
        prompt_and_steps(made, layers_of(made, 12, "bounded"), seed=40)
        made, _ = pair(offload=True)
    histories = layers_of(made, 12, "bounded" if kept else None)
    tokens = [normal(1, 4, 1300, 128, seed=60 + i) for i in range(12)]
    for history, each in zip(histories, tokens, strict=True):
        torch.cuda._sleep(20_000_000)  # the layer computes
        history.append(each)
        assert made.link.packing.nbytes <= (3 if kept else 6) * raw_bytes
    made.finish_packing()
    for history, each in zip(histories, tokens, strict=True):
        assert_same(history, each)


def test_pieces_and_changes_while_a_prompt_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_tokens, "PIECE_BYTES", 1 << 18)
    for offload in (True, False):
        made, _ = pair(offload)
        prompt_and_steps(made, layers_of(made, 2, f"pieces {offload}"), seed=80)
        for change in ("crop", "reorder", "repeat", "select", "pickle"):
            made, _ = pair(offload)
            [history] = layers_of(made, 1, f"pieces {offload}")
            tokens = normal(2, 4, 1300, 128, seed=90)
            torch.cuda._sleep(100_000_000)
            history.append(tokens)
            if change == "crop":
                history.crop(901)
                tokens = tokens[:, :, :901]
            elif change == "reorder":
                history.reorder(torch.tensor([1, 1], device="cuda"))
                tokens = tokens[[1, 1]]
            elif change == "repeat":
                history.repeat(2)
                tokens = tokens.repeat_interleave(2, dim=0)
            elif change == "select":
                history.select([1])
                tokens = tokens[1:]
            else:
                history = pickle.loads(pickle.dumps(history))
            for i in range(3):
                more = normal(tokens.shape[0], 4, 200, 128, seed=i)
                history.append(more)
                tokens = torch.cat([tokens, more], dim=2)
                assert_same(history, tokens)
            history.words.link.packing.finish()
            assert_same(history, tokens)


def test_a_kept_codec_that_does_not_suit_is_replaced(
    no_waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_queue, "LEAD", 0)
    made, _ = pair(offload=True)
    prompt_and_steps(made, layers_of(made, 1, "unsuited"), seed=100)
    made, _ = pair(offload=True)
    [history] = layers_of(made, 1, "unsuited")
    tokens = 1e9 * normal(1, 4, 1300, 128, seed=101)
    history.append(tokens)
    torch.cuda.synchronize()
    with no_waiting():
        for _ in range(3):  # sizes that are refused, a sample, sizes
            made.link.packing.advance()
            torch.cuda._sleep(1000)
    made.finish_packing()
    assert_same(history, tokens)
    assert history.stats()["packed_ratio"] > 1.3


def test_kernels_are_loaded_once() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    load_kernels(device, torch.float16)
    torch.cuda.synchronize()
    loads: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "PackedHistory", loads.append)
        for dtype in (torch.float16, torch.int8):  # the latter are left to their first use
            load_kernels(device, dtype)
    assert not loads
