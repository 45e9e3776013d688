"""A file of packed weights that somebody uses is not replaced; afterwards its path is free."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from bitslab.engine.files.file_locks import check_free, hold, release
from bitslab.errors import ArgumentError, BitslabError
from bitslab.offload import (
    PackedWeights,
    WeightPacker,
    find_offloaded,
    offload_weights,
    restore_weights,
)
from tests.helpers import same_bits
from tests.offload.models import Blocks

X = torch.linspace(-1, 1, 128).view(2, 64)
IN_USE = "holds packed weights that a model is using, in this process or another"


def output(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(X)
    return found


def streamed(path: Path) -> Any:
    model = Blocks(count=2)
    offload_weights(model, execution_device="cpu", min_bytes=0, disk=path)
    return model


def by_offloading(path: Path) -> None:
    model = Blocks(count=2)
    before = dict(model.named_parameters())
    try:
        offload_weights(model, execution_device="cpu", min_bytes=0, disk=path)
    except ArgumentError:
        assert dict(model.named_parameters()) == before
        raise


def by_saving(path: Path) -> None:
    packer = WeightPacker({"unit": ["weight"]})
    packer.add("weight", torch.zeros(64, 64))
    packer.finish().save(path)


@pytest.mark.parametrize(
    ("write", "argument"),
    [(by_offloading, "disk"), (by_saving, "path")],
    ids=["offload_weights", "PackedWeights.save"],
)
@pytest.mark.parametrize("link", [False, True], ids=["same-path", "by-a-symbolic-link"])
def test_a_file_that_a_model_uses_is_not_replaced(write, argument, link, tmp_path):
    expected, path = output(Blocks(count=2)), tmp_path / "weights"
    model = streamed(path)
    other = tmp_path / "link"
    other.symlink_to(path)
    with pytest.raises(ArgumentError, match=f"^{argument}: .*{IN_USE}"):
        write(other if link else path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "weights"]
    assert same_bits(output(model), expected)


def test_a_file_that_is_open_is_not_replaced(tmp_path):
    by_saving(tmp_path / "weights")
    held = PackedWeights.open(tmp_path / "weights")
    with pytest.raises(ArgumentError, match=IN_USE):
        by_offloading(tmp_path / "weights")
    kept = held.compressed("weight")  # its memory is the file's map
    held.close()
    by_offloading(tmp_path / "weights")
    assert kept.shape == (64, 64)


def restored(model: Any) -> None:
    restore_weights(model)


def closed(model: Any) -> None:
    find_offloaded(model).close()


def part_of_a_cycle(model: Any) -> None:
    model.itself = [model]


def deleted(model: Any) -> None:
    pass


@pytest.mark.parametrize("end", [restored, closed, deleted, part_of_a_cycle])
def test_the_path_is_free_when_the_model_is_gone(end, tmp_path):
    gc.collect()
    gc.disable()
    try:
        model = streamed(tmp_path / "weights")
        output(model)
        end(model)
        if end not in (restored, closed):
            del model
        again = streamed(tmp_path / "weights")
    finally:
        gc.enable()
    assert same_bits(output(again), output(Blocks(count=2)))


def test_the_second_of_two_that_write_a_new_file_is_refused(tmp_path):
    first, second = (WeightPacker({"u": ["w"]}, disk=tmp_path / "weights") for _ in range(2))
    for number, packer in enumerate((first, second)):
        packer.add("w", torch.full((64, 64), number, dtype=torch.int32))
    held = first.finish()
    with pytest.raises(ArgumentError, match=f"disk: .*{IN_USE}"):
        second.finish()
    second.abandon()
    assert int(held.read("w").sum()) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["weights"]


USER = """
import sys
from bitslab.offload import PackedWeights
held = PackedWeights.open(sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("end", ["ends", "is-killed"])
def test_a_file_is_not_replaced_until_the_process_that_uses_it(end, tmp_path):
    path = tmp_path / "weights"
    by_saving(path)
    command = [sys.executable, "-c", USER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(ArgumentError, match=IN_USE):
            by_offloading(path)
        if end == "is-killed":
            other.kill()
        else:
            other.communicate(b"\n", timeout=60)
    by_offloading(path)


def test_a_forked_child_that_drops_its_copy_leaves_the_file_in_use(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    hold(fd, tmp_path / "file")
    release(os.dup(fd), owner=os.getpid() + 1)  # as a child does with the descriptor it inherits
    with pytest.raises(ArgumentError, match=f"^path: .*{IN_USE}"):
        check_free(tmp_path / "file", "path")
    release(fd, owner=os.getpid())
    check_free(tmp_path / "file", "path")


def test_writers_that_look_at_once_do_not_take_each_other_for_a_model(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"")

    def look() -> None:
        for _ in range(200):
            check_free(path, "disk")

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(look) for _ in range(2)]:
            done.result()


def refuse_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(fd: int, flags: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("name", ["ENOLCK", "EOPNOTSUPP", "ENOSYS", "EINVAL", "EBADF"])
def test_a_file_system_without_locks_is_written_to_and_read(name, monkeypatch, tmp_path):
    # EBADF is what network file systems say of a folder, or of a file that is open to be read.
    refuse_locks(monkeypatch, getattr(errno, name))
    path = tmp_path / "weights"
    for _ in range(2):
        model = streamed(path)
        assert same_bits(output(model), output(Blocks(count=2)))
        restore_weights(model)


@pytest.mark.parametrize("name", ["EIO", "EDEADLK", "EPERM"])
def test_another_failure_to_lock_is_an_error_that_names_the_file(name, monkeypatch, tmp_path):
    path = tmp_path / "weights"
    by_saving(path)
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        refuse_locks(patched, getattr(errno, name))
        n_open = len(os.listdir("/dev/fd"))
        for use in (PackedWeights.open, lambda p: check_free(p, "disk")):
            with pytest.raises(OSError, match=f"cannot be locked.*{path}") as caught:
                use(path)
            assert caught.value.errno == getattr(errno, name)
        with pytest.raises((OSError, BitslabError), match="cannot be locked"):
            by_offloading(path)
        del caught
        assert len(os.listdir("/dev/fd")) == n_open
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["weights"]
    by_offloading(path)


@pytest.mark.parametrize("name", ["EAGAIN", "EACCES"])
def test_a_lock_that_is_refused_means_that_somebody_uses_the_file(name, monkeypatch, tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(b"")
    refuse_locks(monkeypatch, getattr(errno, name))
    with pytest.raises(ArgumentError, match=IN_USE):
        check_free(path, "disk")
