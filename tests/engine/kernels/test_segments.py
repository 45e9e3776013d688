"""Sums, dot products and softmax over the entries of sparse matrices, against dense torch."""

from __future__ import annotations

import pytest
import torch

from bitslab.engine.kernels.cpu import segment_sums
from bitslab.engine.kernels.cpu.loading import summing


def drawn(seed, rows, columns, entries):
    draw = torch.Generator().manual_seed(seed)
    to = torch.randint(max(rows, 1), (entries,), generator=draw)
    order, starts = segment_sums.order_by_key(to, rows)
    source = torch.randint(max(columns, 1), (entries,), generator=draw)
    return draw, to, source, order, starts


@pytest.mark.parametrize("entries", [0, 1, 50, 30_000])
def test_order_is_stable(entries):
    _, to, source, order, starts = drawn(0, 7, 5, entries)
    assert torch.equal(order, torch.argsort(to, stable=True))
    assert starts.tolist() == [0, *torch.bincount(to, minlength=7).cumsum(0).tolist()]
    by_both, _ = segment_sums.order_by_key(source, 5, order)
    assert torch.equal(by_both, torch.argsort(source * 7 + to, stable=True))


@pytest.mark.parametrize("entries", [0, 1, 50, 3000])
def test_pairs_are_numbered_in_order(entries):
    _, to, source, order, _ = drawn(1, 7, 5, entries)
    by_both, _ = segment_sums.order_by_key(source, 5, order)
    rows, nodes, bounds = segment_sums.number_pairs(source, to, by_both, 5)
    distinct, inverse = torch.unique(source * 7 + to, return_inverse=True)
    assert torch.equal(rows, inverse)
    assert torch.equal(nodes, distinct % 7)
    assert bounds == [0, *torch.bincount(distinct // 7, minlength=5).cumsum(0).tolist()]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("entries", [0, 1, 50, 30_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_and_dots(entries, weighted, dtype):
    draw, to, source, order, starts = drawn(2, 9, 6, entries)
    x = torch.randn(6, 2, 3, generator=draw, dtype=dtype)
    w = torch.randn(entries, 2, generator=draw, dtype=dtype)
    edges = torch.arange(entries)
    edges[::3] = -1  # weighs 1
    scale = torch.where(edges[:, None] >= 0, w, 1) if weighted else torch.ones_like(w)
    given = w if weighted else w[:0]
    out = segment_sums.sum_segments(starts, source[order], edges[order], given, x)
    dense = torch.zeros(9, 2, 3, dtype=dtype).index_add(0, to, x[source] * scale[:, :, None])
    torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-3)
    g = torch.randn(9, 2, 3, generator=draw, dtype=dtype)
    dots = segment_sums.dot_entries(to, source, edges, g, x, entries)
    expected = (g[to] * x[source]).sum(-1) * (edges >= 0)[:, None]
    torch.testing.assert_close(dots, expected)


@pytest.mark.parametrize("cuts", [[], [4], [1, 2, 3, 5], [6]], ids=str)
def test_each_row_of_a_sum_is_written_once(cuts):
    """Rows without entries too, at either end and where ranges meet."""
    starts = torch.tensor([0, 0, 2, 4, 4, 4, 6, 6, 6])
    columns, edges, x = torch.arange(6), torch.full((6,), -1), torch.ones(6, 1, 2)
    out = torch.full((8, 1, 2), torch.nan)
    arrays = [t.numpy() for t in (starts, columns, edges, x[:0, 0], x, out)]
    bounds = [0, *cuts, 6]
    for begin, end in zip(bounds, bounds[1:], strict=False):
        summing().sum_segments(*arrays, begin, end)
    assert out[:, 0, 0].tolist() == [0, 2, 2, 0, 0, 2, 0, 0]


@pytest.mark.parametrize("entries", [1, 50, 30_000])
def test_softmax_and_its_gradient(entries):
    draw, to, _, order, starts = drawn(3, 9, 6, entries)
    x = torch.randn(entries, 2, generator=draw, dtype=torch.float64) * 50
    g = torch.randn(entries, 2, generator=draw, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    parts = [leaf[a:b].softmax(0) for a, b in zip(starts, starts[1:], strict=False)]
    expected = torch.cat(parts)
    out = segment_sums.softmax_segments(starts, x)
    torch.testing.assert_close(out, expected.detach())
    (gradient,) = torch.autograd.grad(expected, leaf, g)
    torch.testing.assert_close(segment_sums.softmax_segments_gradient(starts, out, g), gradient)


@pytest.mark.parametrize("multiplied", [False, True])
@pytest.mark.parametrize("slope", [1.0, 0.2, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softmax_of_two_terms_read_by_index(multiplied, slope, dtype):
    draw, to, source, order, starts = drawn(4, 9, 6, 200)
    x = torch.randn(6, 2, generator=draw, dtype=dtype)
    y = torch.randn(200, 2, generator=draw, dtype=dtype)
    g = torch.randn(200, 2, generator=draw, dtype=dtype)
    index = source[order]
    both = (x[index] * y if multiplied else x[index] + y).requires_grad_()
    logits = torch.where(both > 0, both, both * slope)
    parts = [logits[a:b].softmax(0) for a, b in zip(starts, starts[1:], strict=False)]
    expected = torch.cat(parts)
    terms = (x, index, y, None, multiplied, slope)
    p = segment_sums.softmax_segments(starts, *terms)
    torch.testing.assert_close(p, expected.detach())
    (gradient,) = torch.autograd.grad(expected, both, g)
    found = segment_sums.softmax_segments_gradient(starts, p, g, *terms)
    torch.testing.assert_close(found, gradient)


def test_softmax_of_nan_and_infinity_is_torchs():
    starts = torch.tensor([0, 2, 4, 6])
    x = torch.tensor([1.0, torch.nan, torch.inf, 1.0, -torch.inf, 2.0])[:, None]
    parts = [x[a:b].softmax(0) for a, b in zip(starts, starts[1:], strict=False)]
    out = segment_sums.softmax_segments(starts, x)
    torch.testing.assert_close(out, torch.cat(parts), equal_nan=True)
