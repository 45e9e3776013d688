"""Which rows are kept and which leave: `SlotTable` against a model in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitslab import BitslabError
from bitslab.embedding import CachedRows
from bitslab.embedding.eviction import EvictionStrategy
from bitslab.embedding.slots import SlotTable

EACH = pytest.mark.parametrize("evict", list(EvictionStrategy), ids=lambda evict: evict.name)
N_ROWS, CAPACITY = 20, 6


class Model:
    """What is resident by the definition of each strategy, with a dict."""

    def __init__(self, evict: EvictionStrategy):
        self.evict = evict
        self.worth: dict[int, int] = {}
        self.batches = 0

    def use(self, ids: list[int], pinned: set[int]) -> tuple[list[int], list[int], int] | None:
        """Return the rows that come, those that could leave by worth, and how many have to."""
        self.batches += 1
        for row in ids:
            if row in self.worth:
                self.worth[row] = self._used(row, self.worth[row], 1)
        coming = list(dict.fromkeys(row for row in ids if row not in self.worth))
        leaving = max(0, len(coming) - (CAPACITY - len(self.worth)))
        may = [row for row in self.worth if row not in ids and row not in pinned]
        if leaving > len(may):
            return None
        may.sort(key=lambda row: self.worth[row])
        return coming, may, leaving

    def come(self, ids: list[int], coming: list[int], gone: list[int]):
        for row in gone:
            del self.worth[row]
        for row in coming:
            self.worth[row] = self._used(row, 0, ids.count(row))

    def _used(self, row: int, worth: int, times: int) -> int:
        if self.evict is EvictionStrategy.LFU:
            return worth + times
        return self.batches if self.evict is EvictionStrategy.LRU else -row


def check(slot_table: SlotTable):
    slots = slot_table.resident()
    assert np.array_equal(slot_table.slot_of[slot_table.id_of[slots]], slots)
    assert (slot_table.slot_of != -1).sum() == len(slots)
    inside = len(slots[slots < slot_table.capacity_rows])
    assert slot_table.free_rows + inside == slot_table.capacity_rows


def fetch(slot_table: SlotTable, ids: list[int]) -> bool:
    """Look a batch up and admit its rows; return whether there was room."""
    batch = slot_table.look_up(np.array(ids, np.int64))
    if len(batch.missing):
        slots = slot_table.make_room(batch)
        if slots is None:
            slot_table.reject(batch)
            return False
        slot_table.admit(batch.missing, slots, batch.missing_counts)
    return True


def held(slot_table: SlotTable) -> set[int]:
    return set(slot_table.id_of[slot_table.resident()].tolist())


@EACH
@given(
    batches=st.lists(
        st.tuples(
            st.lists(st.integers(0, N_ROWS - 1), min_size=1, max_size=9),
            st.sets(st.integers(0, N_ROWS - 1), max_size=2),
        ),
        max_size=14,
    )
)
def test_what_leaves_is_what_is_worth_least(evict, batches):
    slot_table, model = SlotTable(N_ROWS, CAPACITY, evict), Model(evict)
    for ids, pinned in batches:
        slot_table.pinned[:] = [row in pinned for row in slot_table.id_of]
        before = held(slot_table)
        plan = model.use(ids, pinned)
        assert fetch(slot_table, ids) == (plan is not None)
        check(slot_table)
        if plan is None:
            assert held(slot_table) == before
            continue
        coming, may, leaving = plan
        gone = sorted(before - held(slot_table))
        assert held(slot_table) == (before - set(gone)) | set(coming)
        # Among rows of the same worth any may leave.
        worths = sorted(model.worth[row] for row in gone)
        assert worths == [model.worth[row] for row in may[:leaving]]
        assert set(gone) <= set(may)
        model.come(ids, coming, gone)


def test_dataset_follows_the_order_that_it_was_given():
    slot_table = SlotTable(4, 2, EvictionStrategy.DATASET)
    slot_table.order = np.array([1, 3, 0, 2])  # row 2 is the most used, row 1 the least
    for row in (1, 0, 3):
        fetch(slot_table, [row])
    assert held(slot_table) == {0, 3}
    fetch(slot_table, [2])
    assert held(slot_table) == {0, 2}


def test_the_order_takes_four_bytes_a_row_and_is_counted():
    slot_table = SlotTable(N_ROWS, CAPACITY, EvictionStrategy.DATASET)
    assert slot_table.map_bytes == 4 * N_ROWS
    slot_table.order = np.arange(N_ROWS)[::-1]
    assert slot_table.order is not None and slot_table.order.dtype == np.int32
    assert slot_table.order.tolist() == list(range(N_ROWS))[::-1]
    assert slot_table.map_bytes == 8 * N_ROWS
    for counts, each in ((None, 4), (torch.arange(N_ROWS), 8)):
        rows = CachedRows.from_tensor(
            torch.randn(N_ROWS, 4),
            cache_rows=CAPACITY,
            device="cpu",
            evict=EvictionStrategy.DATASET,
            counts=counts,
        )
        assert rows.stats()["map_bytes"] == each * N_ROWS


@EACH
def test_a_choice_that_is_put_back_changes_nothing(evict):
    slot_table = SlotTable(N_ROWS, CAPACITY, evict)
    for row in range(CAPACITY - 1):
        fetch(slot_table, [row])
    batch = slot_table.look_up(np.array([10, 11, 12]))
    slots = slot_table.make_room(batch)
    assert slots is not None
    slot_table.reject(batch)
    slot_table.put_back(slots)
    check(slot_table)
    assert held(slot_table) == set(range(CAPACITY - 1))
    assert fetch(slot_table, [0, 1, 13, 14, 15, 16])
    check(slot_table)
    assert held(slot_table) == {0, 1, 13, 14, 15, 16}


@EACH
@pytest.mark.parametrize("stage", ["looked-up", "room-made", "half-admitted"])
def test_an_interrupted_batch_is_repaired(evict, stage):
    slot_table = SlotTable(N_ROWS, CAPACITY, evict)
    fetch(slot_table, list(range(CAPACITY)))
    batch = slot_table.look_up(np.array([0, 10, 11]))
    if stage != "looked-up":
        slots = slot_table.make_room(batch)
        assert slots is not None
        if stage == "half-admitted":
            slot_table.slot_of[batch.missing] = slots
            slot_table.repair(slots)
            assert len(held(slot_table)) == CAPACITY - 2
    for first in (12, 0, 5):
        assert fetch(slot_table, list(range(first, first + CAPACITY)))
        check(slot_table)
        assert held(slot_table) == set(range(first, first + CAPACITY))


@EACH
def test_rows_beyond_the_capacity_come_and_go_without_a_trace(evict):
    slot_table = SlotTable(N_ROWS, CAPACITY, evict)
    fetch(slot_table, list(range(CAPACITY)))
    slots = slot_table.grow(np.array([15, 16, 17]))
    assert slots.tolist() == [6, 7, 8]
    check(slot_table)
    assert slot_table.extra_rows == 3
    assert fetch(slot_table, [15, 17, 10])  # row 10 takes a slot below
    check(slot_table)
    slot_table.shrink()
    check(slot_table)
    assert slot_table.extra_rows == 0
    assert 10 in held(slot_table)
    assert not held(slot_table) & {15, 16, 17}


@EACH
def test_emptied_slots_are_free(evict):
    slot_table = SlotTable(N_ROWS, CAPACITY, evict)
    fetch(slot_table, list(range(CAPACITY)))
    slot_table.evict_slots(slot_table.slot_of[[1, 4]].astype(np.int64))
    check(slot_table)
    assert slot_table.free_rows == 2
    assert held(slot_table) == {0, 2, 3, 5}
    order = slot_table.order
    slot_table.clear()
    check(slot_table)
    assert slot_table.free_rows == CAPACITY
    assert slot_table.order is order


def test_a_slot_is_never_to_be_emptied_twice():
    slot_table = SlotTable(N_ROWS, CAPACITY, EvictionStrategy.LFU)
    fetch(slot_table, list(range(CAPACITY)))
    with pytest.raises(BitslabError, match="emptied twice"):
        slot_table.put_back(np.array([1]))


def test_a_batch_in_inference_does_not_count():
    slot_table = SlotTable(N_ROWS, 2, EvictionStrategy.LFU)
    fetch(slot_table, [0, 0])
    fetch(slot_table, [1])
    for _ in range(5):
        batch = slot_table.look_up(np.array([1]), count=False)
        assert not len(batch.missing)
    fetch(slot_table, [2])
    assert held(slot_table) == {0, 2}
