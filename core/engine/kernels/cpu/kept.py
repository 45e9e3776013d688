"""Numba twins of what the forms that keep some elements share: counting, and zeros alone.

``x`` is a tensor as unsigned integers ``[units]``.
"""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def count_zeros(x, begin, end):
    """Return how many of the units begin..end are zero."""
    zeros = np.int64(0)
    for i in range(begin, end):
        zeros += x[i] == 0
    return zeros
