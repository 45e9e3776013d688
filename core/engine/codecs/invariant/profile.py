"""What invariant bit packing learns from a sample: masks, and the values of their bits."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....errors import CorruptedDataError
from ...kernels.format import CHUNK_BYTES, CODE_BITS, MAX_CLUSTERS, MAX_ROW_BYTES, RowFormat

UNSIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}


@dataclass(frozen=True, eq=False)
class Profile:
    """Masks and values of a packed format.

    Parameters
    ----------
    format : RowFormat
        Chunk width, code width, grouping, and how many masks there are.
    masks : numpy.ndarray
        Unsigned integers of chunk_bytes, ``[clusters, positions]``; bit 1 = invariant (the Mask
        of IBP section 4.1).
    values : numpy.ndarray
        The same dtype, ``[clusters, positions, 2**code_bits - 1]``: the values that masked bits
        take, most frequent first (for one value, the Bitval of IBP section 4.1).
    """

    format: RowFormat
    masks: np.ndarray
    values: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of masks and values."""
        return self.masks.nbytes + self.values.nbytes

    def to_config(self) -> dict[str, Any]:
        """Return the profile as JSON-able values; arrays as base64 of little-endian bytes."""
        f = self.format
        return {
            "row_bytes": f.row_bytes,
            "chunk_bytes": f.chunk_bytes,
            "code_bits": f.code_bits,
            "grouped": f.grouped,
            "uniform": f.uniform,
            "clusters": f.clusters,
            "masks": _base64(self.masks),
            "values": _base64(self.values),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Profile:
        """Build and check the profile that `to_config` described.

        Raises
        ------
        CorruptedDataError
            When an entry is missing, of another type, out of range, or does not fit the others.
        """
        f = RowFormat(
            _integer(config, "row_bytes", 1, MAX_ROW_BYTES),
            _integer(config, "chunk_bytes", min(CHUNK_BYTES), max(CHUNK_BYTES)),
            _integer(config, "code_bits", min(CODE_BITS), max(CODE_BITS)),
            _flag(config, "grouped"),
            _flag(config, "uniform"),
            _integer(config, "clusters", 1, MAX_CLUSTERS),
        )
        if f.chunk_bytes not in CHUNK_BYTES or f.row_bytes % f.chunk_bytes:
            raise CorruptedDataError(
                f"profile: chunk_bytes {f.chunk_bytes} does not divide row_bytes {f.row_bytes}"
            )
        masks = _array(config, "masks", f, (f.clusters, f.positions))
        values = _array(config, "values", f, (f.clusters, f.positions, f.values))
        if (values & ~masks[..., None]).any():
            raise CorruptedDataError("profile: a value has bits outside its mask")
        return cls(f, masks, values)


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def _integer(config: Mapping[str, Any], key: str, low: int, high: int) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise CorruptedDataError(f"profile: {key} is {value!r}, expected {low} to {high}")
    return value


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if not isinstance(value, bool):
        raise CorruptedDataError(f"profile: {key} is {value!r}, expected true or false")
    return value


def _array(config: Mapping[str, Any], key: str, f: RowFormat, shape: tuple[int, ...]) -> np.ndarray:
    text = config.get(key)
    try:
        data = base64.b64decode(text if isinstance(text, str) else "?", validate=True)
    except (binascii.Error, ValueError) as error:
        raise CorruptedDataError(f"profile: {key} is not base64") from error
    dtype = UNSIGNED[f.chunk_bytes]
    expected = int(np.prod(shape)) * dtype.itemsize
    if len(data) != expected:
        raise CorruptedDataError(f"profile: {key} has {len(data)} bytes, expected {expected}")
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="))
