"""What the header of a file of compressed tensors says of their parts, and parts that fit it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from .dtypes import dtype_from_name, flat_bytes
from .errors import CorruptedDataError

#: Stored as they are; parts of other dtypes are stored as bytes, because not every version of
#: safetensors knows every dtype.
STORED_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
#: Parts that hold the rows themselves, and from which size on their checksums may wait.
ROW_PARTS, LEAST_LATER_BYTES = ("words", "rows"), 1 << 20


class Fields:
    """A JSON object that came from outside; each look-up checks the type."""

    def __init__(self, record: Any) -> None:
        if not isinstance(record, dict):
            raise CorruptedDataError(f"its description is {record!r}, expected an object")
        self.record = record

    def get(self, key: str, kind: type) -> Any:
        """Return a value of a type."""
        found = self.record.get(key)
        if not isinstance(found, kind):
            raise CorruptedDataError(f"{key} is {found!r}, expected {kind.__name__}")
        return found

    def count(self, key: str) -> int:
        """Return a number that is not negative."""
        found = self.record.get(key)
        if not is_count(found):
            raise CorruptedDataError(f"{key} is {found!r}, expected a non-negative integer")
        return found

    def shape(self) -> tuple[int, ...]:
        """Return the value of ``shape``."""
        shape = self.get("shape", list)
        if not all(is_count(size) for size in shape):
            raise CorruptedDataError(f"shape is {shape!r}, expected non-negative integers")
        # 16 is the widest element; more than this, torch cannot count, empty or not.
        if math.prod([max(size, 1) for size in shape]) * 16 >= 1 << 63:
            raise CorruptedDataError(f"shape {shape} is too large")
        return tuple(shape)


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether a value is an integer that is not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, eq=False)
class PartCheck:
    """A comparison of a part with its checksum.

    Parameters
    ----------
    part : str
        Name of the part.
    data : torch.Tensor
        uint8 ``[n]``, its bytes.
    crc32 : int
        What they should have.
    prefix : str
        What the error begins with.
    """

    part: str
    data: torch.Tensor
    crc32: int
    prefix: str = ""

    def run(self) -> None:
        """Make the comparison.

        Raises
        ------
        CorruptedDataError
            When the part is damaged.
        """
        self.compare(crc32_of(self.data))

    def compare(self, crc32: int) -> None:
        """Compare a checksum of the bytes; raise as `run` does."""
        if crc32 != self.crc32:
            raise CorruptedDataError(
                f"{self.prefix}part {self.part!r} is damaged: it does not match its checksum"
            )

    def pieces(self, piece_bytes: int) -> Iterator[torch.Tensor]:
        """Yield the bytes in order, `piece_bytes` at a time."""
        for begin in range(0, self.data.shape[0], piece_bytes):
            yield self.data[begin : begin + piece_bytes]


def crc32_of(t: torch.Tensor) -> int:
    """Return the checksum of the bytes of a contiguous tensor on the CPU."""
    return zlib.crc32(flat_bytes(t).numpy().data)


def waits(part: str, stored: torch.Tensor) -> bool:
    """Return whether the checksum of a part may be compared later: that takes long."""
    return part in ROW_PARTS and stored.nbytes >= LEAST_LATER_BYTES


def read_part(
    part: str, fields: Fields, stored: torch.Tensor, later: list[PartCheck] | None
) -> torch.Tensor:
    """Check a part against its description and return it as the codec made it.

    Parameters
    ----------
    part : str
        Its name.
    fields : Fields
        Its description.
    stored : torch.Tensor
        The part, mapped.
    later : list of PartCheck or None
        Gets the comparison of the checksum where that takes long; it is made here where not, and
        when left out.
    """
    dtype, shape = dtype_from_name(fields.get("dtype", str)), fields.shape()
    as_bytes = dtype not in STORED_DTYPES
    expected = (math.prod(shape) * dtype.itemsize,) if as_bytes else shape
    if stored.dtype != (torch.uint8 if as_bytes else dtype) or tuple(stored.shape) != expected:
        raise CorruptedDataError(
            f"part {part!r} is {list(stored.shape)} {stored.dtype}, expected {list(shape)} {dtype}"
        )
    check = PartCheck(part, flat_bytes(stored), fields.count("crc32"))
    if later is not None and waits(part, stored):
        later.append(check)
    else:
        check.run()
    if as_bytes or stored.data_ptr() % dtype.itemsize:
        # It lies anywhere in the file; a copy lies where torch may read wide elements.
        return flat_bytes(stored).clone().view(dtype).view(shape)
    return stored
