"""The file of the disk tier: every byte comes back, faults are named, nothing is left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from bitslab.activations.disk import DiskError, PosixFile, posix_file
from bitslab.activations.disk.tensor_file import ALIGN_BYTES
from bitslab.engine.transfer import ThreadLane
from tests.activations.disk.file_contract import (
    CONTRACT,
    MIB,
    PLACES,
    Promise,
    at_offset,
    bytes_of_a_place_come_back,
    random_bytes,
)


@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_contract(promise: Promise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    promise(PosixFile, tmp_path, monkeypatch)


@settings(max_examples=30)
@given(**PLACES)
def test_bytes_of_any_length_and_place_come_back(
    n: int, misaligned_bytes: int, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    bytes_of_a_place_come_back(PosixFile, folder, n, misaligned_bytes, block)


@pytest.fixture
def file(tmp_path: Path) -> PosixFile:
    made = PosixFile(tmp_path)
    made.grow(4 * MIB)
    return made


@pytest.mark.parametrize("most", [1, 100, ALIGN_BYTES, ALIGN_BYTES + 1, 3 * ALIGN_BYTES - 7])
def test_short_writes_and_reads_go_on(
    file: PosixFile, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def short(move: Any) -> Any:
        def call(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            calls.append(offset)
            left, some = most, []
            if file.direct:  # what the system moves is then whole blocks
                left = max(ALIGN_BYTES, most - most % ALIGN_BYTES)
            for buffer in buffers:
                some.append(buffer[:left])
                left -= len(some[-1])
            got: int = move(fd, [buffer for buffer in some if len(buffer)], offset)
            return got

        return call

    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    monkeypatch.setattr(os, "preadv", short(os.preadv))
    n = 5 * ALIGN_BYTES + 3 if most >= 100 else 700
    data, out = at_offset(n, 0).copy_(random_bytes(n)), at_offset(n, 0)
    file.write(0, data)
    file.read(0, out)
    assert torch.equal(out, data)
    assert len(calls) > 2 or file.direct


def test_write_that_makes_no_progress_is_an_error(
    file: PosixFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *arguments: 0)
    with pytest.raises(DiskError, match="bytes 0 to 100 cannot be written: 0 of"):
        file.write(0, random_bytes(100))


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EIO, "Input/output error"), (errno.ENOSPC, "free some space there")],
)
def test_error_of_the_system_names_folder_range_and_cause(
    file: PosixFile, number: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", fail)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(DiskError, match=f"bytes 4096 to 4196 cannot be written: .*{advice}") as at:
        file.write(4096, random_bytes(100))
    assert str(tmp_path) in str(at.value) and str(os.getpid()) in str(at.value)
    with pytest.raises(DiskError, match="bytes 4096 to 4196 cannot be read: "):
        file.read(4096, random_bytes(100))


def test_requests_that_the_file_system_refuses_go_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = PosixFile(tmp_path)
    file.grow(MIB)
    was_direct, refused = file.direct, []
    write = os.pwritev

    def refuse(fd: int, *arguments: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "not so")
        return write(fd, *arguments)

    monkeypatch.setattr(os, "pwritev", refuse)
    data = random_bytes(MIB - 3)
    file.write(0, data)
    assert not file.direct and len(refused) == was_direct
    file.read(0, out := torch.empty_like(data))
    assert torch.equal(out, data)


def test_device_that_does_not_answer_is_left_behind(
    file: PosixFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posix_file, "CLOSE_SECONDS", 0.05)
    begun, gate, write = threading.Event(), threading.Event(), os.pwritev

    def slow(*arguments: Any) -> int:
        begun.set()
        assert gate.wait(60)
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", slow)
    lane = ThreadLane("test")
    task = lane.submit(file.write, 0, random_bytes(100))
    assert begun.wait(60)
    file.close()
    os.fstat(file._fd)  # nobody else gets the number of a descriptor in use
    gate.set()
    task.result(60)
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file._fd)
    lane.close()


def test_tmpfs_and_network_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = posix_file.file_system("/dev/shm")
    assert (found.kind, found.in_memory, found.network) == ("tmpfs", True, False)
    device = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mounts"
    line = "30 1 {}:{} / / rw shared:1 - {} server:/x rw"
    for kind in ("nfs4", "fuse.sshfs", "cifs"):
        mounts.write_text(line.format(os.major(device), os.minor(device), kind))
        monkeypatch.setattr(posix_file, "_MOUNTS", str(mounts))
        assert posix_file.file_system(tmp_path) == posix_file.FileSystem(kind, network=True)
    monkeypatch.setattr(posix_file, "_MOUNTS", str(tmp_path / "none"))
    assert posix_file.file_system(tmp_path).kind == ""
