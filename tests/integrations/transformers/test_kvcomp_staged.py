"""KVCompCache on the code path of a GPU: its kernels run on the CPU, streams do all at once."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from bitslab.engine.transfer import lanes
from bitslab.integrations.transformers import KVCompCache
from bitslab.integrations.transformers.attention import attention
from bitslab.integrations.transformers.kvcomp_layer import Padding
from bitslab.kvcache import HistoryReader, attending, fetching, link, reader
from bitslab.kvcache.link import Streams
from bitslab.kvcache.words import DeviceWords, HostWords
from tests.integrations.transformers.models import config_of
from tests.integrations.transformers.test_kvcomp_cache import Module
from tests.kvcache.test_reader import Stream
from tests.simt.runner import simt_kernels

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, QUERY_HEADS, DIM, BATCH = 2, 4, 16, 2


@pytest.fixture
def gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    monkeypatch.setattr(lanes, "on_stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    for module in (reader, link):
        monkeypatch.setattr(module, "current_stream", Stream)
    monkeypatch.setattr(link, "stream_pointer", lambda device: Stream.cuda_stream)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(
        HistoryReader,
        "new_words",
        lambda made, on_host: (
            HostWords(made.arena, made.link)
            if on_host
            else DeviceWords(made.link)  # of the device, which is the CPU
        ),
    )
    kernels = simt_kernels()[0]
    monkeypatch.setattr(attending, "_gpu_kernels", lambda device: kernels)


def cache_of(n_layers: int, offload: bool, *, streams: bool) -> Any:
    config = config_of("llama")
    config.num_hidden_layers = n_layers
    config._attn_implementation = "bitslab"
    cache: Any = KVCompCache(
        config, error=0.3, window=16, block_tokens=16, offload=offload, device="cpu"
    )
    if streams:
        for made in cache._histories.readers.values():
            made.link.streams = Streams(torch.device("cpu"), made.link)
            made._start()
    return cache


class Pass:
    """Forward passes of the same values through any cache; keeps what attention returned."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.outputs: list[torch.Tensor] = []
        self.generator = torch.Generator().manual_seed(0)

    def run(self, n: int = 1, batch: int = BATCH, mask: Any = None) -> None:
        for layer in range(len(self.cache.layers)):
            k, v = (self.normal(batch, HEADS, n) for _ in "kv")
            keys, values = self.cache.update(k, v, layer)
            query = self.normal(batch, QUERY_HEADS, n)
            out, _ = attention(Module(), query, keys, values, mask, scaling=0.3)
            self.outputs.append(out)

    def normal(self, batch: int, heads: int, n: int) -> torch.Tensor:
        return torch.randn(batch, heads, n, DIM, generator=self.generator)


def padded(length: int, first: list[int]) -> torch.Tensor:
    """Return a mask of the last token that says where sequences begin, as `masks` makes it."""
    begin = torch.tensor(first, dtype=torch.int32)
    mask = (torch.arange(length) >= begin[:, None])[:, None, None]
    mask.bitslab_padding = Padding(begin)  # type: ignore[attr-defined]
    return mask


def changed(passes: Pass) -> None:
    """Grow over block boundaries, and change in all the ways in between."""
    cache = passes.cache
    passes.run(90)
    for _ in range(20):
        passes.run()
    cache.crop(-3)  # of the tail
    for _ in range(2):
        passes.run()
    cache.crop(-40)  # of packed tokens
    for _ in range(3):
        passes.run()
    cache.reorder_cache(torch.tensor([1, 1]))
    passes.run()
    length = cache.get_seq_length() + 1
    passes.run(mask=padded(length, [7, 50]))
    passes.run(mask=padded(length + 1, [7, 50]))
    cache.batch_repeat_interleave(2)
    for _ in range(18):
        passes.run(batch=2 * BATCH)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("n_layers", [1, 3])
def test_outputs_are_those_of_the_cpu(
    n_layers: int, offload: bool, request: pytest.FixtureRequest
) -> None:
    expected = Pass(cache_of(n_layers, offload, streams=False))
    changed(expected)
    request.getfixturevalue("gpu_path")
    found = Pass(cache_of(n_layers, offload, streams=True))
    changed(found)
    for one, other in zip(found.outputs, expected.outputs, strict=True):
        assert torch.allclose(one, other, atol=2e-5)
    stats = found.cache.stats()
    assert stats["packed_passes"] == expected.cache.stats()["packed_passes"] > 40 * n_layers
    assert not stats["dense_passes"]


def test_words_of_two_layers_are_under_way_while_one_computes(
    gpu_path: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is fetched once a pass, as soon as attention has read what lies in its place."""
    passes = Pass(cache_of(5, True, streams=True))
    passes.run(90)
    for _ in range(3):
        passes.run()
    log: list[Any] = []
    layers = passes.cache.layers
    of = {id(history): i for i, layer in enumerate(layers) for history in layer.histories}
    fetch, attend = fetching.WordBuffer.fetch, attending.PackedAttention.attend

    def logged_fetch(buffer: Any, histories: Any, *, each: bool) -> Any:
        log.append(("fetch", of[id(histories[0])]))
        return fetch(buffer, histories, each=each)

    def logged_attend(self: Any, *args: Any, **options: Any) -> Any:
        log.append(("attend", of[id(self._histories[0])]))
        return attend(self, *args, **options)

    monkeypatch.setattr(fetching.WordBuffer, "fetch", logged_fetch)
    monkeypatch.setattr(attending.PackedAttention, "attend", logged_attend)
    for _ in range(2):
        passes.run()
    steps = [*range(5)] * 2
    assert log == [each for i in steps for each in (("attend", i), ("fetch", (i + 2) % 5))]


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_a_module_that_attends_twice_gets_the_same_twice(offload: bool, gpu_path: None) -> None:
    passes = Pass(cache_of(3, offload, streams=True))
    passes.run(90)
    passes.run()
    for layer in range(3):
        k, v = (passes.normal(BATCH, HEADS, 1) for _ in "kv")
        keys, values = passes.cache.update(k, v, layer)
        query = passes.normal(BATCH, QUERY_HEADS, 1)
        first, again = (
            attention(Module(), query, keys, values, None, scaling=0.3)[0] for _ in range(2)
        )
        assert torch.equal(first, again)
        other = passes.normal(BATCH, QUERY_HEADS, 1)
        found, _ = attention(Module(), other, keys, values, None, scaling=0.3)
        k, v = keys.dense(), values.dense()
        expected, _ = attention(Module(), other, k, v, None, scaling=0.3)
        assert torch.allclose(found, expected, atol=2e-3)
    before = passes.cache.stats()["packed_passes"]
    passes.run()
    assert passes.cache.stats()["packed_passes"] == before + 3


def test_attention_takes_all_multiprocessors(
    gpu_path: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget is that of what is decoded beside the computation."""
    kernels = attending._gpu_kernels(torch.device("cpu"))
    assert kernels is not None
    prepare = kernels.prepare_attention
    budgets: list[Any] = []

    def noted(*args: Any, **options: Any) -> Any:
        budgets.append(options.get("sm_budget"))
        return prepare(*args, **options)

    monkeypatch.setattr(kernels, "prepare_attention", noted)
    cache = cache_of(1, True, streams=True)
    assert cache._histories.readers[torch.device("cpu")].sm_budget == 64
    passes = Pass(cache)
    passes.run(90)
    passes.run()
    assert budgets == [None]
