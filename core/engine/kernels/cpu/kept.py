"""Numba twins of what the forms share that keep some units, and zeros counted; see `kept_format`.

``x`` and ``out`` are a tensor as unsigned integers ``[units]``, ``starts``, ``values`` and
``columns`` the parts of a `KeptLayout`.
"""

from __future__ import annotations

import numpy as np

from ..kept_format import ROW_UNITS
from .jit import njit


@njit(nogil=True, cache=True)
def count_zeros(x, begin, end):
    """Return how many of the units begin..end are zero."""
    zeros = np.int64(0)
    for i in range(begin, end):
        zeros += x[i] == 0
    return zeros


@njit(nogil=True, cache=True)
def check_columns(starts, columns, units, begin, end):
    """Return one of the rows begin..end whose columns do not rise below its end, or -1.

    Starts were checked.
    """
    bad = -1
    for row in range(begin, end):
        count = min(ROW_UNITS, units - row * ROW_UNITS)
        before = -1
        for j in range(starts[row], starts[row + 1]):
            column = np.int64(columns[j])
            if column <= before or column >= count:
                bad = row
            before = column
    return bad


@njit(nogil=True, cache=True)
def put_units(starts, values, columns, out, begin, end):
    """Write the units that the rows begin..end keep to their columns, which were checked."""
    for row in range(begin, end):
        first = np.uint64(row * ROW_UNITS)
        for j in range(starts[row], starts[row + 1]):
            out[first + np.uint64(columns[j])] = values[j]
