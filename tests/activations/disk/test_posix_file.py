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
from hypothesis import strategies as st

from bitslab.activations.disk import DiskError, PosixFile, posix_file
from bitslab.activations.disk.tensor_file import ALIGN_BYTES
from bitslab.engine.files.new_file import SUFFIX
from bitslab.engine.memory import HostBuffer
from bitslab.engine.transfer import ThreadLane

MIB = 1 << 20


def random_bytes(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator)


def at_offset(n: int, misaligned_bytes: int) -> torch.Tensor:
    """Return memory of n bytes that begins so many bytes behind a multiple of a block."""
    memory = HostBuffer.allocate(n + misaligned_bytes, pin=False, private=True)
    return memory.tensor[misaligned_bytes:]


@pytest.fixture
def file(tmp_path: Path) -> PosixFile:
    made = PosixFile(tmp_path)
    made.grow(4 * MIB)
    return made


@settings(max_examples=30, deadline=None)
@given(
    n=st.one_of(
        st.integers(1, 3 * ALIGN_BYTES),
        st.sampled_from([ALIGN_BYTES, 2 * MIB, MIB + 1, 2 * MIB - 1]),
    ),
    misaligned_bytes=st.sampled_from([0, 1, 256, 512, ALIGN_BYTES - 1]),
    block=st.integers(0, 3),
)
def test_bytes_of_any_length_and_place_come_back(
    n: int, misaligned_bytes: int, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = PosixFile(tmp_path_factory.getbasetemp())
    offset = block * ALIGN_BYTES
    file.grow(offset + 3 * MIB)
    before, behind = random_bytes(offset, 1), random_bytes(ALIGN_BYTES, 2)
    end = offset + -(-n // ALIGN_BYTES) * ALIGN_BYTES
    if offset:
        file.write(0, before)
    file.write(end, behind)
    data = at_offset(n, misaligned_bytes).copy_(random_bytes(n))
    file.write(offset, data)
    # Into memory whose neighbours must not change.
    memory = at_offset(n + misaligned_bytes + 64, 0).fill_(99)
    out = memory[misaligned_bytes : misaligned_bytes + n]
    file.read(offset, out)
    assert torch.equal(out, data)
    assert (memory[:misaligned_bytes] == 99).all()
    assert (memory[misaligned_bytes + n :] == 99).all()
    if offset:
        file.read(0, before_again := torch.empty_like(before))
        assert torch.equal(before_again, before)
    file.read(end, behind_again := torch.empty_like(behind))
    assert torch.equal(behind_again, behind)
    file.close()


def test_aligned_memory_is_not_copied(file: PosixFile) -> None:
    file.write(0, at_offset(MIB + 5, 0))
    assert file.bounced_bytes == 0
    if file.direct:
        file.write(0, at_offset(MIB + 5, 16))
        assert file.bounced_bytes == MIB + 5


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


def test_file_that_is_cut_is_named(file: PosixFile, tmp_path: Path) -> None:
    file.write(0, random_bytes(2 * MIB))
    os.truncate(f"/proc/self/fd/{file._fd}", MIB)
    with pytest.raises(DiskError, match=f"was cut from {4 * MIB} to {MIB} bytes by somebody else"):
        file.read(0, torch.empty(2 * MIB, dtype=torch.uint8))
    file.read(0, torch.empty(MIB, dtype=torch.uint8))


def test_space_is_looked_at_before_it_is_taken(
    file: PosixFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = os.stat(f"/proc/self/fd/{file._fd}").st_blocks * 512
    assert blocks >= 4 * MIB, "the space was not taken"
    with pytest.raises(DiskError, match="more are needed, the file system has"):
        file.grow(1 << 60)
    monkeypatch.setattr(posix_file, "free_bytes", lambda fd: 1 << 62)  # as if it went meanwhile
    with pytest.raises(DiskError, match="bytes more: "):
        file.grow(1 << 60)
    assert file.nbytes == 4 * MIB
    assert os.stat(f"/proc/self/fd/{file._fd}").st_size == 4 * MIB


def test_nothing_has_a_name_and_closing_gives_the_space_back(tmp_path: Path) -> None:
    file = PosixFile(tmp_path)
    file.grow(4 * MIB)
    fd = file._fd
    assert file.named is None and not list(tmp_path.iterdir())
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(DiskError, match="is closed"):
        file.write(0, random_bytes(5))


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


@pytest.mark.parametrize("can_unlink", [True, False])
def test_file_systems_without_nameless_files(
    can_unlink: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, unlink = os.open, os.unlink

    def no_tmpfile(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no such files")
        return opened(path, flags, *more, **named)

    def busy(path: Any, *more: Any, **named: Any) -> None:
        raise OSError(errno.EBUSY, "is in use")

    monkeypatch.setattr(os, "open", no_tmpfile)
    if not can_unlink:
        monkeypatch.setattr(os, "unlink", busy)
    file = PosixFile(tmp_path)
    file.grow(MIB)
    data = random_bytes(70_000)
    file.write(0, data)
    assert len(list(tmp_path.iterdir())) == (not can_unlink)
    if not can_unlink:
        assert file.named is not None and file.named.endswith(SUFFIX)
        # Another process's start leaves it: the lock says that it is in use.
        monkeypatch.setattr(os, "unlink", unlink)
        other = PosixFile(tmp_path)
        assert os.path.exists(file.named)
        other.close()
    file.read(0, out := torch.empty_like(data))
    assert torch.equal(out, data)
    file.close()
    assert not list(tmp_path.iterdir())


def test_removed_or_replaced_names_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, unlink = os.open, os.unlink
    monkeypatch.delattr(os, "O_TMPFILE")
    monkeypatch.setattr(os, "unlink", lambda *arguments, **named: opened("/nowhere", 0))
    file = PosixFile(tmp_path)
    monkeypatch.setattr(os, "unlink", unlink)
    file.grow(MIB)
    data = random_bytes(9000)
    file.write(0, data)
    assert file.named is not None
    os.unlink(file.named)
    Path(file.named).write_bytes(b"of somebody else")
    file.read(0, out := torch.empty_like(data))
    assert torch.equal(out, data)


def test_folders_that_cannot_be_used_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    with pytest.raises(DiskError, match=f"{plain}: is no folder"):
        PosixFile(plain)
    with pytest.raises(DiskError, match="there is no such folder; give a folder on an SSD"):
        PosixFile(tmp_path / "none")

    def read_only(*arguments: object, **named: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(DiskError, match="cannot be written: Read-only file system; choose"):
        PosixFile(tmp_path)


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
