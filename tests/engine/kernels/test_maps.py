"""The map from ids to locations: it keeps what it is given, and says what it has no room for."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cpu.maps import mix
from bitslab.engine.kernels.format import BUCKET_ENTRIES, NO_ID, NOT_CACHED
from tests.simt.module import guarded

MASK = (1 << 64) - 1
DTYPES = {"int32": torch.int32, "int64": torch.int64}


def empty_map(buckets: int) -> torch.Tensor:
    return torch.full((buckets * BUCKET_ENTRIES, 2), NO_ID, dtype=torch.int64)


def mix_by_definition(row_id: int) -> int:
    """Return the finalizer of splitmix64 on integers of any size."""
    x = row_id
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & MASK
    return x ^ (x >> 31)


def bucket_of(row_id: int, buckets: int) -> int:
    return mix_by_definition(row_id) % buckets


def find_by_definition(entries: list[list[int]], row_id: int) -> int:
    """Look an id up as the format says, bucket by bucket."""
    buckets = len(entries) // BUCKET_ENTRIES
    for step in range(buckets):
        first = (bucket_of(row_id, buckets) + step) % buckets * BUCKET_ENTRIES
        bucket = entries[first : first + BUCKET_ENTRIES]
        for found, location in bucket:
            if found == row_id:
                return location
        if any(found == NO_ID for found, _ in bucket):
            break
    return NOT_CACHED


def colliding_ids(count: int, buckets: int, bucket: int) -> torch.Tensor:
    """Return the first ids that belong to one bucket."""
    ids = [i for i in range(200 * count) if bucket_of(i, buckets) == bucket]
    return torch.tensor(ids[:count])


@pytest.mark.parametrize(
    ("row_id", "expected"),
    [(0, 0), (1, 0x5692161D100B05E5), (0x9E3779B97F4A7C15 - (1 << 64), 0xE220A8397B1DCDAF)],
    ids=["0", "1", "first-step-of-splitmix64"],
)
def test_mix_is_the_finalizer_of_splitmix64(row_id: int, expected: int) -> None:
    assert int(mix(np.int64(row_id))) == mix_by_definition(row_id & MASK) == expected


@given(
    log_buckets=st.integers(0, 4),
    n=st.integers(0, 150),
    span=st.sampled_from([8, 60, 2**31 - 1]),
    dtype=st.sampled_from([*DTYPES]),
    seed=st.integers(0, 2**32 - 1),
)
def test_map_holds_what_was_put_in_like_a_dict(
    log_buckets: int, n: int, span: int, dtype: str, seed: int
) -> None:
    """Fails to hold an id only when it is full."""
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(rng.integers(0, span, n)).to(DTYPES[dtype])
    locations = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, n))
    entries = empty_map(1 << log_buckets)
    held: dict[int, int] = {}
    failed = 0
    for row_id, location in zip(ids.tolist(), locations.tolist(), strict=True):
        if row_id in held or len(held) < len(entries):
            held[row_id] = location
        else:
            failed += 1
    half = n // 2
    assert (
        cpu.map_insert(entries, ids[:half], locations[:half])
        + cpu.map_insert(entries, ids[half:], locations[half:])
        == failed
    )
    asked = torch.cat([ids, torch.from_numpy(rng.integers(0, span, 50)).to(ids.dtype)])
    found = cpu.map_find(entries, asked)
    assert found.dtype == torch.int64
    assert found.tolist() == [held.get(row_id, NOT_CACHED) for row_id in asked.tolist()]
    rows = entries.tolist()
    assert sorted(r for r, _ in rows if r != NO_ID) == sorted(held)
    assert [find_by_definition(rows, i) for i in asked.tolist()] == found.tolist()


@pytest.mark.parametrize("buckets", [1, 2, 8])
def test_full_map_says_what_it_has_no_room_for_and_loses_nothing(buckets: int) -> None:
    entries = empty_map(buckets)
    size = len(entries)
    ids = torch.randperm(1000)[: size + 5]
    assert cpu.map_insert(entries, ids, ids * 10) == 5
    assert cpu.map_find(entries, ids[:size]).tolist() == (ids[:size] * 10).tolist()
    assert (cpu.map_find(entries, ids[size:]) == NOT_CACHED).all()
    # What is there can still be given another location.
    assert cpu.map_insert(entries, ids[:size], ids[:size] + 1) == 0
    assert cpu.map_find(entries, ids[:size]).tolist() == (ids[:size] + 1).tolist()


@pytest.mark.parametrize("bucket", [0, 3, 7])
def test_ids_that_collide_go_on_around_the_end(bucket: int) -> None:
    entries = empty_map(8)
    ids = colliding_ids(3 * BUCKET_ENTRIES, 8, bucket)
    assert cpu.map_insert(entries, ids, ids + 7) == 0
    assert cpu.map_find(entries, ids).tolist() == (ids + 7).tolist()
    taken = entries.view(8, BUCKET_ENTRIES, 2)[:, :, 0] != NO_ID
    assert taken.all(1).nonzero().flatten().tolist() == sorted((bucket + i) % 8 for i in range(3))
    assert not taken[[(bucket + i) % 8 for i in range(3, 8)]].any()
    absent = colliding_ids(3 * BUCKET_ENTRIES + 5, 8, bucket)[-5:]
    assert (cpu.map_find(entries, absent) == NOT_CACHED).all()


def test_last_of_equal_ids_remains() -> None:
    entries = empty_map(2)
    ids = torch.tensor([5, 9, 5, 5, 9])
    assert cpu.map_insert(entries, ids, torch.arange(5)) == 0
    assert cpu.map_find(entries, torch.tensor([5, 9])).tolist() == [3, 4]
    assert int((entries[:, 0] != NO_ID).sum()) == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_ids_are_in_no_map(dtype: str) -> None:
    entries = empty_map(2)
    ids = torch.tensor([-1, -5, 3]).to(DTYPES[dtype])
    assert cpu.map_insert(entries, ids, torch.tensor([1, 2, 30])) == 2
    assert cpu.map_find(entries, ids).tolist() == [NOT_CACHED, NOT_CACHED, 30]
    assert int((entries[:, 0] != NO_ID).sum()) == 1


def test_map_without_buckets_holds_nothing() -> None:
    entries, ids = empty_map(0), torch.arange(40)
    assert cpu.map_insert(entries, ids, ids) == 40
    assert (cpu.map_find(entries, ids) == NOT_CACHED).all()


@given(
    log_buckets=st.integers(0, 3),
    kept=st.sampled_from([0.0, 0.5, 0.9]),
    seed=st.integers(0, 2**32 - 1),
    side=st.sampled_from(["end", "start"]),
)
def test_damaged_map_is_read_to_its_end_and_no_further(
    log_buckets: int, kept: float, seed: int, side: Literal["end", "start"]
) -> None:
    rng = np.random.default_rng(seed)
    entries = empty_map(1 << log_buckets)
    ids = torch.from_numpy(rng.integers(0, 100, len(entries)))
    cpu.map_insert(entries, ids, ids)
    noise = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, entries.shape))
    damaged = torch.from_numpy(rng.random(entries.shape)) >= kept
    entries = guarded(torch.where(damaged, noise, entries), side=side)
    found = cpu.map_find(entries, guarded(ids, side=side))
    rows = entries.tolist()
    assert found.tolist() == [find_by_definition(rows, i) for i in ids.tolist()]


def test_many_ids_are_found_by_several_threads() -> None:
    entries = empty_map(1 << 14)
    ids = torch.randperm(10**6)[: len(entries) // 2]
    assert cpu.map_insert(entries, ids, ids * 3) == 0
    found = cpu.map_find(entries, torch.arange(10**6))
    expected = torch.full((10**6,), NOT_CACHED)
    expected[ids] = ids * 3
    assert torch.equal(found, expected)
