"""However a process ends, nothing of its files is left; and forked children."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import run_forked

#: Each way to end runs in a child of its own, which has a tier with much to write.
ENDS = """
import os, pathlib, signal, sys, time
import torch
from bitslab.activations.disk import DiskRates, DiskTier, posix_file

torch.set_num_threads(1)  # the team of OpenMP does not live on in a forked child

folder, named = sys.argv[1], sys.argv[2] == "named"
MIB = 1 << 20
rates = DiskRates(MIB, 2, 2, 1e9, 1e9, 1e9, 1e9, direct=True)
unlink = os.unlink
if named:  # as on a file system where a file in use must have a name
    del os.O_TMPFILE

    def busy(path, *more, **named):
        if pathlib.Path(path).parent == pathlib.Path(folder):
            raise OSError(16, "is in use")
        unlink(path, *more, **named)

def begin():
    if named:
        os.unlink = busy
    tier = DiskTier(folder, rates=rates)
    os.unlink = unlink
    tickets = [tier.store(tier.host_buffer(3 * MIB).fill_(i)) for i in range(8)]
    assert all(tickets)
    return tier, tickets

def free():
    return os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize

def run(end):
    ready, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ready)
        sys.stderr = open(os.devnull, "w")
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored
        tier, tickets = begin()
        os.write(write, b"1")
        if end == "exception":
            raise RuntimeError("in the middle of a step")
        if end == "exit":
            sys.exit(0)
        time.sleep(60)
        os._exit(77)
    os.close(write)
    assert os.read(ready, 1) == b"1", end
    os.close(ready)
    number = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "interrupt": signal.SIGINT}.get(end)
    if number is not None:
        os.kill(pid, number)
    _, status = os.waitpid(pid, 0)
    if end in ("kill", "term"):
        assert os.WIFSIGNALED(status), (end, status)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) != 77, end
    return pid

child = os.getpid()
for end in ("kill", "term", "interrupt", "exception", "exit"):
    run(end)
    if os.getpid() != child:
        os._exit(0)
    left = os.listdir(folder)
    if named and end in ("kill", "term"):
        (name,) = left  # nobody was there to remove it
        other = DiskTier(folder, rates=rates)  # the next start does
        assert os.listdir(folder) == [], end
        other.close()
    else:
        assert left == [], (end, left)
print("done")
"""


@pytest.mark.parametrize("kind", ["nameless", "named"])
def test_nothing_is_left_however_a_process_ends(kind: str, tmp_path: Path) -> None:
    done = run_forked(["-c", ENDS, tmp_path, kind])
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


FORK = """
import os, sys
import torch
from bitslab.activations.disk import DiskRates, DiskTier
from bitslab.errors import BitslabError

torch.set_num_threads(1)  # the team of OpenMP does not live on in a forked child

folder = sys.argv[1]
rates = DiskRates(1 << 20, 2, 2, 1e9, 1e9, 1e9, 1e9, direct=True)
tier = DiskTier(folder, rates=rates)
data = tier.host_buffer(9 << 20).random_()
right = data.clone()
ticket = tier.store(data)

def files():
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass
    return [link for link in links if link.startswith(os.path.realpath(folder) + "/")]

assert len(files()) == 1
pid = os.fork()
if pid == 0:
    status = 1
    try:
        assert files() == [], files()  # or the space would be kept when the parent has ended
        try:
            tier.fetch(ticket)
        except BitslabError as error:
            assert f"process {os.getppid()}" in str(error)
        else:
            raise AssertionError("a ticket of the parent")
        own = tier.host_buffer(3 << 20).random_()
        its = own.clone()
        mine = tier.store(own)
        assert tier.drain(60) and not mine.in_memory
        assert len(files()) == 1
        assert torch.equal(tier.fetch(mine).result(60), its)
        tier.close()
        status = 0
    finally:
        sys.stderr.flush()
        if status:
            import traceback
            traceback.print_exc()
        os._exit(status)
_, status = os.waitpid(pid, 0)
assert status == 0
assert tier.drain(60)
assert torch.equal(tier.fetch(ticket).result(60), right)
tier.close()
assert files() == []
print("done")
"""


def test_forked_child_has_files_of_its_own(tmp_path: Path) -> None:
    done = run_forked(["-c", FORK, tmp_path])
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert not list(tmp_path.iterdir())
