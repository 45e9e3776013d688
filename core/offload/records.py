"""Where the packed form of a tensor lies in an image, and how it is read from there.

An image is a run of bytes, uint8 ``[nbytes]``, that holds the packed tensors of a unit one behind
the other. Parts of packed tensors start at multiples of 16 bytes, which the kernels' loads need;
tensors kept raw start at multiples of 256, so that a run of them can be copied at once to where a
GPU's libraries expect them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..compressed import CompressedTensor
from ..dtypes import dtype_from_name, dtype_name, flat_bytes
from ..engine.codecs import PackedRows, RowCodec
from ..engine.codecs.base import elements
from ..engine.codecs.registry import row_codec_class
from ..errors import CorruptedDataError

PART_ALIGNMENT_BYTES = 16
RAW_ALIGNMENT_BYTES = 256
#: Parts of so many bytes are copied by torch's threads, which pays where pages are new.
TEAM_BYTES = 4 << 20


def round_up(nbytes: int, multiple: int) -> int:
    """Round a number of bytes up to a multiple."""
    return -(-nbytes // multiple) * multiple


@dataclass(frozen=True)
class Part:
    """One tensor of a packed tensor's rows.

    Parameters
    ----------
    offset : int
        Its first byte in the image.
    dtype : torch.dtype
        Dtype of its elements.
    shape : tuple of int
        Its shape.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return elements(self.shape) * self.dtype.itemsize

    def of(self, image: torch.Tensor) -> torch.Tensor:
        """View the part in an image."""
        flat = image[self.offset : self.offset + self.nbytes]
        return flat.view(self.dtype).view(self.shape)


@dataclass(frozen=True, eq=False)
class TensorRecord:
    """A packed tensor in an image.

    Parameters
    ----------
    shape : tuple of int
        Shape of the tensor.
    order : tuple of int
        Its dimensions from the one of the largest stride to that of the smallest: they are packed
        in this order, so that a transposed or channels-last weight comes back with its strides.
    codec : RowCodec
        What packed it; `RawCodec` for one that is kept raw.
    n_rows : int
        Rows of the codec.
    parts : mapping of str to Part
        What the codec's packed rows consist of.
    facts : mapping of str to int
        `PackedRows.facts`.
    offset, nbytes : int
        The bytes of the image that hold the parts, from the first to the last.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    codec: RowCodec
    n_rows: int
    parts: Mapping[str, Part]
    facts: Mapping[str, int] = field(default_factory=dict)
    offset: int = 0
    nbytes: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor."""
        return self.codec.dtype

    @property
    def raw(self) -> bool:
        """Whether it is kept raw."""
        return self.codec.keeps_raw

    @property
    def raw_nbytes(self) -> int:
        """Bytes of the tensor before packing."""
        return elements(self.shape) * self.dtype.itemsize

    @property
    def decoded_nbytes(self) -> int:
        """Bytes that decoding writes: those of the tensor and of what fills up its last row."""
        return self.n_rows * self.codec.row_bytes

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the packed tensor and of its profile."""
        return self.nbytes + self.codec.profile_bytes

    @property
    def row_ordered(self) -> bool:
        """Whether its first dimension can be looked up row by row."""
        return self.order == tuple(range(len(self.order))) and len(self.order) > 1

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in the order in which it is packed."""
        return tuple(self.shape[d] for d in self.order)

    def packed(self, image: torch.Tensor) -> PackedRows:
        """View the packed rows in an image."""
        parts = {name: part.of(image) for name, part in self.parts.items()}
        return PackedRows(self.n_rows, parts, self.facts)

    def compressed(self, image: torch.Tensor) -> CompressedTensor:
        """View the packed tensor in an image, its dimensions in the order they are packed in."""
        return CompressedTensor(self.codec, self.packed(image), self.stored_shape)

    def restored(self, flat: torch.Tensor) -> torch.Tensor:
        """View decoded bytes, uint8 ``[at least raw_nbytes]``, as the tensor."""
        stored = flat[: self.raw_nbytes].view(self.dtype).view(self.stored_shape)
        if self.order == tuple(range(len(self.order))):
            return stored
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return stored.permute(inverse)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON-able values."""
        return {
            "shape": list(self.shape),
            "order": list(self.order),
            "codec": self.codec.name,
            "config": self.codec.to_config(),
            "n_rows": self.n_rows,
            "parts": {
                name: [part.offset, dtype_name(part.dtype), list(part.shape)]
                for name, part in self.parts.items()
            },
            "facts": dict(self.facts),
            "offset": self.offset,
            "nbytes": self.nbytes,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], image_nbytes: int) -> TensorRecord:
        """Build the record that `to_json` described, for an image of `image_nbytes` bytes.

        Raises
        ------
        CorruptedDataError
            When an entry is missing, of another type, or reaches out of the image.
        """
        try:
            codec = row_codec_class(content["codec"]).from_config(content["config"])
            parts = {
                name: Part(int(offset), dtype_from_name(dtype), tuple(map(int, shape)))
                for name, (offset, dtype, shape) in content["parts"].items()
            }
            record = cls(
                tuple(map(int, content["shape"])),
                tuple(map(int, content["order"])),
                codec,
                int(content["n_rows"]),
                parts,
                {name: int(value) for name, value in content["facts"].items()},
                int(content["offset"]),
                int(content["nbytes"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptedDataError(f"description of a tensor is damaged: {error}") from error
        ends = [part.offset + part.nbytes for part in parts.values()]
        starts = [part.offset for part in parts.values()]
        inside = min(starts, default=0) >= 0 and max(ends, default=0) <= image_nbytes
        aligned = all(start % PART_ALIGNMENT_BYTES == 0 for start in starts)
        if not inside or not aligned or sorted(record.order) != list(range(len(record.shape))):
            raise CorruptedDataError("description of a tensor does not fit its image")
        return record


def stride_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a dense tensor from the largest stride to the smallest.

    A tensor whose elements do not fill a run of memory is packed as a contiguous one.
    """
    natural = tuple(range(tensor.dim()))
    if tensor.is_contiguous() or tensor.numel() == 0:
        return natural
    strides = tensor.stride()
    order = tuple(sorted(natural, key=lambda d: (-strides[d], d)))
    return order if tensor.permute(order).is_contiguous() else natural


def lay_out(
    packed: Sequence[tuple[CompressedTensor, tuple[int, ...], tuple[int, ...]]],
) -> tuple[list[TensorRecord], int]:
    """Give packed tensors their offsets in one image.

    Parameters
    ----------
    packed : sequence of (CompressedTensor, shape, order)
        Packed tensors, with the shape and `stride_order` of what they were packed from.

    Returns
    -------
    records : list of TensorRecord
        In the same sequence.
    nbytes : int
        Bytes of the image. Tensors kept raw lie behind the others.
    """
    at = 0
    records: dict[int, TensorRecord] = {}
    raw_last = sorted(range(len(packed)), key=lambda i: packed[i][0].codec.keeps_raw)
    for index in raw_last:
        ct, shape, order = packed[index]
        is_raw = ct.codec.keeps_raw
        at = round_up(at, RAW_ALIGNMENT_BYTES if is_raw else PART_ALIGNMENT_BYTES)
        begin = at
        parts = {}
        for name, tensor in ct.packed.parts.items():
            at = round_up(at, PART_ALIGNMENT_BYTES)
            parts[name] = Part(at, tensor.dtype, tuple(tensor.shape))
            at += tensor.nbytes
        records[index] = TensorRecord(
            shape, order, ct.codec, ct.packed.n_rows, parts, ct.packed.facts, begin, at - begin
        )
    return [records[index] for index in range(len(packed))], round_up(at, PART_ALIGNMENT_BYTES)


def write_parts(ct: CompressedTensor, record: TensorRecord, image: torch.Tensor) -> None:
    """Copy a packed tensor to its offset in an image on the CPU."""
    for name, part in record.parts.items():
        packed = ct.packed.parts[name]
        if packed.device.type == "cpu" and packed.nbytes < TEAM_BYTES:
            # By numpy: torch would start a team of threads, which wait for cores that others use.
            np.copyto(flat_bytes(part.of(image)).numpy(), flat_bytes(packed).numpy())
        else:
            part.of(image).copy_(packed)
