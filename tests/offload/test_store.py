"""Packed weights come back as they were, from memory and from files; bad ones are refused."""

from __future__ import annotations

import copy
import os
import pickle
import weakref
from typing import Any

import pytest
import torch

from bitslab.engine.memory import arena, host, host_arena
from bitslab.errors import ArgumentError, BitslabError, CorruptedDataError, IndexRangeError
from bitslab.offload import (
    PackedWeights,
    WeightPacker,
    WeightStream,
    cut_units,
    find_offloaded,
    offload_weights,
)
from bitslab.offload.tensor_packer import TensorPacker
from tests.helpers import DTYPES, dtype_id, packable, random_bits, same_bits
from tests.offload.models import Blocks, stats

SHAPES = [(), (0,), (3,), (5, 7), (64, 48), (33, 100), (4, 8, 3, 3), (2, 0, 4), (300, 1)]


def pack(tensors: dict[str, torch.Tensor], **options) -> PackedWeights:
    names = list(tensors)
    units = {"first": names[::2], "second": names[1::2]}
    with WeightPacker({u: n for u, n in units.items() if n}, **options) as packer:
        for name, tensor in tensors.items():
            packer.add(name, tensor)
        return packer.finish()


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        "weight": packable(torch.bfloat16, (96, 128)),
        "bias": packable(torch.bfloat16, (128,), 1),
        "other": packable(torch.float32, (64, 200), 2),
        "noise": random_bits(torch.int8, (70, 90)),
        "transposed": packable(torch.float32, (48, 80), 3).T,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_every_tensor_comes_back(dtype):
    # One packer a dtype, so that a plan is made for each row size only.
    tensors = {str(shape): packable(dtype, shape) for shape in SHAPES}
    tensors |= {f"noise {shape}": random_bits(dtype, shape, 1) for shape in SHAPES}
    weights = pack(tensors)
    for name, tensor in tensors.items():
        assert same_bits(weights.read(name), tensor), name


def test_host_images_take_their_bytes_of_the_arena_until_they_are_closed(tensors, monkeypatch):
    monkeypatch.setattr(arena, "_arena", None)
    before = host_arena().stats()
    weights = pack(tensors)
    stats = host_arena().stats()
    nbytes = sum(weights.unit(name).image.nbytes for name in weights.units)
    assert stats["reserved_bytes"] - before["reserved_bytes"] == nbytes
    assert stats["buffers"] - before["buffers"] == len(weights.units) == 2
    part = next(iter(weights.compressed("noise").packed.parts.values()))
    kept = part.clone()
    weights.close()
    assert host_arena().stats() == before
    pack(tensors)
    assert same_bits(part, kept), "the memory is not used again while somebody has it"


def test_raw_weights_are_given_up_unit_by_unit():
    model = Blocks(width=64)
    refs = [weakref.ref(p) for p in model.blocks[0].parameters()]
    alive: list[int] = []
    add = WeightPacker.add

    def reported(self, name, tensor):
        if name.startswith("blocks.1."):
            alive.append(sum(ref() is not None for ref in refs))
        return add(self, name, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightPacker, "add", reported)
        offload_weights(model, execution_device="cpu", min_bytes=0)
    assert len(alive) == 4 and max(alive) == 0


def test_two_streams_read_the_same_weights(tensors):
    weights = pack(tensors)
    one, other = WeightStream(weights), WeightStream(weights, {"all": list(tensors)})
    mine, theirs = one.acquire("first"), other.acquire("all")
    assert all(same_bits(tensor, theirs[name]) for name, tensor in mine.items())
    one.release("first")
    one.close()
    assert all(same_bits(theirs[name], tensor) for name, tensor in tensors.items())
    other.release("all")
    other.close()


def test_a_file_that_is_renamed_is_read_on_and_not_overwritten_by_itself(tensors, tmp_path):
    path, moved = tmp_path / "weights", tmp_path / "moved"
    pack(tensors, disk=path).close()
    weights = PackedWeights.open(path, verify=False)
    with pytest.raises(ArgumentError, match="holds these weights"):
        weights.save(path)
    path.rename(moved)
    path.write_bytes(bytes(moved.stat().st_size))  # another file of that name
    assert all(same_bits(weights.read(name), tensor) for name, tensor in tensors.items())
    weights.save(tmp_path / "saved")
    assert same_bits(PackedWeights.open(tmp_path / "saved").read("weight"), tensors["weight"])
    assert {entry.name for entry in tmp_path.iterdir()} == {"weights", "moved", "saved"}


@pytest.mark.parametrize("tier", ["host", "disk", "opened", "saved"])
def test_every_tier_gives_the_same(tensors, tier, tmp_path):
    path = tmp_path / "weights.safetensors"
    weights = pack(tensors, disk=None if tier in ("host", "saved") else path)
    if tier == "saved":
        weights.save(path)
    if tier in ("opened", "saved"):
        weights = PackedWeights.open(path)
    for name, tensor in tensors.items():
        assert same_bits(weights.read(name), tensor)
        if tensor.dim() == 2:
            ids = torch.tensor([[3, 0], [63, 3]])
            assert same_bits(weights.rows(name, ids), tensor[ids])
            for bad in (-1, len(tensor)):
                with pytest.raises(IndexRangeError, match=f"ids: {bad} for '{name}', accepted are"):
                    weights.rows(name, torch.tensor([[3, bad]]))
    assert set(weights.names) == set(tensors) and len(weights) == 5 and "bias" in weights
    assert weights.raw_nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert weights.nbytes < 0.95 * weights.raw_nbytes
    assert weights.record("noise").raw and not weights.record("weight").raw
    stream = WeightStream(weights)
    for unit in stream.units:
        for name, tensor in stream.acquire(unit).items():
            assert same_bits(tensor, tensors[name])
        stream.release(unit)
    stream.close()
    weights.close()
    with pytest.raises(BitslabError, match="closed"):
        weights.read("weight")


def test_the_file_is_one_of_safetensors(tensors, tmp_path):
    from safetensors import safe_open

    path = tmp_path / "weights.safetensors"
    weights = pack(tensors, disk=path, aliases={"tied": "weight"})
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    with safe_open(path, framework="pt") as file:
        assert {"first", "second", "bitslab_weights"} <= set(file.keys())
        image = file.get_tensor("first")
    assert torch.equal(image, weights.unit("first").image.tensor())
    opened = PackedWeights.open(path)
    assert same_bits(opened.read("tied"), tensors["weight"])
    assert opened.path == os.fspath(path) and opened.unit("first").image.tier == "disk"


def test_damaged_files_are_refused(tensors, tmp_path):
    path = tmp_path / "weights.safetensors"
    pack(tensors, disk=path).close()
    good = path.read_bytes()
    for begin in (0, 9, 4096 + 50, len(good) - 5):
        bad = bytearray(good)
        bad[begin] ^= 0x11
        path.write_bytes(bad)
        with pytest.raises(CorruptedDataError, match=str(path)):
            PackedWeights.open(path)
    for size in (0, 5, 100, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises((CorruptedDataError, ValueError)):
            PackedWeights.open(path)
    newer = good.replace(b'"bitslab_weights": "1"', b'"bitslab_weights": "9"')
    path.write_bytes(newer)
    with pytest.raises(CorruptedDataError, match="written in version 9"):
        PackedWeights.open(path)
    with pytest.raises(OSError):
        PackedWeights.open(tmp_path / "none.safetensors")


def test_a_plan_is_kept_for_tensors_that_differ_in_scale_only():
    packer = TensorPacker()
    codecs: list[Any] = []
    for scale in (0.02, 0.3, 0.001):
        tensor = (torch.randn(128, 256) * scale).bfloat16()
        ct, _ = packer.pack(tensor)
        assert ct.nbytes < 0.75 * ct.raw_nbytes
        assert torch.equal(ct.decompress(), tensor)
        codecs.append(ct.codec)
    assert codecs[0].profile.format == codecs[1].profile.format == codecs[2].profile.format
    sparse = torch.zeros(128, 256).bfloat16()
    ct, _ = packer.pack(sparse)
    assert ct.nbytes < 0.5 * ct.raw_nbytes and torch.equal(ct.decompress(), sparse)
    raw, _ = TensorPacker("raw").pack(sparse)
    assert raw.nbytes == sparse.nbytes


def test_a_packer_refuses_what_it_was_not_given(tensors):
    with pytest.raises(ArgumentError, match="'a' stands in"):
        WeightPacker({"x": ["a"], "y": ["a"]})
    packer = WeightPacker({"x": ["a", "b"]})
    with pytest.raises(ArgumentError, match="in no unit"):
        packer.add("c", torch.ones(1))
    with pytest.raises(TypeError, match="meta device"):
        packer.add("a", torch.ones(1, device="meta"))
    with pytest.raises(TypeError, match="expected a tensor"):
        packer.add("a", 3)  # type: ignore[arg-type]
    assert packer.add("a", torch.ones(1)) is False
    with pytest.raises(ArgumentError, match="added before"):
        packer.add("a", torch.ones(1))
    with pytest.raises(ArgumentError, match="never added: b"):
        packer.finish()
    assert packer.add("b", torch.ones(1)) is True
    weights = packer.finish()
    with pytest.raises(ArgumentError, match="no tensor 'c'"):
        weights.read("c")
    with pytest.raises(ArgumentError, match="unit: 'z'"):
        weights.unit("z")
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(weights)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(weights)


def test_an_abandoned_file_is_removed(tensors, tmp_path):
    with pytest.raises(RuntimeError, match="on the way"):
        with WeightPacker({"x": ["weight", "b"]}, disk=tmp_path / "weights") as packer:
            packer.add("weight", tensors["weight"])
            raise RuntimeError("on the way")
    assert list(tmp_path.iterdir()) == []


def test_host_memory_that_runs_out_leaves_the_model_as_it_was(monkeypatch):
    model = Blocks(width=256)
    x = torch.randn(3, 256)
    expected = model(x).detach()
    allocate = host.HostBuffer.allocate
    room = [3]

    def scarce(nbytes, **options):
        room[0] -= 1
        if room[0] < 0:
            raise BitslabError(f"nbytes: {nbytes} bytes of host memory asked for, 0 are available")
        return allocate(nbytes, **options)

    monkeypatch.setattr(host.HostBuffer, "allocate", scarce)
    with pytest.raises(BitslabError, match=r"ran out while packing 'blocks\.2'.*needed in all"):
        offload_weights(model, execution_device="cpu", min_bytes=0)
    assert all(type(p) is torch.nn.Parameter and p.requires_grad for p in model.parameters())
    assert same_bits(model(x), expected)
    monkeypatch.undo()
    offload_weights(model, execution_device="cpu", min_bytes=0)
    assert same_bits(model(x), expected)


@pytest.mark.parametrize("what", ["removed", "cut"])
def test_a_file_that_goes_under_a_running_model_is_reported(tmp_path, what):
    model = Blocks(width=128)
    x = torch.randn(3, 128)
    expected = model(x).detach()
    path = tmp_path / "weights.safetensors"
    report = offload_weights(model, execution_device="cpu", min_bytes=0, disk=path)
    assert {unit.tier for unit in report.units} == {"disk"}
    assert report.path == os.fspath(path) and path.stat().st_size > report.packed_bytes
    assert same_bits(model(x), expected)
    if what == "removed":
        path.unlink()
    else:
        os.truncate(path, 5000)
    with pytest.raises(BitslabError, match=rf"weights\.safetensors: the file .* was {what}"):
        model(x)
    assert stats(model)["buffers"] == 1
    with pytest.raises(BitslabError, match=what):
        model.state_dict()


def test_a_stream_is_used_in_any_order_and_by_several():
    tensors = {f"{i}.weight": packable(torch.float32, (64, 64), i) for i in range(5)}
    with WeightPacker({name[0]: [name] for name in tensors}) as packer:
        for name, tensor in tensors.items():
            packer.add(name, tensor)
        weights = packer.finish()
    stream = WeightStream(weights, {**{n: [f"{n}.weight"] for n in "01234"}, "tied": ["1.weight"]})
    first = stream.acquire("0")["0.weight"]
    second = stream.acquire("3")["3.weight"]
    assert stream.acquire("0")["0.weight"] is first
    assert same_bits(first, tensors["0.weight"]) and same_bits(second, tensors["3.weight"])
    counts = {"acquisitions": 3, "loads": 2, "moved_bytes": 0, "buffers": 2, "fused": 0}
    assert stream.stats() == counts
    for unit in ("0", "0", "3"):
        stream.release(unit)
    with pytest.raises(BitslabError, match="more often"):
        stream.release("0")
    assert same_bits(stream.acquire("tied")["1.weight"], tensors["1.weight"])
    stream.release("tied")
    with pytest.raises(ArgumentError, match="unit: 'x'"):
        stream.acquire("x")
    stream.close()
    with pytest.raises(BitslabError, match="closed"):
        stream.acquire("0")


def test_damaged_weights_raise_and_leave_the_stream_usable():
    model = Blocks(width=128)
    x = torch.randn(3, 128)
    expected = model(x).detach()
    offload_weights(model, execution_device="cpu", min_bytes=0)
    weights = find_offloaded(model).weights
    record = weights.record("blocks.1.linear.weight")
    lengths = record.parts["lengths"].of(weights.unit("blocks.1").image.tensor())
    kept = lengths.clone()
    lengths.fill_(1)
    with pytest.raises(CorruptedDataError, match="damaged"):
        model(x)
    lengths.copy_(kept)
    assert same_bits(model(x), expected)


def test_the_older_name_of_refs_works():
    unit = cut_units(torch.nn.Linear(4, 3))[0]
    assert [ref.name for ref in unit.slots] == ["weight", "bias"]
    assert unit.slots is unit.refs
