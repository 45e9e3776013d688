"""Ids before a gather: the first bad one is found, good ones are ordered by place in the table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitslab.engine.codecs.base import first_bad_id
from bitslab.engine.kernels.cpu import ids as twin
from bitslab.engine.kernels.cuda.ids import (
    CHECKED_BY_ONE,
    IdKernels,
    IdScratch,
    bin_shift,
)
from bitslab.engine.kernels.cuda.runner import INDEX_ERROR
from bitslab.engine.kernels.cuda.source import ORDER_BINS
from bitslab.errors import ArgumentError
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner

DTYPES = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
SEEDS = range(3)


def random_ids(n: int, n_rows: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    return guarded(torch.from_numpy(generator.integers(-n_rows, n_rows, n)).to(dtype))


def first_bad(ids: torch.Tensor, n_rows: int, seed: int = 0, lowest: int | None = None) -> int:
    found = torch.full((1,), 12345)
    IdKernels(SimtRunner(seed)).check(ids, n_rows, found, lowest)
    return int(found)


def assert_ordered(order: torch.Tensor, ids: torch.Tensor, n_rows: int) -> None:
    """A permutation of the positions, bin after bin."""
    positions = order.numpy().view(np.uint32).astype(np.int64)
    assert np.array_equal(np.sort(positions), np.arange(len(ids)))
    bins = (ids.numpy().astype(np.int64) % n_rows)[positions] >> bin_shift(n_rows)
    assert (np.diff(bins) >= 0).all()


@DTYPES
@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_bad_id_is_found(dtype, seed):
    n_rows = 1000
    for n in (1, 31, 700, 3000):
        ids = random_ids(n, n_rows, dtype, seed)
        ids[0], ids[-1] = n_rows - 1, -n_rows
        assert first_bad(ids, n_rows, seed) == -1
        for bad in (n_rows, -n_rows - 1, torch.iinfo(dtype).min, torch.iinfo(dtype).max):
            place = (n - 1) * 2 // 3
            spoilt = ids.clone()
            spoilt[place] = spoilt[-1] = bad
            assert first_bad(spoilt, n_rows, seed) == place
    assert first_bad(torch.zeros(0, dtype=dtype), n_rows, seed) == -1
    assert first_bad(torch.zeros(5, dtype=dtype), 0, seed) == 0


def test_ids_below_the_lowest_are_bad():
    for n in (700, CHECKED_BY_ONE + 1):
        ids = torch.arange(n) % 1000
        assert first_bad(ids, 1000, lowest=0) == -1
        ids[[n // 3, n - 1]] = -1
        assert first_bad(ids, 1000) == -1
        assert first_bad(ids, 1000, lowest=0) == n // 3
        scratch = IdScratch.allocate("cpu", n)
        IdKernels(SimtRunner()).order(ids, 1000, scratch, 0)
        assert scratch.first_bad.tolist() == [n // 3]


@DTYPES
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n_rows", [1, 5, ORDER_BINS, ORDER_BINS + 1, 1_000_003])
def test_the_order_goes_through_the_table_bin_after_bin(n_rows, dtype, seed):
    scratch = IdScratch.allocate("cpu", 9000)
    for n in (9000, 1, 333):  # the same scratch again and again
        ids = random_ids(n, n_rows, dtype, seed)
        scratch.order.fill_(-7)
        order = IdKernels(SimtRunner(seed)).order(ids, n_rows, scratch)
        assert scratch.first_bad.tolist() == [-1]
        assert order.data_ptr() == scratch.order.data_ptr()
        assert_ordered(order, ids, n_rows)
        assert (scratch.order[n:] == -7).all()


@DTYPES
@pytest.mark.parametrize("n_rows", [5, 1_000_003])
def test_twins_order_as_the_kernels_do(n_rows, dtype):
    """But for the sequence within a bin."""
    ids = random_ids(9000, n_rows, dtype)
    scratch, twins = IdScratch.allocate("cpu", 9000), IdScratch.allocate("cpu", 9000)
    shift = bin_shift(n_rows)
    for bad in (None, 4321):
        if bad is not None:
            ids[bad], ids[-1] = n_rows, -n_rows - 1
        order = IdKernels(SimtRunner(1)).order(ids, n_rows, scratch)
        bins, first_bad = twins.bins.numpy(), twins.first_bad.numpy()
        twin.reset_order(bins, first_bad)
        twin.count_ids(ids.numpy(), -n_rows, n_rows, shift, bins, first_bad)
        assert np.array_equal(bins[:ORDER_BINS], scratch.bins[:ORDER_BINS])
        twins.order.fill_(-7)
        twin.order_ids(ids.numpy(), n_rows, shift, bins, first_bad, twins.order.numpy())
        assert torch.equal(twins.first_bad, scratch.first_bad)
        assert first_bad_id(ids, n_rows) == int(scratch.first_bad)
        if bad is None:
            assert torch.equal(twins.bins, scratch.bins)
            assert_ordered(twins.order, ids, n_rows)
            rows = [ids[each.long()] % n_rows >> shift for each in (order, twins.order)]
            assert torch.equal(*rows)
        else:
            assert first_bad[0] == bad and (twins.order == -7).all()


def test_blocks_share_the_bins():
    """More ids than one block takes, all of them in few bins, or one."""
    runner, scratch = SimtRunner(1), IdScratch.allocate("cpu", 20_000)
    for n_rows, ids in (
        (1 << 40, torch.randint((1 << 40) - 4, 1 << 40, (20_000,))),
        (1 << 40, torch.randint(-(1 << 40), 1 << 40, (20_000,))),
        (3, torch.ones(20_000, dtype=torch.int64)),
    ):
        assert_ordered(IdKernels(runner).order(ids, n_rows, scratch), ids, n_rows)
    assert min(grid[0] for grid in runner.grids if grid[0] != 32) > 1


@DTYPES
@pytest.mark.parametrize("seed", SEEDS)
def test_with_a_bad_id_nothing_is_ordered(dtype, seed):
    scratch = IdScratch.allocate("cpu", 9000)
    for n in (1, 40, 9000):
        for bad in (500, -501, torch.iinfo(dtype).min, torch.iinfo(dtype).max):
            ids = random_ids(n, 500, dtype, seed)
            ids[n // 2] = ids[n - 1] = bad
            scratch.order.fill_(-7)
            IdKernels(SimtRunner(seed)).order(ids, 500, scratch)
            assert scratch.first_bad.tolist() == [n // 2]
            assert (scratch.order == -7).all()
    IdKernels(SimtRunner(seed)).order(random_ids(40, 500, dtype), 500, scratch)
    assert scratch.first_bad.tolist() == [-1]


def test_no_ids_are_all_good():
    scratch = IdScratch.allocate("cpu", 0)
    assert len(IdKernels(SimtRunner()).order(torch.zeros(0, dtype=torch.int64), 7, scratch)) == 0
    assert scratch.first_bad.tolist() == [-1]


def test_more_ids_than_the_scratch_takes_are_refused():
    scratch = IdScratch.allocate("cpu", 9)
    with pytest.raises(ArgumentError, match="ids: 10, but the scratch .* takes 9"):
        IdKernels(SimtRunner()).order(torch.zeros(10, dtype=torch.int64), 7, scratch)


def test_bins_are_as_small_as_the_table_allows():
    near = (ORDER_BINS - 1, ORDER_BINS, ORDER_BINS + 1, 2 * ORDER_BINS)
    for n_rows in (1, 2, *near, 10**9, 1 << 40):
        shift = bin_shift(n_rows)
        assert (n_rows - 1) >> shift < ORDER_BINS
        assert shift == 0 or (n_rows - 1) >> (shift - 1) >= ORDER_BINS


@DTYPES
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("counts", [[5], [0, 300, 0, 0, 1, 40, 0], [3] * 33], ids=str)
def test_rows_of_keys_are_those_of_their_tables(counts, seed, dtype):
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 50, len(counts))
    sizes[0] = 0 if not counts[0] else sizes[0]
    begins = np.cumsum(sizes) - sizes
    key_of = np.repeat(np.arange(len(counts)), counts)
    ids = generator.integers(0, sizes[key_of])
    keys = torch.from_numpy(np.stack([np.cumsum(counts), begins, sizes]))
    runner = SimtRunner(seed)
    expected = begins[key_of] + ids
    twins = np.full(len(ids), -9)
    for bad in (None, -1, 1 << 30):
        if bad is not None:
            at = len(ids) // 2
            ids[at] = bad
            expected[at] = begins[key_of[at]] + (0 if bad < 0 else sizes[key_of[at]] - 1)
        given = guarded(torch.from_numpy(ids).to(dtype))
        rows = IdKernels(runner).rows_of_keys(given, guarded(keys))
        assert rows.tolist() == expected.tolist()
        found = twin.rows_of_keys(given.numpy(), keys.numpy(), twins)
        assert twins.tolist() == expected.tolist()
        if bad is None:
            assert found == -1 and not runner.mailbox.any()
        else:
            assert found == at
            assert runner.mailbox.tolist() == [INDEX_ERROR, at, bad, sizes[key_of[at]]]
            runner.mailbox.zero_()
    assert len(IdKernels(runner).rows_of_keys(given[:0], keys)) == 0
