"""Weights packed on a GPU, in threads: the same bytes, in bounded memory, and what errors leave.

Without a GPU the CPU stands for it, behind the same lanes: work of streams is done at once.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bitslab.engine.memory import host
from bitslab.engine.transfer import ThreadLane, upload
from bitslab.errors import BitslabError
from bitslab.offload import (
    PackedWeights,
    WeightHandle,
    WeightPacker,
    device_packing,
    offload_report,
    offload_weights,
    restore_weights,
    weight_packer,
)
from bitslab.offload.device_packing import THREAD_NAME, DevicePacking, OnDevice
from bitslab.offload.records import lay_out
from bitslab.offload.tensor_packer import PackingPlan, TensorPacker
from tests.helpers import packable, random_bits, same_bits
from tests.offload.models import Blocks
from tests.streams import recorded

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        "weight": packable(torch.bfloat16, (960, 128)),
        "bias": packable(torch.bfloat16, (128,), 1),
        "other": packable(torch.float32, (640, 200), 2),
        "noise": random_bits(torch.int8, (70, 90)),
        "transposed": packable(torch.float32, (480, 80), 3).T,
        "narrow": packable(torch.float32, (333, 5), 4),
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(3.0),
    }


UNITS = {"first": ["weight", "bias", "narrow"], "second": ["noise", "other", "transposed"]}
UNITS |= {"third": ["empty", "scalar"]}


@pytest.fixture
def lanes(monkeypatch) -> Iterator[list[DevicePacking]]:
    """Make all packers use lanes, with the CPU in the place of the GPU; return those made."""
    made: list[DevicePacking] = []

    def lanes_for(packer: WeightPacker, tensor: torch.Tensor) -> DevicePacking:
        if packer._lanes is None:
            packer._lanes = DevicePacking(
                CPU,
                images_in_turn=packer._file is not None,
                tensors_bytes=packer._tensors_bytes,
            )
            made.append(packer._lanes)
        return packer._lanes

    monkeypatch.setattr(WeightPacker, "_lanes_for", lanes_for)
    monkeypatch.setattr(upload, "PIECE_BYTES", 64 << 8)
    monkeypatch.setattr(upload, "COPY_BYTES", 24 << 8)
    with recorded(monkeypatch):
        yield made
    gc.collect()


def packing_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(THREAD_NAME)]


def pack(tensors: dict[str, torch.Tensor], **options: Any) -> PackedWeights:
    with WeightPacker(UNITS, **options) as packer:
        for name, tensor in tensors.items():
            packer.add(name, tensor)
        return packer.finish()


def assert_same(found: PackedWeights, expected: PackedWeights) -> None:
    assert found.units == expected.units
    for unit in expected.units:
        a, b = found.unit(unit), expected.unit(unit)
        assert {n: r.to_json() for n, r in a.records.items()} == {
            n: r.to_json() for n, r in b.records.items()
        }
        assert torch.equal(a.image.tensor().cpu(), b.image.tensor().cpu()), unit


@pytest.mark.parametrize("codec", ["auto", "raw"])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_images_are_those_that_are_packed_in_turn(codec, place, tensors, tmp_path, request):
    options = {"codec": codec}
    expected = pack(tensors, **options)
    lanes = request.getfixturevalue("lanes")
    disk = {"disk": tmp_path / "weights"} if place == "disk" else {}
    found = pack(tensors, **options, **disk)
    assert_same(found, expected)
    for name, tensor in tensors.items():
        assert same_bits(found.read(name), tensor), name
    assert len(lanes) == 1 and not packing_threads()


def bytes_on_way(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the raw bytes on the way after each tensor that is admitted."""
    found: list[int] = []
    admit = DevicePacking.admit

    def watched(self: DevicePacking, nbytes: int, make_room: Any) -> None:
        admit(self, nbytes, make_room)
        found.append(self._bytes_on_way)

    monkeypatch.setattr(DevicePacking, "admit", watched)
    return found


def test_units_that_come_mixed_and_are_larger_than_what_may_be_on_the_way(
    tensors, lanes, monkeypatch
):
    monkeypatch.setattr(device_packing, "MOST_BYTES", 100_000)
    on_way = bytes_on_way(monkeypatch)
    mixed = ["other", "weight", "noise", "bias", "empty", "narrow", "transposed", "scalar"]
    found = pack({name: tensors[name] for name in mixed})
    for name, tensor in tensors.items():
        assert same_bits(found.read(name), tensor), name
    assert 0 < max(on_way) <= max(100_000, *(tensor.nbytes for tensor in tensors.values()))
    assert lanes[0]._bytes_on_way == 0


GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize(
    ("tensors_bytes", "limit", "threads"),
    [
        pytest.param(None, 2 * GIB, 6, id="unknown"),
        pytest.param(14 * GIB, 2 * GIB, 6, id="14 GiB"),
        pytest.param(3 * GIB, 2 * GIB, 6, id="3 GiB"),
        pytest.param(768 * MIB, 512 * MIB, 6, id="768 MiB"),
        pytest.param(300 * MIB, 200 * MIB, 3, id="300 MiB"),
        pytest.param(96 * MIB, 64 * MIB, 1, id="96 MiB"),
        pytest.param(1 * MIB, 64 * MIB, 1, id="1 MiB"),
        pytest.param(0, 64 * MIB, 1, id="none"),
    ],
)
def test_of_few_tensors_fewer_are_on_the_way(tensors_bytes, limit, threads):
    room = 2 * GIB
    assert device_packing.limit_bytes(room, tensors_bytes) == limit
    assert device_packing.n_uploaders(room, tensors_bytes, cores=16) == threads


def test_memory_and_cores_that_are_short_bound_what_is_on_the_way_too():
    assert device_packing.limit_bytes(300 * MIB, 3 * GIB) == 300 * MIB
    assert device_packing.n_uploaders(600 * MIB, 3 * GIB, cores=16) == 2
    assert device_packing.n_uploaders(2 * GIB, 3 * GIB, cores=6) == 3
    assert device_packing.n_uploaders(100 * MIB, 3 * GIB, cores=1) == 1


def test_a_small_model_is_packed_in_one_thread_and_its_tensors_are_counted(lanes, monkeypatch):
    monkeypatch.setattr(device_packing, "PIECE_BYTES", 20_000)
    on_way = bytes_on_way(monkeypatch)
    model = Blocks(width=64)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    raw_bytes = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    offload_weights(model, execution_device="cpu", min_bytes=0)
    assert all(same_bits(t, expected[name]) for name, t in model.state_dict().items())
    assert len(lanes) == 1 and lanes[0]._limit_bytes == int(raw_bytes * 2 / 3) > 20_000
    assert largest < max(on_way) <= lanes[0]._limit_bytes


def test_tensors_that_are_uploaded_are_there_at_the_end(tensors, lanes, monkeypatch):
    monkeypatch.setattr(device_packing, "MOST_BYTES", 300_000)
    monkeypatch.setattr(weight_packer, "MIN_UPLOAD_BYTES", 4096)
    copied: list[int] = []
    copy = upload.RowUploader.copy

    def slowly(self: upload.RowUploader, source: torch.Tensor, *args: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        time.sleep(0.01)
        copied.append(source.nbytes)
        return copy(self, source, *args)

    monkeypatch.setattr(upload.RowUploader, "copy", slowly)
    kept = {"kept": packable(torch.float32, (300, 200), 7), "few": torch.arange(5.0)}
    kept |= {"bits": random_bits(torch.bool, (70, 90)), "transposed": torch.randn(80, 90).T}
    with WeightPacker(UNITS) as packer:
        packer._device = CPU  # which stands for a GPU
        uploaded = {}
        for name, tensor in tensors.items():
            packer.add(name, tensor)
            for other, more in kept.items():
                uploaded[name, other] = packer.upload(more)
        found = packer.finish()
    for name, tensor in tensors.items():
        assert same_bits(found.read(name), tensor), name
    for (_, other), tensor in uploaded.items():
        assert same_bits(tensor, kept[other]), other
    assert sorted(copied) == [kept["bits"].nbytes] * len(tensors) + [240_000] * len(tensors)
    assert lanes[0]._bytes_on_way == 0 and not packing_threads()


def test_an_error_of_an_upload_is_raised_at_the_end(tensors, lanes, monkeypatch):
    def fail(*args: Any) -> None:
        raise RuntimeError("of the link")

    monkeypatch.setattr(weight_packer, "MIN_UPLOAD_BYTES", 0)
    monkeypatch.setattr(upload.RowUploader, "copy", fail)
    with WeightPacker({}) as packer:
        packer._device = CPU
        packer.upload(tensors["weight"])
        with pytest.raises(RuntimeError, match="of the link"):
            packer.finish()
    assert not packing_threads()


def test_a_packer_without_a_gpu_uploads_nothing(tensors):
    with WeightPacker({}) as packer, pytest.raises(BitslabError, match="device: none"):
        packer.upload(tensors["weight"])


def hold_images(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no image be filled before the event is set."""
    go_on = threading.Event()
    fill = DevicePacking.fill

    def held(*args: Any) -> None:
        assert go_on.wait(60)
        fill(*args)

    monkeypatch.setattr(DevicePacking, "fill", held)
    return go_on


def test_a_parameter_is_replaced_when_its_image_is_there(lanes, monkeypatch):
    go_on = hold_images(monkeypatch)
    model = Blocks(width=64)
    seen: list[bool] = []
    add = WeightPacker.add

    def watched(self: WeightPacker, name: str, tensor: torch.Tensor) -> bool:
        seen.append(any(isinstance(p, WeightHandle) for p in model.parameters()))
        if len(seen) == len(list(model.parameters())):
            go_on.set()
        return add(self, name, tensor)

    monkeypatch.setattr(WeightPacker, "add", watched)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offload_weights(model, execution_device="cpu", min_bytes=0)
    assert len(seen) > 4 and not any(seen)
    assert all(isinstance(p, WeightHandle) for p in model.parameters())
    assert all(same_bits(t, expected[name]) for name, t in model.state_dict().items())
    assert not packing_threads()


def scarce(monkeypatch: pytest.MonkeyPatch, buffers: int) -> None:
    """Let host memory run out after some buffers."""
    allocate, room = host.HostBuffer.allocate, [buffers]

    def limited(nbytes: int, **options: Any) -> host.HostBuffer:
        if not options.get("private"):  # an image
            room[0] -= 1
            if room[0] < 0:
                raise BitslabError(f"nbytes: {nbytes} bytes asked for, 0 are available")
        return allocate(nbytes, **options)

    monkeypatch.setattr(host.HostBuffer, "allocate", limited)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_host_memory_that_runs_out_in_a_thread_leaves_the_model_as_it_was(
    after, lanes, monkeypatch
):
    model = Blocks(width=256)
    x = torch.randn(3, 256)
    expected = model(x).detach()
    with monkeypatch.context() as patch:
        scarce(patch, after)
        with pytest.raises(BitslabError, match=r"ran out while packing '.*needed in all"):
            offload_weights(model, execution_device="cpu", min_bytes=0)
    assert not packing_threads()
    assert all(type(p) is torch.nn.Parameter and p.requires_grad for p in model.parameters())
    assert same_bits(model(x), expected)
    offload_weights(model, execution_device="cpu", min_bytes=0)
    assert same_bits(model(x), expected)


def test_an_interruption_while_images_are_made_leaves_the_model_as_it_was(lanes, monkeypatch):
    model = Blocks(width=64)
    go_on = hold_images(monkeypatch)
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    calls = 0

    def interrupt(done: int, total: int | None) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise KeyboardInterrupt

    threading.Timer(0.2, go_on.set).start()
    with pytest.raises(KeyboardInterrupt):
        offload_weights(model, execution_device="cpu", min_bytes=0, progress=interrupt)
    assert calls > 2 and not packing_threads()
    for name, p in model.named_parameters():
        assert type(p) is torch.nn.Parameter and same_bits(p, before[name][1])


def test_an_abandoned_packer_reads_no_tensor_any_more(tensors, lanes, monkeypatch):
    go_on = hold_images(monkeypatch)
    packer = WeightPacker(UNITS)
    for name in ("weight", "bias", "narrow", "other"):
        packer.add(name, tensors[name])
    assert packer.completed() == []
    threading.Timer(0.1, go_on.set).start()
    packer.abandon()
    assert not packing_threads()
    assert packer.missing() == [name for names in UNITS.values() for name in names]


def test_an_error_of_a_thread_is_raised_by_a_later_call(tensors, lanes, monkeypatch, tmp_path):
    def fail(*args: Any) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        with WeightPacker(UNITS, disk=tmp_path / "weights") as packer:
            monkeypatch.setattr(packer._file, "write", fail)
            for name in UNITS["first"]:
                packer.add(name, tensors[name])
            while not all(task.done() for task in packer._on_way.values()):
                time.sleep(0.001)
            packer.add("other", tensors["other"])
    assert list(tmp_path.iterdir()) == [] and not packing_threads()


def test_what_does_not_fit_the_gpu_is_packed_on_the_host(tensors, lanes, monkeypatch):
    def too_much(self: PackingPlan, uploader: Any) -> Any:
        raise torch.OutOfMemoryError("of the GPU")

    monkeypatch.setattr(PackingPlan, "packed_by", too_much)
    found = pack(tensors)
    for name, tensor in tensors.items():
        assert same_bits(found.read(name), tensor), name
    assert found.nbytes < 0.95 * found.raw_nbytes


def test_an_image_is_filled_behind_what_made_its_parts(monkeypatch):
    monkeypatch.setattr(ThreadLane, "submit", lambda *args: pytest.fail("a thread"))
    packer = WeightPacker({"unit": ["a", "b"]})
    with recorded(monkeypatch) as record:
        lanes = packer._lanes = DevicePacking(CPU)
        plans = [TensorPacker().plan(packable(torch.bfloat16, (96, 128), n)) for n in range(2)]
        pieces = {}
        for name, plan in zip("ab", plans, strict=True):
            record.work("packs")
            ct = plan.packed()
            made: Any = record.current.record_event() if name == "a" else None
            pieces[name] = OnDevice(ct, made)
        records, nbytes = lay_out([(p.tensor, (96, 128), (0, 1)) for p in pieces.values()])
        placed = dict(zip("ab", records, strict=True))
        image = torch.zeros(nbytes, dtype=torch.uint8)
        record.take()
        lanes.fill(image, placed, pieces)
        steps = record.take()
    assert steps[0] == ("stream0", "after current:1")
    assert [what.split()[0] for who, what in steps[1:4]] == ["copies"] * 3
    assert {who for who, _ in steps[1:4]} == {"stream0"}
    assert steps[4:] == [("host", "after stream0:3")]
    for name, plan in zip("ab", plans, strict=True):
        assert same_bits(placed[name].compressed(image).decompress(), plan.stored)
    packer.abandon()


# On a GPU


def weights_on(place: str) -> dict[str, torch.Tensor]:
    made = {
        "weight": packable(torch.bfloat16, (4096, 2048)),
        "bias": packable(torch.bfloat16, (128,), 1),
        "other": packable(torch.float32, (640, 200), 2),
        "noise": random_bits(torch.int8, (1000, 900)),
        "transposed": packable(torch.float32, (480, 800), 3).T,
        "narrow": packable(torch.float32, (3333, 5), 4),
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(3.0),
    }
    return {name: tensor.to(GPU) if place == "device" else tensor for name, tensor in made.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["auto", "raw"])
@pytest.mark.parametrize("to", ["host", "disk", "device"])
@pytest.mark.parametrize("place", ["host", "device"])
def test_a_gpu_packs_weights_wherever_they_are(place, to, codec, tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "PIECE_BYTES", 1 << 20)
    tensors = weights_on(place)
    options: dict[str, Any] = {"codec": codec, "device": GPU}
    options |= {"disk": tmp_path / "weights"} if to == "disk" else {}
    options |= {"images_on": GPU} if to == "device" else {}
    found = pack(tensors, **options)
    for unit in found.units:
        assert found.unit(unit).image.tier == to
        assert to != "host" or found.unit(unit).image.pinned  # type: ignore[attr-defined]
    for name, tensor in tensors.items():
        assert same_bits(found.read(name).cpu(), tensor.cpu()), name
    assert codec == "raw" or found.nbytes < 0.8 * found.raw_nbytes
    assert not packing_threads()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["weight", "other", "transposed", "narrow"])
def test_a_gpu_packs_to_the_bytes_of_the_host(name, monkeypatch):
    monkeypatch.setattr(upload, "PIECE_BYTES", 1 << 18)
    plan = TensorPacker().plan(weights_on("host")[name])
    assert plan.uploadable
    expected = plan.packed()
    found = plan.packed_by(upload.RowUploader(GPU))
    assert found.device == GPU and found.packed.facts == expected.packed.facts
    for part, data in expected.packed.parts.items():
        assert torch.equal(found.packed.parts[part].cpu(), data), part


@pytest.mark.gpu
def test_tensors_reach_a_gpu_among_those_that_are_packed(monkeypatch):
    monkeypatch.setattr(upload, "COPY_BYTES", 1 << 18)
    monkeypatch.setattr(weight_packer, "MIN_UPLOAD_BYTES", 4096)
    tensors, uploaded = weights_on("host"), {}
    with WeightPacker(UNITS, device=GPU) as packer:
        for name, tensor in tensors.items():
            torch.cuda._sleep(5_000_000)  # memory that torch gives out may be in use on this stream
            uploaded[name] = packer.upload(tensor)
            packer.add(name, tensor)
        found = packer.finish()
    for name, tensor in tensors.items():
        assert uploaded[name].device == GPU and same_bits(uploaded[name].cpu(), tensor), name
        assert same_bits(found.read(name), tensor), name
    assert not packing_threads()


@pytest.mark.gpu
def test_memory_of_uploads_is_taken_at_once():
    tensors = [packable(torch.float32, (n, 1 << 18), n) for n in range(4, 12)]
    total = sum(tensor.nbytes for tensor in tensors)
    torch.cuda.empty_cache()
    with WeightPacker({}, device=GPU, upload_bytes=total) as packer:
        before = torch.cuda.memory_stats()["num_device_alloc"]
        uploaded = [packer.upload(tensor) for tensor in tensors]
        packer.finish()
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
    assert all(same_bits(u.cpu(), t) for u, t in zip(uploaded, tensors, strict=True))
    free, _ = torch.cuda.mem_get_info()
    with WeightPacker({}, device=GPU, upload_bytes=2 * free) as packer:  # more than there is
        copy = packer.upload(tensors[0])
        packer.completed(wait=True)
        assert same_bits(copy.cpu(), tensors[0])


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_memory_that_runs_out_leaves_a_model_where_it_was(place, monkeypatch):
    model = Blocks(width=512, count=6).to(torch.bfloat16).to(place)
    state = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    with monkeypatch.context() as patch:
        scarce(patch, 3)
        with pytest.raises(BitslabError, match="ran out while packing"):
            offload_weights(model, execution_device="cuda", min_bytes=0)
    assert not packing_threads()
    for name, p in model.named_parameters():
        assert type(p) is torch.nn.Parameter and p.device.type == place
        assert same_bits(p.detach().cpu(), state[name])
    offload_weights(model, execution_device="cuda", min_bytes=0)
    assert offload_report(model).ratio > 1.2
    restore_weights(model)
    assert all(same_bits(p.detach(), state[name]) for name, p in model.named_parameters())


@pytest.mark.gpu
def test_a_model_on_a_gpu_gives_its_memory_up_as_it_is_packed():
    model = Blocks(width=2048, count=16).to(torch.bfloat16).cuda()
    torch.cuda.synchronize()
    raw = sum(p.nbytes for p in model.parameters())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    offload_weights(model, execution_device="cuda", min_bytes=0)
    assert torch.cuda.max_memory_allocated() < before + raw  # packed, on the way
    assert torch.cuda.memory_allocated() < before - raw // 2  # less what streaming needs


@pytest.mark.gpu
@pytest.mark.parametrize("slow", ["packing", "bringing"])
def test_weights_that_are_packed_behind_slow_work(slow, monkeypatch):
    """Nothing is read before it is made, nor given up before it is read."""
    fill = DevicePacking.fill

    def slowly(self: DevicePacking, *args: Any) -> None:
        with self._downloads.on():
            torch.cuda._sleep(20_000_000)
        fill(self, *args)

    if slow == "bringing":
        monkeypatch.setattr(DevicePacking, "fill", slowly)
    model = Blocks(width=1024, count=8).to(torch.bfloat16).cuda()
    state = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    for p in model.parameters():  # made anew, late, on the current stream
        data = p.detach().cpu().pin_memory()
        p.data.zero_()
        torch.cuda._sleep(20_000_000)
        p.data.copy_(data, non_blocking=True)
        del data
    if slow == "packing":
        torch.cuda._sleep(100_000_000)
    offload_weights(model, execution_device="cuda", min_bytes=0)
    taken = [torch.full((1 << 20,), 0x5A, dtype=torch.uint8, device="cuda") for _ in range(32)]
    assert all(same_bits(t, state[name]) for name, t in model.state_dict().items())
    del taken


@pytest.mark.gpu
def test_a_file_of_weights_packed_on_a_gpu_is_read_by_a_cpu(tmp_path: Path):
    path = tmp_path / "weights"
    tensors = weights_on("device")
    pack(tensors, device=GPU, disk=path).close()
    held = PackedWeights.open(path)
    for name, tensor in tensors.items():
        assert same_bits(held.read(name), tensor.cpu()), name
    held.close()
