"""Checksums of parts put together."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from bitslab.engine.files.checksums import combined_crc32


@given(st.lists(st.binary(max_size=400), max_size=8))
def test_parts_have_the_checksum_of_the_whole(parts: list[bytes]) -> None:
    assert combined_crc32((zlib.crc32(p), len(p)) for p in parts) == zlib.crc32(b"".join(parts))


def test_a_long_part_behind_another_counts_with_its_length() -> None:
    first, second = bytes(range(256)) * 40, b"\xa5" * 3_000_001
    parts = [(zlib.crc32(first), len(first)), (zlib.crc32(second), len(second))]
    assert combined_crc32(parts) == zlib.crc32(first + second)
    assert combined_crc32(parts[::-1]) == zlib.crc32(second + first)
