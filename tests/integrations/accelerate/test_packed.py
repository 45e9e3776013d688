"""accelerate's own functions, pickling and copying, given a model whose weights are packed."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import (
    ModelHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from torch import nn

import bitslab.integrations.accelerate as plugin
from bitslab.errors import ArgumentError, BitslabError
from bitslab.offload import WeightHandle, attach_weights, offload_weights
from tests.helpers import same_bits
from tests.offload.models import logits, tiny_llama, token_ids

PLACES = {"model": "disk", "lm_head": "disk"}


def by_offload_compressed(model: Any) -> None:
    plugin.offload_compressed(model, execution_device="cpu", min_bytes=0)


def with_layers_left_as_they_are(model: Any) -> None:
    keep: Any = {"model.embed_tokens": "device", "model.layers.0": "device"}
    plugin.offload_compressed(model, execution_device="cpu", min_bytes=0, keep=keep)


def by_compress_offloaded(model: Any) -> None:
    cpu_offload(model, execution_device="cpu")
    plugin.compress_offloaded(model, min_bytes=0)


WAYS = [by_offload_compressed, with_layers_left_as_they_are, by_compress_offloaded]


def named(function: Any) -> str:
    return str(function.__name__)


def by_cpu_offload(model: Any, folder: Any) -> None:
    cpu_offload(model, execution_device="cpu")


def by_cpu_offload_of_a_state_dict(model: Any, folder: Any) -> None:
    cpu_offload(model, execution_device="cpu", state_dict=model.state_dict())


def by_disk_offload(model: Any, folder: Any) -> None:
    disk_offload(model, str(folder), execution_device="cpu")


def by_dispatch_model(model: Any, folder: Any) -> None:
    dispatch_model(model, PLACES, main_device="cpu", offload_dir=str(folder))


@pytest.mark.drawn(6)
@pytest.mark.parametrize("way", WAYS, ids=named)
@pytest.mark.parametrize(
    "place",
    [by_cpu_offload, by_cpu_offload_of_a_state_dict, by_disk_offload, by_dispatch_model],
    ids=named,
)
def test_accelerate_does_not_place_packed_weights(way, place, tmp_path):
    model = tiny_llama()
    expected = logits(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    way(model)
    packed = {n for n, p in model.named_parameters() if isinstance(p, WeightHandle)}
    with pytest.raises(BitslabError, match=r"weights are packed.*restore_weights\(model\)"):
        place(model, tmp_path)
    assert {n for n, p in model.named_parameters() if isinstance(p, WeightHandle)} == packed
    assert same_bits(logits(model), expected)
    # What accelerate had done by then is undone by its own function; then its way works.
    remove_hook_from_submodules(model)
    assert all(same_bits(tensor, state[name]) for name, tensor in model.state_dict().items())
    plugin.restore(model)
    place(model, tmp_path)
    assert all(p.is_meta for p in model.parameters())
    assert same_bits(logits(model), expected)


class Counter(ModelHook):  # type: ignore[misc]
    """Counts forward passes."""

    def __init__(self) -> None:
        self.calls = 0

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return args, kwargs


@pytest.mark.drawn(6)
@pytest.mark.parametrize("way", WAYS, ids=named)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "remove",
    [remove_hook_from_submodules, lambda model: remove_hook_from_module(model, recurse=True)],
    ids=["remove_hook_from_submodules", "remove_hook_from_module"],
)
def test_accelerates_hooks_come_off_and_weights_still_stream(way, when, remove):
    model, hook = tiny_llama(), Counter()
    expected = logits(model)
    hooked = [model, model.model.embed_tokens, model.model.layers[1], model.model.norm]
    for step in ("before", "pack", "after"):
        if step == "pack":
            way(model)
        elif step == when:
            for module in hooked:
                add_hook_to_module(module, hook, append=True)
    assert same_bits(logits(model), expected)
    assert hook.calls == len(hooked)
    packed = {n for n, p in model.named_parameters() if isinstance(p, WeightHandle)}
    remove(model)
    assert not any(hasattr(m, "_hf_hook") or hasattr(m, "_old_forward") for m in model.modules())
    assert packed and packed == {
        n for n, p in model.named_parameters() if isinstance(p, WeightHandle)
    }
    assert same_bits(logits(model), expected) and hook.calls == len(hooked)
    plugin.restore(model)
    assert all(type(p) is nn.Parameter and not p.is_meta for p in model.parameters())
    assert same_bits(logits(model), expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_on_an_embedding_outlives_the_packed_weights(when):
    model, hook = tiny_llama(), Counter()
    embedding = model.model.embed_tokens
    for step in ("before", "pack", "after"):
        if step == "pack":
            by_offload_compressed(model)
        elif step == when:
            add_hook_to_module(embedding, hook)
    plugin.restore(model)
    logits(model)
    assert hook.calls == 1
    remove_hook_from_module(embedding)
    logits(model)
    assert hook.calls == 1


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("way", [by_offload_compressed, by_compress_offloaded], ids=named)
def test_lookups_remain_out_of_compiled_graphs(way):
    model = tiny_llama(layers=1)
    cpu_offload(model, execution_device="cpu")
    remove_hook_from_submodules(model)
    expected = logits(model)
    way(model)
    embedding = model.model.embed_tokens
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(lambda ids: embedding(ids) + 1, backend=backend)
    with torch.no_grad():
        found = compiled(token_ids())
    assert same_bits(found, model.state_dict()["model.embed_tokens.weight"][token_ids()] + 1)
    assert not any("embedding" in target for target in targets)
    assert same_bits(logits(model), expected)


def pickled(model: Any) -> None:
    pickle.dumps(model)


def saved_by_torch(model: Any) -> None:
    torch.save(model, io.BytesIO())


@pytest.mark.drawn(8)
@pytest.mark.parametrize("keep", [pickled, saved_by_torch, copy.deepcopy], ids=named)
@pytest.mark.parametrize(
    "part",
    [
        lambda model: model,
        lambda model: model.model.layers[1],
        lambda model: model.model.layers[1].mlp.up_proj,
        lambda model: model.model.embed_tokens,
        lambda model: nn.Sequential(model),
    ],
    ids=["model", "layer", "linear", "embedding", "module-around-it"],
)
def test_a_packed_model_is_neither_pickled_nor_copied(keep, part):
    model = tiny_llama(layers=2)
    expected = logits(model)
    by_offload_compressed(model)
    with pytest.raises(BitslabError, match=r"packed.*pickled or copied; save model.state_dict\(\)"):
        keep(part(model))
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    assert all(
        same_bits(tensor, model.state_dict()[name]) for name, tensor in torch.load(saved).items()
    )
    plugin.restore(model)
    again = pickle.loads(pickle.dumps(model))
    assert same_bits(logits(again), expected)
    assert not any("__reduce_ex__" in module.__dict__ for module in model.modules())


def test_messages_name_what_the_adapter_exports():
    model = tiny_llama()
    for function in (plugin.report, plugin.restore, lambda m: plugin.generate_blocks(m, [])):
        with pytest.raises(ArgumentError, match=r"call offload_compressed\(model\)"):
            function(model)
    by_offload_compressed(model)
    for function in (plugin.offload_compressed, plugin.compress_offloaded):
        with pytest.raises(ArgumentError, match=r"packed already; call restore\(model\)"):
            function(model)
    with pytest.raises(ArgumentError, match=r"call bitslab.offload.restore_weights\(model\)"):
        offload_weights(model)
    with pytest.raises(ArgumentError, match=r"call bitslab.offload.restore_weights\(model\)"):
        attach_weights(model, {})  # type: ignore[arg-type]
