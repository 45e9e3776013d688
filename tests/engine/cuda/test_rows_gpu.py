"""Raw rows by id, orders and maps on a real GPU: sizes and races that the emulation cannot show."""

from __future__ import annotations

import pytest
import torch

import bitslab
from bitslab.engine.kernels.cuda import CudaKernels, kernels_on
from bitslab.engine.kernels.cuda.ids import IdScratch, bin_shift
from bitslab.engine.kernels.format import BUCKET_ENTRIES, NO_ID, NOT_CACHED
from bitslab.errors import IndexRangeError

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

MEMORIES = pytest.mark.parametrize("on_host", [False, True], ids=["device", "page-locked"])
FILL = 0xA5


@pytest.fixture
def kernels() -> CudaKernels:
    return kernels_on(torch.device("cuda"))


def random_bytes(n: int, *, on_host: bool) -> torch.Tensor:
    flat = torch.randint(0, 256, (n,), dtype=torch.uint8, device="cuda")
    return flat.cpu().pin_memory() if on_host else flat


@MEMORIES
@pytest.mark.parametrize("row_bytes", [1, 3, 4, 20, 64, 128, 200, 256, 301, 602, 2048, 2052, 4104])
def test_rows_of_any_size_and_address_arrive(kernels, row_bytes, on_host):
    n_rows, n = 999, 5000
    for address, gap, to in ((0, 0, 0), (1, 0, 0), (4, 4, 12), (16, 16, 16), (8, 3, 1)):
        stride = row_bytes + gap
        flat = random_bytes(address + n_rows * stride, on_host=on_host)
        rows = flat[address:].view(n_rows, stride)
        for dtype in (torch.int32, torch.int64):
            ids = torch.randint(-n_rows, n_rows, (n,), device="cuda").to(dtype)
            expected = rows.cuda()[ids.long(), :row_bytes]
            for order in (None, torch.randperm(n, device="cuda").int()):
                whole = torch.full((to + n * row_bytes + 64,), FILL, device="cuda").byte()
                out = whole[to : to + n * row_bytes].view(n, row_bytes)
                kernels.copy_rows(rows, row_bytes, ids, out, order=order)
                assert torch.equal(out, expected)
                assert (whole[:to] == FILL).all()
                assert (whole[to + n * row_bytes :] == FILL).all()


@MEMORIES
def test_tables_and_outputs_of_more_than_four_gibibytes(kernels, on_host):
    n_rows, row_bytes = 4_500_000, 1000
    rows = random_bytes(n_rows * row_bytes, on_host=on_host).view(n_rows, row_bytes)
    ids = torch.randperm(n_rows, device="cuda")
    out = torch.empty(n_rows, row_bytes, dtype=torch.uint8, device="cuda")
    scratch = IdScratch.allocate("cuda", n_rows)
    order = kernels.ids.order(ids, n_rows, scratch)
    kernels.copy_rows(rows, row_bytes, ids, out, first_bad=scratch.first_bad, order=order)
    for some in torch.arange(n_rows, device="cuda").split(500_000):
        assert torch.equal(out[some].cpu(), rows[ids[some].to(rows.device)].cpu())


@MEMORIES
def test_a_bad_id_is_reported_and_nothing_is_written(kernels, on_host):
    rows = random_bytes(1000 * 512, on_host=on_host).view(1000, 512)
    ids = torch.randint(-1000, 1000, (20_000,), device="cuda")
    ids[7_777] = 1000
    ids[19_999] = -1001
    scratch = IdScratch.allocate("cuda", 20_000)
    scratch.order.fill_(-7)
    order = kernels.ids.order(ids, 1000, scratch)
    assert scratch.first_bad.item() == 7_777
    assert (scratch.order == -7).all()
    out = torch.full((20_000, 512), FILL, dtype=torch.uint8, device="cuda")
    kernels.copy_rows(rows, 512, ids, out, first_bad=scratch.first_bad, order=order)
    with pytest.raises(IndexRangeError, match="1000 at position 7777"):
        bitslab.raise_pending_errors("cuda")
    assert (out == FILL).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("n_rows", [7, 5000, 1 << 30])
def test_a_million_ids_are_ordered_bin_after_bin(kernels, n_rows, dtype):
    n = 1_000_003
    scratch = IdScratch.allocate("cuda", n)
    for _ in range(3):
        ids = torch.randint(-n_rows, n_rows, (n,), device="cuda").to(dtype)
        order = kernels.ids.order(ids, n_rows, scratch).long()
        assert scratch.first_bad.item() == -1
        assert torch.equal(order.sort().values, torch.arange(n, device="cuda"))
        bins = (ids.long() % n_rows)[order] >> bin_shift(n_rows)
        assert (bins.diff() >= 0).all()


def test_blocks_that_race_for_entries_lose_no_id(kernels):
    buckets = 1 << 16
    entries = torch.full((buckets * BUCKET_ENTRIES, 2), NO_ID, device="cuda")
    distinct = torch.randperm(1 << 22, device="cuda")[: buckets * BUCKET_ENTRIES // 2]
    ids = distinct.repeat(8)[torch.randperm(8 * len(distinct), device="cuda")]
    assert kernels.map.insert(entries, ids, torch.arange(len(ids), device="cuda")).item() == 0
    held = entries[:, 0][entries[:, 0] != NO_ID]
    assert torch.equal(held.sort().values, distinct.sort().values)
    assert torch.equal(ids[kernels.map.find(entries, distinct)], distinct)
    absent = torch.arange(1 << 22, 1 << 23, device="cuda")
    assert (kernels.map.find(entries, absent) == NOT_CACHED).all()


def test_a_map_filled_beyond_its_room_counts_what_is_left_out(kernels):
    buckets = 64
    entries = torch.full((buckets * BUCKET_ENTRIES, 2), NO_ID, device="cuda")
    ids = torch.randperm(100_000, device="cuda")
    failed = kernels.map.insert(entries, ids, ids * 3).item()
    assert failed == 100_000 - buckets * BUCKET_ENTRIES
    found = kernels.map.find(entries, ids)
    there = found != NOT_CACHED
    assert int(there.sum()) == buckets * BUCKET_ENTRIES
    assert torch.equal(found[there], ids[there] * 3)


@MEMORIES
def test_checking_ordering_and_copying_can_be_captured_in_a_graph(kernels, on_host):
    rows = random_bytes(5000 * 602, on_host=on_host).view(5000, 602)
    ids = torch.randint(-5000, 5000, (3000,), device="cuda")
    out = torch.zeros(3000, 602, dtype=torch.uint8, device="cuda")
    scratch = IdScratch.allocate("cuda", 3000)

    def gather() -> None:
        order = kernels.ids.order(ids, 5000, scratch)
        kernels.copy_rows(rows, 602, ids, out, first_bad=scratch.first_bad, order=order)

    gather()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather()
    for _ in range(3):
        ids.copy_(torch.randint(-5000, 5000, (3000,)))
        graph.replay()
        assert torch.equal(out.cpu(), rows.cpu()[ids.cpu()])
