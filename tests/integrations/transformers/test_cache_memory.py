"""What a CompressedCache reserves: never more than raw tokens take, and stats() counts it all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitslab.kvcache import CodecPlans, HistoryReader, PackedHistory
from bitslab.kvcache.words import HostWords
from tests.integrations.transformers.models import SMALL, compressed, config_of

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, HEADS, DIM = 2, 4, 64
#: Of each layer's K and V: small tensors of codecs, and what is left of pieces of memory.
FIXED_BYTES = 2 * LAYERS * 2048
KINDS: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
    "noise": torch.int8,
}


def tokens_of(kind: str, n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "noise":
        return torch.randint(-128, 128, (1, HEADS, n, DIM), dtype=torch.int8, generator=generator)
    return torch.randn(1, HEADS, n, DIM, generator=generator).to(KINDS[kind])


def feed(cache: Any, kind: str, n: int) -> None:
    for layer in range(LAYERS):
        k, v = (tokens_of(kind, n, seed=2 * layer + i) for i in (0, 1))
        cache.update(k, v, layer)


def cache_of(**options: Any) -> Any:
    return compressed(config_of("llama"), **options)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("offload", [True, False, 0.5], ids=["host", "device", "half"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_more_memory_is_reserved_than_raw_tokens_take(kind: str, offload: float) -> None:
    """At every length of a sequence that grows from a prompt, short ones as well."""
    for prompt in (1, 200, 600):
        cache = cache_of(offload=offload, window=64)
        for step in range(12):
            feed(cache, kind, prompt if not step else 37)
            stats = cache.stats()
            length = prompt + 37 * step
            raw = 2 * LAYERS * HEADS * DIM * length * KINDS[kind].itemsize
            assert stats["raw_bytes"] == raw
            assert stats["host_bytes"] + stats["device_bytes"] <= raw + FIXED_BYTES, length
        if kind == "bfloat16" and prompt == 600:
            assert stats["ratio"] > 1.2


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_stats_count_every_byte_once(offload: bool) -> None:
    cache = cache_of(offload=offload, **SMALL)
    feed(cache, "bfloat16", 300)
    feed(cache, "bfloat16", 9)
    stats = cache.stats()
    there: dict[int, int] = {}
    for layer in cache.layers:
        for history in layer.histories:
            tensors = [history.tail]
            for segment in history.segments:
                tensors += segment.tensors()
            for t in [*tensors, history.words.whole()]:
                there[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    assert stats["host_bytes"] + stats["device_bytes"] == pytest.approx(
        sum(there.values()), rel=0.01
    )
    assert stats["ratio"] == stats["raw_bytes"] / (stats["host_bytes"] + stats["device_bytes"])
    assert stats["reserved_bytes"] == stats["host_bytes"]
    assert (stats["host_bytes"] > 0) == offload


def test_a_tail_that_is_part_of_something_larger_is_counted_whole() -> None:
    cache = cache_of(window=100)
    feed(cache, "bfloat16", 90)
    before = cache.stats()["device_bytes"]
    cache.crop(-80)
    stats = cache.stats()
    assert stats["device_bytes"] == before > stats["raw_bytes"]


def test_beams_that_share_packed_tokens_take_their_memory_once() -> None:
    cache = cache_of(**SMALL)
    feed(cache, "bfloat16", 300)
    before = cache.stats()
    cache.batch_repeat_interleave(4)
    after = cache.stats()
    assert after["raw_bytes"] == 4 * before["raw_bytes"]
    assert after["packed_raw_bytes"] == before["packed_raw_bytes"]
    assert after["ratio"] > 2.5 * before["ratio"]


def test_raw_rows_come_in_few_pieces_of_memory() -> None:
    """Each is a transfer of its own, and there is no room ahead for the next ones."""
    reader = HistoryReader(torch.device("cpu"), offload=True, sm_budget=None)
    words = HostWords(reader.arena, reader.link)  # as on a GPU
    history = PackedHistory(words, CodecPlans(), "k", window=16, block_tokens=16)
    for seed in range(400):
        history.append(tokens_of("noise", 8, seed))
    assert history.stats()["kept_raw_bytes"] == history.packed_tokens * HEADS * DIM
    assert len(words._pieces) < 40
    assert history.packed_tokens > 0.8 * history.length
    expected = torch.cat([tokens_of("noise", 8, seed) for seed in range(400)], dim=2)
    assert torch.equal(history.decode(), expected)
