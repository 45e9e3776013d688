"""State dicts whose weights are decoded as they are written: the same files, shard by shard."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from bitslab.errors import BitslabError
from bitslab.integrations.transformers import BitslabConfig
from bitslab.offload import (
    PackedWeights,
    WeightHandle,
    deferred_state_dict,
    offload_weights,
    restore_weights,
)
from tests.helpers import same_bits
from tests.offload.models import Blocks, logits, tiny_llama

SHARD_BYTES = 100_000


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[int | str]:
    """List the raw bytes of every weight that is decoded, and "file" for every file begun."""
    events: list[int | str] = []
    read = PackedWeights.read

    def watched_read(self: PackedWeights, name: str, *device: Any) -> torch.Tensor:
        found = read(self, name, *device)
        events.append(found.nbytes)
        return found

    def watched_save(*args: Any, **options: Any) -> None:
        events.append("file")
        save_file(*args, **options)

    monkeypatch.setattr(PackedWeights, "read", watched_read)
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", watched_save)
    return events


def decoded_for_files(events: list[int | str]) -> list[int]:
    """Return the bytes that were decoded before the first file, and for each of them."""
    sizes = [0]
    for event in events:
        if isinstance(event, int):
            sizes[-1] += event
        else:
            sizes.append(0)
    return sizes


def assert_same_files(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert any(name.endswith(".safetensors") for name in names)
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_it_is_the_state_dict(tied):
    model = tiny_llama(tied=tied, dtype=torch.bfloat16)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offload_weights(model, execution_device="cpu", min_bytes=20_000)
    deferred = deferred_state_dict(model)
    assert list(deferred) == list(state)
    kinds = {name: type(tensor) for name, tensor in deferred.items()}
    assert kinds["model.layers.1.mlp.up_proj.weight"] is WeightHandle
    assert kinds["model.norm.weight"] is not WeightHandle  # small: it is not packed
    assert (kinds["lm_head.weight"] is WeightHandle) is not tied
    for name, tensor in deferred.items():
        found = tensor.to("cpu")
        assert type(found) is not WeightHandle and same_bits(found, state[name]), name
        assert tensor.stride() == found.stride() == state[name].stride()
    if tied:
        data = deferred["lm_head.weight"].data_ptr()
        assert data == deferred["model.embed_tokens.weight"].data_ptr()
    assert not any(isinstance(tensor, WeightHandle) for tensor in model.state_dict().values())


def test_nothing_is_decoded_before_it_is_used(reported):
    model = Blocks()
    offload_weights(model, execution_device="cpu", min_bytes=0)
    deferred = deferred_state_dict(model)
    assert reported == []
    weight = deferred["blocks.1.linear.weight"]
    assert weight.device.type == "meta" and weight.shape == (64, 64)
    assert reported == []
    assert torch.equal(weight + 0, model.state_dict()["blocks.1.linear.weight"])
    assert reported[0] == weight.nbytes


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_shards_are_written_one_after_the_other(tied, tmp_path, reported):
    model = tiny_llama(tied=tied, dtype=torch.bfloat16)
    options: dict[str, Any] = {"max_shard_size": SHARD_BYTES}
    model.save_pretrained(tmp_path / "plain", **options)
    offload_weights(model, execution_device="cpu", min_bytes=0)
    reported.clear()
    model.save_pretrained(tmp_path / "packed", state_dict=deferred_state_dict(model), **options)
    assert_same_files(tmp_path / "plain", tmp_path / "packed")
    first, *others = decoded_for_files(reported)
    table = model.model.embed_tokens.weight.nbytes
    assert first == (table if tied else 0)
    assert len(others) > 3 and 0 < max(others) <= SHARD_BYTES
    assert first + sum(others) == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_that_was_loaded_packed_is_saved_so_by_itself(tied, tmp_path, reported):
    tiny_llama(tied=tied, dtype=torch.bfloat16).save_pretrained(tmp_path / "saved")
    load = transformers.AutoModelForCausalLM.from_pretrained
    config = BitslabConfig(min_bytes=0, execution_device="cpu")
    for number, device_map in enumerate([None, "cpu", "auto"]):
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": device_map}
        model = load(tmp_path / "saved", quantization_config=config, **options)
        reported.clear()
        model.save_pretrained(tmp_path / f"packed-{number}", max_shard_size=SHARD_BYTES)
        first, *others = decoded_for_files(reported)
        assert first == (model.get_input_embeddings().weight.nbytes if tied else 0)
        assert len(others) > 3 and 0 < max(others) <= SHARD_BYTES
        plain = load(tmp_path / "saved", dtype=torch.bfloat16)
        plain.save_pretrained(tmp_path / f"plain-{number}", max_shard_size=SHARD_BYTES)
        assert_same_files(tmp_path / f"plain-{number}", tmp_path / f"packed-{number}")


def test_weights_that_were_restored_are_saved_as_they_are(tmp_path):
    model = tiny_llama(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved",
        dtype=torch.bfloat16,
        quantization_config=BitslabConfig(min_bytes=0, execution_device="cpu"),
    )
    before = deferred_state_dict(model)
    restore_weights(model)
    model.save_pretrained(tmp_path / "restored")
    assert_same_files(tmp_path / "saved", tmp_path / "restored")
    with pytest.raises(BitslabError, match="closed"):
        before["lm_head.weight"].to("cpu")


def test_files_of_safetensors_and_plain_models_take_it(tmp_path, reported):
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64))
    model[0].weight = nn.Parameter(torch.randn(64, 48).T)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file({n: t.contiguous() for n, t in state.items()}, tmp_path / "plain")
    offload_weights(model, execution_device="cpu", min_bytes=0)
    deferred = deferred_state_dict(model)
    assert deferred["0.weight"].stride() == (1, 48)
    with pytest.raises(ValueError, match="non contiguous"):  # as for a plain tensor
        save_file(deferred, tmp_path / "packed")
    save_file({n: t.contiguous() for n, t in deferred.items()}, tmp_path / "packed")
    assert (tmp_path / "packed").read_bytes() == (tmp_path / "plain").read_bytes()
    other = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64))
    other.load_state_dict(deferred)
    assert all(same_bits(tensor, state[name]) for name, tensor in other.state_dict().items())
    with pytest.raises(BitslabError, match="cannot be pickled"):
        pickle.dumps(deferred)
    with pytest.raises(BitslabError, match="cannot be changed in place"):
        deferred["0.weight"].zero_()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft 0.21.2
def test_adapters_are_saved_without_decoding_the_model(tmp_path, reported):
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)

    def adapted() -> Any:
        torch.manual_seed(3)
        return get_peft_model(tiny_llama(), config)

    plain, model = adapted(), adapted()
    plain.save_pretrained(tmp_path / "plain")
    offload_weights(model, execution_device="cpu", min_bytes=0)
    reported.clear()
    model.save_pretrained(tmp_path / "packed", state_dict=deferred_state_dict(model))
    assert reported == []
    name = "adapter_model.safetensors"
    assert load_file(tmp_path / "plain" / name).keys()
    assert (tmp_path / "packed" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_a_plain_model_has_its_own_state_dict():
    model = Blocks()
    deferred = deferred_state_dict(model)
    assert all(deferred[name].data_ptr() == t.data_ptr() for name, t in model.state_dict().items())


def test_two_parts_that_stream_apart_are_both_deferred(reported):
    model = nn.ModuleDict({"one": Blocks(), "two": tiny_llama()})
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = logits(model["two"])
    for part in model.values():
        offload_weights(part, execution_device="cpu", min_bytes=0)
    reported.clear()
    deferred = deferred_state_dict(model)
    assert reported == [] and all(isinstance(t, WeightHandle) for t in deferred.values())
    assert all(same_bits(deferred[name].to("cpu"), t) for name, t in state.items())
    assert same_bits(logits(model["two"]), expected)
