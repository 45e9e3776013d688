"""Codecs of whole tensors that learn nothing: their bytes go to a kernel and come back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ...dtypes import flat_bytes
from ...errors import CorruptedDataError
from .base import bits_in_order
from .blob import (
    HEADER_BYTES,
    Blob,
    BlobCodec,
    FlatCodec,
    bytes_in_order,
    check_decode_arguments,
    check_encode_arguments,
)


class PlainBlobCodec(BlobCodec):
    """A codec whose `write` and `read` take the bytes of a tensor in row-major order."""

    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    @abstractmethod
    def write(
        self, x: torch.Tensor, dtype: torch.dtype, data: torch.Tensor, sm_budget: int | None
    ) -> None:
        """Encode a tensor's bytes, uint8 ``[n]``, to a buffer of `max_encoded_bytes` or more."""

    @abstractmethod
    def read(
        self, data: torch.Tensor, dtype: torch.dtype, x: torch.Tensor, sm_budget: int | None
    ) -> bool:
        """Decode a buffer to a tensor's bytes; return whether it is sound, as far as is known."""

    def encode(
        self, t: torch.Tensor, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> Blob:
        """Encode a tensor on its own device, without waiting for it; see `BlobCodec.encode`."""
        data = check_encode_arguments(self, t, out, sm_budget)
        self.write(flat_bytes(t), t.dtype, data, sm_budget)
        return Blob(data, t.shape, t.dtype)

    def decode(
        self, blob: Blob, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> torch.Tensor:
        """Decode a blob on its own device, without waiting for it; see `BlobCodec.decode`."""
        out = check_decode_arguments(self, blob, out, sm_budget)
        in_order = bits_in_order(out)
        to = out if in_order else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        if not self.read(blob.data, blob.dtype, flat_bytes(to), sm_budget):
            raise damaged(self.name)
        return out if in_order else out.copy_(to)

    def for_flat(self, elements: int, dtype: torch.dtype, device: torch.device) -> FlatCodec:
        """Return what swaps tensors of one size; see `BlobCodec.for_flat`."""
        kind = type(self)
        if (kind.encode, kind.decode) != (PlainBlobCodec.encode, PlainBlobCodec.decode):
            return super().for_flat(elements, dtype, device)
        return _FlatPlain(self, elements, dtype, device)

    def to_config(self) -> dict[str, Any]:
        """Return nothing: there is nothing to choose."""
        return {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PlainBlobCodec:
        """Build the codec, for which a configuration is empty."""
        if not isinstance(config, Mapping) or config:
            raise CorruptedDataError(f"{cls.name}: configuration {config!r:.60}, expected none")
        return cls()


class _FlatPlain(FlatCodec):
    def __init__(
        self, codec: PlainBlobCodec, elements: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(codec, elements, dtype)
        self._plain, self._device = codec, device

    def encode(self, flat: torch.Tensor, data: torch.Tensor, sm_budget: int | None = None) -> None:
        self._plain.write(bytes_in_order(flat), self.dtype, data, sm_budget)

    def decode(self, data: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
        shape = self._shape if shape is None else shape
        found = torch.empty(shape, dtype=self.dtype, device=self._device)
        if data.shape[0] < HEADER_BYTES or not self._plain.read(
            data, self.dtype, bytes_in_order(found), None
        ):
            raise damaged(self._plain.name)
        return found


def damaged(name: str) -> CorruptedDataError:
    """Return the error of a buffer that a codec cannot read."""
    return CorruptedDataError(f"blob: its {name} form is damaged, or of another tensor")
