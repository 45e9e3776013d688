"""Rows between the slots of a cache and the host: the kernel and its twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bitslab.engine.kernels.cpu import slots as twin
from bitslab.engine.kernels.cuda.exchange import ExchangedArray, ExchangeKernels
from bitslab.engine.kernels.format import NO_ROW
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner

CPU = torch.device("cpu")
N_ROWS, N_SLOTS = 90, 40


def drawn(*shape: int) -> torch.Tensor:
    return guarded(torch.randint(256, shape).to(torch.uint8))


@pytest.mark.parametrize("row_bytes", [1, 2, 3, 4, 6, 12, 16, 48, 100, 128, 1000])
@pytest.mark.parametrize("to_host", [True, False], ids=["to-host", "from-host"])
@pytest.mark.parametrize("seed", [0, 3])
def test_rows_go_where_they_belong(row_bytes, to_host, seed):
    generator = np.random.default_rng(seed)
    count = 25
    slots = torch.from_numpy(generator.permutation(N_SLOTS)[:count])
    rows = torch.from_numpy(generator.permutation(N_ROWS)[:count])
    rows[::4] = NO_ROW
    coming = torch.tensor([count])
    states = [(row_bytes, False), (8, False), (row_bytes, True)]
    arrays = [
        ExchangedArray(drawn(N_SLOTS, b), drawn(count if by_position else N_ROWS, b), by_position)
        for b, by_position in states
    ]
    expected = [(a.cached.numpy().copy(), a.stored.numpy().copy()) for a in arrays]
    for (cached, stored), (_, by_position) in zip(expected, states, strict=True):
        twin.exchange_rows(cached, stored, by_position, slots.numpy(), rows.numpy(), count, to_host)
        moved = rows[rows >= 0] if not by_position else (rows >= 0).nonzero()[:, 0]
        here = slots[rows >= 0]
        assert np.array_equal(cached[here], stored[moved])
    kernels = ExchangeKernels(SimtRunner(seed))
    kernels.exchange(
        kernels.described(arrays, CPU), slots, rows, coming, count * row_bytes, to_host=to_host
    )
    for array, (cached, stored) in zip(arrays, expected, strict=True):
        assert np.array_equal(array.cached.numpy(), cached)
        assert np.array_equal(array.stored.numpy(), stored)


def test_units_divide_rows_and_addresses():
    memory = torch.zeros(4096, dtype=torch.uint8)
    for offset, row_bytes, unit in ((0, 128, 16), (4, 128, 4), (0, 20, 4), (2, 64, 2), (1, 64, 1)):
        start = (-memory.data_ptr()) % 16 + offset
        rows = memory[start : start + 8 * row_bytes].view(8, row_bytes)
        assert ExchangedArray(rows, rows).description()[3] == unit
