"""Invariant bit packing of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ...dtypes import flat_bytes
from ...errors import ArgumentError, ArgumentTypeError, CorruptedDataError
from ..kernels import kernels_for
from ..kernels.blob_format import HEADER_BYTES, PackedLayout
from ..kernels.cuda.stream import current_stream, stream_pointer
from ..kernels.format import RowLayout
from ..kernels.packed_blob import pack_blob, unpack_blob
from .base import bits_in_order, check_tensor_argument, elements
from .blob import (
    Blob,
    BlobCodec,
    FlatCodec,
    bytes_in_order,
    check_decode_arguments,
    check_encode_arguments,
)
from .invariant import InvariantCodec

#: Bytes of the rows that a tensor is cut into, whatever its shape.
ROW_BYTES = 1024


class InvariantBlobCodec(BlobCodec):
    """Invariant bit packing of a whole tensor, in rows of 1 KiB that are written back to back.

    As `InvariantCodec` with one mask for all positions, but the tensor's shape does not matter, and
    on a GPU nothing waits for the packed size. Make one with `InvariantBlobCodec.fit`. The parts of
    a buffer: `bitslab.engine.kernels.blob_format.PackedLayout`.

    Parameters
    ----------
    rows : InvariantCodec
        Fitted to rows of 1 KiB, uniform, of one cluster.

    Notes
    -----
    Immutable; threads may share it. The kernels' tables are made once for each device.

    Examples
    --------
    >>> import torch
    >>> from bitslab.engine.codecs import InvariantBlobCodec
    >>> t = torch.randn(64, 1000).bfloat16()
    >>> codec = InvariantBlobCodec.fit(t)
    >>> blob = codec.encode(t)
    >>> blob.raw_nbytes / blob.nbytes > 1.3
    True
    >>> torch.equal(codec.decode(blob), t)
    True
    """

    name: ClassVar[str] = "ibp-blob"
    form: ClassVar[int] = 2
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    learns: ClassVar[bool] = True

    def __init__(self, rows: InvariantCodec) -> None:
        f = rows.profile.format
        if f.row_bytes != ROW_BYTES or not f.uniform or f.clusters > 1:
            raise ArgumentError(
                f"rows: {rows.describe()}, rows of {f.row_bytes} bytes; expected uniform ones of "
                f"{ROW_BYTES} bytes without clusters"
            )
        self.rows = rows
        self._layouts: dict[torch.device, RowLayout] = {}
        self._streams: set[tuple[torch.device, int]] = set()

    @classmethod
    def fit(cls, sample: torch.Tensor, **options: Any) -> InvariantBlobCodec:
        """Learn mask and values from a tensor.

        Parameters
        ----------
        sample : torch.Tensor
            Of any shape, on any device; empty ones teach nothing.
        **options
            Those of `InvariantCodec.fit`, but for ``uniform`` and ``clusters``.

        Notes
        -----
        Planning on a GPU waits for it a few times.
        """
        check_tensor_argument("sample", sample)
        refused = sorted({"uniform", "clusters", "n_rows"} & options.keys())
        if refused:
            raise ArgumentTypeError(f"ibp-blob: takes no option {', '.join(refused)}")
        return cls(fit_rows(flat_bytes(sample), sample.dtype, options))

    @property
    def profile_bytes(self) -> int:
        """Bytes of mask and values."""
        return self.rows.profile_bytes

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether it was fitted to tensors of the dtype."""
        return dtype == self.rows.dtype

    def max_encoded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Return the bytes that are taken where no row shrinks.

        Raises
        ------
        ArgumentError
            When the tensor has 16 GiB or more.
        """
        parts, _ = self.parts_of(shape, dtype)
        if not parts.sound:
            raise ArgumentError(f"t: shape {list(shape)} {dtype}, ibp-blob takes less than 16 GiB")
        return parts.max_bytes

    def encode(
        self, t: torch.Tensor, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> Blob:
        """Encode a tensor on its own device; see `BlobCodec.encode`."""
        data = check_encode_arguments(self, t, out, sm_budget)
        parts, header = self.parts_of(t.shape, t.dtype)
        pack_blob(flat_bytes(t), self.layout_on(t.device), parts, data, header, sm_budget)
        return Blob(data, t.shape, t.dtype)

    def decode(
        self, blob: Blob, out: torch.Tensor | None = None, *, sm_budget: int | None = None
    ) -> torch.Tensor:
        """Decode a blob on its own device; see `BlobCodec.decode`."""
        result = check_decode_arguments(self, blob, out, sm_budget)
        parts, header = self.parts_of(blob.shape, blob.dtype)
        check_room(blob.data, parts)
        target = result if bits_in_order(result) else torch.empty_like(result, memory_format=_ROWS)
        layout = self.layout_on(blob.device)
        unpack_blob(blob.data, layout, parts, flat_bytes(target), header, sm_budget)
        return result if target is result else result.copy_(target)

    def for_flat(self, elements: int, dtype: torch.dtype, device: torch.device) -> FlatCodec:
        """Return what swaps tensors of one size; see `BlobCodec.for_flat`."""
        if type(self) is not InvariantBlobCodec:  # which may encode in another way
            return super().for_flat(elements, dtype, device)
        return _FlatInvariant(self, elements, dtype, device)

    def prepare(self, device: torch.device) -> None:
        """Make the kernels' tables on a device."""
        self.layout_on(device)

    def layout_on(self, device: torch.device) -> RowLayout:
        """Return the kernels' tables on a device; raise the error of an earlier call, if any."""
        kernels_for(device)
        found = self._layouts.get(device)
        if found is None:
            found = self.rows.row_layout()
            found = self._layouts[device] = found if device.type == "cpu" else found.to(device)
        if device.type == "cuda":
            # Their memory remembers each stream until it is given back: once is enough.
            key = device, stream_pointer(device)
            if key not in self._streams and not torch.cuda.is_current_stream_capturing():
                for table in (found.tables, found.starts):
                    table.record_stream(current_stream(device))
                self._streams.add(key)
        return found

    def parts_of(
        self, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[PackedLayout, tuple[int, int, int]]:
        """Return where the parts of a buffer are, and what its header says."""
        n, size = elements(shape), dtype.itemsize
        f = self.rows.profile.format
        n_rows, tail_bytes = divmod(n * size, ROW_BYTES)
        length_bytes = f.length_dtype.itemsize
        parts = PackedLayout.of(HEADER_BYTES, n_rows, f.row_words, length_bytes, tail_bytes)
        return parts, (n, size, self.form)

    def describe(self) -> str:
        """Return the plan in a few words: ``ibp-blob 2B k3 uniform``."""
        return self.name + self.rows.describe().removeprefix(self.rows.name)

    def to_config(self) -> dict[str, Any]:
        """Return the configuration of the codec of rows."""
        return {"rows": self.rows.to_config()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> InvariantBlobCodec:
        """Build the codec that `to_config` described.

        Raises
        ------
        CorruptedDataError
            When the configuration is damaged.
        """
        if not isinstance(config, Mapping) or set(config) != {"rows"}:
            raise CorruptedDataError(f"ibp-blob: configuration is {config!r:.60}, expected rows")
        try:
            return cls(InvariantCodec.from_config(config["rows"]))
        except ArgumentError as error:
            raise CorruptedDataError(f"ibp-blob: configuration: {error}") from None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the tables on devices, which are made again."""
        return {**self.__dict__, "_layouts": {}, "_streams": set()}


def fit_rows(data: torch.Tensor, dtype: torch.dtype, options: Mapping[str, Any]) -> InvariantCodec:
    """Return a codec of rows of 1 KiB that is fitted to bytes ``[n]`` of elements of a dtype."""
    n_rows = data.shape[0] // ROW_BYTES
    if n_rows == 0:  # a row that ends with zeros
        padded = torch.zeros(ROW_BYTES, dtype=torch.uint8, device=data.device)
        padded[: data.shape[0]] = data
        data, n_rows = padded, 1
    # Bytes, however they are aligned, as elements.
    rows = data[: n_rows * ROW_BYTES]
    if rows.data_ptr() % dtype.itemsize or rows.storage_offset() % dtype.itemsize:
        rows = rows.clone()
    return InvariantCodec.fit(rows.view(dtype).view(n_rows, -1), uniform=True, **options)


def check_room(data: torch.Tensor, parts: PackedLayout) -> None:
    """Refuse a buffer that has no room for the parts that its tensor asks for."""
    if data.shape[0] < parts.used_bytes(0):
        raise CorruptedDataError(
            f"blob: {data.shape[0]} bytes, rows of {parts.n_rows * ROW_BYTES + parts.tail_bytes} "
            f"bytes take {parts.used_bytes(0)} or more"
        )


class _FlatInvariant(FlatCodec):
    def __init__(
        self, codec: InvariantBlobCodec, elements: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(codec, elements, dtype)
        self._packer, self._device = codec, device
        self._parts, self._header = codec.parts_of(self._shape, dtype)

    def encode(self, flat: torch.Tensor, data: torch.Tensor, sm_budget: int | None = None) -> None:
        layout = self._packer.layout_on(self._device)
        pack_blob(bytes_in_order(flat), layout, self._parts, data, self._header, sm_budget)

    def decode(self, data: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
        check_room(data, self._parts)
        shape = self._shape if shape is None else shape
        found = torch.empty(shape, dtype=self.dtype, device=self._device)
        layout = self._packer.layout_on(self._device)
        unpack_blob(data, layout, self._parts, bytes_in_order(found), self._header)
        return found


_ROWS = torch.contiguous_format
