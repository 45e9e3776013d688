"""Sums, dot products and softmax over the entries of sparse matrices, of tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..edge_survey import (
    EDGE_COLUMNS,
    PAIR_COLUMNS,
    EdgeSurvey,
    block_length,
    column_length,
)
from .compiling import call, prepare
from .loading import summing
from .threads import run_ranges


def order_by_key(
    keys: torch.Tensor, n_keys: int, before: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stable order of keys, and where each key starts in it.

    Parameters
    ----------
    keys : torch.Tensor
        int64 ``[N]``, 0 to ``n_keys - 1``.
    n_keys : int
        How many keys there are.
    before : torch.Tensor, optional
        int64 ``[N]``: the order in which equal keys are left, such as that of a second key.

    Returns
    -------
    order : torch.Tensor
        int64 ``[N]``.
    starts : torch.Tensor
        int64 ``[n_keys + 1]``.
    """
    before = torch.arange(len(keys), device="cpu") if before is None else before
    starts, order = np.zeros(n_keys + 2, np.int64), np.empty(len(keys), np.int64)
    call(summing().order_by_key, keys.numpy(), before.numpy(), starts, order)
    return torch.from_numpy(order), torch.from_numpy(starts[: n_keys + 1])


def number_pairs(
    kinds: torch.Tensor, nodes: torch.Tensor, order: torch.Tensor, n_kinds: int
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Give numbers to the distinct (kind, node) pairs of edges, in order.

    Parameters
    ----------
    kinds, nodes : torch.Tensor
        int64 ``[E]``.
    order : torch.Tensor
        int64 ``[E]``: the edges sorted by kind, then node.
    n_kinds : int
        How many kinds there are.

    Returns
    -------
    rows : torch.Tensor
        int64 ``[E]``, the number of each edge's pair.
    node_of_row : torch.Tensor
        int64 ``[pairs]``.
    bounds : list of int
        ``n_kinds + 1``, the first pair of each kind.
    """
    rows, nodes_out = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    counts = np.zeros(n_kinds + 1, np.int64)
    arrays = (kinds.numpy(), nodes.numpy(), order.numpy(), rows, nodes_out, counts)
    n = call(summing().number_pairs, *arrays)
    return torch.from_numpy(rows), torch.from_numpy(nodes_out[:n].copy()), counts.cumsum().tolist()


def survey_edges(
    ends: torch.Tensor, kinds: torch.Tensor, sizes: tuple[int, int, int]
) -> EdgeSurvey:
    """Put edges in the order of their destinations, and find their pairs, by one loop.

    Parameters
    ----------
    ends : torch.Tensor
        int64 ``[2, E]``: source and destination of each edge; one edge or more.
    kinds : torch.Tensor
        int64 ``[E]``.
    sizes : tuple of int
        Sources, destinations, and kinds.
    """
    n = len(kinds)
    width = column_length(n)
    of_edges, of_pairs = EDGE_COLUMNS * width, 2 * PAIR_COLUMNS * width
    flat = np.empty(block_length(n, sizes[1]), np.int64)
    edges = flat[:of_edges].reshape(EDGE_COLUMNS, width)
    pairs = flat[of_edges : of_edges + of_pairs].reshape(2, PAIR_COLUMNS, width)
    starts = flat[of_edges + of_pairs :]
    starts[:] = 0
    bounds, limits = np.zeros((3, sizes[2] + 1), np.int64), np.zeros(6, np.int64)
    arrays = (ends.numpy(), kinds.numpy(), np.array(sizes, np.int64), edges, pairs, starts, bounds)
    call(summing().survey_edges, *arrays, limits)
    return EdgeSurvey.of_block(torch.from_numpy(flat), n, limits.tolist(), bounds.tolist())


#: Bytes of rows that are added in the time in which others pack one: waking a thread takes as long
#: as adding the rows of ten thousand edges.
ADDED_BYTES = 8


def _run(kernel: Any, arrays: list[Any], n_entries: int, bytes_per_entry: int) -> None:
    prepare(kernel, *arrays, 0, 0)
    run: Callable[[int, int], Any] = lambda begin, end: kernel(*arrays, begin, end)  # noqa: E731
    run_ranges(run, n_entries, bytes_per_entry // ADDED_BYTES)


def sum_segments(
    starts: torch.Tensor,
    columns: torch.Tensor,
    edges: torch.Tensor,
    weights: torch.Tensor,
    x: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sums of rows of x.

    Parameters
    ----------
    starts : torch.Tensor
        int64 ``[rows + 1]``: the first entry of each row of the result.
    columns, edges : torch.Tensor
        int64 ``[entries]``: the row of x, and of weights, of each entry; edge -1 weighs 1.
    weights : torch.Tensor
        ``[E, H]`` of x's dtype, contiguous; ``[0, H]`` where all entries weigh 1.
    x : torch.Tensor
        float32 or float64 ``[N, H, D]``, contiguous.

    Returns
    -------
    torch.Tensor
        ``[rows, H, D]``. Each row is summed in the order of its entries.
    """
    out = x.new_empty((len(starts) - 1, *x.shape[1:]))
    arrays = [t.numpy() for t in (starts, columns, edges, weights, x, out)]
    _run(summing().sum_segments, arrays, len(columns), 2 * x[0:1].nbytes + 24)
    return out


def dot_entries(
    rows: torch.Tensor,
    columns: torch.Tensor,
    edges: torch.Tensor,
    g: torch.Tensor,
    x: torch.Tensor,
    n_edges: int,
) -> torch.Tensor:
    """Return for each edge the dot products of its row of g and its row of x, by head.

    Parameters
    ----------
    rows, columns, edges : torch.Tensor
        int64 ``[entries]``: the row of g, that of x, and the edge; entries of edge -1 are left out.
    g, x : torch.Tensor
        float32 or float64 ``[N, H, D]`` and ``[M, H, D]``, contiguous.
    n_edges : int
        Rows of the result.

    Returns
    -------
    torch.Tensor
        ``[n_edges, H]``, 0 for an edge without an entry.
    """
    out = x.new_zeros(n_edges, x.shape[1])
    arrays = [t.numpy() for t in (rows, columns, edges, g, x, out)]
    _run(summing().dot_entries, arrays, len(columns), 2 * x[0:1].nbytes + 24)
    return out


def softmax_segments(
    starts: torch.Tensor,
    x: torch.Tensor,
    x_rows: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    y_rows: torch.Tensor | None = None,
    multiplied: bool = False,
    slope: float = 1.0,
) -> torch.Tensor:
    """Return the softmax of logits within rows of entries: ``leaky_relu(x[x_rows] + y[y_rows])``.

    Parameters
    ----------
    starts : torch.Tensor
        int64 ``[rows + 1]``: the first entry of each row.
    x, y : torch.Tensor
        float32 or float64 ``[N, H]`` and ``[M, H]``, contiguous; without y that term is left out.
    x_rows, y_rows : torch.Tensor, optional
        int64 ``[entries]``: the row of x, or of y, of each entry; else entries are the rows.
    multiplied : bool
        Whether the terms are multiplied, not added.
    slope : float
        What logits that are not positive are multiplied by.

    Returns
    -------
    torch.Tensor
        ``[entries, H]``.
    """
    out = x.new_empty(len(x if x_rows is None else x_rows), x.shape[1])
    logits = _logits(x, x_rows, y, y_rows, multiplied, slope)
    arrays = [starts.numpy(), *logits, out.numpy()]
    _run(summing().softmax_segments, arrays, len(out), 16 * out[0:1].nbytes)
    return out


def softmax_segments_gradient(
    starts: torch.Tensor,
    p: torch.Tensor,
    g: torch.Tensor,
    x: torch.Tensor | None = None,
    x_rows: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    y_rows: torch.Tensor | None = None,
    multiplied: bool = False,
    slope: float = 1.0,
) -> torch.Tensor:
    """Return the gradient of the sum or product of which `softmax_segments` made p, from g of p.

    The terms are those of `softmax_segments`; with a slope of 1 none is needed.
    """
    out = torch.empty_like(p)
    logits = _logits(p if x is None else x, x_rows, y, y_rows, multiplied, slope)
    arrays = [starts.numpy(), p.numpy(), g.numpy(), *logits, out.numpy()]
    _run(summing().softmax_segments_gradient, arrays, len(p), 4 * p[0:1].nbytes)
    return out


_NO_ROWS = np.empty(0, np.int64)


def _logits(
    x: torch.Tensor,
    x_rows: torch.Tensor | None,
    y: torch.Tensor | None,
    y_rows: torch.Tensor | None,
    multiplied: bool,
    slope: float,
) -> list[Any]:
    """Return what the loops take of logits: empty arrays for what there is not."""
    return [
        x.numpy(),
        _NO_ROWS if x_rows is None else x_rows.numpy(),
        x[:0].numpy() if y is None else y.numpy(),
        _NO_ROWS if y_rows is None else y_rows.numpy(),
        multiplied,
        slope,
    ]
