"""What never makes the host wait for a GPU: lookups and steps of rows that are all resident."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bitslab
from bitslab.embedding import CachedRows
from bitslab.errors import IndexRangeError
from bitslab.integrations.embedding import CachedEmbeddingBag
from tests.helpers import same_bits

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

N_ROWS, DIM = 4000, 32
A_MOMENT = 600_000_000  # cycles: a third of a second, which no lookup takes


@pytest.fixture(autouse=True)
def no_error_is_left_behind():
    """Every test ends with no error pending on the GPU."""
    yield
    torch.cuda.set_sync_debug_mode("default")
    bitslab.raise_pending_errors()


def made(**options) -> CachedEmbeddingBag:
    weight = torch.randn(N_ROWS, DIM)
    defaults = {"cache_ratio": 0.5, "mode": "sum", "device": "cuda", "codec": "ibp"}
    merged: dict[str, Any] = defaults | {"freeze": False} | options
    return CachedEmbeddingBag.from_pretrained(weight, **merged)


def train(bag, optimizer, ids, offsets):
    optimizer.zero_grad()
    bag(ids, offsets).sum().backward()
    optimizer.step()


def assert_does_not_wait(work):
    """Run `work` while the GPU is busy; it must be done before the GPU is."""
    torch.cuda.synchronize()
    torch.cuda._sleep(A_MOMENT)
    busy = torch.cuda.Event()
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    work()
    torch.cuda.set_sync_debug_mode("default")
    assert not busy.query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("n", [600, 60_000])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_training_by_prefetched_ids_does_not_wait(sparse, n, dtype):
    bag = made(sparse=sparse)
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    batches = [torch.randint(500, (n,), device="cuda").to(dtype) for _ in range(4)]
    offsets = torch.arange(0, n, 3, device="cuda", dtype=dtype)
    for ids in batches:
        bag.prefetch(ids)
        train(bag, optimizer, ids, offsets)
    for ids in batches:
        bag.prefetch(ids)
        assert_does_not_wait(lambda ids=ids: train(bag, optimizer, ids, offsets))


@pytest.mark.parametrize("n", [600, 60_000])
def test_training_by_ids_on_the_cpu_does_not_wait(n):
    bag = made()
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    batches = [torch.randint(500, (n,)) for _ in range(4)]
    offsets = torch.arange(0, n, 3, device="cuda")
    for ids in batches:
        train(bag, optimizer, ids, offsets)
    for ids in batches:
        assert_does_not_wait(lambda ids=ids: train(bag, optimizer, ids, offsets))


@pytest.mark.parametrize("cache", ["rows", "packed"])
@pytest.mark.parametrize("n", [600, 6000, 60_000])
def test_inference_does_not_wait(n, cache):
    bag = made(freeze=True, cache=cache)
    batches = [torch.randint(N_ROWS, (n,), device="cuda") for _ in range(4)]
    offsets = torch.arange(0, n, 3, device="cuda")
    with torch.no_grad():
        for ids in batches:
            bag(ids, offsets)
        for ids in batches:
            assert_does_not_wait(lambda ids=ids: bag(ids, offsets))


def test_prefetching_does_not_wait():
    bag = made()
    batches = [torch.randint(N_ROWS, (600,), device="cuda") for _ in range(3)]
    bag.prefetch(batches[0])
    for ids in batches:
        assert_does_not_wait(lambda ids=ids: bag.prefetch(ids))


@pytest.mark.parametrize("how", ["as it was", "written to", "another", "a view", "untracked"])
def test_results_do_not_depend_on_what_was_prefetched(how):
    weight = torch.randn(N_ROWS, DIM)
    rows = CachedRows.from_tensor(weight, cache_rows=400, device="cuda")
    for _ in range(5):
        with torch.inference_mode(how == "untracked"):
            ids = torch.randint(N_ROWS, (20, 10), device="cuda")
            rows.prefetch(ids)
            if how in ("written to", "untracked"):
                ids.copy_(torch.randint(N_ROWS, (20, 10)))
            elif how == "another":
                ids = torch.randint(N_ROWS, (20, 10), device="cuda")
            elif how == "a view":
                ids = ids.t()
            matrix, index = rows.lookup(ids, train=True)
            assert same_bits(matrix[index].detach().cpu(), weight[ids.cpu()])


def test_rows_of_ids_that_have_arrived_are_fetched_at_the_next_lookup():
    weight = torch.randn(N_ROWS, DIM)
    rows = CachedRows.from_tensor(weight, cache_rows=400, device="cuda")
    coming = torch.arange(3000, 3100, device="cuda")
    rows.prefetch(coming)
    torch.cuda.synchronize()
    rows.lookup(torch.arange(10), train=True)
    assert rows.source.prefetched is not None
    matrix, index = rows.lookup(coming, train=True)
    assert same_bits(matrix[index].detach().cpu(), weight[3000:3100])


def test_a_bad_id_that_was_prefetched_is_told_by_its_lookup():
    rows = CachedRows.from_tensor(torch.randn(N_ROWS, DIM), cache_rows=400, device="cuda")
    ids = torch.tensor([1, N_ROWS], device="cuda")
    rows.prefetch(ids)
    torch.cuda.synchronize()
    rows.lookup(torch.arange(10), train=True)
    with pytest.raises(IndexRangeError, match="position 1"):
        rows.lookup(ids, train=True)
