"""Models that accelerate has dispatched, with their offloaded parts packed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from torch import nn

import bitslab.integrations.accelerate as plugin
from bitslab.engine.memory import host
from bitslab.errors import ArgumentError, BitslabError
from bitslab.offload import WeightHandle, deferred_state_dict, find_offloaded
from tests.helpers import same_bits
from tests.offload.models import Blocks, generated, logits, tiny_llama

CPU = torch.device("cpu")


def by_cpu_offload(model, folder):
    cpu_offload(model, execution_device=CPU)


def by_cpu_offload_with_buffers(model, folder):
    cpu_offload(model, execution_device=CPU, offload_buffers=True)


def by_disk_offload(model, folder):
    disk_offload(model, str(folder), execution_device=CPU)


def by_dispatch(model, folder):
    places = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu" if model.config.tie_word_embeddings else "disk",
    }
    dispatch_model(model, places, main_device="cpu", offload_dir=str(folder))


CASES = [
    (by_cpu_offload, True),
    (by_cpu_offload_with_buffers, False),
    (by_disk_offload, True),
    (by_dispatch, False),
    (by_dispatch, True),
]


@pytest.mark.parametrize(("way", "tied"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_what_was_offloaded_streams_packed(way, tied, tmp_path):
    model = tiny_llama(tied=tied, dtype=torch.bfloat16)
    expected, tokens = logits(model), generated(model, max_new_tokens=3)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    way(model, tmp_path / "weights")
    assert same_bits(logits(model), expected)
    report = plugin.compress_offloaded(model, min_bytes=0)
    assert report.packed_bytes < report.raw_bytes
    assert not any(p.is_meta for p in model.parameters())
    packed = {n for n, p in model.named_parameters() if isinstance(p, WeightHandle)}
    if way is by_dispatch:
        assert packed == {n for n in packed if "layers.1" in n or "layers.2" in n or "head" in n}
        assert type(model.model.layers[0].mlp.up_proj.weight) is nn.Parameter
    else:
        assert packed == {n for n, _ in model.named_parameters()}
    assert same_bits(logits(model), expected) and same_bits(logits(model), expected)
    assert torch.equal(generated(model, max_new_tokens=3), tokens)
    assert all(same_bits(t, state[name]) for name, t in model.state_dict().items())
    model.save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "deferred", state_dict=deferred_state_dict(model))
    for path in (tmp_path / "saved").iterdir():
        assert (tmp_path / "deferred" / path.name).read_bytes() == path.read_bytes()
    plugin.restore(model)
    assert not any(isinstance(p, WeightHandle) or p.is_meta for p in model.parameters())
    assert same_bits(logits(model), expected)


def test_raw_weights_in_memory_are_given_up():
    model = Blocks(width=64)
    cpu_offload(model, execution_device=CPU)
    linear: Any = model.blocks[1].linear
    held = linear._hf_hook.weights_map
    gone = weakref.ref(held["weight"])
    assert gone() is not None
    del held, linear
    plugin.compress_offloaded(model, min_bytes=0)
    gc.collect()
    assert gone() is None


def test_a_model_without_offloaded_parts_is_refused():
    model = tiny_llama()
    with pytest.raises(ArgumentError, match="offloaded no part"):
        plugin.compress_offloaded(model)
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    with pytest.raises(ArgumentError, match="offloaded no part"):
        plugin.compress_offloaded(model)
    with pytest.raises(TypeError, match="model: expected"):
        plugin.compress_offloaded("model")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="none of its weights"):
        plugin.report(model)


def test_a_plain_model_goes_by_the_other_function():
    model = tiny_llama()
    expected = logits(model)
    report = plugin.offload_compressed(model, execution_device="cpu", keep=0.3, min_bytes=0)
    assert report.to_dict()["raw_bytes"] == plugin.report(model).raw_bytes
    assert same_bits(logits(model), expected)
    plugin.restore(model)
    assert same_bits(logits(model), expected)
    cpu_offload(model, execution_device=CPU)
    with pytest.raises(ArgumentError, match="use compress_offloaded"):
        plugin.offload_compressed(model)


def test_host_memory_that_runs_out_leaves_accelerate_as_it_was(monkeypatch):
    model = tiny_llama(tied=True)
    expected = logits(model)
    cpu_offload(model, execution_device=CPU)
    allocate = host.HostBuffer.allocate
    room = [3]

    def scarce(nbytes, **options):
        room[0] -= 1
        if room[0] < 0:
            raise BitslabError(f"nbytes: {nbytes} bytes of host memory asked for, 0 are available")
        return allocate(nbytes, **options)

    monkeypatch.setattr(host.HostBuffer, "allocate", scarce)
    with pytest.raises(BitslabError, match="ran out while packing.*needed in all"):
        plugin.compress_offloaded(model, min_bytes=0)
    assert same_bits(logits(model), expected)
    monkeypatch.undo()
    plugin.compress_offloaded(model, min_bytes=0)
    assert same_bits(logits(model), expected)


def test_an_error_after_packing_leaves_accelerate_as_it_was(monkeypatch, tmp_path):
    model = tiny_llama(tied=True)
    expected = logits(model)
    cpu_offload(model, execution_device=CPU)
    with pytest.raises(ArgumentError, match="depth: -1"):
        plugin.compress_offloaded(model, depth=-1)

    def fails(*_, **__):
        raise MemoryError("no room on the device")

    monkeypatch.setattr("bitslab.offload.attached.WeightStream", fails)
    for disk in (None, tmp_path / "weights"):
        with pytest.raises(MemoryError, match="no room"):
            plugin.compress_offloaded(model, min_bytes=0, disk=disk)
        assert not any(isinstance(p, WeightHandle) for p in model.parameters())
        assert same_bits(logits(model), expected)
    monkeypatch.undo()
    plugin.compress_offloaded(model, min_bytes=0)
    assert same_bits(logits(model), expected)


def test_other_hooks_remain():
    model = tiny_llama()
    cpu_offload(model, execution_device=CPU)
    inner = model.model.layers[0].mlp.up_proj
    called = []
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Notified(ModelHook):  # type: ignore[misc]
        def pre_forward(self, module, *args, **kwargs):
            called.append(module)
            return args, kwargs

    add_hook_to_module(inner, Notified(), append=True)
    plugin.compress_offloaded(model, min_bytes=0)
    logits(model)
    assert called == [inner]
    assert "forward" not in model.model.layers[1].mlp.up_proj.__dict__
    assert find_offloaded(model).device == CPU
