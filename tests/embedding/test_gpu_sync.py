"""What never makes the host wait for a GPU: lookups and steps of rows that are all resident."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from bitslab.embedding import CachedRows, EvictionStrategy
from bitslab.errors import BitslabError, IndexRangeError
from bitslab.integrations.embedding import CachedEmbeddingBag
from tests.helpers import same_bits

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

N_ROWS, DIM = 4000, 32
TORCH_OPTIONS = {"sparse", "max_norm", "padding_idx"}


def made(**options) -> CachedEmbeddingBag:
    weight = torch.randn(N_ROWS, DIM)
    defaults = {"cache_ratio": 0.5, "mode": "sum", "device": "cuda", "codec": "ibp"}
    merged: dict[str, Any] = defaults | {"freeze": False} | options
    return CachedEmbeddingBag.from_pretrained(weight, **merged)


def train(bag, optimizer, ids, offsets):
    optimizer.zero_grad()
    bag(ids, offsets).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("n", [600, 60_000])
def test_training_by_ids_on_the_cpu_does_not_wait(n, run_ahead):
    bag = made()
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    batches = [torch.randint(500, (n,)) for _ in range(4)]
    offsets = torch.arange(0, n, 3, device="cuda")
    for ids in batches:
        train(bag, optimizer, ids, offsets)
    for ids in batches:
        run_ahead(lambda ids=ids: train(bag, optimizer, ids, offsets))


@pytest.mark.parametrize("cache", ["rows", "packed"])
@pytest.mark.parametrize("n", [600, 6000, 60_000])
def test_inference_does_not_wait(n, cache, run_ahead):
    bag = made(freeze=True, cache=cache)
    batches = [torch.randint(N_ROWS, (n,), device="cuda") for _ in range(4)]
    offsets = torch.arange(0, n, 3, device="cuda")
    with torch.no_grad():
        for ids in batches:
            bag(ids, offsets)
        for ids in batches:
            run_ahead(lambda ids=ids: bag(ids, offsets))


def whole(**options) -> CachedEmbeddingBag:
    """Make a bag whose rows are all resident."""
    return made(**{"cache_ratio": 1.0} | options)


def beside_torch(optimizer: str, **options):
    """Make such a bag and what it stands for, each with an optimizer."""
    bag = whole(**options)
    of_torch = {name: options[name] for name in options.keys() & TORCH_OPTIONS}
    plain = torch.nn.EmbeddingBag.from_pretrained(
        bag.weight.cuda(), freeze=False, mode="sum", **of_torch
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
def test_training_a_table_that_is_resident_whole_does_not_wait(
    optimizer, sparse, n, dtype, run_ahead
):
    (bag, ours), (plain, theirs) = beside_torch(optimizer, sparse=sparse)
    batches, offsets = drawn(n, dtype), torch.arange(0, n, 3, device="cuda", dtype=dtype)
    for ids in batches[:2]:  # load the kernels
        train(bag, ours, ids, offsets)
    for ids in batches[2:]:
        run_ahead(lambda ids=ids: train(bag, ours, ids, offsets))
    for ids in batches:
        train(plain, theirs, ids, offsets)
    assert same_bits(bag.weight, plain.weight.cpu())
    assert bag.num_hits_history == [len(ids.unique()) for ids in batches]
    bag.flush()
    assert same_bits(bag.rows.table.decoded(0, N_ROWS), plain.weight.cpu())


def test_sparse_adam_of_a_table_that_is_resident_whole_waits_in_its_step_alone(run_ahead):
    (bag, ours), (plain, theirs) = beside_torch("SparseAdam", sparse=True)
    offsets = torch.arange(0, 600, 3, device="cuda")
    for number, ids in enumerate(drawn(600)):
        ours.zero_grad()
        work = lambda ids=ids: bag(ids, offsets).sum().backward()  # noqa: E731
        work() if number == 0 else run_ahead(work)
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
def test_a_bad_id_in_training_a_table_that_is_resident_whole_is_reported_later(n, run_ahead):
    bag = whole()
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    offsets = torch.arange(0, n, 3, device="cuda")
    good, bad, *_ = drawn(n)
    bad[n // 2] = N_ROWS
    train(bag, optimizer, good, offsets)
    run_ahead(lambda: train(bag, optimizer, bad, offsets))
    with pytest.raises(IndexRangeError, match=f"index {N_ROWS} at position {n // 2}"):
        bag(good, offsets)
    train(bag, optimizer, good, offsets)


STEPS = [
    pytest.param("SGD", False, id="sgd"),
    pytest.param("Adagrad", False, id="adagrad"),
    pytest.param("SGD", True, id="sgd-sparse"),
]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("n", [600, 60_000])
@pytest.mark.parametrize(("optimizer", "sparse"), STEPS)
def test_training_by_ids_on_the_gpu_does_not_wait_for_resident_rows(
    optimizer, sparse, n, dtype, run_ahead
):
    (bag, ours), (plain, theirs) = beside_torch(optimizer, sparse=sparse, cache_ratio=0.5)
    offsets = torch.arange(0, n, 3, device="cuda", dtype=dtype)
    batches = [torch.randint(500, (n,), device="cuda", dtype=dtype) for _ in range(6)]
    for ids in batches[:2]:
        train(bag, ours, ids, offsets)
    for ids in batches[2:]:
        run_ahead(lambda ids=ids: train(bag, ours, ids, offsets))
    for ids in batches:
        train(plain, theirs, ids, offsets)
    assert bag.num_miss_history == [0] * len(batches)
    assert same_bits(bag.weight, plain.weight.cpu())


@pytest.mark.parametrize(("optimizer", "sparse"), STEPS)
def test_two_steps_ahead_of_the_gpu_do_not_wait_for_resident_rows(optimizer, sparse, run_ahead):
    # Of a packed table the host puts what has left into the table before the next lookup.
    (bag, ours), (plain, theirs) = beside_torch(
        optimizer, sparse=sparse, cache_ratio=0.5, codec="raw"
    )
    offsets = torch.arange(0, 600, 3, device="cuda")
    batches = [torch.randint(500, (600,), device="cuda") for _ in range(8)]
    for ids in batches[:-2]:  # room for rows that miss grows with the first ones
        train(bag, ours, ids, offsets)
        torch.cuda.synchronize()
    run_ahead(lambda: [train(bag, ours, ids, offsets) for ids in batches[-2:]])
    for ids in batches:
        train(plain, theirs, ids, offsets)
    assert same_bits(bag.weight, plain.weight.cpu())


@pytest.mark.parametrize("codec", ["ibp", "raw"])
@pytest.mark.parametrize(("optimizer", "sparse"), STEPS)
def test_training_by_ids_on_the_gpu_does_not_wait_for_rows_that_miss(
    optimizer, sparse, codec, run_ahead
):
    (bag, ours), (plain, theirs) = beside_torch(
        optimizer, sparse=sparse, cache_ratio=0.5, codec=codec
    )
    offsets = torch.arange(0, 600, 3, device="cuda")
    batches = drawn(600)
    train(bag, ours, batches[0], offsets)
    run_ahead(lambda: train(bag, ours, batches[1], offsets))
    for ids in batches[2:]:
        train(bag, ours, ids, offsets)
    for ids in batches:
        train(plain, theirs, ids, offsets)
    assert min(bag.num_miss_history) > 0
    assert same_bits(bag.weight, plain.weight.cpu())


@pytest.mark.parametrize("evict", EvictionStrategy)
@pytest.mark.parametrize("cache_ratio", [0.01, 0.2])
@pytest.mark.parametrize(("optimizer", "sparse"), [*STEPS, ("Adagrad", True), ("SparseAdam", True)])
def test_rows_come_and_go_for_ids_on_the_gpu(optimizer, sparse, cache_ratio, evict):
    (bag, ours), (plain, theirs) = beside_torch(
        optimizer, sparse=sparse, cache_ratio=cache_ratio, evict_strategy=evict
    )
    offsets = torch.arange(0, 300, 3, device="cuda")
    for number in range(60):
        ids = (torch.rand(300, device="cuda") ** 4 * N_ROWS).long()
        train(bag, ours, ids, offsets)
        train(plain, theirs, ids, offsets)
        if number % 20 == 10:
            with torch.no_grad():
                assert same_bits(bag.eval()(ids, offsets), plain(ids, offsets))
            bag.train()
        if number % 20 == 15:
            train(bag, ours, ids.cpu(), offsets)
            train(plain, theirs, ids, offsets)
    assert same_bits(bag.weight, plain.weight.cpu())
    bag.flush()
    assert same_bits(bag.rows.table.decoded(0, N_ROWS), plain.weight.cpu())
    theirs, ours = theirs.state_dict()["state"], ours.state_dict()["state"]
    for name, value in (theirs[0] if theirs else {}).items():
        assert same_bits(torch.as_tensor(ours[0][name]).cpu(), torch.as_tensor(value).cpu()), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_lookups_may_be_taken_again_in_backward(reentrant):
    (bag, ours), (plain, theirs) = beside_torch("SGD", cache_ratio=0.05)
    offsets = torch.arange(0, 300, 3, device="cuda")
    for number in range(12):
        ids = torch.randint(N_ROWS, (300,), device="cuda")
        factor = torch.full((1,), number + 1.0, device="cuda", requires_grad=True)
        for module, optimizer in ((bag, ours), (plain, theirs)):
            optimizer.zero_grad()

            def work(x, module=module, ids=ids):
                return module(ids, offsets) * x

            checkpoint(work, factor, use_reentrant=reentrant).sum().backward()
            optimizer.step()
    assert same_bits(bag.weight, plain.weight.cpu())


def test_lookups_on_two_streams_do_not_disturb_each_other():
    weight = torch.randn(N_ROWS, DIM)
    rows = CachedRows.from_tensor(weight, cache_rows=400, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    rows.lookup(torch.arange(5000, device="cuda") % N_ROWS, train=True)
    torch.cuda.synchronize()
    for number in range(40):
        ids = torch.randint(N_ROWS, (5000,), device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[number % 2]), torch.no_grad():
            matrix, index = rows.lookup(ids, train=True)
            assert same_bits(matrix[index].cpu(), weight[ids.cpu()])


def test_prefetching_does_not_wait(run_ahead):
    bag = made()
    batches = [torch.randint(N_ROWS, (600,), device="cuda") for _ in range(3)]
    for ids in batches:
        run_ahead(lambda ids=ids: bag.prefetch(ids))


def test_results_do_not_depend_on_what_was_prefetched():
    weight = torch.randn(N_ROWS, DIM)
    rows = CachedRows.from_tensor(weight, cache_rows=400, device="cuda")
    for number in range(8):
        ids = torch.randint(N_ROWS, (20, 10), device="cuda")
        rows.prefetch(ids.cpu() if number % 3 else ids)
        if number % 2:
            ids = torch.randint(N_ROWS, (20, 10), device="cuda")
        matrix, index = rows.lookup(ids.cpu() if number % 4 == 3 else ids, train=True)
        assert same_bits(matrix[index].detach().cpu(), weight[ids.cpu()])


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


@pytest.mark.parametrize("codec", ["raw", "ibp"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_steps_on_two_streams_in_turns_lose_no_gradient(sparse, codec):
    options = {"cache_ratio": 0.1, "sparse": sparse, "codec": codec}
    (bag, ours), (plain, theirs) = beside_torch("SGD", **options)
    offsets, streams = torch.arange(0, 90, 3, device="cuda"), [torch.cuda.Stream() for _ in "ab"]
    batches = drawn(90) * 4
    before = torch.cuda.current_stream()
    for number, ids in enumerate(batches):
        stream = streams[number % 2]
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            if number % 3 == 0:
                torch.cuda._sleep(1_000_000)
            train(bag, ours, ids, offsets)
        before = stream
    torch.cuda.current_stream().wait_stream(before)
    for ids in batches:
        train(plain, theirs, ids, offsets)
    assert same_bits(bag.weight, plain.weight.cpu())


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


def test_a_bad_id_is_reported_before_rows_are_saved():
    bag = whole()
    ids, offsets = drawn(600)[0], torch.arange(0, 600, 3, device="cuda")
    ids[5] = N_ROWS
    bag(ids, offsets).sum().backward()
    with pytest.raises(IndexRangeError, match=str(N_ROWS)):
        bag.state_dict()
    assert bag.state_dict()["weight"].shape[0] == N_ROWS
