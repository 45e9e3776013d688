"""Prompts packed while other layers compute: order, memory, errors, codecs that are kept."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch

from bitslab import ArgumentError, BitslabError
from bitslab.kvcache import (
    CodecPlans,
    HistoryReader,
    PackedHistory,
    codecs_of_model,
    fitting,
    in_flight,
    model_codecs,
    packed_tokens,
    packing_queue,
)
from bitslab.kvcache.model_codecs import LayerCodecs
from bitslab.kvcache.segment import Segment
from tests.helpers import same_bits

HEADS, DIM, TOKENS = 2, 64, 1100
RAW_BYTES = HEADS * DIM * TOKENS * 2


class Device:
    """A GPU as far as a history knows one: copies to the host arrive when they are waited for.

    Attributes
    ----------
    done : bool
        Whether everything has arrived.
    waits : list of str
        What has been waited for.
    """

    def __init__(self) -> None:
        self.done = False
        self.waits: list[str] = []


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    class Copy(in_flight.AsyncCopy):
        def __init__(self, t: torch.Tensor) -> None:
            super().__init__(t)
            self.what = "sizes" if t.dtype == torch.int64 else "sample"
            self.there = False

        def get(self, wait: bool) -> torch.Tensor | None:
            if wait and not self.there and not made.done:
                made.waits.append(self.what)
            self.there |= wait or made.done
            return super().get(wait) if self.there else None

    for module in (fitting, in_flight):
        monkeypatch.setattr(module, "AsyncCopy", Copy)
    monkeypatch.setattr(model_codecs, "_models", type(model_codecs._models)())
    monkeypatch.setattr(packing_queue, "LEAD", 0)
    return made


class Layers:
    """The K of some layers, one reader's."""

    def __init__(self, n: int, *, kept: str | None = "model", **options: Any) -> None:
        self.reader = HistoryReader(torch.device("cpu"), offload=True, sm_budget=None)
        plans = CodecPlans()
        options = {"window": 8, "block_tokens": 16, **options}
        self.histories = []
        for layer in range(n):
            of_layer = None if kept is None else codecs_of_model(kept).of(layer, "k")
            words = self.reader.new_words()
            history = PackedHistory(words, plans, "k", kept=of_layer, **options)
            history._at_once = False  # as on a GPU
            self.histories.append(history)

    def feed(self, tokens: list[torch.Tensor]) -> None:
        for history, each in zip(self.histories, tokens, strict=True):
            history.append(each)

    @property
    def queue(self) -> packing_queue.PackingQueue:
        return self.reader.link.packing

    @property
    def packed(self) -> list[int]:
        return [history.packed_tokens for history in self.histories]


def prompts(n: int, seed: int = 0, tokens: int = TOKENS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, HEADS, tokens, DIM, generator=generator).bfloat16() for _ in range(n)]


def leave_codecs(n: int) -> None:
    """Pack prompts of some layers, for a second cache."""
    before = Layers(n)
    before.feed(prompts(n))
    before.reader.finish_packing()


def assert_same(layers: Layers, tokens: list[torch.Tensor]) -> None:
    for history, each in zip(layers.histories, tokens, strict=True):
        assert same_bits(history.decode(), each)


@pytest.mark.parametrize("second", [False, True], ids=["first cache", "second cache"])
def test_a_prompt_waits_for_nothing(device: Device, second: bool) -> None:
    if second:
        leave_codecs(6)
        device.waits.clear()
    layers, tokens = Layers(6), prompts(6, seed=1)
    layers.feed(tokens)
    assert device.waits == [] and layers.packed == [0] * 6
    assert [history.packs for history in layers.histories] == [second] * 6
    assert [history.samples for history in layers.histories] == [not second] * 6
    assert_same(layers, tokens)
    device.done = True
    for _ in range(2):  # samples come, then sizes
        layers.queue.advance()
    assert min(layers.packed) > TOKENS - 8 - 16 and not len(layers.queue)
    assert_same(layers, tokens)


@pytest.mark.parametrize("second", [False, True], ids=["first cache", "second cache"])
def test_raw_tokens_of_few_layers_are_held(
    device: Device, second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for old layers alone: others are computed meanwhile."""
    monkeypatch.setattr(packing_queue, "MOST_BYTES", 3 * RAW_BYTES)
    if second:
        leave_codecs(12)
    layers, tokens = Layers(12), prompts(12, seed=1)
    held = []
    for i, (history, each) in enumerate(zip(layers.histories, tokens, strict=True)):
        device.waits.clear()
        history.append(each)
        held.append(layers.queue.nbytes)
        # No layer is waited for that came with the last three appends.
        assert layers.packed[max(0, i - 3) :] == [0] * len(layers.packed[max(0, i - 3) :])
    most = 4 if second else 7  # in each state those up to the limit, and the one that came last
    assert max(held) <= most * RAW_BYTES < 12 * RAW_BYTES
    assert sum(map(bool, layers.packed)) >= 12 - most
    layers.reader.finish_packing()
    assert layers.queue.nbytes == 0 and min(layers.packed) > TOKENS - 8 - 16
    assert_same(layers, tokens)


@pytest.mark.parametrize("lead", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("second", [False, True], ids=["first cache", "second cache"])
def test_codecs_are_fitted_behind_the_appends_that_come_next(
    device: Device, second: bool, lead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the device has their work meanwhile; what needs no fit is packed at once."""
    monkeypatch.setattr(packing_queue, "LEAD", lead)
    if second:
        leave_codecs(6)
    layers, tokens = Layers(6), prompts(6, seed=1)
    began = []
    for history, each in zip(layers.histories, tokens, strict=True):
        device.done = False
        history.append(each)
        device.done = True  # what was copied meanwhile is there
        layers.queue.advance()  # as an append to another layer does
        began.append([bool(other.packs or other.packed_tokens) for other in layers.histories])
    # An append and an advance for each: the next one behind `lead` of them that finds the sample.
    behind = 0 if second else (lead + 1) // 2
    assert began == [[i <= n - behind for i in range(6)] for n in range(6)]
    for _ in range(6):  # tokens behind the prompt
        for history in layers.histories:
            history.append(each[:, :, :1])
    assert min(layers.packed) > TOKENS - 8 - 16 and not len(layers.queue)
    every = [torch.cat([t, *[each[:, :, :1]] * 6], dim=2) for t in tokens]
    assert_same(layers, every)


def test_codecs_are_fitted_as_soon_as_samples_are_there_where_much_waits(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_queue, "LEAD", 100)
    monkeypatch.setattr(packing_queue, "MOST_BYTES", 3 * RAW_BYTES)
    layers, tokens = Layers(5), prompts(5)
    for history, each in zip(layers.histories[:3], tokens[:3], strict=True):
        history.append(each)
    device.done = True
    layers.queue.advance()
    assert layers.packed == [0] * 5 and not any(history.packs for history in layers.histories)
    device.done = False
    layers.histories[3].append(tokens[3])
    device.waits.clear()  # for the oldest, of which there were too many
    device.done = True
    layers.queue.advance()
    assert all(history.packs or history.packed_tokens for history in layers.histories[:3])
    assert device.waits == []


def test_all_pieces_of_a_prompt_are_in_flight_together(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed_prompt(prompts(1)[0])
    monkeypatch.setattr(packed_tokens, "PIECE_BYTES", RAW_BYTES // 7)
    layers, tokens = Layers(1), prompts(1, seed=1)
    layers.feed(tokens)
    [history] = layers.histories
    assert len(history.packed.in_flight) > 6
    # Tokens at the end are removed while they are packed, and others come in their place.
    history.crop(700)
    more = prompts(1, seed=2)[0]
    history.append(more)
    expected = torch.cat([tokens[0][:, :, :700], more], dim=2)
    assert torch.equal(history.decode(), expected)
    history.reorder([0, 0])
    history.append(more.expand(2, -1, -1, -1))
    expected = torch.cat([expected, more], dim=2).expand(2, -1, -1, -1)
    layers.reader.finish_packing()
    assert history.packed_tokens > 2 * TOKENS
    assert torch.equal(history.decode(), expected)


def test_memory_that_runs_out_amid_the_pieces_is_reported_with_the_layer(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_codecs(3)
    monkeypatch.setattr(packed_tokens, "PIECE_BYTES", RAW_BYTES // 7)
    layers, tokens = Layers(3), prompts(3, seed=1)
    layers.feed(tokens)
    device.done = True
    commit, calls = Segment.commit, []

    def fail(segment: Any, *args: Any) -> None:
        calls.append(segment)
        if len(calls) > 4:
            raise BitslabError("K/V history: 4 bytes more of host memory are needed")
        commit(segment, *args)

    monkeypatch.setattr(Segment, "commit", fail)
    for _ in range(2):  # what came before the error is kept, and the error comes again
        with pytest.raises(BitslabError, match="layer [01], k: K/V history: 4 bytes more"):
            layers.histories[2].append(prompts(1, seed=9)[0])
        assert_same(layers, tokens)
    assert 0 < layers.packed[0] < TOKENS - 24
    monkeypatch.undo()
    layers.queue.advance()
    assert min(layers.packed) > TOKENS - 24
    assert_same(layers, tokens)


def test_errors_that_are_not_ours_keep_their_class(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, tokens = Layers(2), prompts(2)
    layers.feed(tokens)
    device.done = True

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(in_flight, "pack_rows", fail)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            layers.queue.advance()
    assert raised.value.__notes__ == ["bitslab: while packing layer 0, k"]
    layers.reader.finish_packing()
    assert min(layers.packed) > TOKENS - 24
    assert_same(layers, tokens)


@pytest.mark.parametrize("second", [False, True], ids=["first cache", "second cache"])
def test_a_prompt_may_come_in_inference_mode(device: Device, second: bool) -> None:
    if second:
        packed_prompt(prompts(1)[0])
    layers, tokens = Layers(1), prompts(1, seed=1)
    with torch.inference_mode():
        layers.feed([t.clone() for t in tokens])
    [history] = layers.histories
    history.reorder([0, 0])
    more = prompts(1, seed=2)[0].expand(2, -1, -1, -1)
    history.append(more)
    layers.reader.finish_packing()
    for _ in range(40):
        history.append(more[:, :, :1])
    expected = [tokens[0].expand(2, -1, -1, -1), more, *[more[:, :, :1]] * 40]
    assert torch.equal(history.decode(), torch.cat(expected, dim=2))


def test_what_is_gone_is_not_packed(device: Device) -> None:
    layers = Layers(3)
    layers.feed(prompts(3))
    assert len(layers.queue) == 3 and layers.queue.nbytes == 3 * RAW_BYTES
    layers.histories[0].reset()
    layers.histories[1].crop(10)
    del layers.histories[2]
    gc.collect()
    layers.queue.advance()
    assert len(layers.queue) == 0
    assert layers.histories[1].length == 10


@pytest.mark.parametrize("way", [copy.deepcopy, lambda h: pickle.loads(pickle.dumps(h))])
def test_a_copy_of_what_is_being_packed(device: Device, way: Any) -> None:
    layers, tokens = Layers(1), prompts(1)
    layers.feed(tokens)
    twin = way(layers.histories[0])
    assert torch.equal(twin.decode(), tokens[0])
    assert twin.packed._fitting._kept.codecs is codecs_of_model("model")
    twin.append(tokens[0])
    twin.words.link.packing.finish()
    assert torch.equal(twin.decode(), torch.cat([tokens[0]] * 2, dim=2))
    assert layers.histories[0].length == TOKENS and len(layers.queue) == 1


# Codecs that a cache leaves to the next


def kept_by(layer: int = 0, model: str = "model") -> Any:
    return codecs_of_model(model).of(layer, "k").get(torch.bfloat16, 256)


def packed_prompt(tokens: torch.Tensor, **options: Any) -> PackedHistory:
    layers = Layers(1, **options)
    layers.feed([tokens])
    layers.reader.finish_packing()
    assert_same(layers, [tokens])
    return layers.histories[0]


def test_each_layer_has_the_codec_of_the_cache_before(device: Device) -> None:
    first, second = Layers(2), Layers(2)
    tokens = [prompts(1)[0], 1e9 * prompts(1)[0]]
    for layers in (first, second):
        layers.feed(tokens)
        layers.reader.finish_packing()
    codecs = [[history.segments[0].codec for history in x.histories] for x in (first, second)]
    assert codecs[0][0] is codecs[1][0] and codecs[0][1] is codecs[1][1]
    assert codecs[0][0] != codecs[0][1]
    words = [[history.words.n_words for history in x.histories] for x in (first, second)]
    assert words[0] == words[1]


def test_a_codec_that_does_not_suit_is_given_up_before_anything_is_moved(device: Device) -> None:
    tokens = prompts(1)[0]
    before = packed_prompt(tokens)
    other = 1e9 * tokens
    fresh = packed_prompt(other, kept="another model")
    history = packed_prompt(other)
    assert history.segments[0].codec is not before.segments[0].codec
    assert history.words.n_words == fresh.words.n_words
    assert len(history.segments) == 1 and history.packed.refits == 0
    assert kept_by().codec is history.segments[0].codec


def test_tokens_that_pack_better_are_kept_as_they_are_and_the_next_cache_looks_again(
    device: Device,
) -> None:
    tokens = prompts(1)[0]
    rare = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(2)) < 0.2
    spread = tokens * (20 * prompts(1, seed=1)[0]).exp()
    codec = packed_prompt(torch.where(rare, spread, tokens)).segments[0].codec
    share = kept_by().share
    assert packed_prompt(tokens).segments[0].codec is codec
    assert kept_by() is None
    assert packed_prompt(tokens).segments[0].codec is not codec
    assert kept_by().share < share - 0.05


def test_noise_leaves_no_codec(device: Device) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(-(1 << 15), 1 << 15, (1, HEADS, TOKENS, DIM), generator=generator)
    noise = noise.to(torch.int16).view(torch.bfloat16)
    for tokens in (prompts(1)[0], noise):
        history = packed_prompt(tokens)
    assert history.stats()["kept_raw_bytes"] == history.stats()["packed_raw_bytes"] > 0
    assert kept_by() is None


def test_a_kept_codec_does_not_drift(device: Device) -> None:
    """Each cache compares with the rows that the codec was made for."""
    packed_prompt(prompts(1)[0])
    share = kept_by().share
    for seed in range(3):
        packed_prompt(prompts(1, seed=seed)[0])
        assert kept_by().share == share


def test_few_rows_leave_no_codec_and_are_no_reason_to_give_one_up(device: Device) -> None:
    tokens = prompts(1)[0]
    packed_prompt(tokens[:, :, :100])
    assert kept_by() is None
    packed_prompt(tokens)
    kept = kept_by()
    history = packed_prompt(1e9 * tokens[:, :, :100])
    assert kept_by() is kept and history.segments[0].codec is kept.codec
    for i in range(100, 600, 10):  # as they come in single blocks, the codec is fitted again
        history.append(1e9 * tokens[:, :, i : i + 10])
        device.done = True
    assert history.packed.refits == 1 and len(history.segments) == 2
    assert torch.equal(history.decode(), 1e9 * tokens[:, :, :600])


def test_few_models_are_kept(device: Device) -> None:
    first = codecs_of_model(0)
    for model in range(model_codecs.MODELS):
        codecs_of_model(model)
    assert codecs_of_model(0) is first  # used again
    codecs_of_model("one more")
    assert len(model_codecs._models) == model_codecs.MODELS
    assert codecs_of_model(0) is first
    assert pickle.loads(pickle.dumps(LayerCodecs(first, 3, "v"))).codecs is first


def test_a_reader_finishes_what_is_refused_with_its_layer(device: Device) -> None:
    class Clustered:
        def fit(self, kind: str, sample: torch.Tensor, *, search_all: bool = False) -> Any:
            from bitslab import InvariantCodec

            return InvariantCodec.fit(sample, clusters=2)

    reader = HistoryReader(torch.device("cpu"), offload=True, sm_budget=None)
    codecs = codecs_of_model("model").of(7, "v")
    history = PackedHistory(
        reader.new_words(), Clustered(), "v", window=8, block_tokens=8, kept=codecs
    )
    history._at_once = False
    x = torch.arange(128 * 64, dtype=torch.int32).view(128, 64) % 1000
    x[::2] <<= 16
    history.append(x.view(torch.float32).view(1, 1, 128, 64))
    with pytest.raises(ArgumentError, match="layer 7, v: plans: a codec with 2 clusters"):
        reader.finish_packing()
