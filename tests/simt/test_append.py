"""Tokens that are put where device memory says: the kernel and its twin."""

from __future__ import annotations

import pytest
import torch

from bitslab.engine.kernels.cpu.append import append_token as twin
from bitslab.engine.kernels.cuda.append import AppendKernels, Pair
from bitslab.errors import ArgumentError
from tests.helpers import dtype_id
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner

BATCH, HEADS, ROOM, DIM = 2, 3, 9, 16


def memory_of(dtype: torch.dtype) -> Pair:
    """Return keys and values of nothing but sevens, with room that nobody may write to around."""
    keys, values = (
        guarded(torch.full((BATCH, HEADS, ROOM, DIM), 7).to(dtype).flatten()) for _ in range(2)
    )
    shape = BATCH, HEADS, ROOM, DIM
    return keys.view(shape), values.view(shape)


def new_tokens(dtype: torch.dtype, seed: int) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        torch.randn(BATCH, HEADS, 1, DIM, generator=generator).to(dtype) for _ in range(2)
    )
    return keys, values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id)
def test_each_token_comes_behind_the_one_before_and_none_behind_the_room(
    dtype: torch.dtype,
) -> None:
    ends = 8, 6  # of keys and of values
    short_by = torch.tensor([3], dtype=torch.int32)
    kernels = AppendKernels(SimtRunner(3))
    found, expected = memory_of(dtype), memory_of(dtype)
    steps = [new_tokens(dtype, seed) for seed in range(6)]
    for new in steps:
        kernels.append_token(new, found, ends, short_by)
        twin(new, expected, ends, short_by)
        short_by.sub_(1)
    assert int(short_by) == -3
    for which, end in enumerate(ends):
        assert torch.equal(found[which], expected[which])
        for i, new in enumerate(steps[:4]):
            assert torch.equal(found[which][:, :, end - 4 + i], new[which][:, :, 0])
        assert (found[which][:, :, : end - 4] == 7).all() and (found[which][:, :, end:] == 7).all()


@pytest.mark.parametrize("missing", [-(1 << 31), -1, 6, (1 << 31) - 1])
def test_counts_that_cannot_be_write_nothing(missing: int) -> None:
    short_by = torch.tensor([missing], dtype=torch.int32)
    for put in (AppendKernels(SimtRunner()).append_token, twin):
        there = memory_of(torch.float32)
        put(new_tokens(torch.float32, 0), there, (8, 6), short_by)
        assert (there[0] == 7).all() and (there[1] == 7).all()


def test_new_tokens_of_any_strides_are_taken() -> None:
    short_by = torch.zeros(1, dtype=torch.int32)
    keys, values = new_tokens(torch.bfloat16, 1)
    for cut in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.nn.functional.pad(x, (1, 2))[..., 1:-2],
        lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
        lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    ):
        there = memory_of(torch.bfloat16)
        new = cut(keys), cut(values)
        AppendKernels(SimtRunner()).append_token(new, there, (ROOM, ROOM), short_by)
        assert torch.equal(there[0][:, :, -1:], keys) and torch.equal(there[1][:, :, -1:], values)


def test_memory_that_does_not_fit_together_is_refused() -> None:
    short_by = torch.zeros(1, dtype=torch.int32)
    new, (keys, values) = new_tokens(torch.float32, 0), memory_of(torch.float32)
    append = AppendKernels(SimtRunner()).append_token
    with pytest.raises(ArgumentError, match="memory: strides"):
        append(new, (keys, values[:, :, :, ::2]), (8, 8), short_by)
    with pytest.raises(ArgumentError, match=r"ends: \(8, 10\), accepted are 1 to 9"):
        append(new, (keys, values), (8, 10), short_by)
