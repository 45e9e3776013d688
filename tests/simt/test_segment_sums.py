"""Sums over the entries of sparse matrices, run on the CPU, are those of the twins."""

from __future__ import annotations

import pytest
import torch

from bitslab.engine.kernels.cpu import segment_sums as twin
from bitslab.engine.kernels.cuda.segment_sums import SegmentKernels
from bitslab.engine.kernels.cuda.source import segment_sums_variant
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
    summed = kernels.prepare_sum(starts, columns, edges, heads, width, dtype)
    for given in ((x, weights), (x,)):
        w = given[1] if len(given) > 1 else weights[:0]
        close(summed(*given), twin.sum_segments(starts, columns, edges, w, x))
    rows = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))
    ends, n = (rows, columns, edges), len(columns)
    dots = kernels.prepare_dots(*ends, n, heads, width, dtype)
    close(dots(g, x), twin.dot_entries(*ends, g, x, n))
    ends = (rows, columns, torch.arange(n))
    dots = kernels.prepare_dots(*ends, n, heads, width, dtype, (1, heads), each=True)
    close(dots(g, x), twin.dot_entries(*ends, g, x, n)[:, None])


def test_rows_that_do_not_begin_at_16_bytes():
    runner = SimtRunner()
    starts, columns, edges = entries()
    x = torch.randn(1 + 20 * 4)
    run = SegmentKernels(runner).prepare_sum(starts, columns, edges, 1, 4, torch.float32)
    for begin in (0, 1):
        rows = x[begin : begin + 80].view(20, 1, 4)
        close(run(rows), twin.sum_segments(starts, columns, edges, torch.empty(0, 1), rows))
    assert [v.name for v, _ in runner.launched] == [
        segment_sums_variant(4, vector).name for vector in (4, 1)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("terms", ["x", "x of rows", "sum", "product"])
@pytest.mark.parametrize("slope", [1.0, 0.2, 0.0])
def test_softmax_and_its_gradient(heads, dtype, terms, slope):
    kernels = SegmentKernels(SimtRunner(seed=heads))
    starts, columns, _ = entries()
    draw = torch.Generator().manual_seed(1)
    n = len(columns)
    x_rows = None if terms == "x" else columns
    x = 5 * torch.randn(n if x_rows is None else 20, heads, dtype=dtype, generator=draw)
    y = torch.randn(n, heads, dtype=dtype, generator=draw)
    given = (guarded(x), guarded(y)) if terms in ("sum", "product") else (guarded(x),)
    g = guarded(torch.randn(n, heads, dtype=dtype, generator=draw))
    options = {"multiplied": terms == "product", "slope": slope}
    run, gradient = kernels.prepare_softmax(starts, n, heads, dtype, x_rows, **options)
    p = run(*given)
    more = given[1:]
    close(p, twin.softmax_segments(starts, x, x_rows, *more, **options))
    found = gradient(p, g, *given)
    close(found, twin.softmax_segments_gradient(starts, p, g, x, x_rows, *more, **options))


def test_nothing_to_sum():
    kernels = SegmentKernels(SimtRunner())
    none = torch.zeros(0, dtype=torch.int64)
    f32 = torch.float32
    x = torch.zeros(3, 1, 4)
    assert kernels.prepare_sum(none.new_zeros(1), none, none, 1, 4, f32)(x).shape == (0, 1, 4)
    assert not kernels.prepare_sum(none.new_zeros(3), none, none, 1, 4, f32)(x).any()
    assert not kernels.prepare_dots(none, none, none, 2, 1, 4, f32)(x, x).any()
    run, gradient = kernels.prepare_softmax(none.new_zeros(3), 0, 2, f32)
    x = torch.zeros(0, 2)
    assert run(x).shape == gradient(x, x, x).shape == (0, 2)
