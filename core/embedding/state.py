"""An optimizer's state of the rows that are not resident."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class RowState:
    """One value of an optimizer for each row of a table, such as Adagrad's sum, in host memory.

    The memory of rows that were never written to is not touched, so that it costs nothing.

    Parameters
    ----------
    n_rows : int
        Rows of the table.
    row_shape : sequence of int
        Shape of a row's value.
    dtype : torch.dtype
        Dtype of the values.
    default : float
        The value of rows that were never written.
    """

    def __init__(
        self, n_rows: int, row_shape: Sequence[int], dtype: torch.dtype, default: float
    ) -> None:
        self.default = default
        # Zeros come from the system untouched; an allocation that were filled would not.
        self._values = torch.zeros((n_rows, *row_shape), dtype=dtype)
        self._written = torch.zeros(n_rows, dtype=torch.bool) if default else None

    @property
    def nbytes(self) -> int:
        """Bytes, were all rows written."""
        return self._values.nbytes

    def read(self, ids: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
        """Return the values ``[n, *row_shape]`` of int64 ``[n]`` rows on a device."""
        where = torch.from_numpy(ids)
        values = self._values[where]
        if self._written is not None:
            values[~self._written[where]] = self.default
        return values.to(device)

    def write(self, ids: np.ndarray[Any, Any], values: torch.Tensor) -> None:
        """Set the values ``[n, *row_shape]`` of int64 ``[n]`` rows, no two alike."""
        where = torch.from_numpy(ids)
        self._values[where] = values.to(self._values)
        if self._written is not None:
            self._written[where] = True

    def load(self, values: torch.Tensor) -> None:
        """Set the values ``[N, *row_shape]`` of all rows."""
        self._values.copy_(values)
        if self._written is not None:
            self._written.fill_(True)

    def whole(self) -> torch.Tensor:
        """Return a copy of the values of all rows ``[N, *row_shape]``, on the CPU."""
        values = self._values.clone()
        if self._written is not None:
            values[~self._written] = self.default
        return values
