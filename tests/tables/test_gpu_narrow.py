"""Narrow rows on a real GPU: those that share packed rows, and raw ones that begin at any byte."""

from __future__ import annotations

import pytest
import torch

import bitslab
from bitslab import CompressedTable, SlabCache
from bitslab.embedding import CachedRows
from bitslab.tables.parts import Layout
from tests.helpers import random_bits, same_bits

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

ROWS = 20_003
NARROW = {
    "bool": lambda: torch.rand(ROWS) < 0.1,
    "int8-rows-of-5": lambda: torch.randint(0, 3, (ROWS, 5)).to(torch.int8),
    "float16-rows-of-3": lambda: (0.05 * torch.randn(ROWS, 3)).half(),
    "bfloat16-rows-of-8": lambda: (0.05 * torch.randn(ROWS, 8)).bfloat16(),
    "int64": lambda: torch.randint(0, 7, (ROWS,)),
}
LAYOUTS: tuple[Layout, ...] = ("compact", "inplace")


@pytest.mark.parametrize("cached", [False, True], ids=["table", "cache"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("narrow", NARROW)
def test_narrow_rows_are_gathered_and_updated(narrow, layout, cached):
    x = NARROW[narrow]()
    with CompressedTable.from_tensor(x, layout, "ibp") as table:
        assert table.rows_per_packed_row > 1
        source: CompressedTable | SlabCache = table
        if cached:
            source = SlabCache(table, x.nbytes // 4)
            assert source.fill(torch.arange(ROWS - 1, 0, -3)) > 0
        ids = torch.randint(-ROWS, ROWS, (5000,))
        for sort in (False, True):
            for some in (ids.cuda(), ids.int().cuda()):
                assert same_bits(source.gather(some, sort=sort).cpu(), x[ids])
        assert same_bits(source.gather(ids, device="cuda").cpu(), x[ids])
        if isinstance(source, SlabCache):
            stats = source.stats()
            assert stats["hits"] + stats["misses"] == 5 * 5000 and stats["hits"] > 0
        chosen = torch.randperm(ROWS)[:300]
        fresh = x[chosen.flip(0)]
        x[chosen] = fresh
        table.update(chosen.cuda(), fresh.cuda())
        assert same_bits(source.gather(ids.cuda()).cpu(), x[ids])
        assert table.stats()["gathered_rows"] == 6 * 5000


@pytest.mark.parametrize("row_bytes", [1, 2, 3, 5, 7, 33, 101, 1433, 40_001])
def test_raw_rows_begin_at_any_byte_of_tables_and_slabs(row_bytes):
    x = random_bits(torch.uint8, (500, row_bytes))
    with CompressedTable.from_tensor(x, codec="raw") as table:
        cache = SlabCache(table, x.nbytes // 3)
        assert cache.fill(torch.randperm(500)) == 500 // 3
        ids = torch.randint(-500, 500, (777,))
        for source in (table, cache):
            assert torch.equal(source.gather(ids.cuda()).cpu(), x[ids])


def test_bad_ids_of_narrow_rows_are_named_and_leave_the_output():
    x = NARROW["bfloat16-rows-of-8"]()
    with CompressedTable.from_tensor(x, codec="ibp") as table:
        for sort in (False, True):
            out = torch.full((3, 8), 7.0, dtype=x.dtype, device="cuda")
            table.gather(torch.tensor([1, ROWS, 2], device="cuda"), out=out, sort=sort)
            with pytest.raises(bitslab.IndexRangeError, match=f"index {ROWS} at position 1"):
                bitslab.raise_pending_errors()
            assert (out == 7).all()


def test_gathers_of_narrow_rows_can_be_captured_and_allocate_nothing():
    x = NARROW["bfloat16-rows-of-8"]()
    with CompressedTable.from_tensor(x, codec="ibp") as table:
        ids = torch.randint(ROWS, (1000,), device="cuda")
        out = torch.zeros(1000, 8, dtype=x.dtype, device="cuda")
        table.gather(ids, out=out)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        table.gather(ids, out=out)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            table.gather(ids, out=out)
        for _ in range(3):
            ids.copy_(torch.randint(ROWS, (1000,)))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out.cpu(), x[ids.cpu()])


def test_resident_rows_of_a_narrow_packed_embedding_come_from_the_gpu():
    """The map of resident rows knows rows of the table, several of which share a packed row."""
    x = 0.05 * torch.randn(ROWS, 8)
    rows = CachedRows.from_tensor(x, cache_rows=2000, device="cuda", codec="ibp", trainable=False)
    assert rows.table.rows_per_packed_row == 8
    ids = torch.randint(ROWS, (3000,), device="cuda")
    cache = rows.cache_on_gpu()
    assert cache is not None
    out = torch.empty(3000, 8, device="cuda")
    rows.table.gather_on_gpu(cache, ids, out)
    assert torch.equal(out.cpu(), x[ids.cpu()])
