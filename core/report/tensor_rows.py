"""Rows of a tensor on the CPU, some at a time."""

from __future__ import annotations

import torch

from ..dtypes import flat_bytes
from ..engine.codecs.base import elements
from ..engine.kernels.format import BLOCK_ROWS
from ..engine.row_map import natural_row_elements, row_map

#: Raw bytes of the rows that are packed, or unpacked, together.
PIECE_BYTES = 16 << 20


class TensorRows:
    """A tensor as the rows that `bitslab.compress` makes of it.

    Parameters
    ----------
    t : torch.Tensor
        Dense, on the CPU. Where it is not row-major, a copy is kept.

    Attributes
    ----------
    data : torch.Tensor
        uint8 ``[nbytes]``, of the tensor.
    dtype : torch.dtype
        Dtype of the tensor.
    row_elements, row_bytes, n_rows : int
        Of the rows; the last one may be longer than what is left of the tensor.
    """

    def __init__(self, t: torch.Tensor) -> None:
        self.dtype = t.dtype
        self.data = flat_bytes(t)
        self.row_elements = natural_row_elements(t.shape, t.dtype.itemsize)
        self.row_bytes = self.row_elements * t.dtype.itemsize
        self.n_rows = row_map(t.shape, self.row_elements).n_rows
        self._item_bytes = elements(t.shape[1:]) * t.dtype.itemsize

    def ranges(self) -> list[tuple[int, int]]:
        """Return ranges of whole blocks of rows, of about PIECE_BYTES each."""
        return row_ranges(self.n_rows, self.row_bytes)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Return rows as uint8 ``[end - begin, row_bytes]``, a view where the tensor has them all.

        The filler of the last row repeats the last item.
        """
        data = self.data[begin * self.row_bytes : end * self.row_bytes]
        missing = (end - begin) * self.row_bytes - data.shape[0]
        if missing:
            last = self.data[-self._item_bytes :]
            data = torch.cat([data, last.repeat(missing // self._item_bytes)])
        return data.view(end - begin, self.row_bytes)

    def bytes_of(self, begin: int, end: int) -> int:
        """Return the bytes of the tensor in a range of rows, without the filler."""
        return min(end * self.row_bytes, self.data.shape[0]) - begin * self.row_bytes

    def typed(self, begin: int, end: int) -> torch.Tensor:
        """Return rows as ``[end - begin, row_elements]`` of the tensor's dtype."""
        flat = self.rows(begin, end).view(-1)
        if flat.storage_offset() % self.dtype.itemsize:
            flat = flat.clone()
        return flat.view(self.dtype).view(end - begin, self.row_elements)


def row_ranges(n_rows: int, row_bytes: int) -> list[tuple[int, int]]:
    """Return ranges that cover ``range(n_rows)``, of whole blocks and of about PIECE_BYTES each."""
    step = max(1, PIECE_BYTES // (BLOCK_ROWS * max(1, row_bytes))) * BLOCK_ROWS
    return [(begin, min(begin + step, n_rows)) for begin in range(0, n_rows, step)]
