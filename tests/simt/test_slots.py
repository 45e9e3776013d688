"""Slots for the rows of a batch: the kernels against a dict and against their twins on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bitslab.engine.kernels.cpu import slots as twin
from bitslab.engine.kernels.cuda.runner import INDEX_ERROR, NO_ERROR, OFFSETS_ERROR, SLOTS_ERROR
from bitslab.engine.kernels.cuda.slots import (
    BY_LAST_USE,
    BY_ORDER,
    BY_USES,
    CLAIMS,
    BagOffsets,
    SlotColumns,
    SlotFinder,
    SlotKeeper,
)
from bitslab.engine.kernels.cuda.source import LEAVING_BINS
from bitslab.engine.kernels.format import NO_ROW, NO_SLOT
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner

SEEDS = range(4)
N_ROWS, N_SLOTS, N_IDS = 3000, 700, 300
NOTHING = np.empty(0, np.int64)
EVICTIONS = {"order": BY_ORDER, "uses": BY_USES, "last-use": BY_LAST_USE}


def columns(pinned: bool = False, order: str = "") -> SlotColumns:
    n_slots = N_SLOTS
    claims = torch.tensor([CLAIMS, CLAIMS])
    common: dict[str, Any] = {
        "n_rows": N_ROWS,
        "keys": guarded(torch.zeros(n_slots, dtype=torch.int64)),
        "seen": guarded(torch.zeros(n_slots, dtype=torch.int32)),
        "changed": guarded(torch.zeros(n_slots, dtype=torch.int32)),
        "claims": guarded(claims),
    }
    ranks = torch.randperm(N_ROWS, generator=torch.Generator().manual_seed(5))
    held = torch.zeros(n_slots, dtype=torch.uint8)
    held[[3, 77]] = 1
    return SlotColumns(
        **common,
        slot_of=guarded(torch.full((N_ROWS,), NO_SLOT, dtype=torch.int32)),
        row_in=guarded(torch.full((n_slots,), NO_ROW)),
        since=guarded(torch.zeros(n_slots, dtype=torch.int32)),
        pinned=guarded(held) if pinned else None,
        bins=guarded(torch.zeros(2, LEAVING_BINS, dtype=torch.int32)),
        order=guarded(ranks.to(getattr(torch, order))) if order else None,
    )


def array(tensor):
    return NOTHING if tensor is None else tensor.numpy()


def offsets_of(bags: BagOffsets | None):
    """Return what twins take for the offsets of a batch."""
    if bags is None:
        return NOTHING, False, NOTHING
    return array(bags.given), bags.include_last, array(bags.sound)


class Lookups:
    """Lookups by the kernels, or by their twins."""

    def __init__(self, columns: SlotColumns, evict: int, seed: int = 0, twins: bool = False):
        self.columns, self.evict, self.twins = columns, evict, twins
        self.runner = SimtRunner(seed)
        self.finder = SlotFinder(self.runner, columns, evict)
        self.number = 0
        self.wanted = guarded(torch.full((N_IDS,), NO_ROW))
        self.victims = guarded(torch.full((N_IDS,), -7))
        self.leaving = guarded(torch.full((N_IDS,), NO_ROW))

    def __call__(
        self,
        ids,
        oldest: int | None = None,
        counting: int | None = None,
        marked=None,
        mark=0,
        bags: BagOffsets | None = None,
    ):
        """Look a batch up; return slots, counts, and the rows that came, with what left."""
        self.number += 1
        oldest = self.number if oldest is None else oldest
        counting = self.evict if counting is None else counting
        slots = guarded(torch.empty(len(ids), dtype=torch.int64))
        kept = guarded(torch.empty(len(ids), dtype=torch.int64)) if self.number % 3 else None
        counts = guarded(torch.zeros(3, dtype=torch.int64))
        look_up = self._by_twins if self.twins else self._by_kernels
        came = look_up(ids, slots, kept, counts, oldest, counting, marked, mark, bags)
        assert kept is None or torch.equal(slots, kept)
        assert self.wanted.eq(NO_ROW).all() and self.leaving.eq(NO_ROW).all()
        assert self.columns.claims[self.number % 2].tolist() == [*CLAIMS]
        return slots, counts.tolist(), came

    def _came(self):
        n = int(self.columns.claims[(self.number - 1) % 2, 0])
        return [t[:n].clone() for t in (self.wanted, self.victims, self.leaving)]

    def _by_kernels(self, ids, slots, kept, counts, oldest, counting, marked, mark, bags):
        finder = self.finder
        batch, to = (self.wanted, self.victims, self.leaving), counts.data_ptr()
        finder.claim(ids, to, self.number, self.wanted, marked, mark, bags)
        finder.choose(to, self.number, oldest, *batch)
        came = self._came()
        finder.give(ids, to, self.number, slots, counting, *batch, kept, bags)
        return came

    def _by_twins(self, ids, slots, kept, counts, oldest, counting, marked, mark, bags):
        c = self.columns
        turn = (self.number - 1) % 2
        claims, bins, next_bins = (
            array(c.claims[turn]),
            array(c.bins[turn]),
            array(c.bins[1 - turn]),
        )
        by_slot = array(c.row_in), array(c.keys)
        batch = array(self.wanted), array(self.victims), array(self.leaving)
        seen, changed, counted = array(c.seen), array(c.changed), counts.numpy()
        leaves = array(c.pinned), self.evict, self.number, oldest, bins
        twin.claim_slots(
            ids.numpy(),
            N_ROWS,
            array(c.slot_of),
            seen,
            self.number,
            batch[0],
            counted,
            claims,
            changed,
            array(marked),
            mark,
            *offsets_of(bags),
        )
        twin.count_slots(N_ROWS, *by_slot, seen, *leaves, claims)
        twin.choose_slots(
            N_ROWS,
            *by_slot,
            seen,
            array(c.since),
            changed,
            leaves[0],
            array(c.order),
            *leaves[1:],
            *batch,
            counted,
            claims,
        )
        came = self._came()
        self.bad, self.bad_offset = twin.give_slots(
            ids.numpy(),
            N_ROWS,
            array(c.slot_of),
            *by_slot,
            changed,
            counting,
            self.number,
            *batch,
            slots.numpy(),
            array(kept),
            counted,
            claims,
            c.claims[1 - turn].numpy(),
            next_bins,
        )
        return came


@pytest.mark.drawn(7)
@pytest.mark.pairwise
@pytest.mark.parametrize("twins", [False, True], ids=["kernels", "twins"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("evict", EVICTIONS.values(), ids=EVICTIONS.keys())
@pytest.mark.parametrize("pinned", [False, True], ids=["none-pinned", "pinned"])
@pytest.mark.parametrize("order", ["", "int32", "int64"])
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_take_the_slots_of_those_that_are_worth_least(
    seed, order, pinned, evict, dtype, twins
):
    c = columns(pinned=pinned, order=order)
    look_up = Lookups(c, evict, seed, twins)
    generator = torch.Generator().manual_seed(seed)
    fixed = set() if c.pinned is None else {3, 77}
    holds: dict[int, int] = {}  # the row in each slot
    uses: dict[int, int] = {}
    last: dict[int, int] = {}
    for number in range(1, 12):
        n = int(torch.randint(1, N_IDS, (1,), generator=generator))
        most = N_ROWS if number % 3 else 400
        ids = torch.randint(most, (n,), generator=generator).to(dtype)
        oldest = max(1, number - number % 2)  # now and then the rows of the last batch remain
        changed = torch.randint(2, (N_SLOTS,), generator=generator).bool()
        c.changed.copy_(changed.int() * 9)
        before = dict(holds)
        slots, counts, (came, victims, leaving) = look_up(ids, oldest)
        there = set(before.values())
        rows = set(ids.tolist())
        assert set(came.tolist()) == rows - there and len(set(victims.tolist())) == len(came)
        for row, slot, left in zip(came.tolist(), victims.tolist(), leaving.tolist(), strict=True):
            old = before.get(slot)
            assert left == (old if old is not None and changed[slot] else NO_ROW)
            assert slot not in fixed and (old is None or last[old] < oldest)
            assert old not in rows
            if old is not None:
                del uses[old]
            holds[slot], uses[row] = row, 0
            assert c.since[slot] == number and not c.changed[slot]
        written = int((leaving != NO_ROW).sum())
        assert counts == [len(rows & there), len(rows - there), written]
        for row in ids.tolist():
            uses[row] += 1
            last[row] = number
        assert all(
            holds[slot] == row for slot, row in zip(slots.tolist(), ids.tolist(), strict=True)
        )
        for slot in range(N_SLOTS):
            row = holds.get(slot)
            assert c.row_in[slot] == (NO_ROW if row is None else row)
            if row is not None:
                assert c.slot_of[row] == slot and c.seen[slot] == last[row]
                rank = row if c.order is None else int(c.order[row])
                key = {BY_USES: uses[row], BY_LAST_USE: last[row], BY_ORDER: -rank}[evict]
                assert c.keys[slot] == key
        assert int((c.slot_of >= 0).sum()) == len(holds)
        gone = [before[slot] for slot in victims.tolist() if slot in before]
        stayed = [
            r for s, r in before.items() if holds[s] == r and last[r] < oldest and s not in fixed
        ]
        stayed = [r for r in stayed if r not in rows]
        ranks = (lambda r: r) if c.order is None else (lambda r: int(c.order[r]))
        if gone and evict == BY_LAST_USE and stayed:
            assert max(last[r] for r in gone) <= min(last[r] for r in stayed)
        if gone and evict == BY_ORDER and stayed:  # two ranks may share a bin
            assert min(map(ranks, gone)) + 1 >= max(map(ranks, stayed))
    assert not look_up.runner.mailbox.any()


@pytest.mark.parametrize("twins", [False, True], ids=["kernels", "twins"])
@pytest.mark.parametrize("n_ids", [1, N_IDS])
def test_slots_are_marked_as_changed_before_rows_leave(n_ids, twins):
    c = columns()
    look_up = Lookups(c, BY_ORDER, twins=twins)
    for first in range(0, N_SLOTS, N_IDS):
        look_up(torch.arange(first, min(first + N_IDS, N_SLOTS)))
    marked = guarded(torch.arange(0, N_SLOTS, 3).repeat(2))
    before = c.row_in.clone()
    _, counts, (_, victims, leaving) = look_up(
        torch.arange(900, 900 + n_ids), None, None, marked, 5
    )
    writes = victims % 3 == 0
    assert torch.equal(leaving, torch.where(writes, before[victims], NO_ROW))
    assert counts == [0, n_ids, int(writes.sum())]
    expected = (torch.arange(N_SLOTS) % 3 == 0).int() * 5
    expected[victims] = 0
    assert torch.equal(c.changed, expected)


def test_the_rows_that_leave_are_those_used_least():
    c = columns()
    look_up = Lookups(c, BY_USES)
    for first in (0, 200, 400):  # all but 100 slots
        look_up(torch.arange(first, first + 200))
    look_up(torch.arange(0, 600, 4))
    used = torch.arange(0, 600, 4)
    _, counts, (came, victims, _) = look_up(torch.arange(1000, 1250))
    assert counts == [0, 250, 0] and len(came) == 250
    assert (c.slot_of[used] >= 0).all()
    look_up(torch.arange(2000, 2300))
    assert (c.slot_of[used] >= 0).all()


@pytest.mark.parametrize("large", [1022, 1023, 1024, 5000, 2**20, 2**40], ids=str)
def test_counts_of_any_size_keep_their_order(large):
    c = columns()
    look_up = Lookups(c, BY_USES)
    for first in range(0, N_SLOTS, N_IDS):
        look_up(torch.arange(first, min(first + N_IDS, N_SLOTS)))
    c.keys.copy_(torch.arange(N_SLOTS) % 2 * large + large)
    _, _, (_, victims, _) = look_up(torch.arange(1000, 1300))
    assert (c.row_in[victims] >= 1000).all() and (victims % 2 == 0).all()


@pytest.mark.parametrize("evict", EVICTIONS.values(), ids=EVICTIONS.keys())
@pytest.mark.parametrize("twins", [False, True], ids=["kernels", "twins"])
def test_a_batch_may_take_every_slot_that_is_left(evict, twins):
    c = columns(pinned=True)
    look_up = Lookups(c, evict, twins=twins)
    for first in range(0, 600, 200):
        look_up(torch.arange(first, first + 200))
    kept = look_up(torch.arange(700, 900))[0]
    number = look_up.number
    rest = N_SLOTS - 200 - 2
    for first, n in ((1000, 299), (2000, rest - 299)):
        _, counts, _ = look_up(torch.arange(first, first + n), oldest=number)
        assert counts[1] == n
    assert torch.equal(c.row_in[kept], torch.arange(700, 900))
    assert c.row_in[c.row_in >= 0].unique().shape[0] == int((c.row_in >= 0).sum())


@pytest.mark.parametrize("counting", EVICTIONS.values(), ids=EVICTIONS.keys())
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_that_are_all_resident_lie_in_the_slots_of_their_numbers(seed, dtype, counting):
    ids = torch.randint(N_ROWS, (500,), generator=torch.Generator().manual_seed(seed)).to(dtype)
    runner, found = SimtRunner(seed), []
    for twins in (False, True):
        keys = guarded(torch.zeros(N_ROWS, dtype=torch.int64))
        seen = guarded(torch.zeros(N_ROWS, dtype=torch.int32))
        counts = guarded(torch.zeros(3, dtype=torch.int64))
        slots = guarded(torch.empty(len(ids), dtype=torch.int64))
        for number in (1, 2):
            if twins:
                given = array(keys), array(seen), counting, number, array(slots), array(counts)
                found_bad = twin.keep_slots(ids.numpy(), N_ROWS, *given, *offsets_of(None))
                assert found_bad == (-1, -1)
            else:
                keeper = SlotKeeper(runner, keys, seen)
                keeper.keep(ids, counts.data_ptr(), number, slots, counting)
        assert torch.equal(slots, ids.long())
        assert counts.tolist() == [2 * len(ids.unique()), 0, 0]
        found.append((keys.tolist(), seen.tolist()))
    assert found[0] == found[1]
    used = torch.bincount(ids, minlength=N_ROWS)
    expected = {BY_USES: 2 * used, BY_LAST_USE: 2 * (used > 0), BY_ORDER: 0 * used}[counting]
    assert found[0][0] == expected.tolist()
    assert not runner.mailbox.any()


@pytest.mark.parametrize("bad", [-3, N_ROWS, 2**31 - 1])
def test_a_bad_id_is_reported_and_stands_for_the_row_next_to_it(bad):
    ids = torch.tensor([5, 6, bad, -9], dtype=torch.int32)
    near = 0 if bad < 0 else N_ROWS - 1
    for twins in (False, True):
        look_up = Lookups(columns(), BY_USES, twins=twins)
        slots, _, _ = look_up(ids)
        assert look_up.columns.row_in[slots].tolist() == [5, 6, near, 0]
        if twins:
            assert look_up.bad == 2
        else:
            assert look_up.runner.mailbox.tolist() == [INDEX_ERROR, 2, bad, N_ROWS]
        look_up.runner.mailbox.zero_()
        look_up(torch.tensor([1, 2]))
        assert not look_up.runner.mailbox.any()
    keys, seen = torch.zeros(N_ROWS, dtype=torch.int64), torch.zeros(N_ROWS, dtype=torch.int32)
    counts, slots = torch.zeros(3, dtype=torch.int64), torch.empty(3, dtype=torch.int64)
    keeper = SlotKeeper(look_up.runner, keys, seen)
    keeper.keep(ids[:3], counts.data_ptr(), 1, slots, BY_USES)
    assert look_up.runner.mailbox.tolist() == [INDEX_ERROR, 2, bad, N_ROWS]
    given = array(keys), array(seen), BY_USES, 2, array(slots), array(counts)
    assert twin.keep_slots(ids[:3].numpy(), N_ROWS, *given, *offsets_of(None)) == (2, -1)
    assert slots.tolist() == [5, 6, near]


@pytest.mark.parametrize("twins", [False, True], ids=["kernels", "twins"])
def test_rows_for_which_there_is_no_slot_are_reported_and_not_resident(twins):
    c = columns()
    look_up = Lookups(c, BY_USES, twins=twins)
    for first in (0, 300):
        look_up(torch.arange(first, first + 300))
    before = c.row_in.clone()
    # Nothing may leave, and only 100 slots are empty.
    slots, counts, _ = look_up(torch.arange(1000, 1300), oldest=1)
    assert counts[1] == 300
    new = (c.row_in >= 1000).sum()
    assert new == 100 and torch.equal(c.row_in[before >= 0], before[before >= 0])
    assert int((c.slot_of >= 0).sum()) == 700 and c.slot_of.min() == NO_SLOT
    assert slots.min() >= 0 and slots.max() < N_SLOTS
    if not twins:
        assert look_up.runner.mailbox.tolist() == [SLOTS_ERROR, 100, 300, N_ROWS]


#: Offsets of 300 ids, whether the last is the end, and the first that is not sound.
OFFSETS = {
    "sound": ([0, 0, 7, 300], False, -1),
    "sound-end": ([0, 0, 7, 300], True, -1),
    "one": ([0], False, -1),
    "more-than-ids": (sorted([0] * 400 + [*range(300)]), False, -1),
    "begins-later": ([1, 5], False, 0),
    "falls": ([0, 9, 8, 20], False, 2),
    "beyond": ([0, 9, 301], False, 2),
    "no-end": ([0, 9, 299], True, 2),
    "falls-late": ([*range(290), 3, 300], True, 290),
    "negative": ([0, -4, 5], False, 1),
}


@pytest.mark.drawn(10)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("case", OFFSETS)
def test_offsets_are_looked_at_on_the_way(case, dtype):
    values, include_last, bad = OFFSETS[case]
    ids = torch.randint(N_ROWS, (N_IDS,), generator=torch.Generator().manual_seed(1))
    expected = values
    if bad >= 0:
        expected = [0] * (len(values) - include_last) + [N_IDS] * include_last

    def bags() -> BagOffsets:
        sound = guarded(torch.full((len(values),), -7))
        return BagOffsets(guarded(torch.tensor(values, dtype=dtype)), include_last, sound)

    def check(found: BagOffsets, runner: SimtRunner) -> None:
        assert found.given.tolist() == values and found.sound.tolist() == expected
        kind, where, _, n_ids = runner.mailbox.tolist()
        expected_mail = (OFFSETS_ERROR, bad, N_IDS) if bad >= 0 else (NO_ERROR, 0, 0)
        assert (kind, where, n_ids) == expected_mail
        runner.mailbox.zero_()

    for twins in (False, True):
        look_up = Lookups(columns(), BY_USES, seed=2, twins=twins)
        plain = Lookups(columns(), BY_USES, twins=twins)
        for _ in range(3):  # what launches share is as it was
            given = bags()
            slots, *_ = look_up(ids, bags=given)
            plain(ids)
            assert torch.equal(look_up.columns.row_in[slots], ids)
            if twins:
                assert look_up.bad_offset == bad and given.sound.tolist() == expected
            else:
                check(given, look_up.runner)
        assert torch.equal(look_up.columns.slot_of >= 0, plain.columns.slot_of >= 0)
    keys, seen = torch.zeros(N_ROWS, dtype=torch.int64), torch.zeros(N_ROWS, dtype=torch.int32)
    counts, slots = torch.zeros(3, dtype=torch.int64), torch.empty(N_IDS, dtype=torch.int64)
    runner = SimtRunner(1)
    keeper = SlotKeeper(runner, keys, seen)
    for number in (1, 2, 3):
        given = bags()
        keeper.keep(ids, counts.data_ptr(), number, slots, BY_USES, given)
        check(given, runner)
        assert torch.equal(slots, ids)
    given = bags()
    by_row = array(keys), array(seen), BY_USES, 4, array(slots), array(counts)
    assert twin.keep_slots(ids.numpy(), N_ROWS, *by_row, *offsets_of(given)) == (-1, bad)
    assert given.sound.tolist() == expected
