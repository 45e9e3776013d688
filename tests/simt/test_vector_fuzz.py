"""A few thousand damaged bodies; `make test-full` decodes more, `vector_fuzz` any number."""

from __future__ import annotations

import zlib

import pytest

from tests import pairwise
from tests.simt.vector_fuzz import fuzz

TIMES = 20 if pairwise.FULL else 1


@pytest.mark.parametrize(("simt", "decodes"), [(False, 3000), (True, 400)], ids=["twins", "simt"])
def test_damaged_bodies_are_refused_or_decode_in_bounds(simt: bool, decodes: int) -> None:
    seen = fuzz(TIMES * decodes, zlib.crc32(str(pairwise.seed).encode()), simt=simt)
    assert seen.decodes >= TIMES * decodes and 0.3 < seen.refused / seen.decodes < 0.95
