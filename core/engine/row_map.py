"""How a tensor lies in rows: which dimensions make a row, and how many items share one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..dtypes import dense
from ..errors import ArgumentError
from .codecs.base import elements
from .kernels.format import ceil_div

#: Rows shorter than this spend too much on their metadata.
MIN_ROW_BYTES = 64
#: Aim for rows that hold several items of the first dimension.
GROUPED_ROW_BYTES = 1 << 10
#: A longer row is cut, because one warp decodes a row.
LONG_ROW_BYTES = 1 << 20


@dataclass(frozen=True)
class RowMap:
    """How the items of a tensor's first dimension lie in rows.

    Parameters
    ----------
    n_items : int
        Length of the first dimension; 1 for a 0-d tensor.
    rows_per_item : int
        Rows that make up an item.
    items_per_row : int
        Items that share a row; 1 where `rows_per_item` is not. The last row may have fewer and
        is filled up.
    """

    n_items: int
    rows_per_item: int
    items_per_row: int

    @property
    def n_rows(self) -> int:
        """Number of rows, the last one filled up."""
        return ceil_div(self.n_items * self.rows_per_item, self.items_per_row)

    @property
    def filler_items(self) -> int:
        """Items of the last row that the tensor does not have."""
        return self.n_rows * self.items_per_row - self.n_items * self.rows_per_item


def row_map(shape: Sequence[int], row_elements: int) -> RowMap:
    """Return how a tensor of `shape` lies in rows of `row_elements` elements.

    Raises
    ------
    ArgumentError
        When neither an item of the first dimension is a whole number of rows nor a row a whole
        number of items.
    """
    n_items = shape[0] if shape else 1
    item = elements(shape[1:])
    if item == row_elements:
        return RowMap(n_items, 1, 1)
    if item and row_elements and item % row_elements == 0:
        return RowMap(n_items, item // row_elements, 1)
    if item and row_elements and row_elements % item == 0:
        return RowMap(n_items, 1, row_elements // item)
    raise ArgumentError(
        f"rows of {row_elements} elements do not fit a tensor of shape {list(shape)}, "
        f"whose items have {item}"
    )


def natural_row_elements(shape: Sequence[int], itemsize: int) -> int:
    """Return the elements of the rows that a tensor is cut into.

    The last dimension makes a row. While that has fewer than 64 bytes, the dimensions before it
    are taken in; where a whole item of the first dimension has fewer, several items share a row
    of about 1 KiB. A row of more than 1 MiB is cut into equal parts, if there is a divisor.

    Parameters
    ----------
    shape : sequence of int
        Shape of the tensor.
    itemsize : int
        Bytes of an element.
    """
    if not shape or 0 in shape:
        return elements(shape[1:])
    sizes = list(shape[1:])
    row = 1
    while sizes and row * itemsize < MIN_ROW_BYTES:
        row *= sizes.pop()
    row_bytes = row * itemsize
    if row_bytes > LONG_ROW_BYTES:
        fewest = ceil_div(row_bytes, LONG_ROW_BYTES)
        parts = next((p for p in range(fewest, 16 * fewest) if row % p == 0), 1)
        return row // parts
    if row_bytes >= MIN_ROW_BYTES:
        return row
    unit = 8 // math.gcd(8, row_bytes)  # items that make a row divisible into chunks of any width
    most = unit * max(1, round(GROUPED_ROW_BYTES / (unit * row_bytes)))
    n_rows = ceil_div(shape[0], most)
    balanced = ceil_div(shape[0], n_rows)  # keeps the filler of the last row small
    return row * unit * ceil_div(balanced, unit)


def as_rows(tensor: torch.Tensor, rows: RowMap, row_shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor as ``[n_rows, *row_shape]``, a view where that is possible.

    The filler of the last row repeats the last item.
    """
    flat = dense(tensor).reshape(-1)
    if rows.filler_items:
        # As bytes, because not every dtype can be concatenated on every device.
        items = flat.view(torch.uint8).view(rows.n_items, -1)
        filler = items[-1:].expand(rows.filler_items, -1)
        flat = torch.cat([items, filler]).view(-1).view(tensor.dtype)
    return flat.view(rows.n_rows, *row_shape)
