"""Folders that are no disk of this machine: in memory, or on another machine, which is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bitslab.activations.disk import posix_file
from tests.activations.disk.test_offload import attach, make, same, step

pytestmark = pytest.mark.usefixtures("one_thread", "quick_disk")


def test_a_folder_in_memory_is_reported() -> None:
    if not os.path.isdir("/dev/shm"):
        raise AssertionError("Linux has /dev/shm")
    model, x = make()
    right = step(model, x)
    with pytest.warns(UserWarning, match="/dev/shm is memory, so that nothing is saved"):
        offload = attach(model, "/dev/shm")
    assert same(step(model, x), right)
    assert any("/dev/shm is in memory" in note for note in offload.report().notes)
    offload.close()


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs"])
def test_a_folder_on_another_machine_is_reported(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the line that Linux has for such a file system."""
    model, x = make()
    right = step(model, x)
    device, folder, mounts = os.stat(tmp_path).st_dev, tmp_path / "disk", tmp_path / "mounts"
    folder.mkdir()
    at = f"{os.major(device)}:{os.minor(device)}"
    mounts.write_text(f"30 1 {at} / / rw shared:1 - {kind} server:/scratch rw\n")
    monkeypatch.setattr(posix_file, "_MOUNTS", str(mounts))
    message = rf"disk: {folder} is on another machine \({kind}\); give a folder on an SSD"
    with pytest.warns(UserWarning, match=message):
        offload = attach(model, folder)
    assert same(step(model, x), right)
    (found,) = offload._tiers.disk.stats()["folders"]  # type: ignore[union-attr]
    assert (found["network"], found["in_memory"], found["file_system"]) == (True, False, kind)
    assert f"{folder} is on another machine ({kind})." in offload.report().notes
    assert offload.stats()["disk_written_bytes"] > 0
    offload.close()
