"""Zero-value compression, and invariant bit packing of the values that it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ...dtypes import flat_bytes
from ...errors import ArgumentError, ArgumentTypeError
from ..kernels import kernels_for
from ..kernels.blob_format import PackedLayout, ZvcLayout
from ..kernels.format import ceil_div
from ..kernels.packed_blob import pack_blob, unpack_blob
from .base import bits_in_order, check_tensor_argument
from .blob import (
    Blob,
    BlobCodec,
    FlatCodec,
    bytes_in_order,
    check_decode_arguments,
    check_encode_arguments,
)
from .packed_blob import ROW_BYTES, InvariantBlobCodec, check_room, fit_rows
from .zvc import ZvcCodec

#: Where the parts of a buffer are: those of zero-value compression, and the packed values'.
Layouts = tuple[ZvcLayout, PackedLayout]


class ChainCodec(BlobCodec):
    """`ZvcCodec`, then `InvariantBlobCodec` for the elements that are not zero.

    What a ReLU leaves is positive and close in size: packing takes another 1.2 (float32) to 1.5
    (bfloat16) times off it. The buffer has the starts and the bitmap of a `ZvcLayout` and behind
    them, where the values would be, the parts of a `PackedLayout` with their rows. Make one with
    `ChainCodec.fit`.

    Parameters
    ----------
    packer : InvariantBlobCodec
        Fitted to values that are not zero.

    Notes
    -----
    Immutable; threads may share it. Between its two steps the values take as many bytes as the
    tensor, on its device.

    Examples
    --------
    >>> import torch
    >>> from bitslab.engine.codecs import ChainCodec
    >>> t = torch.randn(64, 1000).relu().bfloat16()
    >>> codec = ChainCodec.fit(t)
    >>> blob = codec.encode(t)
    >>> blob.raw_nbytes / blob.nbytes > 2.3
    True
    >>> torch.equal(codec.decode(blob), t)
    True
    """

    name: ClassVar[str] = "zvc+ibp"
    form: ClassVar[int] = 3
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    learns: ClassVar[bool] = True

    def __init__(self, packer: InvariantBlobCodec) -> None:
        self.packer = packer

    @classmethod
    def fit(cls, sample: torch.Tensor, **options: Any) -> ChainCodec:
        """Learn mask and values from the elements of a tensor that are not zero.

        Parameters
        ----------
        sample : torch.Tensor
            Of any shape, on any device.
        **options
            As for `InvariantBlobCodec.fit`.

        Notes
        -----
        On a GPU this waits for it a few times.
        """
        check_tensor_argument("sample", sample)
        refused = sorted({"uniform", "clusters", "n_rows"} & options.keys())
        if refused:
            raise ArgumentTypeError(f"zvc+ibp: takes no option {', '.join(refused)}")
        blob = ZvcCodec().encode(sample)
        layout = ZvcLayout.of(sample.shape, sample.dtype)  # of `ZvcCodec`
        values = blob.data[layout.values_at : blob.nbytes]
        return cls(InvariantBlobCodec(fit_rows(values, sample.dtype, options)))

    @property
    def profile_bytes(self) -> int:
        """Bytes of mask and values."""
        return self.packer.profile_bytes

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether it was fitted to tensors of the dtype."""
        return self.packer.takes(dtype)

    def max_encoded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes that are taken where nothing is zero and no row shrinks.

        Raises
        ------
        ArgumentError
            When the tensor has 16 GiB or more.
        """
        zvc, parts = self.layouts(shape, dtype)
        if not (zvc.sound and parts.sound):
            raise ArgumentError(f"t: shape {list(shape)} {dtype}, zvc+ibp takes less than 16 GiB")
        return parts.max_bytes

    def encode(
        self, t: torch.Tensor, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> Blob:
        """Encode a tensor on its own device; see `BlobCodec.encode`."""
        data = check_encode_arguments(self, t, out, sm_budget)
        self.write(flat_bytes(t), self.layouts(t.shape, t.dtype), data, sm_budget)
        return Blob(data, t.shape, t.dtype)

    def write(
        self, x: torch.Tensor, layouts: Layouts, data: torch.Tensor, sm_budget: int | None
    ) -> None:
        """Encode the bytes of a tensor, uint8 ``[n]``; nothing is checked."""
        zvc, parts = layouts
        device = x.device
        values = torch.empty(parts.n_rows * ROW_BYTES, dtype=torch.uint8, device=device)
        kernels = kernels_for(device)
        kernels.encode_zvc(x, zvc, self.form, data, sm_budget, values, ROW_BYTES)
        header = zvc.elements, zvc.element_bytes, self.form
        layout = self.packer.layout_on(device)
        pack_blob(values, layout, parts, data, header, sm_budget, counted=True)

    def decode(
        self, blob: Blob, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> torch.Tensor:
        """Decode a blob on its own device; see `BlobCodec.decode`."""
        result = check_decode_arguments(self, blob, out, sm_budget)
        target = result if bits_in_order(result) else torch.empty_like(result, memory_format=_ROWS)
        layouts = self.layouts(blob.shape, blob.dtype)
        self.read(blob.data, layouts, flat_bytes(target), sm_budget)
        return result if target is result else result.copy_(target)

    def read(
        self, data: torch.Tensor, layouts: Layouts, x: torch.Tensor, sm_budget: int | None
    ) -> None:
        """Decode a buffer to the bytes of a tensor, uint8 ``[n]``; the buffer alone is checked."""
        zvc, parts = layouts
        device = x.device
        check_room(data, parts)
        values = torch.empty(parts.n_rows * ROW_BYTES, dtype=torch.uint8, device=device)
        header = zvc.elements, zvc.element_bytes, self.form
        layout = self.packer.layout_on(device)
        unpack_blob(data, layout, parts, values, header, sm_budget, counted=True)
        kernels_for(device).decode_zvc(data, zvc, self.form, x, sm_budget, values)

    def for_flat(self, elements: int, dtype: torch.dtype, device: torch.device) -> FlatCodec:
        """Return what swaps tensors of one size; see `BlobCodec.for_flat`."""
        if type(self) is not ChainCodec:  # which may encode in another way
            return super().for_flat(elements, dtype, device)
        return _FlatChain(self, elements, dtype, device)

    def prepare(self, device: torch.device) -> None:
        """Make the kernels' tables on a device."""
        self.packer.layout_on(device)

    def layouts(self, shape: Sequence[int], dtype: torch.dtype) -> Layouts:
        """Return where the parts of a buffer are, before and behind the packing of values."""
        zvc = ZvcLayout.of(shape, dtype, chained=True)
        f = self.packer.rows.profile.format
        n_rows = ceil_div(zvc.max_value_bytes, ROW_BYTES)
        return zvc, PackedLayout.of(zvc.values_at, n_rows, f.row_words, f.length_dtype.itemsize)

    def describe(self) -> str:
        """Return the plan in a few words: ``zvc+ibp 2B k3 uniform``."""
        rows = self.packer.rows
        return self.name + rows.describe().removeprefix(rows.name)

    def to_config(self) -> dict[str, Any]:
        """Return the configuration of the codec of rows."""
        return self.packer.to_config()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ChainCodec:
        """Build the codec that `to_config` described.

        Raises
        ------
        CorruptedDataError
            When the configuration is damaged.
        """
        return cls(InvariantBlobCodec.from_config(config))


class _FlatChain(FlatCodec):
    def __init__(
        self, codec: ChainCodec, elements: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(codec, elements, dtype)
        self._chain, self._device = codec, device
        self._layouts = codec.layouts(self._shape, dtype)

    def encode(self, flat: torch.Tensor, data: torch.Tensor, sm_budget: int | None = None) -> None:
        # As `_FlatZvc` does.
        x = flat if flat.is_cuda else bytes_in_order(flat)
        self._chain.write(x, self._layouts, data, sm_budget)

    def decode(self, data: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
        shape = self._shape if shape is None else shape
        found = torch.empty(shape, dtype=self.dtype, device=self._device)
        x = found if found.is_cuda else bytes_in_order(found)
        self._chain.read(data, self._layouts, x, None)
        return found


_ROWS = torch.contiguous_format
