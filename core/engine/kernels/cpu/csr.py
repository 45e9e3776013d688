"""Numba twins of csr.cu: the units that are not zero, and their columns; see `kept_format`.

``x`` and ``out`` are a tensor as unsigned integers ``[units]``, ``starts``, ``values`` and
``columns`` the parts of a `KeptLayout`.
"""

from __future__ import annotations

import numpy as np

from ..kept_format import ROW_UNITS
from .jit import njit


@njit(nogil=True, cache=True)
def count_csr(x, counts, begin, end):
    """Write how many units of each of the rows begin..end are not zero."""
    for row in range(begin, end):
        count = np.int64(0)
        for i in range(row * ROW_UNITS, min(len(x), (row + 1) * ROW_UNITS)):
            count += x[i] != 0
        counts[row] = count


@njit(nogil=True, cache=True)
def pack_csr(x, starts, values, columns, begin, end):
    """Write the values and columns of the rows begin..end."""
    # Written without a branch, one unit too far: so not where another thread may write.
    kept = np.empty(ROW_UNITS + 1, values.dtype)
    at = np.empty(ROW_UNITS + 1, columns.dtype)
    for row in range(begin, end):
        first, count = row * ROW_UNITS, np.int64(0)
        for column in range(min(ROW_UNITS, len(x) - first)):
            kept[count] = x[first + column]
            at[count] = column
            count += np.int64(x[first + column] != 0)
        to = starts[row]
        # Another thread may have changed the row since it was counted.
        count = min(count, starts[row + 1] - to)
        for j in range(count):
            values[to + j] = kept[j]
        for j in range(count):
            columns[to + j] = at[j]


@njit(nogil=True, cache=True)
def clear_rows(out, begin, end):
    """Write zeros to the rows begin..end."""
    for i in range(begin * ROW_UNITS, min(len(out), end * ROW_UNITS)):
        out[i] = 0
