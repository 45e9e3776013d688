"""Rows of tables back to back on a real GPU: as on a CPU, with no wait, bad ids reported."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch

import bitslab
from bitslab.embedding import rows_of_keys
from bitslab.engine.kernels.cpu import ids as twin
from bitslab.errors import IndexRangeError
from tests.gpu import waiting_raises

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("counts", [[1], [0, 70_000, 0, 1, 3000, 0], [4096] * 26], ids=len)
def test_rows_of_keys_are_those_of_the_twin(counts, dtype):
    generator = np.random.default_rng(len(counts))
    sizes = generator.integers(1, 1 << 20, len(counts)).tolist()
    begins = [0, *accumulate(sizes)][:-1]
    key_of = np.repeat(np.arange(len(counts)), counts)
    ids = torch.from_numpy(generator.integers(0, np.array(sizes)[key_of])).to(dtype)
    expected = np.empty(len(ids), np.int64)
    keys = np.array([[*accumulate(counts)], begins, sizes])
    assert twin.rows_of_keys(ids.numpy(), keys, expected) == -1
    on_gpu = ids.cuda()
    rows_of_keys(on_gpu, counts, begins, sizes)  # compiles
    torch.cuda._sleep(200_000_000)  # the host is ahead
    with waiting_raises():
        rows = rows_of_keys(on_gpu, counts, begins, sizes)
    assert rows is not None and rows.tolist() == expected.tolist()


def test_an_id_out_of_range_is_reported_and_stands_for_a_row_of_its_table():
    for bad, row in ((-3, 10), (5, 14), (1 << 40, 14)):
        ids = torch.tensor([9, 2, bad, 4], device="cuda")
        rows = rows_of_keys(ids, [1, 3], [0, 10], [10, 5])
        assert rows is not None and rows.tolist() == [9, 12, row, 14]
        with pytest.raises(IndexRangeError, match=f"got index {bad} at position 2, .* 5 rows"):
            bitslab.raise_pending_errors()


def test_a_cpu_is_left_to_the_host():
    assert rows_of_keys(torch.tensor([1]), [1], [0], [2]) is None
