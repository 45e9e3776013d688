"""Bags of rows on a real GPU: the bits of torch.embedding_bag; bad offsets and ids are reported."""

from __future__ import annotations

import pytest
import torch

import bitslab
from bitslab.engine.kernels.cuda import kernels_on
from bitslab.engine.kernels.cuda.bags import POOLED_DTYPES, BagKernels
from bitslab.errors import ArgumentError, IndexRangeError
from tests.helpers import dtype_id, same_bits

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU

MODES = ("sum", "mean", "max")
N_ROWS = 3000


@pytest.fixture
def bags() -> BagKernels:
    return kernels_on(torch.device("cuda")).bags


def rows_of(dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows with zeros of both signs, infinities and subnormals among them."""
    rows = torch.randn(N_ROWS, dim, dtype=dtype, device="cuda")
    for k, value in enumerate((0.0, -0.0, float("inf"), -float("inf"), 1e-310, 1e-42)):
        rows[k::97] = value
    return rows


@pytest.mark.parametrize("by_warps", [False, True], ids=["threads", "warps"])
@pytest.mark.parametrize("n, n_bags", [(1, 1), (700, 700), (5000, 40), (60_000, 9000)])
@pytest.mark.parametrize("padding", [None, 7], ids=["", "padding"])
@pytest.mark.parametrize("dim", [1, 6, 32, 129, 512])
@pytest.mark.parametrize("mode", range(3), ids=MODES)
@pytest.mark.parametrize("dtype", POOLED_DTYPES, ids=dtype_id)
def test_bags_have_the_bits_of_torch(bags, dtype, mode, dim, padding, n, n_bags, by_warps):
    rows = rows_of(dim, dtype)
    ids = torch.randint(N_ROWS, (n,), device="cuda")
    ids[::9] = 7
    offsets = torch.randint(n + 1, (n_bags,), device="cuda").sort().values
    offsets[0] = 0
    for include_last in (False, True):
        if include_last:
            offsets[-1] = n
        expected = torch.nn.functional.embedding_bag(
            ids,
            rows,
            offsets,
            mode=MODES[mode],
            padding_idx=padding,
            include_last_offset=include_last,
        )
        found = bags.pool(
            rows,
            ids,
            offsets,
            mode,
            padding=padding,
            include_last=include_last,
            by_warps=by_warps,
        )
        assert same_bits(found, expected)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize("mode", range(3), ids=MODES)
@pytest.mark.parametrize("dim", [5, 32, 100, 512])
@pytest.mark.parametrize("dtype", POOLED_DTYPES, ids=dtype_id)
def test_long_bags_have_the_bits_of_torch_whoever_takes_them(bags, dtype, dim, mode, kind):
    rows = torch.randn(N_ROWS, dim, dtype=dtype, device="cuda")  # no sum is infinite or no number
    ids = torch.randint(N_ROWS, (70_000,), device="cuda", dtype=kind)
    ends = torch.tensor([0, 0, 1, 33, 97, 224, 352, 481, 1000, 1000, 30_000], device="cuda")
    offsets = torch.cat([ends, torch.arange(30_500, 70_000, 500, device="cuda")]).to(kind)
    expected = torch.nn.functional.embedding_bag(ids, rows, offsets, mode=MODES[mode])
    for by_warps in (None, False, True):
        assert same_bits(bags.pool(rows, ids, offsets, mode, by_warps=by_warps), expected)


def test_rows_that_are_not_aligned_are_pooled_by_warps(bags):
    for dtype in POOLED_DTYPES:
        rows = torch.randn(N_ROWS * 64 + 1, dtype=dtype, device="cuda")[1:].view(N_ROWS, 64)
        ids = torch.randint(N_ROWS, (5000,), device="cuda")
        offsets = torch.arange(0, 5000, 100, device="cuda")
        expected = torch.nn.functional.embedding_bag(ids, rows, offsets, mode="sum")
        assert same_bits(bags.pool(rows, ids, offsets, 0), expected)


@pytest.mark.parametrize("n", [1, 1000, 300_000])
def test_a_bad_offset_is_reported_wherever_it_is(bags, n):
    rows, ids = rows_of(32, torch.float32), torch.randint(N_ROWS, (n,), device="cuda")
    for at in sorted({0, n // 2, n - 1}):
        offsets = torch.arange(n, device="cuda")
        offsets[at] = n + 5 if at else 1
        for call in (
            lambda offsets=offsets: bags.pool(rows, ids, offsets, 0),
            lambda offsets=offsets: bags.pool(rows, ids, offsets, 0, by_warps=True),
            lambda offsets=offsets: bags.sound_offsets(offsets, n),
        ):
            call()
            torch.cuda.synchronize()
            with pytest.raises(ArgumentError, match=f"lookup of {n} ids .* at position"):
                bitslab.raise_pending_errors()


@pytest.mark.parametrize("by_warps", [False, True], ids=["threads", "warps"])
def test_bad_ids_are_reported(bags, by_warps):
    rows, ids = rows_of(32, torch.float32), torch.arange(500, device="cuda")
    offsets = torch.arange(0, 500, 5, device="cuda")
    for bad in (-1, N_ROWS, 1 << 50):
        given = ids.clone()
        given[77] = bad
        bags.pool(rows, given, offsets, 1, by_warps=by_warps)
        torch.cuda.synchronize()
        with pytest.raises(IndexRangeError, match=f"index {bad} at position 77"):
            bitslab.raise_pending_errors()
