"""Whole tensors on the CPU that keep some elements; see `bitslab.engine.kernels.kept_format`."""

from __future__ import annotations

import torch

from .compiling import call
from .constants import UNSIGNED
from .loading import keeping
from .threads import run_ranges


def count_zeros(data: torch.Tensor, unit_bytes: int) -> torch.Tensor:
    """Count the units of a tensor that are zero: whose bits are all 0.

    Parameters
    ----------
    data : torch.Tensor
        uint8 ``[n]``, contiguous: the tensor's bytes.
    unit_bytes : int
        Bytes of a unit: 1, 2, 4 or 8; divides n.

    Returns
    -------
    torch.Tensor
        int64 ``[]`` on the same device, which nobody waits for.
    """
    x = data.numpy().view(UNSIGNED[unit_bytes])
    kernel = keeping().count_zeros
    parts = run_ranges(lambda begin, end: int(call(kernel, x, begin, end)), x.shape[0], unit_bytes)
    return torch.tensor(sum(parts), dtype=torch.int64)
