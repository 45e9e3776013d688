"""Rows of input times a packed weight: what packed_linear.cu computes, and the path on a CPU.

Blocks of the weight's rows are decoded and multiplied while they are in the cache. Sums are
float32, in the order of torch's product, which is not that of the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ....errors import CorruptedDataError
from ..format import BLOCK_ROWS, RowLayout, RowStorage
from ..packed_products import PackedLinear

#: Raw bytes of a weight that are decoded at a time, about.
BLOCK_BYTES = 1 << 20


def multiply_packed(
    storage: RowStorage,
    layout: RowLayout,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Multiply rows of input by a packed weight: ``out = x weight^T + bias``, rounded once.

    Parameters
    ----------
    storage : RowStorage
        The weight ``[N, K]``, row by row.
    layout : RowLayout
        What `is_multiplied_packed` accepts.
    x, bias, out
        As for `PackedLinear`.

    Raises
    ------
    CorruptedDataError
        When a row of the weight is damaged.
    """
    from . import decode_rows

    f, n_rows = layout.format, storage.lengths.shape[0]
    step = max(1, BLOCK_BYTES // f.row_bytes // BLOCK_ROWS) * BLOCK_ROWS
    given = x.float()
    decoded = torch.empty(min(step, n_rows), f.row_bytes, dtype=torch.uint8)
    for begin in range(0, n_rows, step):
        rows = decoded[: min(step, n_rows - begin)]
        bad = decode_rows(storage, layout, None, begin, rows)
        if bad >= 0:
            raise CorruptedDataError(f"packed: row {bad} of a weight is damaged")
        product = given @ rows.view(torch.bfloat16).float().t()
        end = begin + rows.shape[0]
        out[:, begin:end] = product if bias is None else product + bias[begin:end].float()


def prepare_linear(
    storage: RowStorage, layout: RowLayout, facts: Mapping[str, int]
) -> PackedLinear:
    """Return the product with a packed weight, ready for any number of inputs.

    Parameters
    ----------
    storage, layout
        As for `multiply_packed`.
    facts : mapping of str to int
        For the launch on a GPU; not needed here.
    """

    def multiply(x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        multiply_packed(storage, layout, x, bias, out)

    return multiply
