"""Reading and writing at a position: short calls go on, and the end of a file is found."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bitslab.engine.files.positioned import read_into, write_from

TEXT = bytes(range(256)) * 4


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def limited(move: Any, most: int, offsets: list[int]) -> Any:
    """Return a call that moves so many bytes at most."""

    def call(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        offsets.append(offset)
        done: int = move(fd, [buffers[0][:most]], offset)
        return done

    return call


@pytest.mark.parametrize("align_bytes", [1, 64])
@pytest.mark.parametrize("most", [1024, 300, 100, 64])
def test_short_calls_go_on(
    fd: int, most: int, align_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets: list[int] = []
    monkeypatch.setattr(os, "pwritev", limited(os.pwritev, most, offsets))
    monkeypatch.setattr(os, "preadv", limited(os.preadv, most, offsets))
    view = memoryview(TEXT)
    write_from(fd, 128, [view[:640], view[640:]], align_bytes=align_bytes)
    first, second = bytearray(640), bytearray(384)
    buffers = [memoryview(first), memoryview(second)]
    assert read_into(fd, 128, buffers, align_bytes=align_bytes) == len(TEXT)
    assert bytes(first + second) == TEXT
    assert all(offset % align_bytes == 0 for offset in offsets)


def test_end_of_a_file_is_found(fd: int) -> None:
    write_from(fd, 0, [memoryview(TEXT)[:700]])
    out = bytearray(1024)
    for align_bytes in (1, 512):
        assert read_into(fd, 0, [memoryview(out)], align_bytes=align_bytes) == 700
        assert bytes(out[:700]) == TEXT[:700]
    assert read_into(fd, 700, [memoryview(out)]) == 0


def test_call_that_writes_nothing_is_an_error(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", limited(os.pwritev, 100, []))
    with pytest.raises(OSError, match="100 of 1024 bytes were written"):
        write_from(fd, 0, [memoryview(TEXT)], align_bytes=512)
