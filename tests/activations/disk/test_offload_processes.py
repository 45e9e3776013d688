"""Training with a disk however its process ends: nothing is left; forks and workers of loaders."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked import run_forked

BEGIN = """
import os, sys
import torch, torch._dynamo  # once, rather than in each forked child
from torch import nn
import bitslab
from bitslab.activations.disk import tier
from bitslab.errors import BitslabError
from tests.activations.disk.processes import RATES, UNNOTICED, check_in_child, ended, files, in_use

torch.set_num_threads(1)  # the team of OpenMP does not live on in a forked child
folder = sys.argv[1]
tier.disk_rates = lambda folder: RATES

def make():
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(8, 32, 64)

def step(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]

def attach(model):
    return bitslab.offload_activations(
        model, policy="raw", disk=folder, min_bytes=1024, in_flight_bytes=0, verify=True
    )

def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))
"""

#: Each way to end runs in a child of its own, which trains until it ends.
ENDS = (
    BEGIN
    + """
named = sys.argv[2] == "named"
if named:  # as on a file system where a file in use must have a name
    del os.O_TMPFILE

def begin():
    model, x = make()
    if named:
        with in_use(folder):
            attach(model)
    else:
        attach(model)
    step(model, x)
    assert len(files(folder)) == 1
    loss = model(x).sum()

    def work():
        step(model, x)
        return loss  # whose graph is alive

    return work

for end in ended(begin):
    left = os.listdir(folder)
    # The interrupts that follow the first one, until it has ended, may strike what it cleans up.
    struck = end == "interrupt" and left
    if named and (end in UNNOTICED or struck):
        assert len(left) == 1, (end, left)  # nobody was there to remove it
        model, x = make()
        right = step(model, x)
        offload = attach(model)  # the next start does
        assert os.listdir(folder) == [], end
        assert same(step(model, x), right)
        offload.close()
    assert os.listdir(folder) == [], (end, os.listdir(folder))
print("done")
"""
)


@pytest.mark.parametrize("kind", ["nameless", "named"])
def test_nothing_is_left_however_training_ends(kind: str, tmp_path: Path) -> None:
    done = run_forked(["-c", ENDS, tmp_path, kind])
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


FORK = (
    BEGIN
    + """
model, x = make()
right = step(model, x)
offload = attach(model)
assert same(step(model, x), right)
loss = model(x).square().sum()
assert len(files(folder)) == 1

def check():
    assert files(folder) == []  # or the space would be kept when the parent has ended
    try:
        loss.backward()
    except BitslabError as error:
        assert f"saved by process {os.getppid()}" in str(error), error
    else:
        raise AssertionError("a graph of the parent")
    for _ in range(2):
        assert same(step(model, x), right)
    assert len(files(folder)) == 1
    offload.close()
    assert files(folder) == []

check_in_child(check)
model.zero_grad()
loss.backward()
assert same([p.grad for p in model.parameters()], right)
del loss
offload.close()
assert files(folder) == []
print("done")
"""
)


def test_forked_child_trains_with_a_file_of_its_own(tmp_path: Path) -> None:
    done = run_forked(["-c", FORK, tmp_path])
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert not list(tmp_path.iterdir())


WORKERS = (
    BEGIN
    + """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        assert files(folder) == [], "a worker holds the file"
        return torch.randn(32, 64, generator=torch.Generator().manual_seed(i))

def train(model):
    found = []
    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork"
    )
    for x in loader:
        found += step(model, x)
    return found

model, _ = make()
right = train(model)
offload = attach(model)
for _ in range(2):
    assert same(train(model), right)
assert len(files(folder)) == 1
offload.close()
print("done")
"""
)


def test_workers_of_a_loader(tmp_path: Path) -> None:
    """They are forked in the middle of training, and have nothing of the disk's."""
    done = run_forked(["-c", WORKERS, tmp_path])
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert not list(tmp_path.iterdir())


EXIT = (
    BEGIN
    + """
model, x = make()
offload = attach(model)
for _ in range(2):
    loss = model(x).square().sum()
print("done")
"""
)


def test_the_interpreter_ends_with_a_graph_on_the_disk(tmp_path: Path) -> None:
    done = run_forked(["-c", EXIT, tmp_path])
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert not list(tmp_path.iterdir())
