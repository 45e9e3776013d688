"""Tables of narrow rows: never larger than raw ones, smaller where packing saves, exact always."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import bitslab
from bitslab import CompressedFeature, CompressedTable, PrefetchRing, SlabCache
from bitslab.compressed import CompressedTensor
from bitslab.engine.codecs import InvariantCodec, RawCodec
from bitslab.engine.kernels.format import shared_row_items
from bitslab.errors import ArgumentError, CorruptedDataError, IndexRangeError

DTYPES = (
    torch.bool,
    torch.int8,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.float64,
    torch.complex64,
)
TAILS = ((), (1,), (3,), (5,), (8,))
#: What a table may take beyond its raw bytes: zeros behind its end and, in place, where host memory
#: does not shrink, the profile and the filler of the last packed row.
SPARE_BYTES = {"compact": 32, "inplace": 1024}


def values(dtype, shape, kind="few"):
    generator = torch.Generator().manual_seed(7)
    if kind == "noise":
        size = int(np.prod(shape)) * dtype.itemsize
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        return (data % 2 if dtype == torch.bool else data).view(dtype).view(shape)
    if dtype.is_floating_point or dtype.is_complex:
        return (0.05 * torch.randn(shape, generator=generator)).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 7, shape, generator=generator).to(dtype)


def data_of(t):
    return t.contiguous().reshape(-1).view(torch.uint8)


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(data_of(a), data_of(b))


def updated(t, ids, rows):
    expected = t.clone()
    for i, row in zip(ids.tolist(), rows, strict=True):
        expected[i] = row
    return expected


#: What `bitslab.compress` saves on, with the least ratio of a table of it.
SAVING = {
    "bool-masks": (lambda n: torch.rand(n) < 0.1, 7.0),
    "int64-labels": (lambda n: torch.randint(0, 7, (n,)), 19.0),
    "float32-rows-of-8": (lambda n: 0.05 * torch.randn(n, 8), 1.15),
    "bfloat16-rows-of-8": (lambda n: (0.05 * torch.randn(n, 8)).bfloat16(), 1.38),
}


@pytest.mark.parametrize("saving", SAVING)
def test_what_compress_saves_a_table_saves_too(saving):
    make, least = SAVING[saving]
    torch.manual_seed(0)
    t = make(40_000)
    with CompressedTable.from_tensor(t) as table:
        stats = table.stats()
        assert table.nbytes == stats["packed_bytes"] + stats["metadata_bytes"]
        assert stats["ratio"] == t.nbytes / table.nbytes > least
        assert stats["ratio"] > 0.9 * bitslab.compress(t).ratio
        ids = torch.randint(-len(t), len(t), (999,))
        assert same_bits(table.gather(ids), t[ids]) and same_bits(table[:], t)


@pytest.mark.drawn(7)
@pytest.mark.parametrize("layout", ["compact", "inplace"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_table_is_larger_than_its_rows(dtype, layout):
    """All metadata counted, for every width of a row; in place, a bit a packed row."""
    for tail in TAILS:
        for n, kind in ((1, "few"), (40, "few"), (700, "few"), (700, "noise")):
            t = values(dtype, (n, *tail), kind)
            with CompressedTable.from_tensor(t, layout) as table:
                flags = 0 if layout == "compact" else n // table.rows_per_packed_row // 8
                what = (tail, n, kind, table)
                assert table.nbytes <= t.nbytes + flags + SPARE_BYTES[layout], what
                ids = torch.randint(-n, n, (50,))
                assert same_bits(table.gather(ids), t[ids]), what
                where, rows = torch.randint(-n, n, (20,)), values(dtype, (20, *tail), "noise")
                table.update(where, rows)
                assert same_bits(table[:], updated(t, where, rows)), what


@pytest.mark.parametrize("make", ["from_tensor", "from_batches"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [1, 3, 5, 7, 9, 25, 31])
def test_no_table_in_place_takes_whole_words_for_narrow_rows(columns, dtype, make):
    """Rows of such sizes share packed rows of whole words, or are raw."""
    t = values(dtype, (5000, columns))
    rows = t if make == "from_tensor" else iter(t.split(1000))
    with CompressedTable.from_tensor(rows, "inplace") as table:
        if table.rows_per_packed_row == 1 and table.row_bytes % 4:
            assert table.codec.name == "raw"
            assert table.nbytes == -(-t.nbytes // 4) * 4 + 16
        assert table.nbytes <= t.nbytes + 5000 // 8 + SPARE_BYTES["inplace"]
        assert same_bits(table[:], t)


@pytest.mark.parametrize("saved", ["most", "nothing"])
def test_longer_rows_in_place_take_whole_words_only_where_more_is_saved(saved):
    noise = torch.randint(0, 256, (4000, 65), dtype=torch.uint8)
    t = noise % 4 if saved == "most" else torch.where(torch.rand(4000, 65) < 0.04, noise, noise | 1)
    with CompressedTable.from_tensor(t, "inplace") as table:
        assert (table.codec.name == "raw") == (saved == "nothing")
        if saved == "nothing":
            assert table.nbytes == t.nbytes + 16
        table.gather(torch.arange(4000))
        assert table.stats()["moved_bytes"] <= t.nbytes + 3 * 4000
        assert same_bits(table[:], t)


@pytest.mark.parametrize("layout", ["compact", "inplace"])
def test_rows_that_would_save_little_together_are_raw(layout):
    """A gather from packed rows takes several times as long on a CPU."""
    torch.manual_seed(0)
    t = (0.05 * torch.randn(40_000, 3)).half()
    with CompressedTable.from_tensor(t, codec="ibp") as packed:
        assert packed.rows_per_packed_row > 1 and 1.05 < packed.ratio < 1.125
    with CompressedTable.from_tensor(t, layout) as table:
        assert table.codec.name == "raw" and table.nbytes == t.nbytes + 16


@pytest.mark.parametrize("row_bytes", [1, 2, 3, 5, 6, 7, 33, 63, 65, 101, 1433])
def test_raw_rows_take_exactly_their_bytes_in_tables_and_caches(row_bytes):
    t = values(torch.uint8, (300, row_bytes), "noise")
    with CompressedTable.from_tensor(t, codec="raw") as table:
        assert table.nbytes == -(-t.nbytes // 4) * 4 + 16
        hot = torch.randperm(300)
        cache = SlabCache(table, 100 * row_bytes + row_bytes - 1, ["cpu"])
        assert cache.fill(hot) == cache.stats()["cached_rows"] == 100
        assert cache.stats()["slab_bytes"] == [-(-100 * row_bytes // 4) * 4]
        assert same_bits(cache.gather(torch.arange(-300, 300)), torch.cat([t, t]))
        assert (cache.stats()["hits"], cache.stats()["misses"]) == (200, 400)
        table.update(hot[:7], t[:7])
        assert cache.stats()["cached_rows"] == 93
        expected = updated(t, hot[:7], t[:7])
        assert same_bits(cache.gather(torch.arange(300)), expected)


@pytest.mark.parametrize("item_bytes", range(0, 70))
def test_rows_that_share_a_packed_row_are_few_and_whole_words(item_bytes):
    each = shared_row_items(item_bytes)
    row_bytes = each * item_bytes
    assert (each == 1) == (item_bytes == 0 or item_bytes >= 64)
    assert each == 1 or (row_bytes % 4 == 0 and 150 < row_bytes < 400)


def narrow_table(n=5000, layout="compact"):
    torch.manual_seed(1)
    t = (0.05 * torch.randn(n, 8)).bfloat16()
    table = CompressedTable.from_tensor(t, layout, "ibp")
    assert table.rows_per_packed_row == 16
    return t, table


@pytest.mark.parametrize("layout", ["compact", "inplace"])
def test_a_cache_of_narrow_rows_holds_those_that_are_packed_together(layout):
    t, table = narrow_table(5003, layout)
    cache = SlabCache(table, 20_000, ["cpu", "cpu"])
    rows = cache.fill(torch.tensor([5002, 0, 17, 16, 160]))
    assert rows == cache.stats()["cached_rows"] == 3 * 16 + 5003 % 16
    ids = torch.tensor([0, 15, 16, 31, 32, 160, -1, 5000, 4000])
    assert same_bits(cache.gather(ids), t[ids])
    assert (cache.stats()["hits"], cache.stats()["misses"]) == (7, 2)
    table.update(torch.tensor([3]), t[:1] * 2)
    assert cache.stats()["cached_rows"] == 2 * 16 + 5003 % 16
    expected = updated(t, torch.tensor([3]), t[:1] * 2)
    assert same_bits(cache.gather(torch.arange(5003)), expected)
    full = SlabCache(table, 10**6, ["cpu"])
    assert full.fill(torch.randperm(5003)) == 5003
    assert sum(full.stats()["slab_bytes"]) < t.nbytes
    with pytest.raises(ArgumentError, match="capacity_bytes: 15, accepted are 16, which a row"):
        SlabCache(table, 15, ["cpu"])
    # There is no room for those that come together.
    assert SlabCache(table, 16, ["cpu"]).fill(torch.arange(5003)) == 0


@pytest.mark.parametrize("layout", ["compact", "inplace"])
def test_updates_of_narrow_rows_leave_their_neighbours(layout):
    t, table = narrow_table(5003, layout)
    generator = np.random.default_rng(0)
    for rows in (1, 3, 400):
        ids = torch.from_numpy(generator.integers(-len(t), len(t), rows))
        new = values(torch.bfloat16, (rows, 8), "noise")
        t = updated(t, ids, new)
        table.update(ids, new)
        assert same_bits(table[:], t)
    # Packed rows of noise alone are raw, where they were or moved.
    ids = torch.cat([torch.arange(16), torch.arange(4992, 5003)])
    noise = values(torch.bfloat16, (27, 8), "noise")
    t = updated(t, ids, noise)
    table.update(ids, noise)
    assert same_bits(table[:], t)
    lengths, _ = table.row_lengths(torch.arange(313))
    raw = sum(min(16, 5003 - 16 * int(row)) for row in np.flatnonzero(lengths == 0))
    assert 0 < raw < 5003 and table.stats()["packed_rows"] == 5003 - raw
    assert table.stats()["moved_rows"] == (raw if layout == "compact" else 0)
    table.compact(refit=True)
    assert same_bits(table[:], t) and table.overflow_bytes == 0


def test_a_bad_update_of_narrow_rows_changes_nothing():
    t, table = narrow_table()
    for ids, rows, error in (
        (torch.tensor([0, 5000]), t[:2], IndexRangeError),
        (torch.tensor([0]), t[:2], ArgumentError),
        (torch.tensor([0]), t[:1, :7], ArgumentError),
    ):
        with pytest.raises(error):
            table.update(ids, rows)
    assert same_bits(table[:], t)


def test_a_damaged_packed_row_is_named_by_its_first_row():
    t, table = narrow_table()
    table._parts.tensors["lengths"][2] = 1
    for ids in ([35], [1, 40]):
        with pytest.raises(CorruptedDataError, match="row 32 is damaged"):
            table.gather(torch.tensor(ids))
    with pytest.raises(CorruptedDataError, match="row 32 is damaged"):
        table.update(torch.tensor([0, 33]), t[:2] * 2)
    assert same_bits(table.gather(torch.arange(32)), t[:32])


@pytest.mark.parametrize("layout", ["compact", "inplace"])
def test_narrow_tables_go_through_files(layout, tmp_path):
    t, table = narrow_table(5003, layout)
    path = tmp_path / "table.bitslab"
    table.save(path)
    assert same_bits(bitslab.load(path).decompress(), t)
    for again in ("compact", "inplace"):
        with CompressedTable.from_file(path, again) as opened:
            assert opened.rows_per_packed_row == 16 and opened.codec == table.codec
            assert same_bits(opened[:], t)
    # `compress` stores narrow items in such rows too.
    compressed = bitslab.compress(t)
    compressed.save(path)
    with CompressedTable.from_file(path, layout) as opened:
        assert opened.rows_per_packed_row > 16 and same_bits(opened[:], t)


def test_files_with_one_narrow_row_a_packed_row_still_load(tmp_path):
    """As tables were written before narrow rows shared packed rows."""
    t, _ = narrow_table()
    path = tmp_path / "table.bitslab"
    for codec in (InvariantCodec.fit(t), RawCodec((8,), torch.bfloat16)):
        CompressedTensor(codec, codec.encode(t), t.shape).save(path)
        for layout in ("compact", "inplace"):
            with CompressedTable.from_file(path, layout) as opened:
                assert opened.rows_per_packed_row == 1 and opened.codec == codec
                assert same_bits(opened[:], t)


def test_narrow_tables_reach_other_processes():
    t, table = narrow_table(5003)
    ids = torch.tensor([0, 17, -1])
    for other in (pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
        assert other.rows_per_packed_row == 16 and same_bits(other.gather(ids), t[ids])
    with CompressedTable.attach(table.handle()) as attached:
        assert attached.shape == t.shape and same_bits(attached[:], t)
        cache = SlabCache(table, 10**6, ["cpu"])
        cache.fill(torch.arange(0, 5003, 100))
        with SlabCache.attach(attached, cache.handle(), "cpu") as there:
            assert there.stats()["cached_rows"] == cache.stats()["cached_rows"]
            assert same_bits(there.gather(ids), t[ids])


def test_a_codec_fitted_to_rows_or_to_some_together_is_taken_as_it_is():
    t, _ = narrow_table()
    for each in (1, 4):
        codec = InvariantCodec.fit(t.view(-1, 8 * each))
        with CompressedTable.from_tensor(t, codec=codec) as table:
            assert table.codec is codec and table.rows_per_packed_row == each
            assert same_bits(table[:], t)
    for shape in ((12,), (4, 8), (5000,)):
        rows = t.flatten()[: 3 * int(np.prod(shape))].view(3, *shape)
        with pytest.raises(ArgumentError, match="codec: fitted for rows"):
            CompressedTable.from_tensor(t, codec=InvariantCodec.fit(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_narrow_rows_that_pack_well_alone_are_packed_alone(dtype):
    """A gather then reads no others."""
    torch.manual_seed(3)
    t = (torch.randint(16, (4000, 8)) / 16).to(dtype)
    with CompressedTable.from_tensor(t) as table:
        assert table.rows_per_packed_row == 1 and table.ratio > 1.1
        table.gather(torch.randint(4000, (1000,)))
        assert table.stats()["moved_bytes"] < 1000 * table.row_bytes


def test_batches_of_any_size_share_packed_rows():
    t, table = narrow_table(5003)
    batches = torch.split(t, [1, 7, 2000, 2995])
    with CompressedTable.from_tensor(iter(batches), codec=table.codec) as made:
        assert made.nbytes == table.nbytes and same_bits(made[:], t)


@pytest.mark.parametrize("cache_ratio", [0.0, 0.001, 0.3])
def test_a_feature_of_narrow_rows_is_no_larger_than_they_are(cache_ratio):
    t, _ = narrow_table()
    feature = CompressedFeature.from_tensor(t, device="cpu", cache_ratio=cache_ratio)
    ids = torch.randint(0, len(t), (300,))
    assert same_bits(feature.gather(ids), t[ids])
    stats = feature.stats()
    assert stats["ratio"] > 1.3 and stats["gathered_rows"] == 300
    assert (stats["cache"] is not None) == (cache_ratio == 0.3)
    assert any("hold no packed row" in n for n in stats["notes"]) == (cache_ratio == 0.001)


def test_gathers_of_a_ring_over_a_cache_are_counted():
    t, table = narrow_table()
    cache = SlabCache(table, 10_000, ["cpu"])
    cache.fill(torch.arange(500))
    batches = [torch.arange(begin, begin + 100) for begin in range(0, 1000, 100)]
    with PrefetchRing(cache, batches, device="cpu") as ring:
        for ids, rows in zip(batches, ring, strict=True):
            assert same_bits(rows, t[ids])
    stats = table.stats()
    assert (stats["gathers"], stats["gathered_rows"]) == (10, 1000)
    assert stats["gathered_bytes"] == 1000 * table.row_bytes
    assert stats["moved_bytes"] == cache.stats()["host_bytes"] > 0
