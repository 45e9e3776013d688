"""Small codecs of whole tensors by torch alone: one lossless, one of a fixed rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from bitslab.engine.codecs.blob import (
    HEADER_BYTES,
    Blob,
    BlobCodec,
    check_decode_arguments,
    check_encode_arguments,
)


def _header(data: torch.Tensor, used: int, codec: BlobCodec, t: torch.Tensor) -> None:
    data[:16].view(torch.int64).copy_(torch.tensor([used, t.numel()]))
    data[16:24].view(torch.int32).copy_(torch.tensor([codec.form, t.dtype.itemsize]))
    data[24:HEADER_BYTES] = 0


class MaskCodec(BlobCodec):
    """A byte of each element that says whether it is zero, then the bytes of the others."""

    name: ClassVar[str] = "mask"
    form: ClassVar[int] = 9001

    @classmethod
    def fit(cls, sample: torch.Tensor) -> MaskCodec:
        return cls()

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16, torch.int64)

    def max_encoded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return HEADER_BYTES + torch.Size(shape).numel() * (1 + dtype.itemsize)

    def encode(
        self, t: torch.Tensor, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> Blob:
        data = check_encode_arguments(self, t, out, sm_budget)
        rows = t.contiguous().view(-1).view(torch.uint8).view(-1, t.dtype.itemsize)
        some = (rows != 0).any(1)
        kept = rows[some].view(-1)
        values_at = HEADER_BYTES + len(some)
        used = values_at + len(kept)
        _header(data, used, self, t)
        data[HEADER_BYTES:values_at] = some
        data[values_at:used] = kept
        return Blob(data, t.shape, t.dtype)

    def decode(
        self, blob: Blob, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> torch.Tensor:
        result = check_decode_arguments(self, blob, out, sm_budget)
        n = torch.Size(blob.shape).numel()
        some = blob.data[HEADER_BYTES : HEADER_BYTES + n].bool()
        rows = torch.zeros(n, blob.dtype.itemsize, dtype=torch.uint8)
        kept = blob.data[HEADER_BYTES + n : blob.nbytes].view(-1, blob.dtype.itemsize)
        rows[some] = kept
        return result.copy_(rows.view(-1).view(blob.dtype).view(blob.shape))

    def to_config(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MaskCodec:
        return cls()


class TopBytesCodec(BlobCodec):
    """The upper bytes of float32, 1 to 4: P is 32 bits of a block of four values for each byte."""

    name: ClassVar[str] = "top"
    form: ClassVar[int] = 9002
    error_bound: ClassVar[str | None] = "relative, what the bytes leave"

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes

    @classmethod
    def fit(cls, sample: torch.Tensor, n_bytes: int = 2) -> TopBytesCodec:
        return cls(n_bytes)

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32

    def max_encoded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return HEADER_BYTES + torch.Size(shape).numel() * self.n_bytes

    def encode(
        self, t: torch.Tensor, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> Blob:
        data = check_encode_arguments(self, t, out, sm_budget)
        rows = t.contiguous().view(-1).view(torch.uint8).view(-1, 4)
        used = self.max_encoded_bytes(t.shape, t.dtype)
        _header(data, used, self, t)
        data[HEADER_BYTES:used].view(-1, self.n_bytes).copy_(rows[:, 4 - self.n_bytes :])
        return Blob(data, t.shape, t.dtype)

    def decode(
        self, blob: Blob, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> torch.Tensor:
        result = check_decode_arguments(self, blob, out, sm_budget)
        rows = torch.zeros(torch.Size(blob.shape).numel(), 4, dtype=torch.uint8)
        rows[:, 4 - self.n_bytes :] = blob.data[HEADER_BYTES : blob.nbytes].view(-1, self.n_bytes)
        return result.copy_(rows.view(-1).view(torch.float32).view(blob.shape))

    def describe(self) -> str:
        return f"top {self.n_bytes}"

    def to_config(self) -> dict[str, Any]:
        return {"n_bytes": self.n_bytes}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TopBytesCodec:
        return cls(**config)
