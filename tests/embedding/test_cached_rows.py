"""Cached rows against a plain parameter: random operations in random order, equal results."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bitslab import ArgumentError, ArgumentTypeError, BitslabError, IndexRangeError
from bitslab.embedding import CachedRows, EvictionStrategy
from tests.embedding.support import OPTIMIZERS, Pair, check_map
from tests.helpers import same_bits


class Play:
    """Random operations on a pair."""

    def __init__(self, optimizer: str, seed: int):
        self.random = draw = random.Random(seed)
        self.n_rows = draw.choice([1, 2, 7, 40, 100])
        self.pair = Pair(
            self.n_rows,
            draw.choice([1, 1 + self.n_rows // 4, 1 + self.n_rows // 2, self.n_rows]) or 1
            if self.n_rows > 2
            else 1,
            draw.choice([1, 3, 4, 8]),
            optimizer,
            seed,
            evict=draw.choice(list(EvictionStrategy)),
            pinned_ids=draw.choice([(), (0,)]),
            warmup_ratio=draw.choice([0, 0.7, 1]),
            cache=draw.choice(["rows"] * 4 + ["packed"]),
            layout=draw.choice(["compact", "inplace"]),
            buffer_rows=draw.choice([0, 0, 3]),
        )
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def ids(self) -> torch.Tensor:
        size = self.random.choice([0, 1, 2, 5, 20])
        rare = [self.random.randrange(self.n_rows) for _ in range(size)]
        often = [row if self.random.random() < 0.5 else row // 5 for row in rare]
        return torch.tensor(often, dtype=self.random.choice([torch.int64, torch.int32]))

    def look_up(self):
        losses = [
            self.pair.loss(self.ids(), self.random.random() < 0.85)
            for _ in range(self.random.choice([1, 1, 2, 3]))
        ]
        self.kept.append((sum(one for one, _ in losses), sum(other for _, other in losses)))
        del self.kept[:-4]

    def backward(self):
        if self.kept:
            plain, ours = self.kept.pop(self.random.randrange(len(self.kept)))
            plain.backward()
            self.or_not_cleared(ours.backward)

    def step(self):
        if self.or_not_cleared(self.pair.optimizers[1].step):
            self.pair.optimizers[0].step()
            if self.random.random() < 0.8:
                self.pair.zero_grad()

    def or_not_cleared(self, work) -> bool:
        try:
            work()
        except BitslabError as error:
            assert "were not cleared" in str(error)
            self.pair.zero_grad()
            return False
        return True

    def zero_grad(self):
        self.pair.zero_grad(self.random.random() < 0.5)

    def load(self):
        first = self.random.randrange(self.n_rows)
        last = self.random.choice([self.n_rows, first + 1])
        weight = torch.randn(last - first, self.pair.plain.shape[1], generator=self.pair.generator)
        self.pair.plain.data[first:last] = weight
        self.pair.rows.load(weight, first)

    def read(self):
        ids = self.ids()
        assert same_bits(self.pair.rows.read(ids), self.pair.plain.detach()[ids.long()])

    def prefetch(self):
        self.pair.rows.prefetch(self.ids())

    def look_only(self):
        mode = self.random.choice([torch.no_grad, torch.inference_mode])
        with mode():
            self.pair.rows.lookup(self.ids(), train=True)

    def drop(self):
        self.kept.clear()

    def flush(self):
        self.pair.rows.flush()

    def warm_up(self):
        if self.pair.rows.parameter.grad is None:
            self.kept.clear()
            self.pair.rows.warm_up(
                torch.rand(self.n_rows, generator=self.pair.generator), self.random.random()
            )

    def load_state(self):
        state = self.pair.optimizers[0].state_dict()
        for optimizer in self.pair.optimizers:
            optimizer.load_state_dict(copy.deepcopy(state))

    def compare(self):
        assert same_bits(self.pair.plain, self.pair.rows.whole())
        check_map(self.pair.rows)


OFTEN = ["look_up"] * 8 + ["backward"] * 6 + ["step"] * 6 + ["compare"] * 3
RARELY = ["zero_grad", "load", "read", "prefetch", "look_only", "drop", "flush", "warm_up"]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_thousands_of_random_operations(optimizer):
    for seed in range(6):
        play = Play(optimizer, seed)
        for _ in range(100):
            getattr(play, play.random.choice([*OFTEN, *RARELY, "load_state"]))()
        play.zero_grad()
        play.drop()
        play.pair.zero_grad()
        play.pair.train(list(range(play.n_rows)))
        play.pair.check()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 3], ids=["plain", "padding"])
@pytest.mark.parametrize("cache", ["rows", "packed"])
def test_bags_by_the_place_of_the_row_that_pads(mode, padding_idx, cache):
    pinned = () if padding_idx is None else (padding_idx,)
    pair = Pair(pinned_ids=pinned, cache=cache)
    for n in range(12):
        ids = torch.randint(40, (4, 1 + n), generator=pair.generator)
        ids[1] = 3
        ids[2, 0] = 3
        for train in (True, False):
            weight, index, padding = pair.rows.lookup_padded(
                ids, train=train, padding_idx=padding_idx
            )
            assert (padding is None) == (padding_idx is None)
            with torch.no_grad():
                out = F.embedding_bag(index, weight, mode=mode, padding_idx=padding)
                expected = F.embedding_bag(ids, pair.plain, mode=mode, padding_idx=padding_idx)
            assert same_bits(out, expected)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
@pytest.mark.parametrize("norm_type", [2.0, 1.0])
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable", "frozen"])
def test_rows_that_are_too_long_are_shortened_for_good(max_norm, norm_type, trainable):
    pair = Pair(trainable=trainable)
    pair.plain.requires_grad_(trainable)
    for n in range(12):
        ids = torch.randint(40, (1 + 2 * n,), generator=pair.generator)
        expected = F.embedding(ids, pair.plain, max_norm=max_norm, norm_type=norm_type)
        weight, index = pair.rows.lookup(
            ids, train=n % 2 == 0, max_norm=max_norm, norm_type=norm_type
        )
        assert same_bits(F.embedding(index, weight), expected)
    pair.rows.flush()
    assert same_bits(pair.rows.whole(), pair.plain)


def test_only_rows_that_may_have_changed_go_back():
    pair = Pair()
    with torch.no_grad():
        for first in range(0, 32, 8):
            pair.rows.lookup(torch.arange(first, first + 8), train=True)
    assert pair.rows.stats()["written_back"] == 0
    pair.train((1, 2))
    pair.evict()
    assert pair.rows.stats()["written_back"] == 2


def test_counts_say_what_is_resident_at_first_and_what_is_kept():
    counts = torch.zeros(40, dtype=torch.int64)
    counts[[30, 31, 32, 33]] = torch.tensor([4, 3, 2, 1])
    pair = Pair(cache_rows=4, counts=counts, warmup_ratio=1.0)
    assert set(pair.rows.slot_table.id_of.tolist()) == {30, 31, 32, 33}
    pair.rows.lookup(torch.tensor([5]), train=True)
    assert set(pair.rows.slot_table.id_of.tolist()) == {30, 31, 32, 5}


@pytest.mark.parametrize("cache_rows", [8, 40], ids=["some", "all"])
def test_warming_up_again_keeps_rows_and_state(cache_rows):
    pair = Pair(cache_rows=cache_rows, optimizer="adagrad", pinned_ids=(3,))
    for n in range(5):
        pair.train(range(3 * n, 3 * n + 6))
        pair.rows.warm_up(torch.arange(40))
        check_map(pair.rows)
    pair.check()
    if cache_rows == 40:
        assert pair.rows.slot_table.slot_of.tolist() == list(range(40))


BAD_IDS: dict[str, tuple[Any, type[Exception]]] = {
    "negative": (torch.tensor([1, -1]), IndexRangeError),
    "too-large": (torch.tensor([[1], [40]]), IndexRangeError),
    "int16": (torch.tensor([1], dtype=torch.int16), ArgumentTypeError),
    "float": (torch.tensor([1.0]), ArgumentTypeError),
    "list": ([1], ArgumentTypeError),
}


@pytest.mark.parametrize("bad", BAD_IDS)
def test_bad_ids_change_nothing(bad):
    pair = Pair()
    ids, error = BAD_IDS[bad]
    before = pair.rows.slot_table.slot_of.copy()
    for call in (
        lambda: pair.rows.lookup(ids, train=True),
        lambda: pair.rows.lookup(ids, train=False),
        lambda: pair.rows.read(ids),
        lambda: pair.rows.prefetch(ids),
    ):
        with pytest.raises(error, match="input"):
            call()
    assert (pair.rows.slot_table.slot_of == before).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_rows": 0}, "cache_rows: 0, accepted are 1 to 40"),
        ({"cache_rows": 41}, "cache_rows: 41"),
        ({"cache_rows": 2.5}, "cache_rows: expected an int"),
        ({"cache": "none"}, "cache: 'none', accepted are"),
        ({"evict": "LFU"}, "evict: expected an EvictionStrategy"),
        ({"pinned_ids": (40,)}, "pinned_ids"),
        ({"warmup_ratio": 1.5}, "warmup_ratio: 1.5"),
        ({"counts": [1, 2]}, "counts: "),
        ({"buffer_rows": -1}, "buffer_rows: -1"),
    ],
    ids=str,
)
def test_bad_arguments(options, message):
    with pytest.raises((ArgumentError, ArgumentTypeError, IndexRangeError), match=message):
        CachedRows.from_tensor(torch.zeros(40, 4), **{"cache_rows": 8, "device": "cpu"} | options)


@pytest.mark.parametrize(
    "weight",
    [torch.zeros(40, 5), torch.zeros(41, 4), torch.zeros(40), [[1.0] * 4] * 40],
    ids=["dim", "rows", "1-d", "list"],
)
def test_loading_what_does_not_fit_changes_nothing(weight):
    pair = Pair()
    with pytest.raises((ArgumentError, ArgumentTypeError), match="weight"):
        pair.rows.load(weight)
    pair.check()


def test_pinned_rows_are_counted_once():
    pair = Pair(pinned_ids=(3, 3))
    check_map(pair.rows)
    pair.evict()
    assert pair.rows.slot_table.slot_of[3] >= 0
