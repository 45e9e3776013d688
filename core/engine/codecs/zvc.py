"""The codec that leaves out zeros: ZVC of CSWAP+ (TPDS'22, section 5.2.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ...dtypes import flat_bytes
from ...errors import ArgumentError, ArgumentTypeError, CorruptedDataError
from ..kernels import kernels_for
from ..kernels.blob_format import ZVC_FORM, ZvcLayout
from .base import bits_in_order
from .blob import (
    Blob,
    BlobCodec,
    FlatCodec,
    bytes_in_order,
    check_decode_arguments,
    check_encode_arguments,
)

#: Bytes of the elements that are taken; those of 16 are compared with zero in halves.
ELEMENT_BYTES = (1, 2, 4, 8, 16)


class ZvcCodec(BlobCodec):
    """Zero-value compression: a bit for each element, and the elements that are not zero.

    Zero are elements all of whose bits are zero: -0.0 and subnormal numbers are kept. Of elements
    of one byte, blocks that hold 0 and 1 alone are bits alone: a bool takes one bit. Tensors of
    such elements from 64 KiB on have a form of their own, whose bitmap comes first. The parts of a
    buffer: `bitslab.engine.kernels.blob_format.ZvcLayout`.

    Notes
    -----
    Immutable, and all of them are equal: nothing is learnt.

    Examples
    --------
    >>> import torch
    >>> from bitslab.engine.codecs import ZvcCodec
    >>> t = torch.randn(64, 1000).relu()
    >>> codec = ZvcCodec.fit(t)
    >>> blob = codec.encode(t)
    >>> 1.8 < blob.raw_nbytes / blob.nbytes < 2
    True
    >>> torch.equal(codec.decode(blob), t)
    True
    """

    name: ClassVar[str] = "zvc"
    form: ClassVar[int] = ZVC_FORM
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    @classmethod
    def fit(cls, sample: torch.Tensor | None = None, **options: Any) -> ZvcCodec:
        """Return the codec; nothing is learnt, and there are no options."""
        if options:
            raise ArgumentTypeError(f"zvc: takes no options, got {sorted(options)}")
        return cls()

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether elements have 1, 2, 4, 8 or 16 bytes."""
        return dtype.itemsize in ELEMENT_BYTES

    def max_encoded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes that are taken where nothing is zero.

        Raises
        ------
        ArgumentError
            When the tensor has 32 GiB or more.
        """
        layout = ZvcLayout.of(shape, dtype)
        if not layout.sound:
            raise ArgumentError(f"t: shape {list(shape)} {dtype}, zvc takes less than 32 GiB")
        return layout.max_bytes

    def encode(
        self, t: torch.Tensor, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> Blob:
        """Encode a tensor on its own device; see `BlobCodec.encode`."""
        data = check_encode_arguments(self, t, out, sm_budget)
        layout = ZvcLayout.of(t.shape, t.dtype)
        kernels_for(t.device).encode_zvc(flat_bytes(t), layout, layout.form, data, sm_budget)
        return Blob(data, t.shape, t.dtype)

    def for_flat(self, elements: int, dtype: torch.dtype, device: torch.device) -> FlatCodec:
        """Return what swaps tensors of one size; see `BlobCodec.for_flat`."""
        if type(self) is not ZvcCodec:  # which may encode in another way
            return super().for_flat(elements, dtype, device)
        return _FlatZvc(self, elements, dtype, device)

    def decode(
        self, blob: Blob, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> torch.Tensor:
        """Decode a blob on its own device; see `BlobCodec.decode`."""
        result = check_decode_arguments(self, blob, out, sm_budget)
        layout = ZvcLayout.of(blob.shape, blob.dtype)
        _check_room(blob.data, layout)
        target = result if bits_in_order(result) else torch.empty_like(result, memory_format=_ROWS)
        kernels_for(blob.device).decode_zvc(
            blob.data, layout, layout.form, flat_bytes(target), sm_budget
        )
        return result if target is result else result.copy_(target)

    def to_config(self) -> dict[str, Any]:
        """Return an empty mapping."""
        return {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ZvcCodec:
        """Return the codec.

        Raises
        ------
        CorruptedDataError
            When `config` is no empty mapping.
        """
        if not isinstance(config, Mapping) or config:
            raise CorruptedDataError(f"zvc: configuration is {config!r:.60}, expected {{}}")
        return cls()


class _FlatZvc(FlatCodec):
    def __init__(
        self, codec: ZvcCodec, elements: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(codec, elements, dtype)
        self._layout, self._device = ZvcLayout.of(self._shape, dtype), device

    def encode(self, flat: torch.Tensor, data: torch.Tensor, sm_budget: int | None = None) -> None:
        layout = self._layout
        kernels = kernels_for(self._device)
        # Kernels of a GPU want its address alone: a view takes as long as a launch.
        x = flat if flat.is_cuda else bytes_in_order(flat)
        kernels.encode_zvc(x, layout, layout.form, data, sm_budget)

    def decode(self, data: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
        layout = self._layout
        if data.shape[0] < layout.least_bytes:
            _check_room(data, layout)
        shape = self._shape if shape is None else shape
        found = torch.empty(shape, dtype=self.dtype, device=self._device)
        kernels = kernels_for(self._device)
        out = found if found.is_cuda else bytes_in_order(found)
        kernels.decode_zvc(data, layout, layout.form, out)
        return found


def _check_room(data: torch.Tensor, layout: ZvcLayout) -> None:
    if data.shape[0] < layout.least_bytes:
        raise CorruptedDataError(
            f"blob: {data.shape[0]} bytes, {layout.elements} elements of {layout.element_bytes} "
            f"bytes take {layout.least_bytes} or more"
        )


_ROWS = torch.contiguous_format
