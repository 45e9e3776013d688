"""Which file a folder gets where kvikio is missing, does not load, hangs or is slower, and why.

kvikio moves nothing where there is no driver. What stands for it here is a package of that name
that fails in one way, in a process of its own; what the real one does is tested on a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import bitslab
from bitslab.activations.disk import DiskRates, DiskTier, file_choice, kvikio_file
from bitslab.activations.disk.file_choice import faster, measure_and_choose, open_measured
from tests.forked import run_forked

KIB, MIB = 1 << 10, 1 << 20
SMALL: dict[str, Any] = {
    "seconds": 0.2,
    "requests_bytes": (64 * KIB, 256 * KIB),
    "threads": (1, 2),
    "file_bytes": 2 * MIB,
}
#: As the real one, as far as `KvikioFile` looks: it moves bytes, slowly, or never.
PACKAGE = """
import enum, os, time

class CompatMode(enum.Enum):
    OFF, ON, AUTO = range(3)

class Future:
    def __init__(self, moved):
        self.moved = moved
    def done(self):
        return {answers}
    def get(self):
        return self.moved

class CuFile:
    def __init__(self, path, flags):
        assert flags == "r+"
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    def fileno(self):
        return self.fd
    def close(self):
        os.close(self.fd)
    def pwrite(self, buf, size, file_offset, task_size):
        time.sleep(0.01)
        return Future(os.pwrite(self.fd, buf, file_offset))
    def pread(self, buf, size, file_offset, task_size):
        time.sleep(0.01)
        return Future(os.preadv(self.fd, [buf], file_offset))
"""
SETTINGS = """
import contextlib
values = {"num_threads": 1, "compat_mode": None}

def get(name):
    return values[name]

def set(name, value):
    before, values[name] = values[name], value

    @contextlib.contextmanager
    def restored():
        yield
        values[name] = before

    return restored()
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a package of kvikio's name, and let the C library be the driver."""
    folder = tmp_path / "packages" / "kvikio"
    folder.mkdir(parents=True)
    (folder / "defaults.py").write_text(SETTINGS)
    (folder / "__init__.py").write_text(PACKAGE.format(answers=True))
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(kvikio_file, "_DRIVER", "libc.so.6")
    return folder


def chosen(folder: Path) -> DiskRates:
    """Return the rates of the chosen file; this process has not imported kvikio for them."""
    rates = measure_and_choose(folder, **SMALL)
    assert "kvikio" not in sys.modules
    assert not [path for path in folder.iterdir() if path.name != "packages"]
    return rates


def test_without_kvikio_the_systems_calls_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    rates = chosen(tmp_path)
    assert rates.file == "posix" and rates.files == (rates.own,)
    assert rates.file_reason == "kvikio is not installed (extras gds-cuda12 and gds-cuda13)"


def test_without_a_driver_kvikio_is_not_tried(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "__init__.py").write_text("import os; os.abort()")
    monkeypatch.setattr(kvikio_file, "_DRIVER", "libcuda-of-nobody.so.1")
    rates = chosen(tmp_path)
    assert rates.file == "posix"
    assert rates.file_reason.startswith("kvikio needs NVIDIA's driver even for host memory: libc")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "raise ImportError('libcufile.so.0: cannot open shared object file')",
            "kvikio cannot be used: ImportError: libcufile.so.0: cannot open shared object file",
        ),
        ("import os; os.abort()", "its process ended by signal 6"),
        ("", "AttributeError: module 'kvikio' has no attribute 'CompatMode'"),
    ],
    ids=["import-fails", "import-crashes", "another-package"],
)
def test_kvikio_that_does_not_load_is_not_used(
    source: str, reason: str, package: Path, tmp_path: Path
) -> None:
    (package / "__init__.py").write_text(source)
    rates = chosen(tmp_path)
    assert rates.file == "posix" and reason in rates.file_reason


def test_kvikio_that_hangs_is_ended(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "packages" / "pid"
    (package / "__init__.py").write_text(
        f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    monkeypatch.setattr(file_choice, "PROCESS_SECONDS", 3)
    rates = chosen(tmp_path)
    assert rates.file == "posix" and rates.file_reason == "kvikio was not measured in 3 s"
    if mark.exists():  # on a busy machine it may be ended before
        assert not Path(f"/proc/{mark.read_text()}").exists()


def test_slower_kvikio_is_timed_and_not_used(package: Path, tmp_path: Path) -> None:
    rates = chosen(tmp_path)
    assert rates.file == "posix"
    assert [each.file for each in rates.files] == ["posix", "kvikio"]
    ours, its = rates.files
    assert ours == rates.own and its.seconds_per_byte > ours.seconds_per_byte
    assert rates.file_reason.startswith("a GB written and read again takes kvikio ")


def of(file: Any, write: float, read: float) -> DiskRates:
    return DiskRates(MIB, 1, 1, write, read, 1.0, 1.0, direct=True, file=file)


@pytest.mark.parametrize(
    ("write", "read", "taken"),
    [
        (1.0, 1.0, "posix"),
        (1.04, 1.04, "posix"),  # no reason to load it
        (1.06, 1.06, "kvikio"),
        (0.9, 1.5, "kvikio"),  # both directions together count
        (0.7, 1.5, "posix"),
    ],
)
def test_bytes_there_and_back_decide(write: float, read: float, taken: str) -> None:
    rates = faster(of("posix", 1.0, 1.0), of("kvikio", write, read))
    assert rates.file == taken and rates.own in rates.files
    assert [each.write_bytes_per_s for each in rates.files] == [1.0, write]


def test_a_chosen_file_that_cannot_be_opened_later_is_the_systems(
    package: Path, tmp_path: Path
) -> None:
    """The figures of before say kvikio, which loads no more; the report says why."""
    (package / "__init__.py").write_text("raise ImportError('libcufile.so.0 is gone')")
    file, reason = open_measured(str(tmp_path), of("kvikio", 3.0, 2.0))
    assert file.kind == "posix" and reason.endswith("ImportError: libcufile.so.0 is gone")
    file.close()
    with DiskTier(tmp_path, rates=of("kvikio", 3.0, 2.0)) as tier:
        ticket = tier.store(torch.full((MIB,), 7, dtype=torch.uint8))
        assert ticket is not None and tier.drain(60)
        assert bool(tier.fetch(ticket).result(60).eq(7).all())
        (folder,) = tier.stats()["folders"]
        assert (folder["file"], folder["file_reason"]) == ("posix", reason)


SILENT = """
import os, sys, torch
from bitslab.activations.disk import DiskTier, DiskRates, kvikio_file
folder, packages = sys.argv[1:]
sys.path.insert(0, packages)
kvikio_file.TRIAL_SECONDS = 0.05
rates = DiskRates(1 << 20, 1, 1, 1.0, 1.0, 1.0, 1.0, direct=True, file="kvikio")
tier = DiskTier(folder, rates=rates)
(row,) = tier.stats()["folders"]
assert row["file"] == "posix", row
assert row["file_reason"].endswith("kvikio cannot be used: a block was not moved in 0.05 s"), row
# What the call may still use is not given to others.
(handle, _, memory), = kvikio_file._unanswered
os.fstat(handle.fileno())
assert len(memory.tensor) == 2 * 4096
tier.close()
print("done")
"""


def test_kvikio_that_does_not_answer_keeps_what_it_was_given(package: Path, tmp_path: Path) -> None:
    (package / "__init__.py").write_text(PACKAGE.format(answers=False))
    folder = tmp_path / "disk"
    folder.mkdir()
    done = run_forked(["-c", SILENT, folder, package.parent])
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


INTERRUPTED = """
import os, sys
from bitslab.activations.disk import KvikioFile, kvikio_file
folder, packages = sys.argv[1:]
sys.path.insert(0, packages)
try:
    KvikioFile(folder)
except KeyboardInterrupt:
    pass
(handle, _, memory), = kvikio_file._unanswered
os.fstat(handle.fileno())
assert len(memory.tensor) == 2 * 4096
print("done")
"""


def test_an_interruption_leaves_kvikio_what_it_was_given(package: Path, tmp_path: Path) -> None:
    interrupted = "(_ for _ in ()).throw(KeyboardInterrupt)"
    (package / "__init__.py").write_text(PACKAGE.format(answers=interrupted))
    folder = tmp_path / "disk"
    folder.mkdir()
    done = run_forked(["-c", INTERRUPTED, folder, package.parent])
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


IMPORTS = """
import sys
sys.path.insert(0, sys.argv[2])
import bitslab.activations.disk as disk
rates = disk.DiskRates(1 << 20, 1, 1, 1.0, 1.0, 1.0, 1.0, direct=True)
with disk.DiskTier(sys.argv[1], rates=rates) as tier:
    assert tier.stats()["folders"][0]["file"] == "posix"
disk.measure_rates(sys.argv[1], seconds=0.05, file_bytes=1 << 20)
assert "kvikio" not in sys.modules
print("done")
"""


def test_kvikio_is_not_imported_without_need(package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    done = run_forked(["-c", IMPORTS, folder, package.parent])
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_folder_without_direct_writes_is_not_tried(package: Path) -> None:
    """In memory both files would make the same calls."""
    found = file_choice._why_not_direct("/dev/shm")
    assert found == "/dev/shm takes no O_DIRECT, without which kvikio's calls are the same"


def test_the_report_says_which_file_and_the_rates_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = faster(of("posix", 2e9, 3e9), of("kvikio", 1e9, 3e9))
    monkeypatch.setattr("bitslab.activations.disk.tier.disk_rates", lambda folder: rates)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with bitslab.ActivationOffload("raw", min_bytes=1024, disk=folders) as offload:
        torch.randn(64, 64, requires_grad=True).mul(2).sin().sum().backward()
    (note,) = [n for n in offload.report().notes if "POSIX calls" in n]
    assert note == (
        f"{folders[0]}, {folders[1]}: written and read by POSIX calls: a GB written and read again "
        "takes kvikio 1.33 s and POSIX calls 0.833 s; posix 2 GB/s out, 3 back and kvikio 1 GB/s "
        "out, 3 back."
    )
    offload.close()
