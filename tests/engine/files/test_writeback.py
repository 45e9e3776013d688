"""Pieces of a file: threads write them in any order, one at a time, and errors leave the turn."""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from bitslab.engine.files.writeback import PieceWriter

PIECE_BYTES, PIECES = 10_000, 40


def test_threads_write_pieces_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, most = 0, 0
    pwritev, counting = os.pwritev, threading.Lock()

    def slow(fd: int, buffers: Any, offset: int) -> int:
        nonlocal inside, most
        with counting:
            inside += 1
            most = max(most, inside)
        time.sleep(0.001)
        with counting:
            inside -= 1
        return pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    data = torch.randint(0, 256, (PIECES, PIECE_BYTES), dtype=torch.uint8)
    with open(tmp_path / "x", "wb+") as file, ThreadPoolExecutor(8) as threads:
        pieces = PieceWriter(file.fileno())
        order = torch.randperm(PIECES).tolist()
        list(threads.map(lambda i: pieces.write(i * PIECE_BYTES, data[i]), order))
    assert most == 1
    assert (tmp_path / "x").read_bytes() == data.numpy().tobytes()


def test_a_piece_that_cannot_be_written_leaves_the_turn_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    one = torch.ones(3, dtype=torch.uint8)
    with open(tmp_path / "x", "wb+") as file:
        pieces = PieceWriter(file.fileno())
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwritev", full)
            with pytest.raises(OSError, match="No space left"):
                pieces.write(0, one)
        pieces.write(2, one)
    assert (tmp_path / "x").read_bytes() == b"\0\0\1\1\1"


def test_nothing_is_written_once_the_file_is_closed(tmp_path: Path) -> None:
    """Its number may be that of another file by then."""
    pieces = PieceWriter(os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT))
    pieces.close()
    with open(tmp_path / "other", "wb+"), pytest.raises(OSError, match="descriptor"):
        pieces.write(0, torch.ones(3, dtype=torch.uint8))
    pieces.close()
    assert (tmp_path / "other").read_bytes() == b""
