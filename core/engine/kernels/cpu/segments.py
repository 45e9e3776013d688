"""Loops over the entries of a sparse matrix whose entries stand row by row.

``starts`` is int64 ``[rows + 1]``, ``columns`` int64 ``[entries]`` the row of `x` of each entry.
``edges`` int64 ``[entries]`` is the row of `weights` of each entry; an entry of edge -1 weighs 1.
Work is cut by entries, not by rows: a range begin..end has the rows that start in it, so that rows
of many entries do not keep one thread busy while the others wait.
"""

from __future__ import annotations

import numpy as np

from .jit import njit

_REORDERED = {"reassoc", "contract", "nsz"}


@njit(nogil=True, cache=True)
def order_by_key(keys, before, starts, order):
    """Write the stable order of `keys`, visited in the order `before`, and where each key starts.

    ``starts`` is int64 ``[keys + 2]``, zeros; afterwards its first ``keys + 1`` are the starts.
    """
    for i in range(keys.shape[0]):
        starts[keys[i] + 2] += 1
    for k in range(2, starts.shape[0]):
        starts[k] += starts[k - 1]
    for j in range(before.shape[0]):
        i = before[j]
        key = keys[i] + 1
        order[starts[key]] = i
        starts[key] += 1


@njit(nogil=True, cache=True)
def number_pairs(kinds, nodes, order, rows, node_of_row, bounds):
    """Give numbers to the distinct (kind, node) of edges visited in `order`, which sorts them.

    Writes the row of each edge, the node of each row and in ``bounds[kind + 1]`` the rows of the
    kind; returns the number of rows.
    """
    count = 0
    for j in range(order.shape[0]):
        i = order[j]
        if j == 0 or kinds[i] != kinds[order[j - 1]] or nodes[i] != nodes[order[j - 1]]:
            node_of_row[count] = nodes[i]
            bounds[kinds[i] + 1] += 1
            count += 1
        rows[i] = count - 1
    return count


@njit(nogil=True, cache=True)
def survey_edges(ends, kinds, sizes, edges, pairs, starts, bounds, limits):
    """Put edges in order, and find their pairs of nodes and kinds, for `segment_sums.survey_edges`.

    Writes lowest and highest of each column to ``limits`` and, unless one is out of range, all
    else; returns whether all are in range.
    """
    n, n_src, n_kinds = len(kinds), sizes[0], sizes[2]
    inside = True
    for c in range(3):
        column = kinds if c == 2 else ends[c]
        low = high = column[0]
        for i in range(n):
            low, high = min(low, column[i]), max(high, column[i])
        limits[2 * c], limits[2 * c + 1] = low, high
        inside = inside and low >= 0 and high < sizes[c]
    if not inside:
        return False
    order, src, dst, kind = edges[0, :n], edges[1, :n], edges[2, :n], edges[3, :n]
    numbers, place, of_kind = edges[4, :n], edges[5, :n], edges[6, :n]
    numbers[:] = np.arange(n)
    order_by_key(ends[1], numbers, starts, order)
    for i in range(n):
        edge = order[i]
        src[i], dst[i], kind[i] = ends[0, edge], ends[1, edge], kinds[edge]
    # Edges are in the order of their destinations: by kind they are in that of both.
    by_src, by_both, by_kind = np.empty_like(numbers), pairs[0, 3, :n], pairs[1, 3, :n]
    begins = np.zeros(n_kinds + 2, np.int64)
    order_by_key(kind, numbers, begins, by_kind)
    bounds[0] = begins[: n_kinds + 1]
    for i in range(n):
        place[by_kind[i]] = i
        of_kind[i] = kind[by_kind[i]]
    order_by_key(src, numbers, np.zeros(n_src + 2, np.int64), by_src)
    order_by_key(kind, by_src, np.zeros(n_kinds + 2, np.int64), by_both)
    for side in range(2):
        rows, nodes, kinds_of = pairs[side, 0, :n], pairs[side, 1, :n], pairs[side, 2, :n]
        by, begin = pairs[side, 3, :n], pairs[side, 4]
        at = bounds[1 + side]
        at[:] = 0
        n_pairs = number_pairs(kind, dst if side else src, by, rows, nodes, at)
        for k in range(n_kinds):
            at[k + 1] += at[k]
            kinds_of[at[k] : at[k + 1]] = k
        for i in range(n - 1, -1, -1):
            begin[rows[by[i]]] = i
        begin[n_pairs] = n
    return True


@njit(nogil=True, cache=True)
def sum_segments(starts, columns, edges, weights, x, out, begin, end):
    """Write the weighted sum of the rows of x of each row's entries.

    x and out are ``[rows, H, D]``, weights ``[edges, H]``, or ``[0, H]`` where all entries weigh 1.
    The last range has the rows without entries behind it too.
    """
    weighted = weights.shape[0] > 0
    heads, width = x.shape[1], x.shape[2]
    first = np.searchsorted(starts[:-1], begin)
    for row in range(first, starts.shape[0] - 1):
        if starts[row] >= end and end < columns.shape[0]:
            break
        for h in range(heads):
            for d in range(width):
                out[row, h, d] = 0
        for i in range(starts[row], starts[row + 1]):
            column, edge = columns[i], edges[i]
            for h in range(heads):
                if weighted and edge >= 0:
                    w = weights[edge, h]
                    for d in range(width):
                        out[row, h, d] += w * x[column, h, d]
                else:
                    for d in range(width):
                        out[row, h, d] += x[column, h, d]


@njit(nogil=True, cache=True, fastmath=_REORDERED)
def dot_entries(rows, columns, edges, g, x, out, begin, end):
    """Write to each entry's edge the dot products by head of its row of g and its row of x."""
    heads, width = x.shape[1], x.shape[2]
    for i in range(begin, end):
        edge = edges[i]
        if edge < 0:
            continue
        row, column = rows[i], columns[i]
        for h in range(heads):
            total = x.dtype.type(0)
            for d in range(width):
                total += g[row, h, d] * x[column, h, d]
            out[edge, h] = total


@njit(nogil=True, cache=True)
def _logit(x, x_rows, y, y_rows, multiplied, slope, i, h):
    """Return the value of an entry and head, as `segment_sums.softmax_segments` has it."""
    value = x[x_rows[i] if x_rows.shape[0] else i, h]
    if y.shape[0]:
        other = y[y_rows[i] if y_rows.shape[0] else i, h]
        value = value * other if multiplied else value + other
    return value if value > 0 else value * x.dtype.type(slope)


@njit(nogil=True, cache=True)
def softmax_segments(starts, x, x_rows, y, y_rows, multiplied, slope, out, begin, end):
    """Write the softmax of each column of the logits of entries within each row's entries."""
    heads = x.shape[1]
    first = np.searchsorted(starts[:-1], begin)
    for row in range(first, starts.shape[0] - 1):
        if starts[row] >= end:
            break
        low, high = starts[row], starts[row + 1]
        for h in range(heads):
            if low == high:
                continue
            for i in range(low, high):
                out[i, h] = _logit(x, x_rows, y, y_rows, multiplied, slope, i, h)
            largest = out[low, h]
            for i in range(low + 1, high):
                if out[i, h] > largest or out[i, h] != out[i, h]:
                    largest = out[i, h]
            total = x.dtype.type(0)
            for i in range(low, high):
                value = np.exp(out[i, h] - largest)
                out[i, h] = value
                total += value
            for i in range(low, high):
                out[i, h] /= total


@njit(nogil=True, cache=True)
def softmax_segments_gradient(
    starts, p, g, x, x_rows, y, y_rows, multiplied, slope, out, begin, end
):
    """Write the gradient of the logits before the slope, of the softmax p and its gradient g."""
    heads = p.shape[1]
    first = np.searchsorted(starts[:-1], begin)
    for row in range(first, starts.shape[0] - 1):
        if starts[row] >= end:
            break
        for h in range(heads):
            total = p.dtype.type(0)
            for i in range(starts[row], starts[row + 1]):
                total += p[i, h] * g[i, h]
            for i in range(starts[row], starts[row + 1]):
                found = p[i, h] * (g[i, h] - total)
                # A slope keeps signs, unless it is 0: the logit is looked at before it.
                if slope != 1 and not (_logit(x, x_rows, y, y_rows, multiplied, 1, i, h) > 0):
                    found *= p.dtype.type(slope)
                out[i, h] = found
