"""Which rows stay and which leave: `Residents` against a model in plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitslab import BitslabError
from bitslab.embedding import CachedRows
from bitslab.embedding.eviction import EvictionStrategy
from bitslab.embedding.residents import Residents

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


def check(residents: Residents):
    slots = residents.resident()
    assert np.array_equal(residents.slot_of[residents.id_of[slots]], slots)
    assert (residents.slot_of != -1).sum() == len(slots)
    inside = len(slots[slots < residents.capacity_rows])
    assert residents.free_rows + inside == residents.capacity_rows


def bring(residents: Residents, ids: list[int]) -> bool:
    """Look a batch up and let its rows come; tell whether there was room."""
    batch = residents.look_up(np.array(ids, np.int64))
    if len(batch.missing):
        slots = residents.make_room(batch)
        if slots is None:
            residents.leave(batch)
            return False
        residents.admit(batch.missing, slots, batch.missing_counts)
    return True


def held(residents: Residents) -> set[int]:
    return set(residents.id_of[residents.resident()].tolist())


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
    residents, model = Residents(N_ROWS, CAPACITY, evict), Model(evict)
    for ids, pinned in batches:
        residents.pinned[:] = [row in pinned for row in residents.id_of]
        before = held(residents)
        plan = model.use(ids, pinned)
        assert bring(residents, ids) == (plan is not None)
        check(residents)
        if plan is None:
            assert held(residents) == before
            continue
        coming, may, leaving = plan
        gone = sorted(before - held(residents))
        assert held(residents) == (before - set(gone)) | set(coming)
        # Among rows of the same worth any may leave.
        worths = sorted(model.worth[row] for row in gone)
        assert worths == [model.worth[row] for row in may[:leaving]]
        assert set(gone) <= set(may)
        model.come(ids, coming, gone)


def test_dataset_follows_the_order_that_it_was_told():
    residents = Residents(4, 2, EvictionStrategy.DATASET)
    residents.order = np.array([1, 3, 0, 2])  # row 2 is the most used, row 1 the least
    for row in (1, 0, 3):
        bring(residents, [row])
    assert held(residents) == {0, 3}
    bring(residents, [2])
    assert held(residents) == {0, 2}


def test_the_order_takes_four_bytes_a_row_and_is_counted():
    residents = Residents(N_ROWS, CAPACITY, EvictionStrategy.DATASET)
    assert residents.map_bytes == 4 * N_ROWS
    residents.order = np.arange(N_ROWS)[::-1]
    assert residents.order is not None and residents.order.dtype == np.int32
    assert residents.order.tolist() == list(range(N_ROWS))[::-1]
    assert residents.map_bytes == 8 * N_ROWS
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
    residents = Residents(N_ROWS, CAPACITY, evict)
    for row in range(CAPACITY - 1):
        bring(residents, [row])
    batch = residents.look_up(np.array([10, 11, 12]))
    slots = residents.make_room(batch)
    assert slots is not None
    residents.leave(batch)
    residents.put_back(slots)
    check(residents)
    assert held(residents) == set(range(CAPACITY - 1))
    assert bring(residents, [0, 1, 13, 14, 15, 16])
    check(residents)
    assert held(residents) == {0, 1, 13, 14, 15, 16}


@EACH
@pytest.mark.parametrize("stage", ["looked-up", "room-made", "half-admitted"])
def test_an_interrupted_batch_is_mended(evict, stage):
    residents = Residents(N_ROWS, CAPACITY, evict)
    bring(residents, list(range(CAPACITY)))
    batch = residents.look_up(np.array([0, 10, 11]))
    if stage != "looked-up":
        slots = residents.make_room(batch)
        assert slots is not None
        if stage == "half-admitted":
            residents.slot_of[batch.missing] = slots
            residents.mend(slots)
            assert len(held(residents)) == CAPACITY - 2
    for first in (12, 0, 5):
        assert bring(residents, list(range(first, first + CAPACITY)))
        check(residents)
        assert held(residents) == set(range(first, first + CAPACITY))


@EACH
def test_rows_beyond_the_capacity_come_and_go_without_a_trace(evict):
    residents = Residents(N_ROWS, CAPACITY, evict)
    bring(residents, list(range(CAPACITY)))
    slots = residents.grow(np.array([15, 16, 17]))
    assert slots.tolist() == [6, 7, 8]
    check(residents)
    assert residents.extra_rows == 3
    assert bring(residents, [15, 17, 10])  # row 10 takes a slot below
    check(residents)
    residents.shrink()
    check(residents)
    assert residents.extra_rows == 0
    assert 10 in held(residents)
    assert not held(residents) & {15, 16, 17}


@EACH
def test_emptied_slots_are_free(evict):
    residents = Residents(N_ROWS, CAPACITY, evict)
    bring(residents, list(range(CAPACITY)))
    residents.empty(residents.slot_of[[1, 4]].astype(np.int64))
    check(residents)
    assert residents.free_rows == 2
    assert held(residents) == {0, 2, 3, 5}
    order = residents.order
    residents.clear()
    check(residents)
    assert residents.free_rows == CAPACITY
    assert residents.order is order


def test_a_slot_is_never_to_be_emptied_twice():
    residents = Residents(N_ROWS, CAPACITY, EvictionStrategy.LFU)
    bring(residents, list(range(CAPACITY)))
    with pytest.raises(BitslabError, match="emptied twice"):
        residents.put_back(np.array([1]))


def test_a_batch_in_inference_does_not_count():
    residents = Residents(N_ROWS, 2, EvictionStrategy.LFU)
    bring(residents, [0, 0])
    bring(residents, [1])
    for _ in range(5):
        batch = residents.look_up(np.array([1]), count=False)
        assert not len(batch.missing)
    bring(residents, [2])
    assert held(residents) == {0, 2}
