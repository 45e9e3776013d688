"""The map from ids to locations: the kernels against a dict and against their twins on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cuda.map import MapKernels
from bitslab.engine.kernels.format import BUCKET_ENTRIES, NO_ID, NOT_CACHED
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner

SEEDS = range(4)
WORD = (1 << 64) - 1


def empty_map(buckets: int) -> torch.Tensor:
    # The locations of free entries mean nothing; here they would be noticed.
    return guarded(torch.tensor([NO_ID, 12345]).repeat(buckets * BUCKET_ENTRIES, 1))


def own_bucket(row_id: int, buckets: int) -> int:
    x = row_id
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return (x ^ x >> 31) % buckets


def assert_holds(entries: torch.Tensor, wanted: dict[int, int], absent: list[int]) -> None:
    """The map is sound, both kinds of lookup agree with `wanted`, and no id is there twice."""
    used = {int(i): int(location) for i, location in entries if i != NO_ID}
    assert used == wanted
    assert int((entries[:, 0] != NO_ID).sum()) == len(wanted)
    ids = torch.tensor([*wanted, *absent], dtype=torch.int64)
    expected = [*wanted.values(), *[NOT_CACHED] * len(absent)]
    before = entries.clone()
    assert MapKernels(SimtRunner()).find(entries, ids).tolist() == expected
    assert cpu.map_find(entries, ids).tolist() == expected
    assert torch.equal(entries, before)


def distinct_ids(n: int, seed: int) -> list[int]:
    generator = np.random.default_rng(seed)
    return list(dict.fromkeys(generator.integers(0, 1 << 62, 2 * n).tolist()))[:n]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("buckets", [1, 2, 64])
def test_inserted_ids_are_found_up_to_a_full_map(buckets, seed):
    room = buckets * BUCKET_ENTRIES
    for n in (1, room // 2, room - 1, room):
        ids = distinct_ids(n + 50, seed)
        wanted = {i: k * k - 7 for k, i in enumerate(ids[:n])}
        entries = empty_map(buckets)
        failed = MapKernels(SimtRunner(seed)).insert(
            entries, torch.tensor([*wanted]), torch.tensor([*wanted.values()])
        )
        assert failed.tolist() == [0]
        assert_holds(entries, wanted, [*ids[n:], -1, -2, -(1 << 63)])


@pytest.mark.parametrize("seed", SEEDS)
def test_ids_that_find_no_room_are_counted_and_the_others_remain(seed):
    for buckets, too_many in ((1, 5), (4, 1), (4, 300)):
        room = buckets * BUCKET_ENTRIES
        ids = torch.tensor(distinct_ids(room + too_many, seed))
        entries = empty_map(buckets)
        failed = MapKernels(SimtRunner(seed)).insert(entries, ids, ids + 1)
        assert failed.tolist() == [too_many]
        held = set(entries[:, 0].tolist())
        absent = [i for i in ids.tolist() if i not in held]
        assert len(absent) == too_many
        assert_holds(entries, {i: i + 1 for i in held}, absent)
        # What is there can be given new locations, even now.
        again = torch.tensor(sorted(held))
        assert MapKernels(SimtRunner(seed)).insert(entries, again, again + 2).tolist() == [0]
        assert_holds(entries, {i: i + 2 for i in held}, absent)


@pytest.mark.parametrize("seed", SEEDS)
def test_ids_of_one_bucket_spill_over_the_end(seed):
    """All belong to the last bucket; what it cannot hold goes to the first ones."""
    buckets = 8
    alike = [i for i in range(3000) if own_bucket(i, buckets) == buckets - 1]
    ids, absent = alike[:20], alike[20:30]
    entries = empty_map(buckets)
    failed = MapKernels(SimtRunner(seed)).insert(entries, torch.tensor(ids), torch.tensor(ids) * 3)
    assert failed.tolist() == [0]
    per_bucket = (entries[:, 0] != NO_ID).view(buckets, BUCKET_ENTRIES).sum(1).tolist()
    assert per_bucket == [8, 4, 0, 0, 0, 0, 0, 8]
    assert_holds(entries, {i: 3 * i for i in ids}, absent)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_id_given_many_times_at_once_gets_one_entry(seed):
    """Lanes that race for a free entry may not both place the same id."""
    generator = np.random.default_rng(seed)
    for buckets, kinds in ((1, 8), (1, 3), (16, 40)):
        ids = torch.from_numpy(generator.integers(0, kinds, 2000))
        entries = empty_map(buckets)
        failed = MapKernels(SimtRunner(seed)).insert(entries, ids, torch.arange(2000))
        assert failed.tolist() == [0]
        held = {int(i): int(location) for i, location in entries if i != NO_ID}
        assert set(held) == set(ids.tolist())
        assert all(int(ids[location]) == i for i, location in held.items())
        assert_holds(entries, held, [kinds, kinds + 1])


@pytest.mark.parametrize("seed", SEEDS)
def test_later_calls_overwrite_and_add(seed):
    entries = empty_map(32)
    wanted: dict[int, int] = {}
    for call in range(3):
        ids = torch.randperm(120)[:80]
        locations = torch.randint(-(1 << 63), (1 << 63) - 1, (80,))
        assert MapKernels(SimtRunner(seed + call)).insert(entries, ids, locations).tolist() == [0]
        wanted |= dict(zip(ids.tolist(), locations.tolist(), strict=True))
    assert_holds(entries, wanted, [i for i in range(150) if i not in wanted])


def test_maps_filled_on_the_cpu_are_read_and_filled_on():
    entries = empty_map(16)
    ids = torch.tensor(distinct_ids(100, 0))
    assert cpu.map_insert(entries, ids[:60], ids[:60] // 3) == 0
    assert MapKernels(SimtRunner()).insert(entries, ids[40:], ids[40:] // 3).tolist() == [0]
    assert_holds(entries, {i: i // 3 for i in ids.tolist()}, distinct_ids(20, 1))


def test_ids_of_four_bytes_are_the_same_ids():
    entries, out = empty_map(16), guarded(torch.zeros(90, dtype=torch.int64))
    ids = torch.arange(40, 100, dtype=torch.int32)
    assert MapKernels(SimtRunner()).insert(entries, ids, ids.long() + 5).tolist() == [0]
    asked = torch.arange(20, 110, dtype=torch.int32)
    assert MapKernels(SimtRunner()).find(entries, asked, out) is out
    expected = [i + 5 if 40 <= i < 100 else NOT_CACHED for i in range(20, 110)]
    assert out.tolist() == expected
    assert MapKernels(SimtRunner()).find(entries, asked.long()).tolist() == expected


def test_negative_ids_are_never_held():
    entries = empty_map(2)
    ids = torch.tensor([-1, 3, -5, -(1 << 63)])
    assert MapKernels(SimtRunner()).insert(entries, ids, torch.arange(4)).tolist() == [3]
    assert_holds(entries, {3: 1}, [-1, -5, -(1 << 63)])


def test_maps_without_entries_and_calls_without_ids():
    runner, none = SimtRunner(), torch.zeros(0, dtype=torch.int64)
    nothing, ids = torch.zeros(0, 2, dtype=torch.int64), torch.arange(5)
    assert MapKernels(runner).insert(nothing, ids, ids).tolist() == [5]
    assert MapKernels(runner).find(nothing, ids).tolist() == [NOT_CACHED] * 5
    assert MapKernels(runner).insert(empty_map(1), none, none).tolist() == [0]
    assert MapKernels(runner).find(empty_map(1), none).tolist() == []
    assert runner.launched == []
