"""SlabCache on the CPU: cached rows, their locations, counts of reads, and updates."""

from __future__ import annotations

import importlib
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitslab import (
    ArgumentError,
    ArgumentTypeError,
    BitslabError,
    CompressedTable,
    InvariantCodec,
    SlabCache,
)
from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.format import MAX_SLABS, NO_ID, NOT_CACHED, PAD_WORDS
from bitslab.tables import snapshot
from tests.helpers import DTYPES, dtype_id, packable, random_bits, same_bits, take
from tests.tables.kinds import KINDS, even_rows, make, weights

CPU = torch.device("cpu")


def mixed(n: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return rows of which every fifth cannot be packed."""
    x = packable(torch.float32, (n, columns), seed)
    x[::5] = random_bits(torch.float32, (len(x[::5]), columns), seed)
    return x


def entries_of(cache: SlabCache) -> dict[int, int]:
    """Return the map of a cache: locations by id."""
    storage = cache._snapshot.storages[CPU]
    used = storage.entries[storage.entries[:, 0] != NO_ID]
    assert len(used.unique(dim=0)) == len(used)
    return {int(i): int(location) % (1 << 64) for i, location in used.tolist()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_slabs", [1, 3, MAX_SLABS])
def test_locations_are_the_words_of_the_design(kind, n_slabs):
    x = mixed(300, 40)
    table = make(x, kind)
    cache = SlabCache(table, 3000, ["cpu"] * n_slabs)
    hot = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    cached = cache.fill(hot)
    found = entries_of(cache)
    assert len(found) == cached > n_slabs * 3000 // 168
    ends = [0] * n_slabs
    for i in [i for i in hot.tolist() if i in found]:
        word = found[i]
        slab, offset = word >> 61, (word >> 21) & ((1 << 40) - 1)
        packed, words = (word >> 20) & 1, word & ((1 << 20) - 1)
        # Back to back, in the order of hotness.
        assert offset == ends[slab]
        ends[slab] += 4 * words
        expected = int(table.codec.packed_bytes(x[i : i + 1]))
        assert 4 * words == expected and packed == (expected < 160)
        content = cache._snapshot.slabs.words[slab][offset // 4 :][:words]
        if not packed:
            assert same_bits(content.view(torch.float32), x[i])
        else:
            row = table.codec.encode(x[i : i + 1]).parts["words"][:words]
            assert torch.equal(content, row)
    assert ends == cache.stats()["slab_bytes"] and max(ends) <= 3000
    for held, end in zip(cache._snapshot.slabs.words, ends, strict=True):
        assert held.shape == (end // 4 + PAD_WORDS,)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_slab_has_no_room_for_the_next_row(kind):
    x = mixed(300, 40)
    table = make(x, kind)
    for n_slabs in (1, 2):
        cache = SlabCache(table, 3000, ["cpu"] * n_slabs)
        cached = cache.fill(torch.arange(300))
        found = entries_of(cache)
        for slab, used in enumerate(cache.stats()["slab_bytes"]):
            first_out = next(i for i in range(slab, 300, n_slabs) if i not in found)
            assert used + int(table.codec.packed_bytes(x[first_out : first_out + 1])) > 3000
            assert not any(i in found for i in range(first_out, 300, n_slabs))
        assert cached == len(found) == cache.stats()["cached_rows"]


def test_the_map_is_at_most_half_full_and_made_anew_by_each_fill():
    table = make(torch.zeros(3000, 16), "compact")
    cache = SlabCache(table, 1 << 20, ["cpu"])
    for n in (1, 3, 4, 5, 100, 128, 129, 2999, 7, 0):
        assert cache.fill(torch.arange(n)) == n
        entries = cache._snapshot.storages[CPU].entries
        buckets = entries.shape[0] // 8
        assert buckets & (buckets - 1) == 0 and 2 * n <= entries.shape[0] <= max(8, 4 * n + 8)
        assert set(entries_of(cache)) == set(range(n))
        assert cache.stats()["map_bytes"] == entries.nbytes
        assert n < 8 or 32 * n <= entries.nbytes <= 64 * n + 128
        found = cpu.map_find(entries, torch.arange(3000))
        assert (found[:n] != NOT_CACHED).all() and (found[n:] == NOT_CACHED).all()


def test_fills_in_stages_are_fills_at_once(monkeypatch):
    x = mixed(500, 40)
    for kind in KINDS:
        table = make(x, kind)
        for n_slabs in (1, 3):
            caches = [SlabCache(table, 9000, ["cpu"] * n_slabs) for _ in range(2)]
            hot = torch.randperm(500)
            caches[0].fill(hot)
            with monkeypatch.context() as patched:
                patched.setattr(snapshot, "STAGE_BYTES", 2000)
                caches[1].fill(hot)
            assert entries_of(caches[0]) == entries_of(caches[1])
            for a, b in zip(
                caches[0]._snapshot.slabs.words, caches[1]._snapshot.slabs.words, strict=True
            ):
                assert torch.equal(a, b)


@pytest.mark.drawn(10)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_every_dtype_comes_out_of_the_slabs_bit_for_bit(dtype):
    for shape in ((90, 7), (90,), (20, 3, 33), (9, 0)):
        for kind in KINDS:
            x = packable(dtype, shape)
            table = make(x, kind)
            cache = SlabCache(table, max(64, x.nbytes // 4 + 300), ["cpu", "cpu"])
            cache.fill(torch.arange(0, shape[0], 2))
            ids = torch.randint(-shape[0], shape[0], (100,))
            assert same_bits(cache.gather(ids), take(x, ids % shape[0]))
            out = torch.empty((100, *shape[1:]), dtype=dtype)
            assert cache.gather(ids.int(), out=out) is out
            assert same_bits(out, take(x, ids % shape[0]))


steps: st.SearchStrategy[Any] = st.one_of(
    st.tuples(st.just("fill"), st.lists(st.integers(-60, 59), max_size=90)),
    st.tuples(st.just("update"), st.lists(st.integers(-60, 59), max_size=20)),
    st.tuples(st.just("gather"), st.lists(st.integers(-60, 59), max_size=60)),
    st.tuples(st.just("compact"), st.just([])),
)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind", [*KINDS, "raw, packed cache"])
@settings(max_examples=20)
@given(
    n_slabs=st.integers(1, MAX_SLABS),
    capacity=st.integers(44, 900),
    actions=st.lists(steps, max_size=14),
)
def test_any_sequence_of_fills_and_updates_gives_the_rows_of_a_tensor(
    kind, n_slabs, capacity, actions
):
    x = mixed(60, 11)
    table = make(x, kind.split(",")[0])
    codec = None if kind in KINDS else InvariantCodec.fit(x)
    cache = SlabCache(table, capacity, ["cpu"] * n_slabs, codec=codec)
    asked = hits = 0
    cached: set[int] = set()
    each = table.rows_per_packed_row
    for number, (action, ids) in enumerate(actions):
        index = torch.tensor(ids, dtype=torch.int64)
        if action == "fill":
            count = cache.fill(index)
            cached = {each * row + i for row in entries_of(cache) for i in range(each)}
            assert count == len(cached) <= each * len({i % 60 // each for i in ids})
        elif action == "update":
            fresh = mixed(len(ids), 11, seed=number)
            table.update(index, fresh)
            for one, row in zip(ids, fresh, strict=True):
                x[one] = row
            changed = {i % 60 // each for i in ids}
            cached = {i for i in cached if i // each not in changed}
        elif action == "compact":
            table.compact()
        else:
            assert same_bits(cache.gather(index), take(x, index % 60))
            asked += len(ids)
            hits += sum(i % 60 in cached for i in ids)
    assert same_bits(cache.gather(torch.arange(60)), x)
    stats = cache.stats()
    assert stats["hits"] == hits + len(cached) and stats["misses"] == asked - hits + 60 - len(
        cached
    )
    assert stats["cached_rows"] == len(cached)


@pytest.mark.parametrize("kind", KINDS)
def test_hits_misses_and_bytes_are_exact(kind):
    x = mixed(200, 40)
    table = make(x, kind)
    cache = SlabCache(table, 2000, ["cpu", "cpu"])
    cache.fill(torch.arange(0, 200, 2))
    found = entries_of(cache)
    ids = torch.randint(-200, 200, (999,))
    cache.gather(ids)
    cache.gather(ids[:0])
    sizes = table.codec.packed_bytes(x)[ids % 200]
    hit = torch.tensor([int(i) % 200 in found for i in ids])
    stats = cache.stats()
    assert stats["hits"] == int(hit.sum()) and stats["misses"] == int((~hit).sum())
    assert stats["hit_rate"] == pytest.approx(float(hit.float().mean()))
    assert stats["local_bytes"] == int(sizes[hit].sum()) and stats["peer_bytes"] == 0
    assert stats["host_bytes"] == int(sizes[~hit].sum())
    assert stats["capacity_bytes"] == 2000
    of_table = table.stats()
    assert (of_table["gathers"], of_table["gathered_rows"]) == (2, 999)
    assert of_table["moved_bytes"] == stats["host_bytes"]
    assert SlabCache(table, 2000, ["cpu"]).stats()["hit_rate"] == 0.0


def test_bytes_of_each_slab_go_to_its_own_device(monkeypatch):
    table = make(weights(100, 16), "raw")
    cache = SlabCache(table, 640, ["cpu", "cpu"])
    cache.fill(torch.arange(20))
    monkeypatch.setattr(cache, "_slab_devices", (CPU, torch.device("cuda:1")))
    cache.gather(torch.arange(30))
    stats = cache.stats()
    assert (stats["local_bytes"], stats["peer_bytes"], stats["host_bytes"]) == (640, 640, 640)


def test_counts_of_caches_that_are_gone_take_no_memory():
    table = make(mixed(200, 40), next(iter(KINDS)))
    counters, moved_bytes = [], []
    ids = torch.arange(200)
    for _ in range(20):
        cache = SlabCache(table, 4000, ["cpu"])
        cache.fill(ids)
        cache.gather(ids)
        counters.append(weakref.ref(cache.counters))
        moved_bytes.append(table.stats()["moved_bytes"])
        del cache
    assert sum(ref() is not None for ref in counters) <= 2
    assert moved_bytes == [moved_bytes[0] * n for n in range(1, 21)] and moved_bytes[0]


def test_bad_ids_are_reported_and_not_counted():
    table = make(weights(100, 16), "compact")
    cache = SlabCache(table, 3000, ["cpu"])
    cache.fill(torch.arange(100))
    out = torch.full((2, 16), 7.0)
    with pytest.raises(IndexError, match="index 100 at position 1"):
        cache.gather(torch.tensor([1, 100]), out=out)
    assert (out == 7).all() and cache.stats()["hits"] == 0
    before = entries_of(cache)
    refused: list[tuple[Any, type[Exception]]] = [
        (torch.tensor([1, 100]), IndexError),
        (torch.tensor([1.0]), ArgumentTypeError),
        ([1], ArgumentTypeError),
        (torch.zeros(2, 2, dtype=torch.int64), ArgumentError),
    ]
    for bad, error in refused:
        with pytest.raises(error):
            cache.fill(bad)
        assert entries_of(cache) == before


@pytest.mark.parametrize(
    ("capacity", "devices", "error", "says"),
    [
        (63, ["cpu"], ArgumentError, "capacity_bytes: 63, accepted are 64"),
        (0, ["cpu"], ArgumentError, "capacity_bytes: 0"),
        (-5, ["cpu"], ArgumentError, "capacity_bytes: -5"),
        ((1 << 40) + 1, ["cpu"], ArgumentError, "capacity_bytes: "),
        (1.5, ["cpu"], ArgumentTypeError, "capacity_bytes: expected an int, got 1.5"),
        ("1", ["cpu"], ArgumentTypeError, "capacity_bytes: expected an int"),
        (1000, [], ArgumentError, "devices: 0, accepted are 1 to 8"),
        (1000, ["cpu"] * 9, ArgumentError, "devices: 9, accepted are 1 to 8"),
        (1000, ["cuda:77"], ArgumentError, "cuda:77, but torch sees"),
        (1000, ["cpu", "meta"], ArgumentTypeError, "meta, accepted are cpu and cuda"),
        (1000, "nonsense", ArgumentError, "'nonsense' names no device"),
    ],
    ids=str,
)
def test_a_cache_that_cannot_be_is_refused(capacity, devices, error, says):
    with pytest.raises(error, match=says):
        SlabCache(make(weights(100, 16), "compact"), capacity, devices)
    with pytest.raises(ArgumentTypeError, match="table: expected a CompressedTable, got Tensor"):
        SlabCache(weights(), 1000)  # type: ignore[arg-type]


def test_a_raw_row_that_is_no_multiple_of_four_takes_its_bytes():
    table = make(random_bits(torch.uint8, (50, 5)), "raw")
    with pytest.raises(ArgumentError, match="accepted are 5"):
        SlabCache(table, 4, ["cpu"])
    assert SlabCache(table, np.int64(17), "cpu").fill(torch.arange(50)) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_change_leave_the_caches_they_are_in(kind):
    x = mixed(100, 16)
    table = make(x, kind)
    caches = [SlabCache(table, 10_000, ["cpu"] * n) for n in (1, 2)]
    for cache in caches:
        cache.fill(torch.arange(100))
    x[[3, 99]] = mixed(2, 16, seed=8)
    table.update(torch.tensor([3, -1]), x[[3, 99]])
    for cache in caches:
        assert cache.stats()["cached_rows"] == 98
        assert same_bits(cache.gather(torch.arange(100)), x)
        assert (cache.stats()["hits"], cache.stats()["misses"]) == (98, 2)
        table.update(torch.tensor([3]), x[3:4])  # not there any more
        assert cache.stats()["cached_rows"] == 98
        assert cache.fill(torch.arange(100)) == 100
        assert same_bits(cache.gather(torch.arange(100)), x)


def test_refresh_runs_concurrently_with_readers_and_updates():
    x = even_rows(600, 100)
    table = make(x, "compact")
    cache = SlabCache(table, 40_000, ["cpu"] * 3)
    cache.fill(torch.arange(600))
    stop, failures = threading.Event(), []

    def read(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        while not stop.is_set():
            ids = torch.randint(300, (400,), generator=generator)  # rows that are kept
            if not same_bits(cache.gather(ids), x[ids]):
                failures.append(seed)

    def change() -> None:
        while not stop.is_set():
            table.update(torch.arange(300, 600), even_rows(300, 100, seed=5))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(2)]
    threads.append(threading.Thread(target=change))
    for thread in threads:
        thread.start()
    for seed in range(25):
        hot = torch.randperm(600, generator=torch.Generator().manual_seed(seed))
        cache.refresh(hot)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    expected = torch.cat([x[:300], even_rows(300, 100, seed=5)])
    assert same_bits(cache.gather(torch.arange(600)), expected)
    assert cache.stats()["hits"] and cache.stats()["misses"]


def test_a_closed_cache_says_so_and_the_table_goes_on():
    x = weights(100, 16)
    table = make(x, "compact")
    with SlabCache(table, 3000, ["cpu"]) as cache:
        cache.fill(torch.arange(100))
        assert "rows of CompressedTable(" in repr(cache) and "on cpu" in repr(cache)
        assert len(cache) == 100 and cache.shape == x.shape and cache.dtype == x.dtype
        assert same_bits(cache[torch.tensor([5])], x[5:6])
    cache.close()
    for use in (
        lambda: cache.gather(torch.tensor([1])),
        lambda: cache.fill(torch.tensor([1])),
        lambda: cache.refresh(torch.tensor([1])),
        lambda: cache.stats(),
    ):
        with pytest.raises(BitslabError, match="cache: is closed"):
            use()
    assert repr(cache) == "SlabCache(closed)"
    table.update(torch.tensor([1]), x[:1])
    assert same_bits(table[1], x[0])
    other = SlabCache(table, 3000, ["cpu"])
    table.close()
    with pytest.raises(BitslabError, match="table: is closed"):
        other.gather(torch.tensor([1]))


def test_a_deleted_cache_gets_no_more_invalidations():
    table = make(weights(100, 16), "compact")
    cache = SlabCache(table, 3000, ["cpu"])
    assert table._caches
    del cache
    assert not table._caches


# The capacity law (IBP, section 5, Table 7)

PUBLISHED = {"chunk_bytes": 4, "code_bits": 1, "grouped": False, "uniform": False}


def citeseer() -> torch.Tensor:
    """Return row-normalised Citeseer; where its files are missing, rows as sparse, drawn evenly."""
    # By name: mypy knows the scripts of benchmarks/ by their plain names.
    found: torch.Tensor
    try:
        found = importlib.import_module("benchmarks.codec_ratio").planetoid("citeseer")
        return found
    except FileNotFoundError:
        generator = torch.Generator().manual_seed(0)
        ones = (torch.rand(3312, 3703, generator=generator) < 0.0086).float()
        return ones / ones.sum(1, keepdim=True).clamp(min=1)


@pytest.fixture(scope="module")
def tiled_citeseer():
    """Return the rows, repeated to 100,000, as batches."""
    x, n = citeseer(), 100_000
    return n, x, [x[: min(len(x), n - begin)] for begin in range(0, n, len(x))]


@pytest.mark.parametrize(
    ("options", "times"), [(PUBLISHED, 24), ({}, 52)], ids=["published", "best"]
)
def test_a_cache_holds_as_many_times_more_rows_as_they_are_smaller(tiled_citeseer, options, times):
    n, x, batches = tiled_citeseer
    capacity = n * x.shape[1] * 4 // 100
    table = CompressedTable.from_tensor(iter(batches), codec="ibp", progress=False, **options)
    cache = SlabCache(table, capacity, ["cpu"])
    cached = cache.fill(torch.randperm(n, generator=torch.Generator().manual_seed(0)))
    uncompressed = capacity // (4 * x.shape[1])
    assert cached >= times * uncompressed
    ids = torch.randint(n, (500,))
    assert same_bits(cache.gather(ids), x[ids % len(x)])
