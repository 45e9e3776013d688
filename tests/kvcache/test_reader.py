"""The reader's buffers, with synchronous streams: what a GPU does, but for time."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from bitslab.engine.kernels.cuda import CudaKernels
from bitslab.engine.kernels.row_kernels import LayoutKernels
from bitslab.engine.transfer import lanes
from bitslab.errors import ArgumentError, CorruptedDataError
from bitslab.kvcache import CodecPlans, HistoryReader, PackedHistory, fetching, link, reader
from bitslab.kvcache.link import Streams
from bitslab.kvcache.reader import BUFFERS
from bitslab.kvcache.segment import Segment
from tests.simt.runner import SimtRunner, simt_kernels

CPU = torch.device("cpu")


class Stream:
    """A stream, or an event, of which all is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    cuda_stream = 0

    def wait(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self) -> Stream:
        return self


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    monkeypatch.setattr(lanes, "on_stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    for module in (reader, link):
        monkeypatch.setattr(module, "current_stream", Stream)
    monkeypatch.setattr(link, "stream_pointer", lambda device: Stream.cuda_stream)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)


def reader_with_streams(offload: bool = True) -> HistoryReader:
    made = HistoryReader(CPU, offload=offload, sm_budget=None)
    made.link.streams = Streams(CPU, made.link)
    made._start()
    return made


def layers_of(made: HistoryReader, n: int) -> list[list[PackedHistory]]:
    plans = CodecPlans()
    return [
        [PackedHistory(made.new_words(), plans, kind, window=8, block_tokens=16) for kind in "kv"]
        for _ in range(n)
    ]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.drawn(3)
@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_layers_come_in_turn(n_layers: int, offload: bool) -> None:
    """K and V of layers that differ, over steps that pack blocks on the way."""
    made = reader_with_streams(offload)
    layers = layers_of(made, n_layers)
    tokens = [
        [normal(2, 2, 260, dim, seed=10 * i + dim) for dim in (64, 24)] for i in range(n_layers)
    ]
    fetches = 0
    for begin, end in [(0, 200), *((t, t + 1) for t in range(200, 260))]:
        for i, histories in enumerate(layers):
            kept = [buffer.content for buffer in made._tokens]
            parts = made.read(histories)
            if begin:
                # It had come before it was asked for.
                assert kept == [buffer.content for buffer in made._tokens]
                fetches += 4 * sum(history.words.n_words for history in histories)
            for history, part, whole in zip(histories, parts, tokens[i], strict=True):
                found = torch.cat([*part, history.tail], dim=-2) if begin else whole[:, :, :0]
                assert torch.equal(found, whole[:, :, :begin])
            made.done(histories)
            for history, whole in zip(histories, tokens[i], strict=True):
                history.append(whole[:, :, begin:end])
            made.prefetch(layers[(i + 1) % n_layers])
    ahead = sum(4 * history.words.n_words for history in layers[0]) if offload else 0
    assert made.moved_to_device_bytes == (fetches + ahead if offload else 0)
    assert made.buffer_bytes > 0


def test_words_that_have_crossed_early_are_decoded() -> None:
    """Those of the host layer behind the next layer, while layers of the device are read."""
    made = reader_with_streams()
    plans = CodecPlans()
    hosted = [1, 4]
    layers = [
        [
            PackedHistory(
                made.new_words(on_host=i in hosted), plans, kind, window=8, block_tokens=16
            )
            for kind in "kv"
        ]
        for i in range(6)
    ]
    tokens = [[normal(1, 2, 300, 32, seed=2 * i + j) for j in range(2)] for i in range(6)]
    expected = 0
    for begin, end in [(0, 200), *((t, t + 1) for t in range(200, 300))]:
        for i, histories in enumerate(layers):
            if begin and i in hosted:
                assert fetching.holding(made._tokens, histories)
                expected += 4 * sum(history.words.n_words for history in histories)
            parts = made.read(histories)
            for history, part, whole in zip(histories, parts, tokens[i], strict=True):
                found = torch.cat([*part, history.tail], dim=-2) if begin else whole[:, :, :0]
                assert torch.equal(found, whole[:, :, :begin])
            made.done(histories)
            for history, whole in zip(histories, tokens[i], strict=True):
                history.append(whole[:, :, begin:end])
            made.prefetch(layers[(i + 1) % 6])
            behind = layers[4 if i < 3 else 1]
            made.prefetch_words(behind, decoded=True, early=True)
            if begin and i == 1:
                assert fetching.holding(made._words, layers[4])
    ahead = sum(
        4 * history.words.n_words
        for i in hosted
        for history in layers[i]
        if fetching.holding(made._words, layers[i])
    )
    assert made.moved_to_device_bytes == expected + ahead


@pytest.mark.parametrize("change", ["crop", "reorder", "repeat", "select", "reset", "append"])
def test_what_came_before_a_change_is_not_used(change: str) -> None:
    made = reader_with_streams()
    [histories] = layers_of(made, 1)
    tokens = normal(3, 2, 200, 64, seed=1)
    for history in histories:
        history.append(tokens)
    made.prefetch(histories)
    index = torch.tensor([2, 0, 0])
    for history in histories:
        if change == "crop":
            history.crop(100)
        elif change == "reorder":
            history.reorder(index)
        elif change == "repeat":
            history.repeat(2)
        elif change == "select":
            history.select(index)
        elif change == "reset":
            history.reset()
            history.append(tokens.flip(2))
        else:
            history.append(tokens)
    expected = {
        "crop": tokens[:, :, :100],
        "reorder": tokens[index],
        "repeat": tokens.repeat_interleave(2, dim=0),
        "select": tokens[index],
        "reset": tokens.flip(2),
        "append": torch.cat([tokens, tokens], dim=2),
    }[change]
    for part, history in zip(made.read(histories), histories, strict=True):
        assert torch.equal(torch.cat([*part, history.tail], dim=-2), expected)
    made.done(histories)


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_buffers_are_shared_by_all_layers(offload: bool) -> None:
    """For decoded tokens of one layer, which is copied before the next one is decoded."""
    made = reader_with_streams(offload)
    layers = layers_of(made, 6)
    for i, histories in enumerate(layers):
        for history in histories:
            history.append(normal(1, 2, 500, 64, seed=i))
    for histories in layers:
        made.prefetch(histories)
        made.read(histories)
        made.done(histories)
    raw, packed = (
        sum(history.stats()[name] for history in layers[0])
        for name in ("packed_raw_bytes", "packed_bytes")
    )
    words = BUFFERS * packed if offload else 0
    assert raw < made.buffer_bytes < 1.2 * (raw + words) + 4096


def test_what_is_read_holds_until_it_is_done() -> None:
    """Whatever has been fetched for others in between."""
    made = reader_with_streams()
    layers = layers_of(made, 3)
    for i, histories in enumerate(layers):
        for history in histories:
            history.append(normal(1, 2, 200, 64, seed=i))
    made.prefetch(layers[1])
    made.read(layers[0])
    made.prefetch(layers[1])
    made.done(layers[0])
    found = made.read(layers[1])
    before = [part.clone() for parts in found for part in parts]
    made.prefetch(layers[2])
    assert all(map(torch.equal, before, [part for parts in found for part in parts]))
    found[0].clear()
    assert len(made.read(layers[1])[0]) == 1, "the lists are the caller's"


def test_words_that_are_staged_are_not_released_as_what_is_read() -> None:
    """Else another layer would overwrite what kernels still read."""
    made = reader_with_streams()
    layers = layers_of(made, 2)
    for i, histories in enumerate(layers):
        for history in histories:
            history.append(normal(1, 2, 200, 64, seed=i))
    made.stage(layers[0])
    with pytest.raises(ArgumentError, match="histories: .*`done_words`"):
        made.done(layers[0])
    assert fetching.holding(made._words, layers[0])
    made.done_words(layers[0])
    made.done(layers[0])
    made.prefetch_words(layers[1], decoded=True)
    made.done(layers[1])  # fetched ahead, and read by nobody


def test_any_number_of_histories_comes_at_once() -> None:
    made = reader_with_streams()
    histories = [history for both in layers_of(made, 2) for history in both][:3]
    for i, history in enumerate(histories):
        history.append(normal(1, 2, 200, 64, seed=i))
    for history, parts in zip(histories, made.read(histories), strict=True):
        assert torch.equal(torch.cat([*parts, history.tail], dim=-2), history.decode())


def test_fetches_of_histories_that_have_changed_are_dropped() -> None:
    made = reader_with_streams(offload=False)
    layers = layers_of(made, 3)
    for turn in range(4):
        for i, histories in enumerate(layers):
            made.prefetch(histories)
            made.read(histories)
            made.done(histories)
            for history in histories:
                history.append(normal(1, 2, 40, 64, seed=10 * turn + i))
    assert sum(len(buffer._decodings) for buffer in made._tokens) == 0
    for histories in layers:
        for history in histories:
            history.reorder(torch.tensor([0, 0]))
        before = made.buffer_bytes
        made.prefetch(histories)
        ids = sum(segment.ids().nbytes for history in histories for segment in history.segments)
        assert made.buffer_bytes >= before + ids > before, "numbers of rows are counted"


@pytest.fixture
def gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> SimtRunner:
    """Make plans start the GPU's kernels, which run on the CPU."""
    kernels, runner = simt_kernels()

    def gpu_kernels(device: torch.device) -> CudaKernels:
        kind = int(runner.mailbox[0])
        runner.mailbox.zero_()
        if kind:
            raise CorruptedDataError("an earlier decode")
        return kernels

    def decoding(
        segment: Segment,
        words: torch.Tensor,
        ids: torch.Tensor,
        out: torch.Tensor,
        budget: int | None,
    ) -> Any:
        target = out.view(-1, segment.rows.row_bytes)
        assert isinstance(segment.kernels, LayoutKernels)
        table = segment.new_table(words)
        return kernels.prepare_gather(table, segment.kernels.layout, ids, target, budget)

    monkeypatch.setattr(Segment, "decoding", decoding)
    monkeypatch.setattr(fetching, "kernels_for", gpu_kernels)
    return runner


def test_launches_that_are_kept_decode_and_tell_of_damage(gpu_kernels: SimtRunner) -> None:
    made = reader_with_streams()
    [histories] = layers_of(made, 1)
    tokens = normal(1, 2, 100, 64, seed=3)
    for history in histories:
        history.append(tokens)
    for _ in range(3):
        for parts, history in zip(made.read(histories), histories, strict=True):
            assert torch.equal(torch.cat([*parts, history.tail], dim=-2), tokens)
        made.done(histories)
    histories[0].segments[0]._lengths[3] = 250
    made.read(histories)
    made.done(histories)
    with pytest.raises(CorruptedDataError, match="an earlier decode"):
        made.read(histories)
