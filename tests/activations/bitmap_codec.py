"""A small lossless codec of whole tensors: a bit for each byte, and the bytes that are not zero."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bitslab.engine.codecs.blob import (
    HEADER_BYTES,
    Blob,
    BlobCodec,
    check_decode_arguments,
    check_encode_arguments,
)
from bitslab.errors import CorruptedDataError


class BitmapCodec(BlobCodec):
    """See above; on the CPU alone."""

    name = "test-bitmap"
    form = 9001

    @classmethod
    def fit(cls, sample: torch.Tensor) -> BitmapCodec:
        return cls()

    def takes(self, dtype: torch.dtype) -> bool:
        return not dtype.is_complex

    def max_encoded_bytes(self, shape: Any, dtype: torch.dtype) -> int:
        n = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return HEADER_BYTES + -(-n // 8) + n

    def encode(
        self, t: torch.Tensor, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> Blob:
        data = check_encode_arguments(self, t, out, sm_budget)
        raw = t.detach().contiguous().flatten().view(torch.uint8).numpy()
        bitmap, values = np.packbits(raw != 0), raw[raw != 0]
        used = HEADER_BYTES + bitmap.size + values.size
        buffer = data.numpy()
        buffer[:HEADER_BYTES] = 0
        buffer[:16].view(np.int64)[:] = used, t.numel()
        buffer[16:24].view(np.int32)[:] = self.form, t.element_size()
        buffer[HEADER_BYTES:used] = np.concatenate([bitmap, values])
        return Blob(data, t.shape, t.dtype)

    def decode(
        self, blob: Blob, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> torch.Tensor:
        out = check_decode_arguments(self, blob, out, sm_budget)
        buffer, n = blob.data.numpy(), blob.raw_nbytes
        end = HEADER_BYTES + -(-n // 8)
        used = int(buffer[:8].view(np.int64)[0])
        mask = np.unpackbits(buffer[HEADER_BYTES:end], count=n).astype(bool)
        if not end <= used <= buffer.size or mask.sum() != used - end:
            raise CorruptedDataError("blob: test-bitmap is damaged")
        raw = np.zeros(n, np.uint8)
        raw[mask] = buffer[end:used]
        out.copy_(torch.from_numpy(raw).view(blob.dtype).view(blob.shape))
        return out

    def to_config(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_config(cls, config: Any) -> BitmapCodec:
        return cls()
