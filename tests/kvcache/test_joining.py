"""Joined tokens on the code path of a GPU: what is kept of packed tokens, and streams that change.

The kernel runs on the CPU; streams do all at once, and note what waits for what.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import pytest
import torch

from bitslab.engine.kernels.joins import Sides, SideTokens
from bitslab.kvcache import (
    CodecPlans,
    HistoryReader,
    PackedHistory,
    TokenJoin,
    joining,
    link,
    reader,
)
from tests.kvcache.test_reader import CPU, Stream, normal, reader_with_streams, streams  # noqa: F401
from tests.simt.runner import simt_kernels

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, HEADS, DIM, WINDOW, BLOCK = 2, 2, 32, 8, 16
PLACES = pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Join by the GPU's kernel; return its kernels."""
    kernels = simt_kernels()[0]
    monkeypatch.setattr(joining, "_gpu_kernels", lambda device: kernels)
    return kernels


class Layer:
    """K and V of a layer that grow as a model decodes, beside the tokens that they are."""

    def __init__(self, made: HistoryReader, seed: int = 0) -> None:
        plans = CodecPlans()
        self.reader = made
        self.histories = [
            PackedHistory(made.new_words(), plans, kind, window=WINDOW, block_tokens=BLOCK)
            for kind in "kv"
        ]
        self.join = TokenJoin(made, self.histories)
        self.tokens = [normal(BATCH, HEADS, 0, DIM, seed=0) for _ in "kv"]
        self.seed = seed
        self.steps = 0

    def grow(self, n: int = 1) -> list[torch.Tensor] | None:
        """Append tokens; return what the join returned, which is checked, or None."""
        self.steps += 1
        batch, dim = self.tokens[0].shape[0], self.tokens[0].shape[3]
        new = [
            normal(batch, HEADS, n, dim, seed=1000 * self.seed + 2 * self.steps + i)
            for i in range(2)
        ]
        self.tokens = [torch.cat([t, x], dim=2) for t, x in zip(self.tokens, new, strict=True)]
        joined = self.join.join(*new)
        memory = (None, None) if joined is None else joined[1]
        for each, x, there in zip(self.histories, new, memory, strict=True):
            each.append(x, memory=there)
        if joined is None:
            return None
        self.check(joined[0])
        return list(joined[0])

    def check(self, found: Sequence[torch.Tensor]) -> None:
        for one, expected in zip(found, self.tokens, strict=True):
            assert torch.equal(one, expected)

    def change(self, of_history: Callable[[PackedHistory], None], of_tokens: Any) -> None:
        for each in self.histories:
            of_history(each)
        self.tokens = [of_tokens(t) for t in self.tokens]


def grown(offload: bool, **options: Any) -> Layer:
    layer = Layer(reader_with_streams(offload), **options)
    assert layer.grow(100) is None  # nothing is packed yet
    assert layer.grow() is not None
    return layer


def move(layer: Layer) -> None:
    """Move the words of both sides to the other place."""
    on_host = not layer.histories[0].words.on_host
    stores = [layer.reader.new_words(on_host=on_host) for _ in "kv"]
    pairs = zip(layer.histories, stores, strict=True)
    for commit in [each.prepare_move(store) for each, store in pairs]:
        commit()


def pack(layer: Layer) -> None:
    """Pack a block more."""
    for _ in range(2 * BLOCK):
        layer.grow()


INDEX = [1, 0, 1]
CHANGES: dict[str, Callable[[Layer], None]] = {
    "crop": lambda layer: layer.change(lambda h: h.crop(50), lambda t: t[:, :, :50]),
    "reset": lambda layer: layer.change(
        lambda h: h.reset(), lambda t: normal(3, HEADS, 0, DIM // 2, seed=0)
    ),
    "reorder": lambda layer: layer.change(lambda h: h.reorder(INDEX), lambda t: t[INDEX]),
    "select": lambda layer: layer.change(lambda h: h.select([1]), lambda t: t[[1]]),
    "repeat": lambda layer: layer.change(lambda h: h.repeat(2), lambda t: t[[0, 0, 1, 1]]),
    "move": move,
    "pack": pack,
}


@PLACES
@pytest.mark.parametrize("change", ["packed", "cropped", "reordered"])
def test_tokens_are_appended_to_a_tail_that_changed_behind_the_join(
    change: str, offload: bool, gpu: Any
) -> None:
    """As where K's append goes on with the packing of V's tokens."""
    layer = grown(offload)
    more = [normal(BATCH, HEADS, WINDOW + BLOCK, DIM, seed=7 + i) for i in range(2)]
    for each, x in zip(layer.histories, more, strict=True):
        each.append(x, pack=False)
    layer.tokens = [torch.cat([t, x], dim=2) for t, x in zip(layer.tokens, more, strict=True)]
    new = [normal(BATCH, HEADS, 3, DIM, seed=17 + i) for i in range(2)]
    joined = layer.join.join(*new)
    assert joined is not None
    if change == "packed":
        packed = layer.histories[1].packed_tokens
        layer.change(PackedHistory.pack, lambda t: t)
        assert layer.histories[1].packed_tokens > packed
    elif change == "cropped":
        kept = layer.histories[0].length - 5
        layer.change(lambda each: each.crop(kept), lambda t: t[:, :, :kept])
    else:
        index = torch.tensor([1, 0])
        layer.change(lambda each: each.reorder(index), lambda t: t[index])
    for each, x, there in zip(layer.histories, new, joined[1], strict=True):
        each.append(x, memory=there)
    expected = [torch.cat([t, x], dim=2) for t, x in zip(layer.tokens, new, strict=True)]
    for each, tokens in zip(layer.histories, expected, strict=True):
        assert torch.equal(each.decode(), tokens)


@pytest.mark.drawn(7)
@PLACES
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_planned_is_dropped_with_the_tokens_it_was_of(
    change: str, offload: bool, gpu: Any
) -> None:
    """At once, with all memory that it keeps; the next tokens are joined as they are then."""
    layer = grown(offload)
    plan = layer.join._plan
    assert plan is not None
    staged = [*plan._staged.values(), *([plan._here] if plan._here else [])]
    words = [ref(run.table) for each in staged for side in each.runs for run in side]
    assert len(words) == 2
    planned = ref(plan)
    del plan, staged
    CHANGES[change](layer)
    assert planned() is None
    assert [table() for table in words] == [None, None]
    layer.grow(70)
    for _ in range(2 * BLOCK):
        assert layer.grow() is not None
    assert layer.histories[0].packed_tokens > 70


@PLACES
@pytest.mark.parametrize("side", [0, 1], ids=["k", "v"])
def test_a_change_of_one_side_is_noticed_though_its_revision_is_kept(
    side: int, offload: bool, gpu: Any
) -> None:
    layer = grown(offload)
    kept = [each.packed.revision for each in layer.histories]
    layer.histories[side].reorder([1, 0])
    layer.tokens[side] = layer.tokens[side][[1, 0]]
    assert layer.grow() is not None
    assert layer.histories[side].packed.revision is not kept[side]


def test_room_for_words_that_moved_is_not_kept(gpu: Any) -> None:
    """Where another layer needs a larger buffer, the one before is freed."""
    small = grown(True)
    before = [buffer.memory for buffer in small.reader._words]
    memory = [ref(t) for t in before if t.shape[0]]
    del before
    assert memory
    large = Layer(small.reader, seed=1)
    large.grow(400)
    for _ in range(2):  # each of the buffers
        assert large.grow() is not None
        small.reader.drop_stale()
        for buffer in small.reader._words:
            buffer.content = None
    assert large.grow() is not None
    assert [t() for t in memory] == [None] * len(memory)
    assert small.grow() is not None


@PLACES
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))],
    ids=["deepcopy", "pickle"],
)
def test_copies_join_their_own_tokens(copied: Any, offload: bool, gpu: Any) -> None:
    """The reader of a copy has no streams here, and decodes words where they lie."""
    layer = grown(offload)
    twin = copied(layer)
    assert twin.join._plan is None
    for _ in range(2 * BLOCK):
        assert twin.grow() is not None
    assert layer.grow() is not None
    assert twin.histories[0].length == layer.histories[0].length + 2 * BLOCK - 1


class Current(Stream):
    """A stream of a number; which is current is set here."""

    current = 0
    waits: list[tuple[int, int]] = []  # noqa: RUF012 - of all

    def __init__(self, number: int = 0) -> None:
        self.number = self.cuda_stream = number

    def wait_stream(self, stream: Any) -> None:
        Current.waits.append((self.number, stream.number))


@pytest.fixture
def read(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Make streams current that differ; return what each launch of the kernel reads, by address.

    Fails where a launch on a second stream reads memory of which the allocator does not know that.
    """
    monkeypatch.setattr(Current, "current", 0)
    monkeypatch.setattr(Current, "waits", [])
    monkeypatch.setattr(link, "stream_pointer", lambda device: Current.current)
    for module in (link, reader):
        monkeypatch.setattr(module, "current_stream", lambda device: Current(Current.current))
    known: set[tuple[int, int]] = set()

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        if isinstance(stream, Current):
            known.add((tensor.untyped_storage().data_ptr(), stream.number))

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    prepare, launches = gpu.prepare_join, []

    def prepared(sides: Sides, *args: Any) -> Callable[[SideTokens, SideTokens], None]:
        kernel = prepare(sides, *args)
        tables = [
            t
            for run in (*sides[0], *sides[1])
            for t in (
                *(run.table.words, run.table.bases, run.table.lengths, run.ids),
                *(run.layout.tables, run.layout.starts),
            )
            if t is not None
        ]

        def launch(keys: SideTokens, values: SideTokens) -> None:
            tensors = [*tables, keys.tail, values.tail]
            addresses = [t.untyped_storage().data_ptr() for t in tensors]
            if len(set(Current.waits)) or Current.current:
                assert {(address, Current.current) for address in addresses} <= known
            launches.append(addresses)
            kernel(keys, values)

        return launch

    monkeypatch.setattr(gpu, "prepare_join", prepared)
    return launches


@PLACES
def test_another_current_stream_waits_for_the_one_before(offload: bool, read: Any) -> None:
    layers = [grown(offload)]
    layers.append(Layer(layers[0].reader, seed=1))
    layers[1].grow(100)
    assert not Current.waits
    for stream, waits in ((7, [(7, 0)]), (7, []), (0, [(0, 7)]), (9, [(9, 0)])):
        Current.current = stream
        Current.waits.clear()
        for layer in layers:
            assert layer.grow() is not None
        assert Current.waits == waits
    assert len(read) == 1 + 4 * 2


@PLACES
def test_memory_that_another_stream_reads_is_not_used_again_before(
    offload: bool, read: Any
) -> None:
    """Also where it was replaced on the first one meanwhile: `read` checks each launch."""
    layer = grown(offload)
    for step in range(4 * BLOCK):  # over several blocks
        Current.current = (0, 7, 7, 9)[step % 4]
        assert layer.grow() is not None
    assert len(read) == 1 + 4 * BLOCK


CHANGING: dict[str, Callable[[PackedHistory], object]] = {
    "append": lambda h: h.append(normal(BATCH, HEADS, 1, DIM, seed=1)),
    "crop": lambda h: h.crop(50),
    "reset": lambda h: h.reset(),
    "reorder": lambda h: h.reorder([1, 0]),
    "select": lambda h: h.select([0]),
    "repeat": lambda h: h.repeat(2),
    "move": lambda h: h.prepare_move(reader_with_streams(False).new_words())(),
}


@PLACES
@pytest.mark.parametrize("change", CHANGING)
def test_a_change_on_another_stream_waits_for_what_reads_the_tokens(
    change: str, offload: bool, read: Any
) -> None:
    layer = grown(offload)
    Current.current = 7
    CHANGING[change](layer.histories[0])
    assert Current.waits == [(7, 0)]


def test_a_cpu_has_no_turns() -> None:
    made = HistoryReader(CPU, offload=True, sm_budget=None)
    assert made.link.take_turn() == link.NO_STREAM
    assert not made.link.several_streams
