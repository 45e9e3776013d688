"""Slots for the rows of a batch: the kernels against a dict and against their twins on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitslab.engine.kernels.cpu import slots as twin
from bitslab.engine.kernels.cuda.runner import INDEX_ERROR
from bitslab.engine.kernels.cuda.slots import SlotFinder
from bitslab.engine.kernels.format import NO_ROW, NO_SLOT
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner

SEEDS = range(4)
N_ROWS, N_SLOTS = 300, 900
NOTHING = np.empty(0, np.int64)


class Cache:
    """What a finder works on, and its twin."""

    def __init__(self, seed: int, adds: bool, whole: bool = False):
        generator = np.random.default_rng(seed)
        slot_of = np.full(N_ROWS, NO_SLOT, np.int32)
        resident = generator.permutation(N_ROWS)[:100]
        slot_of[resident] = np.arange(100)
        self.whole = whole
        self.slot_of = guarded(torch.from_numpy(slot_of))
        self.seen = guarded(torch.zeros(N_SLOTS, dtype=torch.int32))
        self.uses = guarded(torch.zeros(N_SLOTS, dtype=torch.int64))
        self.claims = guarded(torch.tensor([0, -1]))
        self.adds = adds
        self.runner = SimtRunner(seed)
        self.finder = SlotFinder(
            self.runner,
            N_ROWS,
            self.seen,
            self.claims,
            slot_of=None if whole else self.slot_of,
            adds=adds,
        )

    def kernels(self, ids, first, number, counts=True):
        wanted = guarded(torch.full((len(ids),), NO_ROW))
        slots = guarded(torch.empty(2, len(ids), dtype=torch.int64))
        hits_misses, misses = (
            guarded(torch.zeros(2, dtype=torch.int64)),
            guarded(torch.tensor([-1])),
        )
        uses = self.uses if counts else None
        self.finder.claim(ids, wanted)
        self.finder.give(
            ids, slots, hits_misses, number, uses=uses, first=first, miss_count=misses.data_ptr()
        )
        assert torch.equal(slots[0], slots[1])
        assert self.claims.tolist() == [0, -1]
        return wanted, slots[0], hits_misses, misses

    def twins(self, ids, first, number, counts=True):
        wanted = torch.full((len(ids),), NO_ROW)
        slots, kept = torch.empty(2, len(ids), dtype=torch.int64)
        hits_misses, misses = torch.zeros(2, dtype=torch.int64), torch.tensor([-1])
        slot_of = NOTHING if self.whole else self.slot_of.numpy()
        twin.claim_slots(ids.numpy(), N_ROWS, slot_of, wanted.numpy(), self.claims.numpy())
        bad = twin.give_slots(
            ids.numpy(),
            N_ROWS,
            slot_of,
            first,
            slots.numpy(),
            kept.numpy(),
            self.seen.numpy(),
            number,
            self.uses.numpy() if counts else NOTHING,
            self.adds,
            hits_misses.numpy(),
            misses.numpy(),
            self.claims.numpy(),
        )
        assert torch.equal(slots, kept)
        return wanted, slots, hits_misses, misses, bad


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("adds", [True, False], ids=["counts", "last"])
@pytest.mark.parametrize("n", [1, 31, 700])
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_without_a_slot_get_the_free_ones(seed, n, adds, dtype):
    cache, theirs = Cache(seed, adds), Cache(seed, adds)
    generator = torch.Generator().manual_seed(seed)
    first = 100
    for number in (7, 8, 9):
        ids = torch.randint(-3 if number == 8 else 0, N_ROWS, (n,), generator=generator).to(dtype)
        rows = ids.clamp(0).long()
        before = cache.slot_of.clone()
        wanted, slots, hits_misses, misses = cache.kernels(ids, first, number)
        missing = set(rows[before[rows] == NO_SLOT].tolist())
        count = len(missing)
        assert set(wanted[:count].tolist()) == missing
        assert wanted[count:].eq(NO_ROW).all()
        assert hits_misses.tolist() == [len(rows.unique()) - count, count] and misses.tolist() == [
            count
        ]
        assert torch.equal(cache.slot_of[wanted[:count]], torch.arange(first, first + count).int())
        assert torch.equal(slots, cache.slot_of[rows].long())
        there = before != NO_SLOT
        assert torch.equal(cache.slot_of[there], before[there])
        their_wanted, their_slots, their_counts, their_misses, bad = theirs.twins(
            ids, first, number
        )
        assert their_counts.tolist() == hits_misses.tolist() and their_misses.tolist() == [count]
        outside = (ids < 0).nonzero()
        assert bad == (int(outside[0]) if len(outside) else -1)
        if len(outside):
            assert cache.runner.mailbox.tolist() == [INDEX_ERROR, bad, int(ids[bad]), N_ROWS]
        if seed == 0:  # lanes in order: the same to the bit
            assert torch.equal(their_wanted, wanted) and torch.equal(their_slots, slots)
            assert torch.equal(cache.uses, theirs.uses)
        assert cache.uses.sum() == theirs.uses.sum()
        first += count


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_that_are_all_resident_lie_in_the_slots_of_their_numbers(seed):
    cache, theirs = Cache(seed, True, whole=True), Cache(seed, True, whole=True)
    ids = torch.randint(N_ROWS, (500,), generator=torch.Generator().manual_seed(seed))
    for counts in (False, True):
        _, slots, hits_misses, misses = cache.kernels(ids, 0, 1 + counts, counts)
        assert torch.equal(slots, ids)
        assert hits_misses.tolist() == [len(ids.unique()), 0] and misses.tolist() == [0]
        their_slots, their_counts = theirs.twins(ids, 0, 1 + counts, counts)[1:3]
        assert torch.equal(slots, their_slots) and torch.equal(hits_misses, their_counts)
        assert torch.equal(cache.uses, theirs.uses)
    assert torch.equal(cache.uses[:N_ROWS], torch.bincount(ids, minlength=N_ROWS))
    assert not cache.runner.mailbox.any()


def test_a_bad_id_of_a_batch_that_was_given_up_is_not_looked_for_in_a_shorter_one():
    cache = Cache(0, True, whole=True)
    cache.finder.claim(torch.tensor([1, 2, -5]))
    cache.kernels(torch.tensor([3, 4]), 0, 1)
    assert not cache.runner.mailbox.any()
