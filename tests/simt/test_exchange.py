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
@pytest.mark.parametrize("ways", ["both", "out", "in"])
@pytest.mark.parametrize("seed", [0, 3])
def test_rows_go_where_they_belong(row_bytes, ways, seed):
    generator = np.random.default_rng(seed)
    count = 25
    slots = torch.from_numpy(generator.permutation(N_SLOTS)[:count])
    rows = torch.from_numpy(generator.permutation(N_ROWS)[: 2 * count])
    leaving, wanted = rows[:count].clone(), rows[count:].clone()
    leaving[::4] = NO_ROW
    wanted[::7] = NO_ROW
    if ways == "out":
        wanted.fill_(NO_ROW)
    if ways == "in":
        leaving.fill_(NO_ROW)
    arrays = [
        ExchangedArray(drawn(N_SLOTS, row_bytes), drawn(N_ROWS, row_bytes)),
        ExchangedArray(drawn(N_SLOTS, 8), drawn(N_ROWS, 8)),
        ExchangedArray(
            drawn(N_SLOTS, row_bytes),
            drawn(count, row_bytes),
            drawn(count, row_bytes),
            by_position=True,
        ),
        ExchangedArray(drawn(N_SLOTS, row_bytes), None, drawn(count, row_bytes), by_position=True),
    ]
    expected = []
    for cached, stored, incoming, by_position in arrays:
        sides = [cached.numpy().copy(), (cached[:0] if stored is None else stored).numpy().copy()]
        sides.append(sides[1] if incoming is None else incoming.numpy().copy())
        before, from_host = cached.numpy().copy(), sides[2].copy()
        coming = np.array([count, 0])
        batch = [*sides, by_position, slots.numpy(), leaving.numpy(), wanted.numpy(), coming]
        twin.exchange_rows(*batch)
        assert coming.tolist() == [count, 1]
        leaves, comes = leaving.numpy() >= 0, wanted.numpy() >= 0
        positions = np.arange(count)
        to = positions if by_position else leaving.numpy()
        if stored is not None:
            assert np.array_equal(sides[1][to[leaves]], before[slots[leaves]])
        at = positions if by_position else wanted.numpy()
        assert np.array_equal(sides[0][slots[comes]], from_host[at[comes]])
        assert np.array_equal(sides[0][slots[~comes]], before[slots[~comes]])
        expected.append(sides)
    kernels = ExchangeKernels(SimtRunner(seed))
    described = kernels.described(arrays, CPU)
    counted = torch.tensor([count, 0])
    kernels.exchange(described, slots, leaving, wanted, counted, count * row_bytes)
    assert counted.tolist() == [count, 1]
    for array, sides in zip(arrays, expected, strict=True):
        for found, side in zip(array[:3], sides, strict=True):
            assert found is None or np.array_equal(found.numpy(), side)


def test_where_no_row_comes_nothing_is_moved():
    kernels = ExchangeKernels(SimtRunner())
    cached, stored = drawn(N_SLOTS, 16), drawn(N_ROWS, 16)
    before = cached.clone(), stored.clone()
    rows, coming = torch.arange(5), torch.tensor([0, 0])
    described = kernels.described([ExchangedArray(cached, stored)], CPU)
    kernels.exchange(described, rows, rows, rows, coming, 5)
    assert coming.tolist() == [0, 0]
    assert torch.equal(cached, before[0]) and torch.equal(stored, before[1])


def test_units_divide_rows_and_addresses():
    memory = torch.zeros(4096, dtype=torch.uint8)
    for offset, row_bytes, unit in ((0, 128, 16), (4, 128, 4), (0, 20, 4), (2, 64, 2), (1, 64, 1)):
        start = (-memory.data_ptr()) % 16 + offset
        rows = memory[start : start + 8 * row_bytes].view(8, row_bytes)
        assert ExchangedArray(rows, rows).description()[4] == unit
