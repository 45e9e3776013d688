"""Optimizer state of rows that are not resident, in host memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..engine.memory.host import HostBuffer
from ..errors import BitslabError
from .device_access import DeviceAccess

#: Rows that are copied at once.
PIECE_ROWS = 1 << 16


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
        # NumPy takes zeros from the system untouched; torch fills them in.
        nbytes = n_rows * math.prod(row_shape) * dtype.itemsize
        zeros = torch.from_numpy(np.zeros(nbytes, np.uint8))
        self._values = zeros.view(dtype).view(n_rows, *row_shape)
        self._written = torch.zeros(n_rows, dtype=torch.bool, device="cpu") if default else None
        # The memory of the values, once it is page-locked or was refused to be.
        self._buffer: HostBuffer | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Describe the state for a copy, which has memory of its own."""
        return self.__dict__ | {"_buffer": None}

    def pin(self, access: DeviceAccess) -> bool:
        """Page-lock the values so that a device can read them; return whether that worked.

        The memory of all rows is taken then.
        """
        if self._buffer is None:
            try:
                buffer = HostBuffer.allocate(self._values.nbytes)
            except BitslabError:  # there is too little memory
                buffer = HostBuffer.allocate(0)
            if access.reads_memory(buffer):
                values = buffer.tensor.view(self._values.dtype).view(self._values.shape)
                for begin in range(0, len(values), PIECE_ROWS):
                    piece = slice(begin, begin + PIECE_ROWS)
                    values[piece] = self._values[piece]
                    if self._written is not None:
                        values[piece][~self._written[piece]] = self.default
                self._values, self._written = values, None
                self._buffer = buffer
            else:
                self._buffer = HostBuffer.allocate(0)
        return access.reads_memory(self._buffer)

    @property
    def address(self) -> int:
        """Of the values in host memory."""
        return self._values.data_ptr()

    def as_bytes(self) -> torch.Tensor:
        """Return the values as the GPU reads them: uint8 ``[N, bytes of a row]``."""
        return self._values.view(len(self._values), -1).view(torch.uint8)

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
