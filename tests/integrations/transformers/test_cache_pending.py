"""CompressedCache whose prompts are still being packed, as on a GPU: DynamicCache's bits.

On the CPU what a GPU would do later arrives when it has been asked for some times.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bitslab import BitslabError
from bitslab.integrations.transformers.layer_histories import LayerHistories
from bitslab.kvcache import (
    HistoryReader,
    PackedHistory,
    codecs_of_model,
    fitting,
    in_flight,
    packed_tokens,
    packing_queue,
)
from tests.integrations.transformers.models import SMALL, compressed, config_of, dynamic

HEADS, DIM, LAYERS = 2, 16, 4
pytestmark = pytest.mark.usefixtures("one_thread")


class Late(in_flight.AsyncCopy):
    """Arrives when it has been asked for `asks` times, or is waited for."""

    asks = 0

    def __init__(self, t: torch.Tensor) -> None:
        super().__init__(t)
        self.left = Late.asks

    def get(self, wait: bool) -> torch.Tensor | None:
        self.left = -1 if wait else self.left - 1
        return None if self.left >= 0 else super().get(wait)


def open_as_on_gpu(
    self: Any, layer: int, device: torch.device
) -> tuple[HistoryReader, list[PackedHistory]]:
    """Return histories that wait for nothing and take the codecs of the cache before."""
    reader = self._reader(device)
    codecs = codecs_of_model(("pending", self._model))
    found = [
        PackedHistory(
            reader.new_words(), self._plans, kind, kept=codecs.of(layer, kind), **self._options
        )
        for kind in "kv"
    ]
    for history in found:
        history._at_once = False
    return reader, found


open_as_on_gpu.__name__ = "open"  # as which a pickled layer finds it


@pytest.fixture
def as_on_gpu() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch, most_bytes=1 << 30)
        yield patch


def prepare(patch: pytest.MonkeyPatch, most_bytes: int) -> None:
    patch.setattr(LayerHistories, "open", open_as_on_gpu)
    patch.setattr(packing_queue, "MOST_BYTES", most_bytes)
    patch.setattr(packed_tokens, "PIECE_BYTES", 1 << 14)
    patch.setattr(fitting, "SAMPLE_BYTES", 1 << 13)
    for module in (fitting, in_flight):
        patch.setattr(module, "AsyncCopy", Late)


def drawn(layer: int, i: int, batch: int, n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 2 * layer + i)
    # As a model gives them: a view of [B, n, H, D].
    return torch.randn(batch, n, HEADS, DIM, generator=generator).transpose(1, 2)


def feed(cache: Any, n: int, batch: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        cache.update(*(drawn(layer, i, batch, n, seed) for i in (0, 1)), layer)
        for layer in range(LAYERS)
    ]


def assert_same(ours: Any, plain: Any) -> None:
    for one, other in zip(ours.layers, plain.layers, strict=True):
        assert one.get_seq_length() == other.get_seq_length()
        if other.get_seq_length():
            assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def queue_of(cache: Any) -> packing_queue.PackingQueue:
    [reader] = cache._histories.readers.values()
    queue: packing_queue.PackingQueue = reader.link.packing
    return queue


class Caches(RuleBasedStateMachine):
    """A compressed and a plain cache, one sequence of calls."""

    @initialize(
        asks=st.integers(0, 30),
        most_bytes=st.sampled_from([0, 1 << 15, 1 << 30]),
        batch=st.integers(1, 3),
        offload=st.booleans(),
    )
    def start(self, asks: int, most_bytes: int, batch: int, offload: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        prepare(self.patch, most_bytes)
        Late.asks = asks
        config = config_of("llama", num_hidden_layers=LAYERS)
        self.ours = compressed(config, **SMALL, offload=offload)
        self.plain = dynamic(config)
        self.batch, self.seed = batch, 0

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    @property
    def length(self) -> int:
        return int(self.plain.get_seq_length())

    @rule(n=st.sampled_from([1, 1, 1, 3, 40, 150]))
    def update(self, n: int) -> None:
        self.seed += 1
        found = [feed(cache, n, self.batch, self.seed) for cache in (self.ours, self.plain)]
        for ours, plain in zip(*found, strict=True):
            assert all(map(torch.equal, ours, plain))

    @precondition(lambda self: self.length)
    @rule(share=st.floats(0, 1))
    def crop(self, share: float) -> None:
        for cache in (self.ours, self.plain):
            cache.crop(-int(share * (self.length - 1)))

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        numbers = st.integers(0, self.batch - 1)
        index = data.draw(st.lists(numbers, min_size=self.batch, max_size=self.batch))
        for cache in (self.ours, self.plain):
            cache.reorder_cache(torch.tensor(index))

    @precondition(lambda self: self.length and self.batch < 4)
    @rule()
    def repeat(self) -> None:
        for cache in (self.ours, self.plain):
            cache.batch_repeat_interleave(2)
        self.batch *= 2

    @precondition(lambda self: self.length)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        numbers = st.integers(0, self.batch - 1)
        index = data.draw(st.lists(numbers, min_size=1, max_size=3))
        for cache in (self.ours, self.plain):
            cache.batch_select_indices(torch.tensor(index))
        self.batch = len(index)

    @rule()
    def reset(self) -> None:
        self.ours.reset()
        self.plain = dynamic(config_of("llama", num_hidden_layers=LAYERS))

    @rule(way=st.sampled_from([copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]))
    def take_a_copy(self, way: Any) -> None:
        before, self.ours = self.ours, way(self.ours)
        if self.length:
            feed(before, 30, self.batch, 77)  # which the copy must not see

    @rule(layer=st.integers(0, LAYERS - 1))
    def run_out_of_memory(self, layer: int) -> None:
        """After an error, wherever it came from, all layers are as they were before."""
        failing = [h.packed for h in self.ours.layers[layer].histories]

        def fail(packed: Any, blocks: Any) -> None:
            if packed in failing:
                raise BitslabError("K/V history: no memory")
            move(packed, blocks)

        self.seed += 1
        with pytest.MonkeyPatch.context() as patch:
            move = packed_tokens.PackedTokens._move
            patch.setattr(packed_tokens.PackedTokens, "_move", fail)
            try:
                feed(self.ours, 60, self.batch, self.seed)
            except BitslabError:
                assert_same(self.ours, self.plain)
                return
        feed(self.plain, 60, self.batch, self.seed)

    @rule()
    def finish(self) -> None:
        for reader in self.ours._histories.readers.values():
            reader.finish_packing()
            assert not len(reader.link.packing)

    @invariant()
    def same(self) -> None:
        if hasattr(self, "patch"):
            assert_same(self.ours, self.plain)


TestCaches = Caches.TestCase
TestCaches.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)


def both(n: int = 150) -> tuple[Any, Any]:
    config = config_of("llama", num_hidden_layers=LAYERS)
    caches = compressed(config, **SMALL), dynamic(config)
    for cache in caches:
        feed(cache, n, 2, 0)
    return caches


def test_layers_are_packed_in_the_next_pass(as_on_gpu: Any) -> None:
    Late.asks = 1 << 30
    ours, plain = both()
    assert len(queue_of(ours)) == 2 * LAYERS and ours.stats()["packed_tokens"] == 0
    for history in (h for layer in ours.layers for h in layer.histories):
        for copied in filter(None, [history.packed._fitting._sample, *history.packed.in_flight]):
            vars(getattr(copied, "_sizes_copy", copied)).update(left=0)
    Late.asks = 0
    for cache in (ours, plain):
        feed(cache, 1, 2, 1)
    assert not len(queue_of(ours)) and ours.stats()["packed_tokens"] > 100
    assert_same(ours, plain)


@pytest.mark.parametrize("asks", [0, 1 << 30], ids=["packed", "in flight"])
def test_a_cache_that_is_gone_leaves_its_memory_at_once(as_on_gpu: Any, asks: int) -> None:
    """For the next one: a collector that comes later would have it take pages of its own."""
    Late.asks = asks
    gc.disable()
    try:
        ours, _ = both()
        [reader] = ours._histories.readers.values()
        histories = [h for layer in ours.layers for h in layer.histories]
        left = [weakref.ref(each) for each in (ours, reader, *histories)]
        left += [weakref.ref(history.words) for history in histories]
        del ours, reader, histories
        assert [each() for each in left] == [None] * len(left)
    finally:
        gc.enable()


def test_an_error_of_an_earlier_layer_names_it_and_changes_no_layer(as_on_gpu: Any) -> None:
    Late.asks = 1 << 30
    ours, plain = both()
    history = ours.layers[2].histories[1]

    def fail(packed: Any, blocks: Any) -> None:
        if packed is history.packed:
            raise BitslabError("K/V history: no memory")
        move(packed, blocks)

    move = packed_tokens.PackedTokens._move
    as_on_gpu.setattr(packed_tokens.PackedTokens, "_move", fail)
    reader = ours._histories.readers[torch.device("cpu")]
    for _ in range(2):
        with pytest.raises(BitslabError, match="^layer 2, v: K/V history: no memory$"):
            reader.finish_packing()
    Late.asks = 0
    with pytest.raises(BitslabError, match="^layer 2, v: K/V history: no memory$"):
        feed(ours, 1, 2, 1)
    assert_same(ours, plain)
    as_on_gpu.setattr(packed_tokens.PackedTokens, "_move", move)
    for cache in (ours, plain):
        feed(cache, 1, 2, 1)
    assert_same(ours, plain)
    assert history.packed_tokens > 100


def test_a_second_cache_of_a_config_takes_the_codecs_of_the_first(as_on_gpu: Any) -> None:
    Late.asks = 0
    codecs = []
    for _ in range(2):
        ours, plain = both(400)
        queue_of(ours).finish()
        assert_same(ours, plain)
        histories = [h for layer in ours.layers for h in layer.histories]
        codecs.append([history.segments[0].codec for history in histories])
    assert all(a is b for a, b in zip(*codecs, strict=True))
    assert len(set(map(id, codecs[0]))) == 2 * LAYERS
