"""Page-locked memory on machines with several NUMA nodes: asked for on that of the current GPU."""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bitslab.engine.memory import numa, page_locking
from bitslab.engine.memory.arena import Arena
from bitslab.engine.memory.host import LARGE_BYTES, HostBuffer, Pin
from tests.tables.support import Recorder

GPU = "0000:1b:00.0"
#: Numbers of Linux's call that sets a thread's policy.
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    found = Recorder()
    found.address = GPU
    monkeypatch.setattr(page_locking, "registrar", found)
    yield found
    gc.collect()  # what is left is released here, not by CUDA


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return what makes the system say which nodes have memory, and at which one the GPU is."""
    nodes, devices = tmp_path / "node", tmp_path / "devices"
    nodes.mkdir()
    (devices / GPU).mkdir(parents=True)
    monkeypatch.setattr(numa, "NODES", nodes)
    monkeypatch.setattr(numa, "DEVICES", devices)

    def says(memory: str, of_gpu: str) -> None:
        (nodes / "has_memory").write_text(memory + "\n")
        (devices / GPU / "numa_node").write_text(of_gpu + "\n")

    return says


def policy_at(t: torch.Tensor) -> str:
    """Return where the system takes the pages of mapped memory from, as it says itself."""
    address = t.data_ptr()
    found = ""
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        begin, policy, *_ = line.split()
        if int(begin, 16) > address:
            break
        found = policy
    return found


@pytest.mark.parametrize(
    ("memory", "of_gpu", "node"),
    [
        ("0-1", "1", 1),
        ("0-1", "0", 0),
        ("0,2-3", "2", 2),
        ("0-1", "-1", None),
        ("0-1", "2", None),  # a node without memory
        ("0", "0", None),
        ("", "0", None),
    ],
)
def test_the_nearest_node_is_what_the_system_says(
    memory: str,
    of_gpu: str,
    node: int | None,
    recorder: Recorder,
    system: Callable[[str, str], None],
) -> None:
    system(memory, of_gpu)
    assert numa.nearest_node() == node


def test_what_the_user_says_of_memory_holds(
    recorder: Recorder, system: Callable[[str, str], None]
) -> None:
    """As under ``numactl``: a policy of this thread, which the test sets and takes back."""
    system("0-1", "0")
    machine = platform.machine()
    if machine not in SET_MEMPOLICY:  # Linux has other numbers there, and nothing is asked for
        assert not numa.prefer_node(0, 0, 0)
        return
    call, number = ctypes.CDLL(None).syscall, ctypes.c_long(SET_MEMPOLICY[machine])
    mask = ctypes.c_ulong(1)
    bits = ctypes.c_ulong(65)
    if call(number, ctypes.c_int(2), ctypes.byref(mask), bits) != 0:  # MPOL_BIND, refused
        assert numa.nearest_node() == 0
        return
    try:
        assert numa.nearest_node() is None
    finally:
        call(number, ctypes.c_int(0), ctypes.c_void_p(None), ctypes.c_ulong(0))
    assert numa.nearest_node() == 0


def test_without_a_gpu_or_its_place_there_is_no_nearest_node(
    recorder: Recorder, system: Callable[[str, str], None], tmp_path: Path
) -> None:
    system("0-1", "1")
    for address in (None, "0000:ff:00.0"):  # an older torch; a device that is not listed
        recorder.address = address
        assert numa.nearest_node() is None
    recorder.address, recorder.there = GPU, False
    assert numa.nearest_node() is None
    recorder.there = True
    assert numa.nearest_node() == 1
    (tmp_path / "node" / "has_memory").unlink()  # a system that was built without
    assert numa.nearest_node() is None


@pytest.mark.parametrize("private", [True, False], ids=["private", "shared"])
@pytest.mark.parametrize("nbytes", [5000, LARGE_BYTES + 1], ids=["small", "large"])
def test_page_locked_memory_is_asked_for_near_the_gpu(
    nbytes: int, private: bool, recorder: Recorder, system: Callable[[str, str], None]
) -> None:
    system("0-1", "0")
    probe = HostBuffer.allocate(1 << 16, pin=False, private=True)
    # A system may let no process say where its memory comes from; then it is as ever.
    allowed = numa.prefer_node(probe.tensor.data_ptr(), probe.nbytes, 0)
    asked_for = "prefer:0" if allowed else "default"
    assert policy_at(probe.tensor) == asked_for
    near = HostBuffer.allocate(nbytes, private=private)
    assert policy_at(near.tensor) == asked_for
    assert near.pinned and not near.tensor.any()
    pins: tuple[Pin, ...] = (False, "lazily")
    for pin in pins:
        other = HostBuffer.allocate(nbytes, pin=pin, private=private)
        assert policy_at(other.tensor) == "default"
    system("0", "0")
    assert policy_at(HostBuffer.allocate(nbytes, private=private).tensor) == "default"


def test_what_activations_cross_to_is_near_the_gpu(
    recorder: Recorder, system: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    system("0-1", "1")
    asked: list[tuple[int, int, int]] = []

    def prefer(address: int, nbytes: int, node: int) -> bool:
        asked.append((address, nbytes, node))
        return False

    monkeypatch.setattr("bitslab.engine.memory.host.prefer_node", prefer)
    piece = Arena().reserve(1 << 16).cut(1 << 16)
    assert asked == [(piece.data_ptr(), 1 << 16, 1)]
    assert recorder.names() == ["register"]


def test_a_node_that_is_not_there_is_refused_and_changes_nothing() -> None:
    memory = HostBuffer.allocate(1 << 16, pin=False, private=True)
    before = policy_at(memory.tensor)
    assert not numa.prefer_node(memory.tensor.data_ptr(), memory.nbytes, 1000)
    assert policy_at(memory.tensor) == before
