"""Histories whose codec is lossy: first and last tokens as they came, all others quantised once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bitslab.kvcache import HistoryReader, PackedHistory, fitting, words
from tests.helpers import same_bits
from tests.kvcache.lossy_codec import RoundingPlans, quantised

CPU = torch.device("cpu")
HEADS, DIM, BLOCK = 2, 16, 16


def make(plans: RoundingPlans, *, pieces: bool = False, **options: Any) -> PackedHistory:
    reader = HistoryReader(CPU, offload=True, sm_budget=None)
    store = words.HostWords(reader.arena, reader.link) if pieces else reader.new_words()
    options = {"window": 8, "block_tokens": BLOCK, "sinks": 4, "tile_tokens": BLOCK, **options}
    return PackedHistory(store, plans, "k", **options)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def expected(history: PackedHistory, tokens: torch.Tensor) -> torch.Tensor:
    """Return what a history of these tokens returns."""
    first = history.head.shape[2]
    last = first + history.packed_tokens
    parts = [tokens[:, :, :first], quantised(tokens[:, :, first:last]), tokens[:, :, last:]]
    return torch.cat(parts, dim=2)


class LossyHistories(RuleBasedStateMachine):
    """What is packed is quantised once, whatever happens to it."""

    @initialize(
        sinks=st.sampled_from([0, 1, 4, 30]),
        window=st.integers(0, 20),
        tile=st.sampled_from([4, BLOCK]),
        pieces=st.booleans(),
        at_once=st.booleans(),
    )
    def start(self, sinks: int, window: int, tile: int, pieces: bool, at_once: bool) -> None:
        options = {"sinks": sinks, "window": window, "tile_tokens": tile}
        self.history = make(RoundingPlans(), pieces=pieces, **options)
        self.history._at_once = at_once
        self.seed, self.sinks, self.window = 0, sinks, window
        self.tokens = normal(2, HEADS, 0, DIM)

    @rule(n=st.integers(1, 70), pack=st.booleans())
    def append(self, n: int, pack: bool) -> None:
        self.seed += 1
        new = normal(self.tokens.shape[0], HEADS, n, DIM, seed=self.seed)
        self.history.append(new, pack=pack)
        self.tokens = torch.cat([self.tokens, new], dim=2)
        assert self.history.head.shape[2] == min(self.sinks, self.history.length)
        if not pack:
            self.history.pack()

    @rule(share=st.floats(0, 1))
    def crop(self, share: float) -> None:
        length = int(share * self.tokens.shape[2])
        packed = self.history.packed_tokens
        self.history.crop(length)
        self.tokens = self.tokens[:, :, :length]
        # What was packed remains so: a tail of decoded tokens would be quantised again.
        assert self.history.packed_tokens == min(packed, max(0, length - self.sinks))

    @rule(index=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def reorder(self, index: list[int]) -> None:
        if not self.tokens.shape[2] or self.tokens.shape[0] < 2:
            return
        self.history.reorder(torch.tensor(index))
        self.tokens = self.tokens[index]

    @rule(repeats=st.integers(1, 2))
    def repeat(self, repeats: int) -> None:
        if self.tokens.shape[2] and self.tokens.shape[0] < 3:
            self.history.repeat(repeats)
            self.tokens = self.tokens.repeat_interleave(repeats, dim=0)

    @rule()
    def select(self) -> None:
        if self.tokens.shape[2]:
            self.history.select([0])
            self.tokens = self.tokens[:1]

    @rule(way=st.sampled_from([copy.deepcopy, lambda h: pickle.loads(pickle.dumps(h))]))
    def copy(self, way: Any) -> None:
        self.history = way(self.history)

    @rule()
    def reset(self) -> None:
        self.history.reset()
        self.tokens = self.tokens[:, :, :0]

    @invariant()
    def holds_what_it_was_given(self) -> None:
        if self.tokens.shape[2]:
            assert same_bits(self.history.decode(), expected(self.history, self.tokens))
        assert self.history.length == self.tokens.shape[2]
        assert self.history.stats()["raw_bytes"] == self.tokens.nbytes


TestLossyHistories = pytest.mark.usefixtures("one_thread")(LossyHistories.TestCase)


def test_first_tokens_and_the_window_are_kept_as_they_came() -> None:
    tokens = normal(1, HEADS, 200, DIM)
    history = make(RoundingPlans())
    history.append(tokens)
    assert history.packed_tokens == (200 - 4 - 8) // BLOCK * BLOCK
    found = history.decode()
    end = 4 + history.packed_tokens
    assert same_bits(found[:, :, :4], tokens[:, :, :4])
    assert same_bits(found[:, :, end:], tokens[:, :, end:])
    assert not torch.equal(found, tokens)
    assert history.stats()["packed_ratio"] > 1.9


def test_a_cut_segment_is_followed_by_one_of_its_codec() -> None:
    """The codes of the block that is cut remain; no sample is drawn again."""
    plans, tokens = RoundingPlans(), normal(1, HEADS, 200, DIM)
    history = make(plans)
    history.append(tokens)
    history.crop(4 + 3 * BLOCK + 5)
    assert history.packed_tokens == 3 * BLOCK + 5 and history.tail.shape[2] == 0
    history.append(tokens)
    assert [segment.tokens for segment in history.segments] == [3 * BLOCK + 5, 12 * BLOCK]
    assert len(plans.samples) == 1
    first, second = history.segments
    assert second.codec is first.codec and second.expected_words == first.expected_words
    history.crop(4 + 3 * BLOCK + 2)
    assert [segment.tokens for segment in history.segments] == [3 * BLOCK + 2]


def test_samples_of_tiles_are_whole_blocks_of_all_heads() -> None:
    plans, tokens = RoundingPlans(), normal(2, HEADS, 100, DIM)
    history = make(plans, tile_tokens=4)
    history.append(tokens)
    [sample] = plans.samples
    blocks = tokens[:, :, 4 : 4 + 6 * BLOCK].unflatten(2, (6, BLOCK))
    assert same_bits(sample, blocks.permute(2, 0, 1, 3, 4).reshape(-1, 4 * DIM))


def test_a_refit_keeps_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "DRIFT", -1.0)
    monkeypatch.setattr(fitting, "REFIT_GAIN", -1.0)
    history = make(RoundingPlans())
    parts = [normal(1, HEADS, 40, DIM, seed=seed) for seed in range(8)]
    for part in parts:
        history.append(part)
    tokens = torch.cat(parts, dim=2)
    assert history.packed.refits > 0 and len(history.segments) > 1
    assert same_bits(history.decode(), expected(history, tokens))


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_sinks_are_checked(value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="sinks"):
        make(RoundingPlans(), sinks=value)


@pytest.mark.parametrize("pieces", [False, True])
def test_sequences_that_are_dropped_leave_the_words(pieces: bool) -> None:
    """What remains is copied as it is packed; another codec's blocks, cut ones and copies too."""
    plans, tokens = RoundingPlans(), normal(6, HEADS, 200, DIM)
    history = make(plans, pieces=pieces, tile_tokens=4)
    history.append(tokens)
    history.crop(4 + 5 * BLOCK + 7)
    history.append(tokens[:, :, :90])
    tokens = torch.cat([tokens[:, :, : 4 + 5 * BLOCK + 7], tokens[:, :, :90]], dim=2)
    samples, codecs = len(plans.samples), [segment.codec for segment in history.segments]
    found = history.decode()
    before = history.stats()
    index = [5, 1]
    history.select(torch.tensor(index))
    after = history.stats()
    assert same_bits(history.decode(), found[index])
    assert [segment.codec for segment in history.segments] == codecs
    assert all(segment.origin is None for segment in history.segments)
    assert history.words.n_words < 0.4 * before["packed_bytes"] / 4
    assert after["packed_raw_bytes"] * 3 == before["packed_raw_bytes"]
    assert len(plans.samples) == samples
    more = normal(2, HEADS, 60, DIM, seed=3)
    history.append(more)
    history.reorder(torch.tensor([1, 1]))
    assert len(plans.samples) == samples
    tokens = torch.cat([tokens[index], more], dim=2)[[1, 1]]
    shown = expected(history, tokens)
    # What the cut had left of a block stands quantised, whatever was packed since.
    assert same_bits(history.decode(), shown)
