"""kvikio's file: it promises what the system's does, and the tier uses it where it is faster.

kvikio asks NVIDIA's driver whether memory is a GPU's, so that it moves nothing on other machines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import bitslab
from bitslab.activations.disk import (
    DiskError,
    DiskRates,
    DiskTier,
    KvikioFile,
    disk_rates,
    kvikio_file,
)
from bitslab.activations.disk.file_choice import faster
from bitslab.activations.disk.tensor_file import ALIGN_BYTES
from bitslab.engine.transfer import StreamLane
from tests.activations.disk.file_contract import (
    CONTRACT,
    MIB,
    PLACES,
    Promise,
    at_offset,
    bytes_of_a_place_come_back,
    opened,
    random_bytes,
)

pytestmark = pytest.mark.gpu

RATES = DiskRates(MIB, 2, 2, 1e9, 1e9, 1e9, 1e9, direct=True, file="kvikio")


@pytest.fixture(autouse=True)
def kvikio() -> Any:
    """Return the package, without which all tests here fail."""
    import kvikio
    import kvikio.defaults

    return kvikio


@pytest.fixture
def own_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return the sizes of what this package's own calls have moved."""
    moved: list[int] = []

    def counted(move: Any) -> Any:
        def call(fd: int, buffers: Any, offset: int) -> int:
            moved.append(sum(map(len, buffers)))
            done: int = move(fd, buffers, offset)
            return done

        return call

    monkeypatch.setattr(os, "pwritev", counted(os.pwritev))
    monkeypatch.setattr(os, "preadv", counted(os.preadv))
    yield moved


@pytest.mark.parametrize("promise", CONTRACT, ids=lambda promise: promise.__name__)
def test_contract(promise: Promise, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    promise(KvikioFile, tmp_path, monkeypatch)


@settings(max_examples=30)
@given(**PLACES)
def test_bytes_of_any_length_and_place_come_back(
    n: int, misaligned_bytes: int, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    bytes_of_a_place_come_back(KvikioFile, folder, n, misaligned_bytes, block)


def test_whole_blocks_are_moved_by_kvikio(tmp_path: Path, own_calls: list[int]) -> None:
    file = opened(KvikioFile, tmp_path)
    assert file.kind == "kvikio" and file.direct
    data = at_offset(MIB + 5, 0).copy_(random_bytes(MIB + 5))
    file.write(0, data)
    file.read(0, out := at_offset(MIB + 5, 0))
    assert torch.equal(out, data)
    assert own_calls == [ALIGN_BYTES, ALIGN_BYTES]  # the last block, out and back
    file.close()


def test_the_page_cache_is_bypassed_both_ways(tmp_path: Path, kvikio: Any) -> None:
    file = opened(KvikioFile, tmp_path)
    file.write(0, at_offset(4 * MIB, 0))
    file.read(0, at_offset(4 * MIB, 0))
    pages, _ = kvikio.get_page_cache_info(file._fd)
    assert pages == 0
    file.close()


def test_kvikio_has_as_many_threads_as_before_when_all_files_are_closed(
    tmp_path: Path, kvikio: Any
) -> None:
    KvikioFile(tmp_path).close()
    before, threads = kvikio.defaults.get("num_threads"), len(os.listdir("/proc/self/task"))
    files = [KvikioFile(tmp_path), KvikioFile(tmp_path)]
    for file in files:
        assert kvikio.defaults.get("num_threads") == max(before, kvikio_file.THREADS)
        file.close()
    assert kvikio.defaults.get("num_threads") == before
    assert len(os.listdir("/proc/self/task")) <= threads


def test_settings_of_the_process_are_as_before(tmp_path: Path, kvikio: Any) -> None:
    names = ("compat_mode", "task_size", "auto_direct_io_read", "auto_direct_io_write")
    before = [kvikio.defaults.get(name) for name in names]
    file = opened(KvikioFile, tmp_path)
    file.write(0, at_offset(MIB, 0))
    assert [kvikio.defaults.get(name) for name in names] == before
    file.close()


def test_a_forked_child_opens_none(tmp_path: Path) -> None:
    """Its threads are the parent's: a call would never end."""
    file = opened(KvikioFile, tmp_path)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            KvikioFile(tmp_path)
        except DiskError as error:
            status = int("threads are those of the parent process" not in str(error))
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0) == (pid, 0)
    file.close()


def test_a_forked_childs_tier_has_the_systems_file(tmp_path: Path) -> None:
    data = random_bytes(3 * MIB)
    with DiskTier(tmp_path, rates=RATES) as tier:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                ticket = tier.store(data)
                assert ticket is not None and tier.drain(60)
                back = tier.fetch(ticket).result(60)
                assert back.numpy().tobytes() == data.numpy().tobytes()  # no threads of torch's
                (folder,) = tier.stats()["folders"]
                assert folder["file"] == "posix" and "parent process" in folder["file_reason"]
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0) == (pid, 0)
        assert tier.stats()["folders"][0]["file"] == "kvikio"


@pytest.mark.parametrize("forward", [False, True], ids=["written", "forwarded"])
def test_bytes_of_a_stream_come_back_from_the_tier(
    forward: bool, tmp_path: Path, own_calls: list[int]
) -> None:
    device = torch.device("cuda")
    lane = StreamLane(device)
    with DiskTier(tmp_path, rates=RATES, verify=True) as tier:
        source = torch.randint(0, 256, (9 * MIB + 5,), dtype=torch.uint8, device=device)
        host = tier.host_buffer(len(source))
        lane.follow(torch.cuda.current_stream(device))

        def copy() -> None:
            torch.cuda._sleep(20_000_000)
            host.copy_(source, non_blocking=True)

        ticket = tier.store(host, after=lane.run(copy))
        assert ticket is not None
        if not forward:
            assert tier.drain(60) and not ticket.in_memory
            host.zero_()
        out = tier.host_buffer(len(source))
        back = tier.fetch(ticket, out).result(60).to(device, non_blocking=True)
        assert torch.equal(back, source)
        (folder,) = tier.stats()["folders"]
        assert folder["file"] == "kvikio" and folder["error"] is None
        if not forward:
            assert own_calls == [ALIGN_BYTES, ALIGN_BYTES]
            assert tier._stripes[0].file.bounced_bytes == 0  # type: ignore[attr-defined]


def test_a_failed_write_keeps_its_bytes_in_memory(tmp_path: Path) -> None:
    with DiskTier(tmp_path, rates=RATES) as tier:
        ticket = tier.store(random_bytes(MIB))
        assert ticket is not None and tier.drain(60)
        handle = tier._stripes[0].file._handle  # type: ignore[attr-defined]
        handle.close()  # as if the system refused it
        data = random_bytes(MIB, 1)
        ticket = tier.store(data)
        assert ticket is not None and tier.drain(60)
        assert isinstance(ticket.error, DiskError) and str(tmp_path) in str(ticket.error)
        assert torch.equal(tier.fetch(ticket).result(60), data)
        assert str(tmp_path) in tier.stats()["folders"][0]["error"]


def test_the_probe_times_both_and_takes_the_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BITSLAB_CACHE", str(tmp_path / "cache"))
    rates = disk_rates(tmp_path)
    posix, kvikio = rates.files
    assert (posix.file, kvikio.file) == ("posix", "kvikio"), rates.file_reason
    assert rates.own == (kvikio if rates.file == "kvikio" else posix)
    assert (rates.file == "kvikio") == (kvikio.seconds_per_byte <= 0.95 * posix.seconds_per_byte)
    assert disk_rates(tmp_path) == rates


def test_the_report_says_which_file_and_that_there_is_no_direct_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = DiskRates(MIB, 2, 2, 1e9, 1e9, 1e9, 1e9, direct=True)
    its = DiskRates(MIB, 2, 2, 3e9, 2e9, 1e9, 1e9, direct=True, file="kvikio")
    monkeypatch.setattr("bitslab.activations.disk.tier.disk_rates", lambda at: faster(ours, its))
    x = torch.randn(512, 512, device="cuda", requires_grad=True)
    offload = bitslab.ActivationOffload("raw", min_bytes=1024, disk=tmp_path)
    with offload:
        y = (x * 2).sin()
    y.sum().backward()
    report = str(offload.report())
    assert f"{tmp_path}: written and read by kvikio's POSIX calls" in report
    assert "posix 1 GB/s out, 1 back and kvikio 3 GB/s out, 2 back" in report
    assert "GPU Direct Storage is not used" in report
    assert "kvikio" in sys.modules
    offload.close()
