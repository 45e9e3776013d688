"""`offload_activations(model, disk=...)`: what reaches the disk, what is refused, what is left."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bitslab
from bitslab import ArgumentError, ArgumentTypeError
from bitslab.activations.disk import DiskError, PosixFile
from bitslab.activations.on_disk import DiskMoves
from bitslab.activations.report import disk_notes
from bitslab.engine.memory import host_arena
from bitslab.engine.memory.arena import THREAD_NAME as ARENA_THREAD
from bitslab.errors import BitslabError

pytestmark = pytest.mark.usefixtures("one_thread", "quick_disk")

MIB = 1 << 20


def make() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(8, 32, 64)


def attach(model: nn.Module, folder: Any, **options: Any) -> bitslab.ActivationOffload:
    """Attach with a disk; each tensor is written before the next one is saved."""
    given: dict[str, Any] = {"policy": "raw", "min_bytes": 1024, "in_flight_bytes": 0}
    return bitslab.offload_activations(model, disk=folder, **{**given, **options})


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def files(folder: Path) -> list[str]:
    """Return the files that this process has open in a folder, names or none."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return [link for link in found if link.startswith(f"{os.path.realpath(folder)}/")]


def threads() -> list[str]:
    """Return the library's threads but for the process's: of the arena, and those of tables."""
    names = [t.name for t in threading.enumerate() if t.name.startswith("bitslab-")]
    return [name for name in names if not name.startswith((ARENA_THREAD, "bitslab-fetch"))]


# What reaches the disk


@pytest.mark.parametrize("bad", ["disk_bytes", "write_budget", "drive"])
def test_options_of_a_disk_need_one(bad: str) -> None:
    with pytest.raises(ArgumentError, match=f"{bad}: it is for a disk, and no folder"):
        bitslab.ActivationOffload("raw", **{bad: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tiers": "tape"}, ArgumentError, "tiers: 'tape', accepted are host, disk"),
        ({"tiers": ()}, ArgumentError, "tiers: none is named"),
        ({"tiers": "host"}, ArgumentError, "disk: a folder is given, and tiers= does not name"),
        ({"tiers": "disk", "disk": None}, ArgumentError, "tiers: 'disk' is named, and no folder"),
        ({"host_bytes": "1"}, ArgumentTypeError, "host_bytes: expected an int, got '1'"),
        ({"host_bytes": -1}, ArgumentError, "host_bytes: -1, accepted are numbers from 0"),
        ({"disk_bytes": 0}, ArgumentError, "disk_bytes: 0, accepted are numbers above 0"),
        ({"disk": 3}, ArgumentTypeError, "disk: expected a folder or several, got 3"),
        ({"disk": "/no/such"}, DiskError, "disk: /no/such: there is no such folder"),
        (
            {"policy": "host"},
            ArgumentError,
            "disk: policy 'host' packs what remains in host memory",
        ),
        ({"drive": "floppy"}, ArgumentError, "drive: 'floppy', known are d7-p5620, 980-pro"),
        ({"drive": 1.5}, ArgumentTypeError, "drive: expected a Drive or its name, got 1.5"),
    ],
)
def test_bad_options(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        bitslab.ActivationOffload(**{"policy": "raw", "disk": tmp_path, **options})
    assert message in str(caught.value)


def written_by_this_process() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["write_bytes"])


def test_bytes_reach_the_disk_once_for_all_views(tmp_path: Path) -> None:
    """As the kernel counts them."""
    x, w = torch.randn(2048, 256, requires_grad=True), torch.randn(256, 768, requires_grad=True)
    offload = bitslab.ActivationOffload("raw", disk=tmp_path, in_flight_bytes=0, min_bytes=MIB)
    before = written_by_this_process()
    with offload:
        q, k, v = (x.sin() @ w).chunk(3, -1)  # views of one storage of 6 MiB
        y = (q * k + k * v + v * q).sum()
    saved_bytes = 2048 * (768 + 256 + 256) * 4  # with the sine, and what it saved of x
    saved_bytes -= x.nbytes  # a leaf is left alone
    stats = offload.stats()
    assert stats["disk_written_bytes"] == saved_bytes
    if offload.report().to_dict()["disk"]["folders"][0]["direct"]:
        assert saved_bytes <= written_by_this_process() - before < 2 * saved_bytes
    y.backward()
    assert offload.stats()["disk_read_bytes"] == saved_bytes
    offload.close()


def test_packed_bytes_alone_are_written(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 8))
    x = torch.randn(512, 256)
    right = step(model, x)
    offload = attach(model, tmp_path, policy="static", codecs="zvc", min_bytes=MIB)
    for _ in range(3):
        assert same(step(model, x), right)
    stats = offload.stats()
    assert stats["moved_tensors"] == 3  # the output of ReLU, half of it zeros
    assert 0.4 < stats["crossed_out_bytes"] / stats["moved_out_bytes"] < 0.6
    written = stats["disk_written_bytes"] + stats["disk_forwarded_bytes"]
    assert 0 < written <= 2 * stats["crossed_out_bytes"]
    offload.close()


def test_bytes_spread_over_folders(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    model, x = make()
    right = step(model, x)
    offload = attach(model, folders)
    assert same(step(model, x), right)
    assert [len(files(folder)) for folder in folders] == [1, 1]
    offload.close()
    assert [len(files(folder)) for folder in folders] == [0, 0]


def test_what_is_wanted_while_it_is_written_comes_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has not begun is not written, and the guard for changes in place holds."""
    gate = threading.Event()
    real = PosixFile.write

    def write(*arguments: Any) -> None:
        assert gate.wait(60)
        real(*arguments)

    monkeypatch.setattr(PosixFile, "write", write)
    model, x = make()
    right = step(model, x)
    offload = attach(model, tmp_path, in_flight_bytes=None)
    assert same(step(model, x), right)
    stats = offload.stats()
    assert stats["disk_forwarded_bytes"] == stats["moved_in_bytes"] > 0
    assert stats["disk_read_bytes"] == stats["stall_us"] == 0
    h = torch.randn(64, 64, requires_grad=True)
    with offload:
        y = h * 2
        z = y.exp()
        loss = (z * z).sum()
    z.add_(1)  # its copy waits to be written
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    gate.set()
    offload.close()
    disk = offload.report().to_dict()["disk"]
    assert disk["cancelled_bytes"] > 0
    assert disk["written_bytes"] + disk["cancelled_bytes"] <= offload.stats()["moved_out_bytes"]


def test_the_report_says_what_the_disk_did(tmp_path: Path) -> None:
    model, x = make()
    offload = attach(model, tmp_path, drive="980-pro")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a step is short, and the drives' life with it
        step(model, x)
    report = offload.report()
    assert {site.unit.tier for site in report.sites if site.tensors} == {"disk"}
    said = "\n".join(report.notes)
    assert f"Disk ({tmp_path}): " in said and " GB a pass" in said
    assert "At this rate the drives last " in said
    assert "GPU Direct" not in said
    stats = report.to_dict()["disk"]
    assert "GPU Direct Storage is not used: " in "".join(disk_notes(stats, 1, on_gpu=True))
    assert "raw, disk" in str(report)
    assert report.to_dict()["disk"]["written_bytes"] == offload.stats()["disk_written_bytes"] > 0
    offload.close()


def test_a_slow_disk_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors remain where they are when as many wait as may, and the step does not wait."""
    real = PosixFile.write
    slow = threading.Event()

    def write(*arguments: Any) -> None:
        if not slow.is_set():
            slow.set()
            time.sleep(1.0)
        real(*arguments)

    monkeypatch.setattr(PosixFile, "write", write)
    monkeypatch.setattr("bitslab.activations.disk.tier.QUEUE_BYTES", 0)
    model, x = make()
    right = step(model, x)
    offload = attach(model, tmp_path, in_flight_bytes=None, host_bytes=4 * MIB)
    assert same(step(model, x), right)
    stats = offload.stats()
    assert stats["stall_us"] < 500_000
    assert same(step(model, x), right)
    offload.close()
    assert same(step(model, x), right)


def test_back_pressure_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = PosixFile.write

    def write(*arguments: Any) -> None:
        assert gate.wait(60)
        real(*arguments)

    monkeypatch.setattr(PosixFile, "write", write)
    model, x = make()
    right = step(model, x)
    # Half of half of it may wait to be written.
    offload = attach(model, tmp_path, in_flight_bytes=None, host_bytes=1 * MIB)
    assert same(step(model, x), right)
    gate.set()
    assert offload.stats()["disk_refused_bytes"] > 0
    assert any("did not take what came while it was behind" in n for n in offload.report().notes)
    offload.close()


# Faults


def test_a_disk_that_fills_up_in_the_middle_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its file system says, and as `disk_bytes` does."""
    model, x = make()
    right = step(model, x)
    real = PosixFile.write
    calls = []

    def write(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) > 4:
            raise DiskError(f"disk: {tmp_path}: cannot be written: No space left on device")
        real(*arguments)

    monkeypatch.setattr(PosixFile, "write", write)
    offload = attach(model, tmp_path)
    with pytest.warns(UserWarning, match="could not be written .*No space left on device"):
        assert same(step(model, x), right)
    assert offload.stats()["disk_written_bytes"] > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # reported once
        assert same(step(model, x), right)
    report = offload.report()
    assert any("Nothing more is written to" in note for note in report.notes)
    assert report.to_dict()["disk"]["refused_bytes"]["failed"] > 0
    offload.close()
    monkeypatch.undo()


WRITES: dict[str, tuple[Callable[..., int], str]] = {}


def fault(message: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    def add(function: Callable[..., int]) -> Callable[..., int]:
        WRITES[function.__name__] = function, message
        return function

    return add


@fault("Input/output error")
def eio(*arguments: Any) -> int:
    raise OSError(5, "Input/output error")


@fault("No space left")
def no_space(*arguments: Any) -> int:
    raise OSError(28, "No space left on device")


@fault("cannot be written")
def nothing(*arguments: Any) -> int:
    return 0


@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_fails_keeps_the_tensor(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = make()
    right = step(model, x)
    offload = attach(model, tmp_path)
    write, message = WRITES[name]
    monkeypatch.setattr("os.pwritev", write)
    with pytest.warns(UserWarning, match=rf"'layers.*could not be written .*{tmp_path}.*{message}"):
        assert same(step(model, x), right)
    monkeypatch.undo()
    assert same(step(model, x), right)  # without the disk
    assert offload.stats()["disk_written_bytes"] == 0
    offload.close()


def test_a_short_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def short(fd: int, buffers: Any, offset: int) -> int:
        return real(fd, [memoryview(buffers[0])[:4096]], offset)

    model, x = make()
    right = step(model, x)
    offload = attach(model, tmp_path, verify=True)
    monkeypatch.setattr("os.pwritev", short)
    assert same(step(model, x), right)
    assert offload.stats()["disk_read_bytes"] > 0
    offload.close()


def fail_to_read(*arguments: Any) -> int:
    raise OSError(5, "Input/output error")


def test_a_read_that_fails_ends_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names tensor, file and cause, and no parameter has a gradient; later steps are right."""
    model, x = make()
    right = step(model, x)
    offload = attach(model, tmp_path)
    model.zero_grad()
    loss = model(x).square().sum()
    monkeypatch.setattr("os.preadv", fail_to_read)
    with pytest.raises(DiskError, match=f"{tmp_path}.*cannot be read: Input/output") as caught:
        loss.backward()
    assert any("while reading 'layers.2" in note for note in caught.value.__notes__)
    assert all(p.grad is None for p in model.parameters())
    monkeypatch.undo()
    del loss, caught
    for _ in range(2):
        assert same(step(model, x), right)
    offload.close()


def test_other_bytes_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PosixFile.read

    def read(file: PosixFile, offset: int, out: torch.Tensor) -> None:
        real(file, offset, out)
        out[7] ^= 4

    model, x = make()
    offload = attach(model, tmp_path, verify=True)
    monkeypatch.setattr(PosixFile, "read", read)
    with pytest.raises(DiskError, match="checksum differs"):
        step(model, x)
    offload.close()


def test_a_file_that_is_cut_is_named(tmp_path: Path) -> None:
    model, x = make()
    right = step(model, x)
    offload = attach(model, tmp_path)
    loss = model(x).square().sum()
    (fd,) = [
        int(name)
        for name in os.listdir("/proc/self/fd")
        if os.path.realpath(f"/proc/self/fd/{name}").startswith(str(tmp_path))
    ]
    os.truncate(f"/proc/self/fd/{fd}", 4096)
    with pytest.raises(DiskError, match=f"in {tmp_path}: was cut from .* to 4096 bytes"):
        loss.backward()
    del loss
    assert same(step(model, x), right)
    offload.close()


def test_a_folder_that_is_removed_or_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file, which has no name, is used on; the next one cannot be made."""
    folder = tmp_path / "disk"
    folder.mkdir()
    model, x = make()
    right = step(model, x)
    offload = attach(model, folder)
    folder.rmdir()
    assert same(step(model, x), right)
    assert offload.stats()["disk_written_bytes"] > 0
    offload.detach()  # which gives the file up
    offload.attach(model)
    assert same(step(model, x), right)
    assert any("there is no such folder" in note for note in offload.report().notes)
    offload.close()
    real = os.open

    def read_only(path: Any, *rest: Any) -> int:
        if Path(path) == tmp_path:
            raise OSError(30, "Read-only file system")
        return real(path, *rest)

    monkeypatch.setattr("os.open", read_only)
    with pytest.raises(DiskError, match=f"{tmp_path}: cannot be written: Read-only file system"):
        attach(model, tmp_path)
    monkeypatch.undo()
    assert same(step(model, x), right)


# What is left


@pytest.mark.drawn(3)
@pytest.mark.parametrize("policy", ["raw", "static"])
@pytest.mark.parametrize("how", ["close", "dropped", "interrupted"])
def test_nothing_is_left(how: str, policy: str, tmp_path: Path) -> None:
    gc.collect()
    host_arena().trim()
    running, before = threads(), host_arena().stats()  # what other tests still hold is there
    model, x = make()
    offload = attach(model, tmp_path, policy=policy, codecs="zvc")
    step(model, x)
    assert len(files(tmp_path)) == 1 and len(threads()) > len(running)
    if how == "interrupted":

        def stop(*arguments: Any) -> None:
            raise KeyboardInterrupt

        handle = model.layers[1].register_forward_hook(stop)  # type: ignore[union-attr, index]
        with pytest.raises(KeyboardInterrupt):
            model(x)
        handle.remove()
        loss = model(x).square().sum()
        loss.register_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        del loss
    if how == "dropped":
        del offload
        model.__dict__.clear()
        del model
        gc.collect()
    else:
        offload.close()
        offload.close()
    assert files(tmp_path) == [] and list(tmp_path.iterdir()) == []
    assert threads() == running
    after = host_arena().stats()
    assert after["used_bytes"] == before["used_bytes"]
    if how != "dropped":
        assert after["reserved_bytes"] == before["reserved_bytes"]


def test_detach_gives_up_threads_and_files_and_graphs_go_on(tmp_path: Path) -> None:
    model, x = make()
    right = step(model, x)
    offload = attach(model, tmp_path)
    model.zero_grad()
    loss = model(x).square().sum()
    offload.detach()
    assert threads() == [] and len(files(tmp_path)) == 1  # its tensors are there
    loss.backward()
    assert same([p.grad for p in model.parameters() if p.grad is not None], right)
    del loss
    offload.detach()
    assert threads() == [] and files(tmp_path) == []
    offload.attach(model)
    assert same(step(model, x), right)
    assert len(files(tmp_path)) == 1
    loss = model(x).square().sum()
    offload.close()
    assert files(tmp_path) == []
    with pytest.raises(BitslabError, match="closed"):
        loss.backward()
    assert same(step(model, x), right)  # plainly


def test_two_in_one_folder(tmp_path: Path) -> None:
    pairs = [make() for _ in range(2)]
    right = [step(*pair) for pair in pairs]
    offloads = [attach(model, tmp_path, verify=True) for model, _ in pairs]
    losses = [model(x).square().sum() for model, x in pairs]
    assert len(files(tmp_path)) == 2
    for loss, (model, _) in zip(losses, pairs, strict=True):
        model.zero_grad()
        loss.backward()
    for (model, _), expected in zip(pairs, right, strict=True):
        assert same([p.grad for p in model.parameters() if p.grad is not None], expected)
    for offload in offloads:
        offload.close()


def test_a_limit_of_the_host_is_kept_to() -> None:
    """Without a disk what is over it is kept; a packed tensor takes what it needs."""
    model, x = make()
    right = step(model, x)
    offload = bitslab.offload_activations(
        model, policy="raw", min_bytes=1024, in_flight_bytes=0, host_bytes=MIB // 2
    )
    loss = model(x).square().sum()
    stats = offload.stats()
    assert 0 < stats["host_bytes"] <= MIB // 2
    assert stats["moved_out_bytes"] <= MIB // 2
    model.zero_grad()
    loss.backward()
    assert same([p.grad for p in model.parameters() if p.grad is not None], right)
    del loss
    offload.detach()  # a thread may hold what it has copied last
    assert offload.stats()["host_bytes"] == 0
    offload.close()


def test_moves_wait_for_no_write_of_a_closed_tier(tmp_path: Path) -> None:
    """Else closing while another thread trains would hang that."""
    model, x = make()
    offload = attach(model, tmp_path)
    loss = model(x).square().sum()
    assert isinstance(offload._hooks.executors()[0]._disk, DiskMoves)
    offload._tiers.disk.close()  # type: ignore[union-attr]
    with pytest.raises(BitslabError, match="this DiskTier is closed"):
        loss.backward()
    right = step(model, x)  # as the tier takes nothing, tensors are kept
    offload.close()
    assert same(step(model, x), right)


def test_what_is_encoded_when_it_is_asked_for_goes_on_to_the_disk(tmp_path: Path) -> None:
    """No tensor is saved after the last one, which would see to it."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 8))
    x = torch.randn(512, 256)
    offload = attach(
        model, tmp_path, policy="static", codecs="zvc", min_bytes=MIB, in_flight_bytes=None
    )
    loss = model(x).sum()
    until = time.monotonic() + 60
    while not offload.stats()["disk_written_bytes"]:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert offload._tiers.disk is not None and offload._tiers.disk.drain(60)
    assert offload.stats()["peak_saved_bytes"] == 512 * 1024 * 4
    loss.backward()
    assert offload.stats()["disk_read_bytes"] == offload.stats()["disk_written_bytes"]
    offload.close()
