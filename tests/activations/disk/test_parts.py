"""Parts of one storage that go to a disk, each with a version counter of its own."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import bitslab
from bitslab.activations.disk import PosixFile

pytestmark = pytest.mark.usefixtures("one_thread", "quick_disk")


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_parts_that_change_while_others_are_written(
    dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks with version counters of their own, as gates of an LSTM: each is written alone."""
    changed, write = threading.Event(), PosixFile.write

    def late(file: PosixFile, begin: int, data: torch.Tensor) -> None:
        assert changed.wait(10)
        write(file, begin, data)

    monkeypatch.setattr(PosixFile, "write", late)
    x = torch.randn(64, 64, requires_grad=True)
    offload = bitslab.ActivationOffload("raw", min_bytes=1024, disk=tmp_path, verify=True)
    with offload:
        a, b = torch.unsafe_chunk(x * 2, 2, dim)
        y = a.sin()
        b.mul_(3)
        z = b.cos()
    changed.set()
    offload._tiers.disk.drain()  # type: ignore[union-attr]
    (y.sum() + z.sum()).backward()
    a, b = (2 * x.detach()).chunk(2, dim)
    assert torch.equal(x.grad, torch.cat([2 * a.cos(), 2 * (3 * -(3 * b).sin())], dim))  # type: ignore[arg-type]
    assert offload.stats()["disk_written_bytes"] == x.nbytes
    offload.close()
