"""Compressed sparse rows of whole tensors: what is not zero, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernels import kernels_for
from ..kernels.kept_format import COLUMN_BYTES, CSR_FORM, KeptLayout
from .base import elements
from .plain_blobs import PlainBlobCodec


class CsrCodec(PlainBlobCodec):
    """Encodes whole tensors as the elements that are not zero, their columns, and row starts.

    Zero means all bits zero, so that -0.0 and subnormals remain. A column takes 16 bits, in rows of
    4096 elements; elements of 16 bytes are two of 8. A tensor that would not shrink is kept raw.
    See `bitslab.engine.kernels.kept_format` for the bytes.
    """

    name = "csr"
    form = CSR_FORM

    @classmethod
    def fit(cls, sample: torch.Tensor) -> CsrCodec:
        """Return the codec; a sample teaches it nothing."""
        return cls()

    def takes(self, dtype: torch.dtype) -> bool:
        """Return True: every dtype has elements of 1, 2, 4, 8 or 16 bytes."""
        return True

    def max_encoded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes of the raw tensor and the header."""
        return KeptLayout(elements(shape), dtype.itemsize, COLUMN_BYTES).max_bytes

    def write(
        self, x: torch.Tensor, dtype: torch.dtype, data: torch.Tensor, sm_budget: int | None
    ) -> None:
        """Encode a tensor's bytes."""
        kernels_for(x.device).encode_csr(x, dtype.itemsize, data, sm_budget)

    def read(
        self, data: torch.Tensor, dtype: torch.dtype, x: torch.Tensor, sm_budget: int | None
    ) -> bool:
        """Decode to a tensor's bytes."""
        return kernels_for(x.device).decode_csr(data, dtype.itemsize, x, sm_budget)
