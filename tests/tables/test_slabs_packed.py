"""Caches that pack rows of a raw table: cached rows, counts of reads, and updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitslab import (
    ArgumentError,
    ArgumentTypeError,
    CompressedTable,
    InvariantCodec,
    RawCodec,
    SlabCache,
)
from bitslab.engine.kernels.format import NO_ID
from bitslab.tables import snapshot
from tests.helpers import dtype_id, packable, random_bits, same_bits, take
from tests.tables.kinds import make, weights

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def mixed(dtype: torch.dtype, n: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return rows of which every fifth cannot be packed."""
    x = packable(dtype, (n, columns), seed)
    x[::5] = random_bits(dtype, (len(x[::5]), columns), seed)
    return x


def sparse(n: int, columns: int) -> torch.Tensor:
    """Return float32 rows of a few ones each, as words of a text."""
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(n, columns, generator=generator) < 0.01).float()


def two_kinds(n: int, columns: int) -> torch.Tensor:
    """Return rows of two kinds, by turns, that one mask does not serve."""
    x = random_bits(torch.int32, (n, columns)) & 0xFFFF
    x[::2] <<= 16
    return x


def entries_of(cache: SlabCache) -> dict[int, int]:
    """Return the map of a cache: locations by id."""
    entries = cache._snapshot.storages[CPU].entries
    used = entries[entries[:, 0] != NO_ID]
    return {int(i): int(location) % (1 << 64) for i, location in used.tolist()}


@pytest.mark.parametrize("n_slabs", [1, 3])
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_slabs_hold_packed_rows_and_raw_ones_and_the_table_raw_ones(dtype, n_slabs):
    x = mixed(dtype, 300, 50)
    table = make(x, "raw")
    cache = SlabCache(table, 5000, ["cpu"] * n_slabs, codec="auto")
    codec = cache.codec
    assert isinstance(codec, InvariantCodec) and table.codec.name == "raw"
    hot = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    cached = cache.fill(hot)
    found = entries_of(cache)
    row_bytes = 50 * dtype.itemsize
    assert len(found) == cached < 300
    sizes = codec.packed_bytes(x)
    ends = [0] * n_slabs
    for i in [i for i in hot.tolist() if i in found]:
        word = found[i]
        slab, offset = word >> 61, (word >> 21) & ((1 << 40) - 1)
        packed, words = (word >> 20) & 1, word & ((1 << 20) - 1)
        assert offset == ends[slab] and packed == (int(sizes[i]) < row_bytes)
        ends[slab] += 4 * words
        content = cache._snapshot.slabs.words[slab][offset // 4 :][:words]
        assert torch.equal(content, codec.encode(x[i : i + 1]).parts["words"][:words])
    assert {(word >> 20) & 1 for word in found.values()} == {0, 1}
    ids = torch.randint(-300, 300, (999,))
    assert same_bits(cache.gather(ids), take(x, ids % 300))
    assert same_bits(cache[7], x[7]) and cache.gather(ids[:0]).shape == (0, 50)
    # Packed where the slabs are read, raw where the table is.
    hit = torch.tensor([int(i) % 300 in found for i in [*ids, 7]])
    asked = torch.cat([ids % 300, torch.tensor([7])])
    whole_words = -(-sizes // 4) * 4
    stats = cache.stats()
    assert stats["hits"] == int(hit.sum()) and stats["misses"] == int((~hit).sum())
    assert stats["local_bytes"] == int(whole_words[asked][hit].sum())
    assert stats["host_bytes"] == int((~hit).sum()) * row_bytes
    assert stats["slab_bytes"] == ends and stats["codec"] == codec.describe()
    assert table.stats()["gathered_rows"] == 999 + 1
    assert table.stats()["moved_bytes"] == stats["host_bytes"]


@pytest.mark.parametrize("rows", ["sparse", "weights"])
def test_a_packed_cache_holds_as_many_times_more_rows_as_they_are_smaller(rows):
    x = sparse(4000, 200) if rows == "sparse" else weights(4000, 200).bfloat16()
    table = make(x, "raw")
    capacity = x.nbytes // 50
    caches = [SlabCache(table, capacity, ["cpu"], codec=codec) for codec in (None, "auto")]
    raw, packed = (cache.fill(torch.randperm(4000)) for cache in caches)
    ratio = x.nbytes / float(caches[1].codec.packed_bytes(x).sum())
    assert raw == capacity // x[0].nbytes
    assert packed >= 0.97 * ratio * raw
    assert ratio > (8 if rows == "sparse" else 1.3)
    # As many as a packed table's cache.
    whole = CompressedTable.from_tensor(x, codec=caches[1].codec, progress=False)
    assert SlabCache(whole, capacity, ["cpu"]).fill(torch.randperm(4000)) == pytest.approx(
        packed, rel=0.1
    )


def test_rows_of_different_clusters_are_distinguished():
    x = two_kinds(400, 30)
    codec = InvariantCodec.fit(x, clusters=2)
    assert codec.clusters == 2
    table = make(x, "raw")
    plain = SlabCache(table, 20_000, ["cpu"])
    cache = SlabCache(table, 20_000, ["cpu", "cpu"], codec=codec)
    assert cache.codec is codec
    plain.fill(torch.arange(400))
    for ids in (torch.arange(400), torch.arange(100, 300)):
        assert cache.fill(ids) == len(ids)
        assert same_bits(cache.gather(torch.arange(400)), x)
    # The map of 200 rows, and a byte a row of the table.
    assert cache.stats()["map_bytes"] == 512 * 16 + 400


@pytest.mark.parametrize("clustered", [False, True], ids=["one-profile", "clusters"])
def test_rows_that_change_leave_the_cache(clustered):
    x = two_kinds(200, 30)
    table = make(x, "raw")
    codec = InvariantCodec.fit(x, clusters=2) if clustered else "ibp"
    cache = SlabCache(table, 50_000, ["cpu"], codec=codec)
    assert cache.fill(torch.arange(200)) == 200
    x[[3, 4, 199]] = random_bits(torch.int32, (3, 30), seed=9)
    table.update(torch.tensor([3, 4, -1]), x[[3, 4, 199]])
    assert cache.stats()["cached_rows"] == 197
    assert same_bits(cache.gather(torch.arange(200)), x)
    assert (cache.stats()["hits"], cache.stats()["misses"]) == (197, 3)
    assert cache.refresh(torch.arange(200)) == 200
    assert same_bits(cache.gather(torch.arange(200)), x)


def test_fills_in_stages_are_fills_at_once(monkeypatch):
    x = mixed(torch.float32, 300, 40)
    table = make(x, "raw")
    codec = InvariantCodec.fit(x)
    caches = [SlabCache(table, 9000, ["cpu"] * 3, codec=codec) for _ in range(2)]
    caches[0].fill(torch.arange(300))
    monkeypatch.setattr(snapshot, "STAGE_BYTES", 2000)
    caches[1].fill(torch.arange(300))
    assert entries_of(caches[0]) == entries_of(caches[1])
    words = [cache._snapshot.slabs.words for cache in caches]
    assert all(torch.equal(a, b) for a, b in zip(*words, strict=True))


def test_a_cache_of_rows_that_packing_does_not_shrink_is_kept_raw():
    x = random_bits(torch.float32, (300, 16))
    table = make(x, "raw")
    for codec in ("auto", "raw", RawCodec((16,), torch.float32)):
        cache = SlabCache(table, 6400, ["cpu"], codec=codec)
        assert cache.codec.name == "raw" == cache.stats()["codec"]
        assert cache.fill(torch.arange(300)) == 100
        assert same_bits(cache.gather(torch.arange(300)), x)


@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (9,), (20, 3, 5)], ids=str)
def test_tables_of_any_shape(shape):
    x = packable(torch.float16, shape)
    cache = SlabCache(make(x, "raw"), 1000, ["cpu"], codec="auto")
    assert cache.fill(torch.arange(0, shape[0], 2)) == -(-shape[0] // 2)
    assert same_bits(cache.gather(torch.arange(shape[0])), x)


def test_a_codec_that_cannot_be_is_refused():
    x = weights(100, 16)
    raw, packed = make(x, "raw"), make(x, "compact")
    for codec in ("auto", "ibp", "raw", InvariantCodec.fit(x)):
        with pytest.raises(ArgumentError, match="codec: .* but the table is packed by ibp"):
            SlabCache(packed, 1000, ["cpu"], codec=codec)
    with pytest.raises(ArgumentError, match="codec: 'nonsense' is not known"):
        SlabCache(raw, 1000, ["cpu"], codec="nonsense")
    with pytest.raises(ArgumentError, match="codec: fitted for rows"):
        SlabCache(raw, 1000, ["cpu"], codec=InvariantCodec.fit(weights(50, 8)))
    with pytest.raises(ArgumentTypeError, match="codec: expected a name or a codec, got int"):
        SlabCache(raw, 1000, ["cpu"], codec=5)  # type: ignore[arg-type]
    assert SlabCache(packed, 1000, ["cpu"]).codec is packed.codec


def test_the_sample_is_drawn_from_all_rows(monkeypatch):
    # Rows that pack, behind more than a sample of rows that do not.
    x = random_bits(torch.float32, (4000, 16))
    x[2000:] = torch.randint(4, (2000, 16)).float()
    monkeypatch.setattr("bitslab.tables.slabs.SAMPLE_BYTES", 32_000)
    cache = SlabCache(make(x, "raw"), 64_000, ["cpu"], codec="ibp")
    assert float(cache.codec.packed_bytes(x[2000:]).float().mean()) < 40
    ids = torch.from_numpy(np.arange(3999, -1, -1))
    assert cache.fill(ids) > 1600
    assert same_bits(cache.gather(ids), x.flip(0))
