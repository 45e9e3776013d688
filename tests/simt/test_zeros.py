"""Zeros counted by the kernel and by its twin."""

from __future__ import annotations

import pytest
import torch

from bitslab.engine.kernels import cpu
from bitslab.engine.kernels.cuda.zeros import ZeroKernels
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner


@pytest.mark.drawn(4)
@pytest.mark.parametrize("unit", [1, 2, 4, 8])
@pytest.mark.parametrize("side", ["start", "end"])
def test_zeros_are_counted_from_any_address(unit, side):
    kernels = ZeroKernels(SimtRunner())
    many = 2 * 256 * 64 * 16 + 8 * 37  # more than the blocks have under way at once
    for n in (0, unit, 3 * unit, 16 * 9, 16 * 9 + 3 * unit, many):
        x = torch.randint(1, 256, (n // unit, unit), dtype=torch.uint8)
        x[:, : unit - 1] *= torch.rand(n // unit, 1) < 0.5
        x[torch.rand(n // unit) < 0.5] = 0
        data = guarded(x.view(-1), side=side)
        for offset in (0, unit, 16 - unit):
            part = data[offset:]
            expected = cpu.count_zeros(part, unit)
            assert torch.equal(kernels.count_zeros(part, unit), expected), (n, offset)
            assert int(expected) == int((part.view(-1, unit) == 0).all(1).sum())
