"""Offsets of bags, and which bags a kernel of ours pools."""

from __future__ import annotations

import pytest
import torch

from bitslab.embedding.bags import pools_on_gpu, sound_offsets
from bitslab.errors import ArgumentError
from tests.helpers import dtype_id

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_id)
def test_bags_of_floats_are_pooled_by_our_kernel(dtype):
    assert pools_on_gpu(dtype, 5)
    assert not pools_on_gpu(dtype, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
def test_bags_of_other_dtypes_are_left_to_torch(dtype):
    assert not pools_on_gpu(dtype, 5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "offsets, include_last", [([0, 0, 3], False), ([0, 2, 7], True), ([], False), ([0], False)]
)
def test_sound_offsets_are_left_unchanged(offsets, include_last, dtype):
    given = torch.tensor(offsets, dtype=dtype)
    found = sound_offsets(given, 7, CPU, include_last=include_last)
    assert found.dtype == torch.int64 and found.tolist() == offsets


@pytest.mark.parametrize(
    "offsets, include_last, says",
    [
        ([1, 2], False, "begins with 1, expected 0"),
        ([0, 5, 4], False, "falls from 5 to 4 at position 2"),
        ([0, 8], False, "reaches 8, but there are 7 ids"),
        ([0, 6], True, "ends with 6, expected 7"),
        ([], True, "is empty"),
    ],
    ids=["begin", "falls", "beyond", "end", "empty"],
)
def test_offsets_that_are_not_sound_are_refused(offsets, include_last, says):
    with pytest.raises(ArgumentError, match=f"offsets: {says}"):
        sound_offsets(torch.tensor(offsets, dtype=torch.int64), 7, CPU, include_last=include_last)
