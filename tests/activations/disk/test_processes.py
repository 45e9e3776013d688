"""However a process ends, nothing of its files is left; and forked children."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import run_forked

BEGIN = """
import os, sys, time
import torch
from bitslab.activations.disk import DiskTier
from bitslab.errors import BitslabError
from tests.activations.disk.processes import RATES, UNNOTICED, check_in_child, ended, files, in_use

torch.set_num_threads(1)  # the team of OpenMP does not live on in a forked child
folder = sys.argv[1]
MIB = 1 << 20
"""

#: Each way to end runs in a child of its own, which has a tier with much to write.
ENDS = (
    BEGIN
    + """
named = sys.argv[2] == "named"
if named:  # as on a file system where a file in use must have a name
    del os.O_TMPFILE

def make():
    if not named:
        return DiskTier(folder, rates=RATES)
    with in_use(folder):
        return DiskTier(folder, rates=RATES)

def begin():
    tier = make()
    tickets = [tier.store(tier.host_buffer(3 * MIB).fill_(i)) for i in range(8)]
    assert all(tickets)

    def wait():
        time.sleep(0.01)
        return tier, tickets  # which are alive

    return wait

for end in ended(begin):
    left = os.listdir(folder)
    if named and end in UNNOTICED:
        (name,) = left  # nobody was there to remove it
        other = DiskTier(folder, rates=RATES)  # the next start does
        assert os.listdir(folder) == [], end
        other.close()
    else:
        assert left == [], (end, left)
print("done")
"""
)


@pytest.mark.parametrize("kind", ["nameless", "named"])
def test_nothing_is_left_however_a_process_ends(kind: str, tmp_path: Path) -> None:
    done = run_forked(["-c", ENDS, tmp_path, kind])
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


FORK = (
    BEGIN
    + """
tier = DiskTier(folder, rates=RATES)
data = tier.host_buffer(9 * MIB).random_()
right = data.clone()
ticket = tier.store(data)
assert len(files(folder)) == 1

def check():
    assert files(folder) == []  # or the space would be kept when the parent has ended
    try:
        tier.fetch(ticket)
    except BitslabError as error:
        assert f"process {os.getppid()}" in str(error)
    else:
        raise AssertionError("a ticket of the parent")
    own = tier.host_buffer(3 * MIB).random_()
    its = own.clone()
    mine = tier.store(own)
    assert tier.drain(60) and not mine.in_memory
    assert len(files(folder)) == 1
    assert torch.equal(tier.fetch(mine).result(60), its)
    tier.close()

check_in_child(check)
assert tier.drain(60)
assert torch.equal(tier.fetch(ticket).result(60), right)
tier.close()
assert files(folder) == []
print("done")
"""
)


def test_forked_child_has_files_of_its_own(tmp_path: Path) -> None:
    done = run_forked(["-c", FORK, tmp_path])
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert not list(tmp_path.iterdir())


AT_REST = (
    BEGIN
    + """
from bitslab.activations.disk import PosixFile

class Slow(PosixFile):
    def write(self, offset, data):
        time.sleep(0.3)
        try:
            super().write(offset, data)
        except BaseException as error:
            os.write(1, f"failed: {error}".encode())
            raise

tier = DiskTier(folder, rates=RATES, open_file=Slow)
tier.rest()
tickets = [tier.store(tier.host_buffer(MIB).fill_(i)) for i in range(6)]
time.sleep(0.05)
print("done", flush=True)
"""
)


def test_files_are_open_as_long_as_threads_write_behind_a_rest(tmp_path: Path) -> None:
    """Their number may be that of another file otherwise, which something else has opened."""
    done = run_forked(["-c", AT_REST, tmp_path])
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
