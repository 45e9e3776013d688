"""How many elements of a tensor are zero."""

from __future__ import annotations

import torch

from ...dtypes import flat_bytes
from ..kernels import kernels_for
from ..kernels.kept_format import unit_bytes_of
from .base import check_tensor_argument


def count_zeros(t: torch.Tensor) -> torch.Tensor:
    """Count the elements of a tensor that are zero: whose bits are all 0.

    A zero with a sign and subnormal numbers are not counted, since codecs keep them.

    Parameters
    ----------
    t : torch.Tensor
        Dense, of any shape, strides and dtype, on a CPU or GPU. The halves of an element of 16
        bytes are counted by themselves, as codecs see them. One whose elements fill its memory, in
        whatever order, is read where it is.

    Returns
    -------
    torch.Tensor
        int64 ``[]`` on its device, which is not waited for.
    """
    check_tensor_argument("t", t)
    data = flat_bytes(in_memory_order(t))
    return kernels_for(t.device).count_zeros(data, unit_bytes_of(t.dtype.itemsize))


def in_memory_order(t: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor whose dimensions follow its strides, longest first."""
    return t.permute(sorted(range(t.dim()), key=t.stride, reverse=True))
