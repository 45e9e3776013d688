"""The kernels that find resident rows and choose what leaves, against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitslab.engine.kernels.cpu import slot_table as kernels
from bitslab.engine.kernels.cpu.compiling import call


def slots_of(n_rows: int, held: dict[int, int]) -> np.ndarray:
    slot_of = np.full(n_rows, -1, np.int32)
    for row, slot in held.items():
        slot_of[row] = slot
    return slot_of


@given(st.lists(st.integers(-2, 11), max_size=20))
def test_slots_are_found_up_to_the_first_id_out_of_range(ids):
    slot_of = slots_of(10, {3: 0, 7: 2})
    slots = np.full(len(ids), -9, np.int64)
    bad, missing = call(kernels.find_slots, np.array(ids, np.int64), slot_of, slots)
    outside = [n for n, row in enumerate(ids) if not 0 <= row < 10]
    end = outside[0] if outside else len(ids)
    assert bad == (end if outside else -1)
    expected = [int(slot_of[row]) for row in ids[:end]]
    assert slots[:end].tolist() == expected
    assert missing == expected.count(-1)
    assert call(kernels.find_outside, np.array(ids, np.int64), 10) == bad


@given(
    ids=st.lists(st.integers(0, 9), max_size=30),
    how=st.sampled_from([kernels.KEEP, kernels.COUNT_UP, kernels.LAST_USE]),
)
def test_a_batch_is_looked_up_and_its_marks_are_taken_back(ids, how):
    held = {3: 0, 7: 2, 8: 1}
    slot_of, n = slots_of(10, held), len(ids)
    keys, stamps = np.array([4, 5, 6, 7]), np.full(4, -1)
    rank, touched = np.zeros(4, np.int64), np.empty(4, np.int64)
    slots, missing, counts = (np.empty(n, np.int64) for _ in range(3))
    n_touched, n_missing = call(
        kernels.look_up,
        np.array(ids, np.int64),
        slot_of,
        keys,
        stamps,
        1,
        how,
        slots,
        touched,
        rank,
        missing,
        counts,
    )
    away = list(dict.fromkeys(row for row in ids if row not in held))
    there = list(dict.fromkeys(held[row] for row in ids if row in held))
    assert missing[:n_missing].tolist() == away
    assert counts[:n_missing].tolist() == [ids.count(row) for row in away]
    assert touched[:n_touched].tolist() == there
    assert slots.tolist() == [
        held.get(row, -away.index(row) - 2 if row in away else 0) for row in ids
    ]
    row_in = {slot: row for row, slot in held.items()}
    for slot, before in enumerate([4, 5, 6, 7]):
        used = slot in there
        worth = {
            kernels.KEEP: before,
            kernels.COUNT_UP: before + (ids.count(row_in[slot]) if used else 0),
            kernels.LAST_USE: 1 if used else before,
        }
        assert keys[slot] == worth[how]
        assert stamps[slot] == (1 if used else -1)

    numbers = slots.copy()
    call(kernels.compress_slots, numbers, rank, n_missing)
    order = away + [row_in[slot] for slot in there]
    assert numbers.tolist() == [order.index(row) for row in ids]
    places = np.arange(100, 100 + n_missing)
    call(kernels.resolve, slots, places)
    assert slots.tolist() == [
        held.get(row, 100 + away.index(row) if row in away else 0) for row in ids
    ]
    call(kernels.unmark, slot_of, missing[:n_missing])
    assert np.array_equal(slot_of, slots_of(10, held))


@given(
    keys=st.lists(st.integers(0, 6), min_size=1, max_size=24),
    used=st.sets(st.integers(0, 23)),
    pinned=st.sets(st.integers(0, 23)),
    grown=st.lists(st.integers(0, 3), min_size=24, max_size=24),
    count=st.integers(0, 24),
)
def test_the_slots_of_least_worth_are_taken_or_the_heap_is_as_before(
    keys, used, pinned, grown, count
):
    n = len(keys)
    heap, heap_keys = np.zeros(n, np.int32), np.zeros(n, np.int64)
    size = call(kernels.push, heap, heap_keys, 0, np.arange(n), np.array(keys, np.int64))
    assert size == n
    now = np.array(keys, np.int64) + np.array(grown[:n])  # the heap does not hear of it
    stamps = np.array([5 if slot in used else 0 for slot in range(n)])
    fixed = np.array([slot in pinned for slot in range(n)])
    free = [slot for slot in range(n) if slot not in used and slot not in pinned]
    taken, held = np.empty(count, np.int64), np.empty(n, np.int64)
    found, size = call(
        kernels.take_least, heap, heap_keys, size, now, stamps, 5, fixed, count, taken, held
    )
    assert found == min(count, len(free))
    gone = set()
    if found == count:
        gone = set(taken.tolist())
        assert len(gone) == count
        assert gone <= set(free)
        assert sorted(now[taken]) == sorted(now[free])[:count]
        assert list(now[taken]) == sorted(now[taken])
    assert sorted(heap[:size].tolist()) == [slot for slot in range(n) if slot not in gone]


@pytest.mark.parametrize("include_last", [False, True], ids=["begins", "begins-and-end"])
@pytest.mark.parametrize(
    ("ids", "offsets"),
    [
        ([3, 7], [0, 1]),
        ([3, 7], [0, 2]),
        ([3, 7, 3], [0, 3, 3]),
        ([3, 4], [0, 1]),
        ([3, -1], [0, 1]),
        ([3, 10], [0, 1]),
        ([3, 7], [1, 2]),
        ([3, 7, 3], [0, 2, 1]),
        ([3, 7], [0, 3]),
        ([3, 7], [0, -1]),
        ([], [0]),
        ([], []),
        ([3], []),
    ],
    ids=str,
)
def test_rows_of_bags_are_found_where_nothing_is_wrong(ids, offsets, include_last):
    slot_of = slots_of(10, {3: 0, 7: 2})
    slots = np.full(len(ids), -9, np.int64)
    found = call(
        kernels.find_bags,
        np.array(ids, np.int64),
        np.array(offsets, np.int64),
        include_last,
        slot_of,
        slots,
    )
    right = all(0 <= row < 10 for row in ids)
    right = right and offsets == sorted(offsets) and offsets[:1] in ([], [0])
    last = offsets[-1] if offsets else 0  # torch takes no bags at all, too
    right = right and last <= len(ids) and not (include_last and (last != len(ids) or not offsets))
    if not right:
        assert found == -1
    else:
        assert slots.tolist() == [int(slot_of[row]) for row in ids]
        assert found == sum(slot < 0 for slot in slots)
