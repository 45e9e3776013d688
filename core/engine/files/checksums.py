"""CRC-32 of bytes that are written piece by piece, in any order."""

from __future__ import annotations

import functools
from collections.abc import Iterable

#: The polynomial of zlib's CRC-32; as there, the highest bit is the coefficient of x^0.
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_BYTE = 1 << 23  # x^8


def combined_crc32(pieces: Iterable[tuple[int, int]]) -> int:
    """Return the checksum of bytes from those of their parts.

    Parameters
    ----------
    pieces : iterable of (int, int)
        Of each part, in order: what `zlib.crc32` returns, and its bytes.

    Notes
    -----
    A checksum is a remainder of polynomials over two elements. Bytes behind a part multiply its
    remainder by x^8 each; what the checksum adds at the beginning and at the end cancels.

    Examples
    --------
    >>> import zlib
    >>> from bitslab.engine.files.checksums import combined_crc32
    >>> parts = [b"invariant ", b"", b"bit packing"]
    >>> combined_crc32((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(
    ...     b"".join(parts)
    ... )
    True
    """
    total = 0
    for crc32, n_bytes in pieces:
        total = _product(_power(n_bytes), total) ^ crc32
    return total


def _product(a: int, b: int) -> int:
    """Multiply two remainders."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@functools.lru_cache(maxsize=256)
def _power(n_bytes: int) -> int:
    """Return the remainder of x^(8 n)."""
    power, square = _ONE, _BYTE
    while n_bytes:
        if n_bytes & 1:
            power = _product(power, square)
        square = _product(square, square)
        n_bytes >>= 1
    return power
