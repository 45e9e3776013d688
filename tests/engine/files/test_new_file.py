"""Files that appear whole: errors name the file that was asked for, and nothing is left over."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bitslab.engine.files import new_file
from bitslab.engine.files.new_file import FOREIGN_SECONDS, SUFFIX, NewFile, replacing

WRITER = """
import sys, time
from bitslab.engine.files.new_file import replacing
with replacing(sys.argv[1]) as temporary:
    temporary.write_bytes(b"half")
    print(temporary.name, flush=True)
    time.sleep(300)
"""


def left_over(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))


def test_next_write_removes_what_a_killed_process_left_and_nothing_that_is_written(
    tmp_path: Path,
) -> None:
    names = []
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / f"{i}")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            names.append(process.stdout.readline().strip())
        processes[0].kill()
        processes[0].wait()
        assert left_over(tmp_path) == sorted(names)
        with replacing(tmp_path / "other") as temporary:
            temporary.write_bytes(b"whole")
            assert left_over(tmp_path) == sorted([names[1], temporary.name])
        assert left_over(tmp_path) == [names[1]]
        assert (tmp_path / "other").read_bytes() == b"whole"
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_writers_of_one_process_leave_each_others_files(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as first, replacing(tmp_path / "b") as second:
        first.write_bytes(b"1")
        second.write_bytes(b"2")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("name", [".0123456789abcdef-77", ".0123456789abcdef"])
def test_file_of_another_machine_is_removed_after_a_day(name: str, tmp_path: Path) -> None:
    foreign = tmp_path / f"{name}{SUFFIX}"
    foreign.write_bytes(b"half")
    with replacing(tmp_path / "x"):
        pass
    assert foreign.exists()
    long_ago = time.time() - FOREIGN_SECONDS - 60
    os.utime(foreign, (long_ago, long_ago))
    with replacing(tmp_path / "x"):
        pass
    assert sorted(os.listdir(tmp_path)) == ["x"]


def test_links_pipes_and_folders_under_such_names_are_left(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_bytes(b"kept")
    boot = new_file._boot()
    (tmp_path / f".{boot}-link{SUFFIX}").symlink_to(kept)
    (tmp_path / f".{boot}-folder{SUFFIX}").mkdir()
    os.mkfifo(tmp_path / f".{boot}-pipe{SUFFIX}")
    with replacing(tmp_path / "x"):
        pass
    assert len(left_over(tmp_path)) == 3 and kept.read_bytes() == b"kept"


def test_file_system_without_locks_is_written_to_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOTSUP, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    left = tmp_path / f".{new_file._boot()}-left{SUFFIX}"
    left.touch()
    with replacing(tmp_path / "x") as temporary:
        temporary.write_bytes(b"whole")
    assert (tmp_path / "x").read_bytes() == b"whole" and left.exists()


def test_file_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    removed: list[Path] = []

    def late(file: int, how: int) -> None:
        lock(file, how)
        if not removed:
            (path,) = tmp_path.iterdir()
            removed.append(path)
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", late)
    with replacing(tmp_path / "x") as temporary:
        assert temporary != removed[0]
        temporary.write_bytes(b"whole")
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EROFS, "choose a folder"),
        (errno.EACCES, "choose a folder"),
        (errno.EIO, "cannot be written"),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "",
)
@pytest.mark.parametrize("where", ["block", "temporary", "sync", "rename", "begin"])
def test_error_names_the_file_that_was_asked_for_and_says_what_to_do(
    where: str, number: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "asked-for"
    path.write_bytes(b"old")
    link = tmp_path / "link"
    link.symlink_to(path)

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), str(arguments[0]))

    with pytest.raises(OSError) as caught, monkeypatch.context() as patched:
        if where == "begin":
            patched.setattr(new_file, "FileIO", fail)
        if where in ("sync", "rename"):
            patched.setattr(os, "fsync" if where == "sync" else "replace", fail)
        with NewFile(link) as new:
            if where == "block":
                raise OSError(number, os.strerror(number))
            if where == "temporary":
                fail(new.temporary)
    text = str(caught.value)
    assert caught.value.errno == number and type(caught.value) is type(OSError(number, ""))
    assert caught.value.filename == str(link) and SUFFIX not in text
    assert "cannot be written" in text and os.strerror(number) in text and advice in text
    assert path.read_bytes() == b"old" and sorted(os.listdir(tmp_path)) == ["asked-for", "link"]


def test_errors_of_other_files_are_left_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "x"):
        open(tmp_path / "missing")
    assert caught.value.filename == str(tmp_path / "missing")
    with pytest.raises(OSError, match="^of a library$"), replacing(tmp_path / "x"):
        raise OSError("of a library")


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_interrupted_file_knows_whether_it_is_complete(
    call: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    real = getattr(os, call)

    def interrupted(*arguments: object) -> None:
        if after:
            real(*arguments)
        raise KeyboardInterrupt

    new = NewFile(path)
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(os, call, interrupted)
        with new:
            new.temporary.write_bytes(b"new")
    renamed = call == "replace" and after
    assert new.complete is renamed
    assert path.read_bytes() == (b"new" if renamed else b"old") and os.listdir(tmp_path) == ["x"]


def test_many_threads_write_into_one_folder(tmp_path: Path) -> None:
    failed = []

    def write(n: int) -> None:
        try:
            for _ in range(30):
                with replacing(tmp_path / "x") as temporary:
                    temporary.write_bytes(b"%d" % n * 100)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and os.listdir(tmp_path) == ["x"]
    assert len(set((tmp_path / "x").read_bytes())) == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_while_a_file_is_written_keeps_no_lock_on_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    new = NewFile(path)
    wait, go = os.pipe()
    child = os.fork()
    if not child:
        try:
            new.close()  # as when the child's copy is collected
            os.read(wait, 1)
        finally:
            os._exit(0)
    try:
        assert new.temporary.exists()
        new.commit()
        new.close()
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.write(go, b"x")
        os.waitpid(child, 0)


@pytest.mark.parametrize("linked", [False, True], ids=["itself", "by a link"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_are_not_replaced(kind: str, linked: bool, tmp_path: Path) -> None:
    node = tmp_path / "node"
    if kind == "pipe":
        os.mkfifo(node)
    else:
        try:
            os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        except PermissionError:
            node = Path(os.devnull)  # nobody but root could replace it
    path = node
    if linked:
        path = tmp_path / "link"
        path.symlink_to(node)
    before = node.stat()
    with pytest.raises(OSError, match="no regular file, which would be replaced") as caught:
        NewFile(path)
    assert caught.value.filename == str(path)
    assert (node.stat().st_mode, node.stat().st_rdev) == (before.st_mode, before.st_rdev)
    assert not left_over(tmp_path)
