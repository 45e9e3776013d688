"""Sums over the entries of sparse matrices, run on the CPU, are those of the twins."""

from __future__ import annotations

import pytest
import torch

from bitslab.engine.kernels.cpu import segment_sums as twin
from bitslab.engine.kernels.cuda.segment_sums import SegmentKernels
from tests.simt.module import guarded
from tests.simt.runner import SimtRunner

#: A row without entries, short ones, one that a block sums together, the last one empty.
COUNTS = [3, 0, 1, 300, 40, 7, 0]
SHAPES = [(1, 64), (3, 4), (2, 5), (1, 1)]


def entries(seed=0):
    draw = torch.Generator().manual_seed(seed)
    starts = torch.nn.functional.pad(torch.tensor(COUNTS).cumsum(0), (1, 0))
    n = int(starts[-1])
    edges = torch.randperm(n, generator=draw)
    edges[::5] = -1
    return starts, torch.randint(20, (n,), generator=draw), edges


def close(found, expected):
    tolerance = 1e-5 if found.dtype is torch.float32 else 1e-12
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("heads", "width"), SHAPES)
def test_sums_and_dot_products(heads, width, dtype):
    kernels = SegmentKernels(SimtRunner(seed=width))
    starts, columns, edges = entries()
    draw = torch.Generator().manual_seed(1)
    x = guarded(torch.randn(20, heads, width, dtype=dtype, generator=draw))
    g = guarded(torch.randn(len(COUNTS), heads, width, dtype=dtype, generator=draw))
    weights = guarded(torch.randn(len(columns), heads, dtype=dtype, generator=draw))
    for w in (weights, weights[:0]):
        summed = (starts, columns, edges, w, x)
        close(kernels.sum_segments(*summed), twin.sum_segments(*summed))
    rows = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))
    ends = (rows, columns, edges)
    n = len(columns)
    close(kernels.dot_entries(*ends, g, x, n), twin.dot_entries(*ends, g, x, n))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("heads", [1, 3])
def test_softmax_and_its_gradient(heads, dtype):
    kernels = SegmentKernels(SimtRunner(seed=heads))
    starts, columns, _ = entries()
    draw = torch.Generator().manual_seed(1)
    x = guarded(10 * torch.randn(len(columns), heads, dtype=dtype, generator=draw))
    g = guarded(torch.randn(len(columns), heads, dtype=dtype, generator=draw))
    y = kernels.softmax_segments(starts, x)
    close(y, twin.softmax_segments(starts, x))
    found = kernels.softmax_segments_gradient(starts, y, g)
    close(found, twin.softmax_segments_gradient(starts, y, g))


def test_nothing_to_sum():
    kernels = SegmentKernels(SimtRunner())
    none = torch.zeros(0, dtype=torch.int64)
    x = torch.zeros(3, 1, 4)
    assert kernels.sum_segments(none.new_zeros(1), none, none, x[0, :0], x).shape == (0, 1, 4)
    assert not kernels.sum_segments(none.new_zeros(3), none, none, torch.zeros(0, 1), x).any()
    assert not kernels.dot_entries(none, none, none, x, x, 2).any()
    assert kernels.softmax_segments(none.new_zeros(3), torch.zeros(0, 2)).shape == (0, 2)
