"""PackedHistory against a plain tensor of tokens."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bitslab import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.engine.memory import host
from bitslab.kvcache import (
    CodecPlans,
    HistoryReader,
    PackedHistory,
    codecs_of_model,
    fitting,
    in_flight,
    packed_tokens,
    packing_queue,
    words,
)
from bitslab.kvcache.gathering import RowGatherer
from bitslab.kvcache.packing import TokenRows, draw_rows
from bitslab.kvcache.segment import Segment
from bitslab.kvcache.selection import Selection

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8]


def make(offload: bool = True, *, pieces: bool = False, **options: Any) -> PackedHistory:
    """Return a history; with words in pieces of host memory, as on a GPU."""
    reader = HistoryReader(CPU, offload=offload, sm_budget=None)
    options = {"window": 8, "block_tokens": 16, **options}
    store = words.HostWords(reader.arena, reader.link) if pieces else reader.new_words()
    return PackedHistory(store, CodecPlans(), "k", **options)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_same(packed: PackedHistory, tokens: torch.Tensor) -> None:
    found = packed.decode()
    assert found.shape == tokens.shape and found.dtype == tokens.dtype and found.is_contiguous()
    raw = [t.contiguous().view(torch.uint8) for t in (found, tokens)]
    assert torch.equal(*raw)


AsyncCopy = in_flight.AsyncCopy


class Late(AsyncCopy):
    """What comes to the host only when it has been asked for some times, as from a busy GPU.

    Who waits asks as often, or, if that `helps`, once.
    """

    asks = 0
    helps = False

    def __init__(self, t: torch.Tensor) -> None:
        super().__init__(t)
        self.left = Late.asks

    def get(self, wait: bool) -> torch.Tensor | None:
        self.left = -1 if wait and Late.helps else self.left - 1
        return None if self.left >= 0 else super().get(wait)


class Histories(RuleBasedStateMachine):
    """A history and a tensor that is cut, joined and indexed as DynamicCache does it."""

    @initialize(
        offload=st.booleans(),
        window=st.integers(0, 20),
        block=st.sampled_from([1, 4, 16, 32]),
        heads=st.integers(1, 3),
        dim=st.sampled_from([1, 3, 16, 64]),
        dtype=st.sampled_from(DTYPES),
        batch=st.integers(1, 3),
        late=st.integers(0, 3),
        helps=st.booleans(),
        ahead=st.sampled_from([None, 0, 1 << 30]),
        kept=st.booleans(),
    )
    def start(
        self, offload, window, block, heads, dim, dtype, batch, late, helps, ahead, kept
    ) -> None:
        self.put(Late)
        Late.asks, Late.helps = late, helps
        options: dict[str, Any] = {"window": window, "block_tokens": block}
        if kept:  # of the examples before, which may suit these tokens or not
            options["kept"] = codecs_of_model("Histories").of(0, "k")
        self.packed = make(offload, **options)
        self.packed._at_once = ahead is None
        self.limits = packing_queue.MOST_BYTES, packing_queue.LEAST_HISTORIES
        packing_queue.MOST_BYTES, packing_queue.LEAST_HISTORIES = ahead or 0, 0
        self.shape, self.dtype, self.seed = (heads, dim), dtype, 0
        self.batch = batch
        self.tokens = self.draw(0)

    def put(self, async_copy: type[in_flight.AsyncCopy]) -> None:
        for module in (fitting, in_flight):
            vars(module)["AsyncCopy"] = async_copy

    def draw(self, n: int) -> torch.Tensor:
        self.seed += 1
        shape = (self.batch, n, self.shape[0], self.shape[1])
        # As a model gives them: a view of [B, n, H, D].
        return normal(*shape, dtype=torch.float32, seed=self.seed).to(self.dtype).transpose(1, 2)

    def teardown(self) -> None:
        self.put(AsyncCopy)
        packing_queue.MOST_BYTES, packing_queue.LEAST_HISTORIES = self.limits

    @rule(n=st.sampled_from([0, 1, 1, 2, 5, 17, 60, 150]))
    def append(self, n: int) -> None:
        new = self.draw(n)
        self.packed.append(new)
        self.tokens = torch.cat([self.tokens, new], dim=-2)

    @rule()
    def advance(self) -> None:
        """As an append to another layer does."""
        self.packed.words.link.packing.advance()

    @rule()
    def finish(self) -> None:
        self.packed.words.link.packing.finish()
        assert not len(self.packed.words.link.packing)

    @rule(share=st.floats(0, 1))
    def crop(self, share: float) -> None:
        length = int(share * self.tokens.shape[2])
        self.packed.crop(length)
        self.tokens = self.tokens[:, :, :length]

    @precondition(lambda self: self.tokens.shape[2])
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        index = data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=4))
        self.packed.reorder(torch.tensor(index))
        self.tokens = self.tokens.index_select(0, torch.tensor(index))
        self.batch = len(index)

    @precondition(lambda self: self.tokens.shape[2] and self.batch < 5)
    @rule(repeats=st.integers(1, 3))
    def repeat(self, repeats: int) -> None:
        self.packed.repeat(repeats)
        self.tokens = self.tokens.repeat_interleave(repeats, dim=0)
        self.batch *= repeats

    @precondition(lambda self: self.tokens.shape[2])
    @rule(data=st.data(), mask=st.booleans())
    def select(self, data: st.DataObject, mask: bool) -> None:
        chosen = data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=3))
        index: Any = torch.tensor(chosen)
        if mask:
            index = torch.zeros(self.batch, dtype=torch.bool).index_fill(0, index, True)
        self.packed.select(index)
        bits = self.tokens.view(torch.uint8) if self.tokens.itemsize == 1 else self.tokens
        self.tokens = bits[index].view(self.tokens.dtype)  # torch 2.8 cannot index 8-bit floats
        self.batch = self.tokens.shape[0]

    @rule()
    def reset(self) -> None:
        self.packed.reset()
        self.tokens = self.draw(0)

    @rule(way=st.sampled_from([copy.deepcopy, lambda h: pickle.loads(pickle.dumps(h))]))
    def take_a_copy(self, way: Any) -> None:
        before, self.packed = self.packed, way(self.packed)
        if before.length:
            before.append(self.draw(40))  # which the copy must not see

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "packed"):
            return
        assert self.packed.length == self.tokens.shape[2]
        if self.packed.length:
            assert_same(self.packed, self.tokens)
            assert self.packed.batch == self.batch
            assert self.packed.packed_tokens % self.packed.packed.block_tokens == 0


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=40, stateful_step_count=14, deadline=None)


def test_the_window_is_kept_and_blocks_are_packed() -> None:
    packed = make(window=40, block_tokens=32)
    packed.append(normal(1, 2, 71, 64))
    assert packed.packed_tokens == 0
    packed.append(normal(1, 2, 1, 64))
    assert packed.packed_tokens == 32
    packed.append(normal(1, 2, 500, 64))
    assert 40 <= packed.tail.shape[2] < 40 + 32


@pytest.mark.parametrize(
    ("dim", "dtype", "tokens"),
    [
        (128, torch.bfloat16, 1),
        (64, torch.bfloat16, 2),
        (128, torch.float32, 1),
        (1, DTYPES[3], 64),
    ],
)
def test_tokens_of_a_row(dim: int, dtype: torch.dtype, tokens: int) -> None:
    rows = TokenRows(2, dim, dtype, 64)
    assert rows.tokens_per_row == tokens


def test_a_sample_meets_all_heads() -> None:
    rows = TokenRows(8, 128, torch.bfloat16, 64)
    heads = torch.arange(8, dtype=torch.bfloat16)[None, :, None, None]
    sample = draw_rows(rows, heads.expand(2, 8, 2048, 128))
    assert sample.nbytes < 1 << 20
    assert torch.unique(sample).tolist() == list(range(8))


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_a_long_prompt_is_packed_in_pieces(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_tokens, "PIECE_BYTES", 50_000)
    monkeypatch.setattr(words, "MIN_PIECE_WORDS", 1 << 10)
    tokens = normal(2, 2, 1000, 64)
    packed = make(offload)
    packed.append(tokens)
    for i in range(3):
        more = normal(2, 2, 400, 64, seed=i)
        packed.append(more)
        tokens = torch.cat([tokens, more], dim=-2)
    assert_same(packed, tokens)
    stats = packed.stats()
    assert stats["packed_ratio"] > 1.35
    assert stats["packed_bytes"] < stats["packed_raw_bytes"]
    assert stats["refits"] == 0


@pytest.mark.parametrize("pieces", [False, True], ids=["one-tensor", "pieces"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=["packed", "raw"])
def test_rows_are_decoded_where_they_lie(dtype: torch.dtype, pieces: bool, monkeypatch) -> None:
    """What readers of chosen tokens use."""
    monkeypatch.setattr(words, "MIN_PIECE_WORDS", 1 << 8)
    tokens = torch.randint(-128, 128, (3, 2, 700, 64), dtype=torch.int8)
    if dtype == torch.bfloat16:
        tokens = normal(3, 2, 700, 64)
    packed = make(block_tokens=32, pieces=pieces)
    for begin in range(0, 700, 100):
        packed.append(tokens[:, :, begin : begin + 100])
    packed.reorder(torch.tensor([2, 0]))
    tokens = tokens[[2, 0]]
    each, (segment,) = packed.packed.tokens_per_row, packed.segments
    assert each == 256 // (64 * dtype.itemsize)
    places = torch.randint(0, segment.tokens // each, (2, 2, 50))
    assert not pieces or len(packed.words._pieces) > 1  # type: ignore[attr-defined]
    all_words = packed.words.merged()
    out = torch.empty((200, 256), dtype=torch.uint8)
    segment.decode_rows(all_words, segment.row_ids(places).flatten(), out, None)
    rows = tokens[:, :, : segment.tokens].reshape(2, 2, -1, each * 64)
    expected = rows.gather(2, places[..., None].expand(-1, -1, -1, rows.shape[3]))
    assert torch.equal(out.view(dtype).view(expected.shape), expected)
    assert_same(packed, tokens)


def test_reserved_tokens_are_one_piece_of_memory() -> None:
    packed = make(reserve_tokens=2000)
    packed.append(normal(1, 2, 100, 64))
    before = packed.stats()["host_bytes"]
    for i in range(9):
        packed.append(normal(1, 2, 200, 64, seed=i))
    assert packed.stats()["host_bytes"] == before


@pytest.mark.parametrize("offload", [True, False], ids=["host", "device"])
def test_noise_is_kept_raw(offload: bool) -> None:
    packed = make(offload, block_tokens=32)
    noise = torch.randint(-128, 128, (2, 2, 500, 64), dtype=torch.int8)
    packed.append(noise)
    assert_same(packed, noise)
    stats = packed.stats()
    assert stats["packed_bytes"] < 1.001 * stats["packed_raw_bytes"]
    assert stats["kept_raw_bytes"] == stats["packed_raw_bytes"]
    packed.crop(99)
    packed.append(noise[:, :, 99:])
    assert_same(packed, noise)


@pytest.mark.pairwise
@pytest.mark.parametrize("block", [8, 16, 64])
@pytest.mark.parametrize("kind", ["normal", "coarse", "noise"])
@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_small_blocks_take_no_more_than_raw(dtype: torch.dtype, kind: str, block: int) -> None:
    """Of two heads of 16, as many tokens make few rows, whose metadata weighs most."""
    packed = make(block_tokens=block)
    tokens = normal(1, 2, 600, 16, dtype=torch.float32)
    if kind == "coarse":
        tokens = tokens.to(torch.float8_e4m3fn).float()
    tokens = tokens.to(dtype)
    if kind == "noise":
        generator = torch.Generator().manual_seed(0)
        noise = torch.randint(0, 256, (1, 2, 600, 16 * dtype.itemsize), generator=generator)
        tokens = noise.to(torch.uint8).view(dtype)
    packed.append(tokens[:, :, :40])
    for i in range(40, 600):
        packed.append(tokens[:, :, i : i + 1])
    stats = packed.stats()
    assert stats["packed_bytes"] <= stats["packed_raw_bytes"]
    assert (stats["kept_raw_bytes"] > 0) == (kind == "noise")
    if kind == "normal" and dtype == torch.bfloat16:
        assert stats["packed_ratio"] > 1.25
    assert_same(packed, tokens)


def test_it_may_begin_in_inference_mode() -> None:
    tokens = normal(1, 2, 400, 64)
    packed = make()
    with torch.inference_mode():
        packed.append(tokens[:, :, :200].clone())
    for i in range(200, 400, 5):
        packed.append(tokens[:, :, i : i + 5])
    assert_same(packed, tokens)


@pytest.mark.parametrize("anew", [False, True], ids=["first", "fitted again"])
def test_a_segment_is_read_before_its_first_block_is_packed(
    anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, that tells the size of a block later."""
    packed = make(window=0)
    tokens = normal(2, 2, 40, 64)
    if anew:
        packed.append(tokens)
        monkeypatch.setattr(fitting, "REFIT_GAIN", -1.0)
        packed.packed._fitting.wanted = True
    before = packed.packed_tokens
    monkeypatch.setattr(in_flight.InFlightBlocks, "known", lambda block, wait: False)
    more = normal(2, 2, 40, 64, seed=1)
    packed.append(more)
    assert packed.packed_tokens == before and not packed.segments[-1].n_blocks
    all_tokens = torch.cat([tokens, more], dim=-2) if anew else more
    assert_same(packed, all_tokens)
    if anew:
        groups = torch.arange(before // packed.packed.tokens_per_row).expand(2, 2, -1)
        chosen = Selection(groups, packed.packed.tokens_per_row, before)
        [found] = RowGatherer(packed.words.link, None).gather([packed], chosen).get()
        assert torch.equal(found, tokens[:, :, :before])
    monkeypatch.undo()
    packed.append(all_tokens)
    assert packed.packed_tokens > before
    assert_same(packed, torch.cat([all_tokens, all_tokens], dim=-2))


def test_tokens_of_another_kind_after_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = make()
    monkeypatch.setattr(host, "LARGE_BYTES", 0)
    monkeypatch.setattr(host, "available_bytes", lambda: 0)
    with pytest.raises(BitslabError, match="more of host memory"):
        packed.append(normal(2, 2, 100, 64))
    assert packed.length == 0
    monkeypatch.undo()
    for tokens in (normal(1, 3, 100, 40), normal(3, 2, 100, 64, dtype=torch.float32)):
        packed.append(tokens)
        assert_same(packed, tokens)
        packed.crop(0)


def test_any_error_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = make()
    tokens = normal(1, 2, 100, 64)
    packed.append(tokens)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(in_flight, "pack_rows", fail)
    with pytest.raises(torch.OutOfMemoryError):
        packed.append(tokens)
    monkeypatch.undo()
    assert_same(packed, tokens)


@pytest.mark.parametrize("pieces", [False, True], ids=["one-tensor", "pieces"])
def test_copies_take_memory_of_their_own(pieces: bool) -> None:
    packed = make(pieces=pieces)
    packed.append(normal(1, 2, 300, 64))
    twin = copy.deepcopy(packed)
    if pieces:
        arenas = [one.words._arena for one in (packed, twin)]  # type: ignore[attr-defined]
        assert arenas[0] is not arenas[1] and arenas[1].nbytes >= twin.stats()["host_bytes"]
    assert 0 < twin.stats()["host_bytes"] <= packed.stats()["host_bytes"]
    assert twin.words.link is not packed.words.link
    assert len({one.words.merged().data_ptr() for one in (packed, twin)}) == 2


def test_the_cpu_reads_words_where_they_lie_however_they_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed, tokens = make(), normal(1, 2, 2000, 64)
    for begin in range(0, 2000, 50):
        packed.append(tokens[:, :, begin : begin + 50])
    read: list[tuple[int, int]] = []
    decoding = Segment.decoding

    def recorded(segment: Segment, words: torch.Tensor, *args: Any) -> Callable[[], None]:
        read.append((words.data_ptr(), words.untyped_storage().nbytes()))
        return decoding(segment, words, *args)

    monkeypatch.setattr(Segment, "decoding", recorded)
    for _ in range(2):
        assert_same(packed, tokens)
    assert len(set(read)) == 1
    assert read[0][1] == packed.stats()["host_bytes"] <= 1.2 * 4 * packed.words.n_words


def test_a_codec_is_fitted_again_when_tokens_change() -> None:
    packed = make(block_tokens=32)
    first, second = normal(1, 4, 400, 64), 1e9 * normal(1, 4, 1200, 64, seed=1)
    packed.append(first)
    for i in range(0, 1200, 8):
        packed.append(second[:, :, i : i + 8])
    assert packed.packed.refits == 1
    assert len(packed.segments) == 2
    tokens = torch.cat([first, second], dim=-2)
    assert_same(packed, tokens)
    assert packed.stats()["packed_ratio"] > 1.25
    packed.crop(380)
    assert len(packed.segments) == 1
    packed.append(tokens[:, :, 380:])
    assert_same(packed, tokens)


def test_tokens_that_are_harder_to_pack_are_fitted_once() -> None:
    packed = make(block_tokens=32)
    exact = normal(1, 4, 400, 64).to(torch.float8_e4m3fn).to(torch.bfloat16)
    packed.append(exact)
    noise = torch.randint(-(1 << 15), 1 << 15, (1, 4, 1200, 64), dtype=torch.int16)
    for i in range(0, 1200, 8):
        packed.append(noise.view(torch.bfloat16)[:, :, i : i + 8])
    assert packed.packed.refits <= 2


def test_few_sequences_of_many_are_packed_anew() -> None:
    packed = make(block_tokens=32)
    tokens = normal(6, 2, 300, 64)
    packed.append(tokens)
    before = packed.words.n_words
    packed.select(torch.tensor([4]))
    assert packed.words.n_words < before / 5
    assert_same(packed, tokens[4:5])


def test_nothing_can_be_packed_of_empty_tokens() -> None:
    packed = make()
    packed.append(normal(2, 0, 100, 64))
    packed.append(normal(2, 0, 1, 64))
    assert packed.length == 101
    assert packed.packed_tokens == 0


def test_host_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = make()
    tokens = normal(1, 2, 300, 64)
    packed.append(tokens)
    monkeypatch.setattr(host, "LARGE_BYTES", 0)
    monkeypatch.setattr(host, "available_bytes", lambda: 1000)
    more = normal(1, 2, 30_000, 64)
    with pytest.raises(BitslabError, match=r"\d+ bytes more of host memory are needed"):
        packed.append(more)
    assert_same(packed, tokens)
    monkeypatch.undo()
    packed.append(more)
    assert_same(packed, torch.cat([tokens, more], dim=-2))


def test_less_memory_than_would_be_good_to_have(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = make()
    monkeypatch.setattr(host, "LARGE_BYTES", 0)
    monkeypatch.setattr(host, "available_bytes", lambda: 100_000)
    tokens = normal(1, 2, 300, 64)
    packed.append(tokens)
    assert_same(packed, tokens)


@pytest.mark.parametrize(
    ("tokens", "error", "text"),
    [
        (normal(2, 2, 1, 64), ArgumentError, r"k: shape \[2, 2, 1, 64\], the cache holds \[1, 2"),
        (normal(1, 3, 1, 64), ArgumentError, "another model"),
        (normal(1, 2, 1, 32), ArgumentError, "another model"),
        (normal(1, 2, 64), ArgumentError, r"expected \[B, H, tokens, D\]"),
        (normal(1, 2, 1, 64).half(), ArgumentTypeError, "float16, the cache holds torch.bfloat16"),
        (torch.empty(1, 2, 1, 64, device="meta"), ArgumentTypeError, "on meta"),
    ],
    ids=["batch", "heads", "dim", "dimensions", "dtype", "device"],
)
def test_tokens_that_do_not_continue_it(tokens, error, text: str) -> None:
    packed = make()
    before = normal(1, 2, 100, 64)
    packed.append(before)
    with pytest.raises(error, match=text):
        packed.append(tokens)
    assert_same(packed, before)


@pytest.mark.parametrize("length", [101, -1])
def test_crop_refuses_other_lengths(length: int) -> None:
    packed = make()
    packed.append(normal(1, 2, 100, 64))
    with pytest.raises(ArgumentError, match="length"):
        packed.crop(length)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"window": -1}, ArgumentError),
        ({"window": 1.5}, ArgumentTypeError),
        ({"block_tokens": 48}, ArgumentError),
        ({"block_tokens": 8192}, ArgumentError),
        ({"block_tokens": True}, ArgumentTypeError),
        ({"reserve_tokens": -2}, ArgumentError),
    ],
)
def test_options_are_checked(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        make(**options)


def test_a_history_takes_an_empty_store_of_words_alone() -> None:
    used = make()
    used.append(normal(1, 2, 300, 64))
    for bad in (HistoryReader(CPU, offload=True, sm_budget=None), used.words, None):
        with pytest.raises(ArgumentTypeError, match="words: expected an empty store"):
            PackedHistory(bad, CodecPlans(), "k", window=8, block_tokens=16)  # type: ignore[arg-type]
    assert used.length == 300


def test_a_reader_checks_its_arguments() -> None:
    with pytest.raises(ArgumentTypeError, match="device"):
        HistoryReader(torch.device("meta"), offload=True, sm_budget=None)
    with pytest.raises(ArgumentError, match="sm_budget"):
        HistoryReader(CPU, offload=True, sm_budget=0)
