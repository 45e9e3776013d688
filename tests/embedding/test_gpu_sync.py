"""What never makes the host wait for a GPU: lookups and steps of rows that are all resident."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import bitslab
from bitslab.embedding import CachedRows
from bitslab.errors import BitslabError, IndexRangeError
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


def whole(**options) -> CachedEmbeddingBag:
    """Make a bag whose rows are all resident."""
    return made(cache_ratio=1.0, **options)


def beside_torch(optimizer: str, **options):
    """Make such a bag and what it stands for, each with an optimizer."""
    bag = whole(**options)
    plain = torch.nn.EmbeddingBag.from_pretrained(
        bag.weight.cuda(), freeze=False, mode="sum", **options
    )
    kind = getattr(torch.optim, optimizer)
    return [(each, kind(each.parameters(), lr=0.1)) for each in (bag, plain)]


def drawn(n: int, dtype: torch.dtype = torch.int64) -> list[torch.Tensor]:
    return [torch.randint(N_ROWS, (n,), device="cuda", dtype=dtype) for _ in range(4)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("n", [600, 60_000])
@pytest.mark.parametrize(
    ("optimizer", "sparse"), [("SGD", False), ("Adagrad", False), ("SGD", True)]
)
def test_training_a_table_that_is_resident_whole_does_not_wait(optimizer, sparse, n, dtype):
    (bag, ours), (plain, theirs) = beside_torch(optimizer, sparse=sparse)
    batches, offsets = drawn(n, dtype), torch.arange(0, n, 3, device="cuda", dtype=dtype)
    train(bag, ours, batches[0], offsets)
    for ids in batches[1:]:
        assert_does_not_wait(lambda ids=ids: train(bag, ours, ids, offsets))
    for ids in batches:
        train(plain, theirs, ids, offsets)
    assert same_bits(bag.weight, plain.weight.cpu())
    assert bag.num_hits_history == [len(ids.unique()) for ids in batches]
    bag.flush()
    assert same_bits(bag.rows.table.decoded(0, N_ROWS), plain.weight.cpu())


def test_sparse_adam_of_a_table_that_is_resident_whole_waits_in_its_step_alone():
    (bag, ours), (plain, theirs) = beside_torch("SparseAdam", sparse=True)
    offsets = torch.arange(0, 600, 3, device="cuda")
    for number, ids in enumerate(drawn(600)):
        ours.zero_grad()
        work = lambda ids=ids: bag(ids, offsets).sum().backward()  # noqa: E731
        work() if number == 0 else assert_does_not_wait(work)
        ours.step()
        train(plain, theirs, ids, offsets)
    assert same_bits(bag.weight, plain.weight.cpu())


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_table_that_is_resident_whole_is_copied_moved_and_read_as_it_is(max_norm):
    (bag, ours), (plain, theirs) = beside_torch("Adagrad", max_norm=max_norm, padding_idx=7)
    offsets = torch.arange(0, 600, 3, device="cuda")
    batches = drawn(600)
    for ids in batches:
        train(bag, ours, ids, offsets)
        train(plain, theirs, ids, offsets)
    assert same_bits(copy.deepcopy(bag).weight, plain.weight.cpu())
    assert same_bits(bag.state_dict()["weight"], plain.weight.cpu())
    for wants_grad in (False, True):
        with torch.set_grad_enabled(wants_grad):
            out = bag.eval()(batches[0], offsets)
            assert same_bits(out, plain.eval()(batches[0], offsets))
    bag.train().cpu()
    assert same_bits(bag.weight, plain.weight.cpu())


@pytest.mark.parametrize("n", [600, 60_000])
def test_a_bad_id_in_training_a_table_that_is_resident_whole_is_told_later(n):
    bag = whole()
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    offsets = torch.arange(0, n, 3, device="cuda")
    good, bad, *_ = drawn(n)
    bad[n // 2] = N_ROWS
    train(bag, optimizer, good, offsets)
    assert_does_not_wait(lambda: train(bag, optimizer, bad, offsets))
    with pytest.raises(IndexRangeError, match=f"index {N_ROWS} at position {n // 2}"):
        bag(good, offsets)
    train(bag, optimizer, good, offsets)


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


def test_what_another_stream_has_changed_is_read():
    (bag, ours), (plain, theirs) = beside_torch("SGD")
    ids, offsets = drawn(600)[0], torch.arange(0, 600, 3, device="cuda")
    train(bag, ours, ids, offsets)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        train(bag, ours, ids, offsets)
    found = bag.weight
    for _ in range(2):
        train(plain, theirs, ids, offsets)
    assert same_bits(found, plain.weight.cpu())
    bag.flush()
    assert same_bits(bag.rows.table.decoded(0, N_ROWS), plain.weight.cpu())


def test_training_lookups_are_not_captured_by_a_graph():
    bag = whole()
    ids, offsets = drawn(600)[0], torch.arange(0, 600, 3, device="cuda")
    bag(ids, offsets).sum().backward()
    with (
        pytest.raises(BitslabError, match="cannot be captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        _ = ids + 1  # torch warns of a graph with nothing in it
        bag(ids, offsets)
    bag(ids, offsets).sum().backward()


def test_a_bad_id_is_told_before_rows_are_saved():
    bag = whole()
    ids, offsets = drawn(600)[0], torch.arange(0, 600, 3, device="cuda")
    ids[5] = N_ROWS
    bag(ids, offsets).sum().backward()
    with pytest.raises(IndexRangeError, match=str(N_ROWS)):
        bag.state_dict()
    assert bag.state_dict()["weight"].shape[0] == N_ROWS
