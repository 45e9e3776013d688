"""What every file of the disk tier promises: bytes come back, faults are named, nothing is left."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from bitslab.activations.disk import DiskError, PosixFile, posix_file
from bitslab.activations.disk.tensor_file import ALIGN_BYTES
from bitslab.engine.files.new_file import SUFFIX
from bitslab.engine.memory import HostBuffer
from bitslab.engine.transfer import ThreadLane
from tests.activations.disk.processes import files

MIB = 1 << 20
OpenFile = Callable[[Path], PosixFile]
Promise = Callable[[OpenFile, Path, pytest.MonkeyPatch], None]

#: How many bytes, where their memory begins, and where they stand in the file.
PLACES: dict[str, st.SearchStrategy[int]] = {
    "n": st.one_of(
        st.integers(1, 3 * ALIGN_BYTES),
        st.sampled_from([ALIGN_BYTES, 2 * MIB, MIB + 1, 2 * MIB - 1]),
    ),
    "misaligned_bytes": st.sampled_from([0, 1, 256, 512, ALIGN_BYTES - 1]),
    "block": st.integers(0, 3),
}


def random_bytes(n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator)


def at_offset(n: int, misaligned_bytes: int) -> torch.Tensor:
    """Return memory of n bytes that begins so many bytes behind a multiple of a block."""
    memory = HostBuffer.allocate(n + misaligned_bytes, pin=False, private=True)
    return memory.tensor[misaligned_bytes:]


def opened(open_file: OpenFile, folder: Path) -> PosixFile:
    """Return a file of 4 MiB."""
    file = open_file(folder)
    file.grow(4 * MIB)
    return file


def bytes_of_a_place_come_back(
    open_file: OpenFile, folder: Path, n: int, misaligned_bytes: int, block: int
) -> None:
    file = open_file(folder)
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


def aligned_memory_is_not_copied(
    open_file: OpenFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = opened(open_file, folder)
    file.write(0, at_offset(MIB + 5, 0))
    assert file.bounced_bytes == 0
    if file.direct:
        file.write(0, at_offset(MIB + 5, 16))
        assert file.bounced_bytes == MIB + 5
    file.close()


def random_numbers_are_left_alone(
    open_file: OpenFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_rng_state()
    file = opened(open_file, folder)
    file.write(0, at_offset(MIB, 0))
    file.close()
    assert torch.equal(torch.get_rng_state(), before)


def threads_write_and_read_at_once(
    open_file: OpenFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_file(folder)
    file.grow(16 * MIB)
    data = [at_offset(MIB - i, 0).copy_(random_bytes(MIB - i, i)) for i in range(16)]
    out = [at_offset(len(t), 0) for t in data]

    def there_and_back(i: int) -> None:
        for _ in range(3):
            file.write(i * MIB, data[i])
            file.read(i * MIB, out[i].zero_())
            assert torch.equal(out[i], data[i])

    lane = ThreadLane("test", 8)
    for task in [lane.submit(there_and_back, i) for i in range(16)]:
        task.result(60)
    lane.close()
    file.close()


def file_that_is_cut_is_named(
    open_file: OpenFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = opened(open_file, folder)
    file.write(0, random_bytes(2 * MIB))
    os.truncate(f"/proc/self/fd/{file._fd}", MIB)
    with pytest.raises(DiskError, match=f"was cut from {4 * MIB} to {MIB} bytes by somebody else"):
        file.read(0, torch.empty(2 * MIB, dtype=torch.uint8))
    file.read(0, torch.empty(MIB, dtype=torch.uint8))
    file.close()


def write_that_the_system_refuses_is_named(
    open_file: OpenFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real refusal: a limit of the process on the size of files."""
    file = opened(open_file, folder)
    data = at_offset(MIB, 0).copy_(random_bytes(MIB))
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, hard))
    try:
        message = f"bytes {2 * MIB} to {3 * MIB} cannot be written: File too large; .*ulimit -f"
        with pytest.raises(DiskError, match=message) as at:
            file.write(2 * MIB, data)
        assert isinstance(at.value.__cause__, OSError) and at.value.__cause__.errno == errno.EFBIG
        assert str(folder) in str(at.value) and str(os.getpid()) in str(at.value)
        file.write(0, data)  # elsewhere it goes on
        file.read(0, out := torch.empty_like(data))
        assert torch.equal(out, data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        file.close()


def space_is_looked_at_before_it_is_taken(
    open_file: OpenFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = opened(open_file, folder)
    blocks = os.stat(f"/proc/self/fd/{file._fd}").st_blocks * 512
    assert blocks >= 4 * MIB, "the space was not taken"
    with pytest.raises(DiskError, match="more are needed, the file system has"):
        file.grow(1 << 60)
    monkeypatch.setattr(posix_file, "free_bytes", lambda fd: 1 << 62)  # as if it went meanwhile
    with pytest.raises(DiskError, match="bytes more: "):
        file.grow(1 << 60)
    assert file.nbytes == 4 * MIB
    assert os.stat(f"/proc/self/fd/{file._fd}").st_size == 4 * MIB
    file.close()


def nothing_has_a_name_and_closing_gives_the_space_back(
    open_file: OpenFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = opened(open_file, folder)
    assert files(folder)
    fd = file._fd
    assert file.named is None and not list(folder.iterdir())
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(DiskError, match="is closed"):
        file.write(0, random_bytes(5))
    assert not files(folder)


def a_file_that_is_dropped_is_closed(
    open_file: OpenFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = opened(open_file, folder)
    assert files(folder)
    del file
    assert not files(folder)


def a_forked_child_keeps_no_descriptor(
    open_file: OpenFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the space would be kept when the parent has ended."""
    file = opened(open_file, folder)
    pid = os.fork()
    if pid == 0:
        kept = 1
        with contextlib.suppress(BaseException):
            kept = len(files(folder))
            file.close()
        os._exit(kept)
    assert os.waitpid(pid, 0) == (pid, 0)
    data = at_offset(MIB, 0).copy_(random_bytes(MIB))
    file.write(0, data)
    file.read(0, out := torch.empty_like(data))
    assert torch.equal(out, data)
    file.close()


def kill_leaves_nothing(open_file: OpenFile, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = getattr(open_file, "__name__", "")
    script = (
        "import sys, time, torch\n"
        f"from bitslab.activations.disk import {name}\n"
        f"file = {name}(sys.argv[1])\n"
        "file.grow(1 << 20)\n"
        "file.write(0, torch.ones(1 << 20, dtype=torch.uint8))\n"
        "print('written', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, os.fspath(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    assert not list(folder.iterdir())


def _without_nameless_files(
    open_file: OpenFile, folder: Path, monkeypatch: pytest.MonkeyPatch, can_unlink: bool
) -> None:
    open_, unlink = os.open, os.unlink

    def no_tmpfile(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no such files")
        return open_(path, flags, *more, **named)

    def busy(path: Any, *more: Any, **named: Any) -> None:
        raise OSError(errno.EBUSY, "is in use")

    monkeypatch.setattr(os, "open", no_tmpfile)
    if not can_unlink:
        monkeypatch.setattr(os, "unlink", busy)
    file = open_file(folder)
    file.grow(MIB)
    data = random_bytes(70_000)
    file.write(0, data)
    assert len(list(folder.iterdir())) == (not can_unlink)
    if not can_unlink:
        assert file.named is not None and file.named.endswith(SUFFIX)
        # Another process's start leaves it: the lock says that it is in use.
        monkeypatch.setattr(os, "unlink", unlink)
        other = open_file(folder)
        assert os.path.exists(file.named)
        other.close()
    file.read(0, out := torch.empty_like(data))
    assert torch.equal(out, data)
    file.close()
    assert not list(folder.iterdir())


def a_file_system_without_nameless_files(
    open_file: OpenFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_nameless_files(open_file, folder, monkeypatch, True)


def a_file_system_whose_files_keep_their_names(
    open_file: OpenFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_nameless_files(open_file, folder, monkeypatch, False)


def removed_or_replaced_names_do_no_harm(
    open_file: OpenFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_, unlink = os.open, os.unlink
    monkeypatch.delattr(os, "O_TMPFILE")
    monkeypatch.setattr(os, "unlink", lambda *arguments, **named: open_("/nowhere", 0))
    file = open_file(folder)
    monkeypatch.setattr(os, "unlink", unlink)
    file.grow(MIB)
    data = random_bytes(9000)
    file.write(0, data)
    assert file.named is not None
    os.unlink(file.named)
    Path(file.named).write_bytes(b"of somebody else")
    file.read(0, out := torch.empty_like(data))
    assert torch.equal(out, data)
    file.close()


def folders_that_cannot_be_used_are_named(
    open_file: OpenFile, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = folder / "plain"
    plain.touch()
    with pytest.raises(DiskError, match=f"{plain}: is no folder"):
        open_file(plain)
    with pytest.raises(DiskError, match="there is no such folder; give a folder on an SSD"):
        open_file(folder / "none")

    def read_only(*arguments: object, **named: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(DiskError, match="cannot be written: Read-only file system; choose"):
        open_file(folder)


CONTRACT: list[Promise] = [
    aligned_memory_is_not_copied,
    random_numbers_are_left_alone,
    threads_write_and_read_at_once,
    file_that_is_cut_is_named,
    write_that_the_system_refuses_is_named,
    space_is_looked_at_before_it_is_taken,
    nothing_has_a_name_and_closing_gives_the_space_back,
    a_file_that_is_dropped_is_closed,
    a_forked_child_keeps_no_descriptor,
    kill_leaves_nothing,
    a_file_system_without_nameless_files,
    a_file_system_whose_files_keep_their_names,
    removed_or_replaced_names_do_no_harm,
    folders_that_cannot_be_used_are_named,
]
