"""Device maps are planned with the sizes that weights will have; no GPU is needed for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.accelerate import _get_device_map

from bitslab.errors import ArgumentError, CorruptedDataError
from bitslab.integrations.transformers import BitslabConfig, BitslabQuantizer
from bitslab.integrations.transformers.loading import representatives
from bitslab.integrations.transformers.placement import (
    execution_device,
    place_of,
    unit_places,
    unpack_while_room,
)
from bitslab.integrations.transformers.sizes import ASSUMED, MARGIN, estimate, kind_of

from .quantizer_models import BASE, write_model

CPU_BYTES = 1 << 32
LARGER = BASE | {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 24}


def meta_model() -> Any:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LARGER)).bfloat16()


def planned(
    device_map: Any, max_memory: dict[Any, int], files: list[str] | None = None, **options: Any
) -> tuple[BitslabQuantizer, dict[str, str], Any]:
    """Plan as from_pretrained does, for GPUs that need not be there."""
    quantizer = BitslabQuantizer(BitslabConfig(min_bytes=0, **options), pre_quantized=False)
    model = meta_model()
    found = quantizer.update_device_map(device_map)
    quantizer.update_dtype(torch.bfloat16)
    quantizer._process_model_before_weight_loading(model, checkpoint_files=files)
    found = _get_device_map(model, found, max_memory, quantizer)
    units = quantizer._units
    device = execution_device(quantizer._plan.device_map, quantizer.config.execution_device)
    return quantizer, quantizer._places(units, device), found


def raw_bytes() -> int:
    return sum(p.nbytes for p in meta_model().parameters())


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    # It says that the GPUs of these plans are not there.
    monkeypatch.setattr("accelerate.utils.modeling.logger.warning", lambda *args, **kwargs: None)


def test_all_that_fits_remains_as_it_is() -> None:
    quantizer, places, found = planned("sequential", {0: 4 * raw_bytes(), "cpu": CPU_BYTES})
    assert set(places.values()) == {"device"}
    assert found == {"": "cpu"}, "weights come to the CPU first, and accelerate has no hooks to set"
    assert set(quantizer._plan.device_map or {}) != {""} or quantizer._plan.device_map == {"": 0}


def test_more_fits_packed_than_raw() -> None:
    quantizer, places, _ = planned("sequential", {0: raw_bytes() - 1, "cpu": CPU_BYTES})
    there = {unit for unit, place in places.items() if place != "host"}
    raw = quantizer._raw_sizes()
    held = sum(raw[name] for unit in there for name in quantizer._units[unit])
    packed = sum(
        sum(raw[n] for n in quantizer._units[u])
        if places[u] == "device"
        else quantizer._packed_bytes(quantizer._units[u])
        for u in there
    )
    assert packed <= quantizer._plan.budget[0] < raw_bytes()
    assert held > packed
    assert "packed" in places.values()


def test_little_memory_streams_the_rest() -> None:
    quantizer, places, _ = planned("sequential", {0: raw_bytes() * 7 // 8, "cpu": CPU_BYTES})
    assert "host" in places.values()
    quantizer, nothing, _ = planned("sequential", {0: 1000, "cpu": CPU_BYTES})
    assert set(nothing.values()) == {"host"}
    assert quantizer._plan.gpu == 0, "the model runs there all the same"


def test_a_gpu_that_may_hold_nothing_is_not_used() -> None:
    quantizer, places, _ = planned("sequential", {0: 0, "cpu": CPU_BYTES})
    assert quantizer._plan.gpu is None
    assert set(places.values()) == {"host"}


def test_one_of_several_gpus_is_used() -> None:
    memory = {0: 4 * raw_bytes(), 1: 6 * raw_bytes(), "cpu": CPU_BYTES}
    quantizer, places, _ = planned("sequential", dict(memory))
    assert set(map(str, (quantizer._plan.device_map or {}).values())) == {"1"}
    quantizer, _, _ = planned("sequential", dict(memory), execution_device="cuda:0")
    assert set(map(str, (quantizer._plan.device_map or {}).values())) == {"0"}


def test_what_is_planned_on_disk_needs_a_file(tmp_path: Path) -> None:
    memory = {0: 1000, "cpu": 1000}
    with pytest.raises(ArgumentError, match=r"device_map: \d+ of \d+ units are on disk.*disk=FILE"):
        planned("sequential", dict(memory))
    _, places, _ = planned("sequential", dict(memory), disk=tmp_path / "packed")
    assert set(places.values()) == {"host"}


@pytest.mark.parametrize("device_map", ["auto", {"model": "disk", "lm_head": "cpu"}], ids=str)
def test_keep_and_a_plan_are_not_taken_together(device_map: Any) -> None:
    quantizer = BitslabQuantizer(BitslabConfig(keep="packed"), pre_quantized=False)
    with pytest.raises(ArgumentError, match="keep: 'packed' together with"):
        quantizer.update_device_map(device_map)


def test_gpu_that_is_not_there_is_refused() -> None:
    quantizer = BitslabQuantizer(BitslabConfig(), pre_quantized=False)
    with pytest.raises(ArgumentError, match="cuda:63|no CUDA GPU"):
        quantizer.update_device_map({"": 63})


def test_execution_devices() -> None:
    assert execution_device({"": "cpu"}, None).type == "cpu"
    assert execution_device({"a": 1, "b": "cpu", "c": "disk"}, None) == torch.device("cuda:1")
    assert execution_device({"": "cpu"}, "cuda:2") == torch.device("cuda:2")
    with pytest.raises(ArgumentError, match="cuda:0 and cuda:1; the model runs on one device"):
        execution_device({"a": 0, "b": 1}, None)
    with pytest.raises(ArgumentError, match="execution_device: cpu, but device_map"):
        execution_device({"": 0}, "cpu")
    with pytest.raises(ArgumentError, match="device_map: 'mps'"):
        execution_device({"": "mps"}, None)


def test_places_of_units() -> None:
    units = {"emb": ["emb.w"], "l.0": ["l.0.a.w", "l.0.b.w"], "l.1": ["l.1.a.w"]}
    assert unit_places(units, {"": 0}) == dict.fromkeys(units, "gpu")
    divided = {"emb": "cpu", "l.0.a": 0, "l.0.b": "cpu", "l.1": "disk"}
    assert unit_places(units, divided) == {"emb": "cpu", "l.0": "cpu", "l.1": "disk"}
    assert place_of("l.0.a.w", {"l": 0, "l.0.a": 1}) == 1
    with pytest.raises(ArgumentError, match="has no place for l.1.a.w"):
        unit_places(units, {"emb": 0, "l.0": 0})


def test_room_is_given_to_units_in_order() -> None:
    raw, packed = {"a": 10, "b": 10, "c": 10}, {"a": 7, "b": 7, "c": 7}
    assert unpack_while_room(raw, raw, packed, 21) == set()
    assert unpack_while_room(raw, raw, packed, 27) == {"a", "b"}
    assert unpack_while_room(raw, raw, packed, 1e9) == {"a", "b", "c"}


def test_sizes_are_sampled_from_the_checkpoint(tmp_path: Path) -> None:
    folder = write_model("mixtral", tmp_path)
    files = [str(folder / "model.safetensors")]
    found = estimate(files, torch.bfloat16)
    assert "kinds of tensors" in found.source and "bfloat16" in found.source
    share = found.share("model.layers.2.self_attn.q_proj.weight")
    assert 0.6 < share < 0.85
    # The model has another prefix, and merged experts, of which the file has no tensor.
    assert found.share("layers.7.self_attn.q_proj.weight") == share
    assert found.share("model.layers.0.mlp.experts.gate_up_proj") == min(1, found.mean * MARGIN)
    wide = estimate(files, torch.float32)
    assert wide.share("model.layers.2.self_attn.q_proj.weight") < share  # zeros behind bfloat16


@pytest.mark.parametrize("files", [None, [], ["pytorch_model.bin"]], ids=str)
def test_sizes_are_assumed_without_samples(files: Any) -> None:
    found = estimate(files, torch.bfloat16)
    assert found.mean == ASSUMED[torch.bfloat16] and "assumed" in found.source
    assert estimate(files, torch.int8).share("a.b") == 1


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(CorruptedDataError, match=r"a\.safetensors: not a safetensors file"):
        estimate([str(tmp_path / "a.safetensors")], torch.bfloat16)


def test_progress_has_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    for theirs, ours in ((True, False), (False, None)):
        monkeypatch.setattr(
            "bitslab.integrations.transformers.quantizer.is_progress_bar_enabled",
            lambda theirs=theirs: theirs,
        )
        assert BitslabQuantizer(BitslabConfig())._progress() is ours
        assert BitslabQuantizer(BitslabConfig(progress=True))._progress() is True


def test_samples_of_experts_in_one_tensor_are_small(tmp_path: Path) -> None:
    experts = {"experts.w": (torch.randn(4, 1024, 256) * 0.02).bfloat16()}
    save_file(experts, tmp_path / "a.safetensors")
    found = estimate([str(tmp_path / "a.safetensors")], torch.bfloat16)
    assert found.share("experts.w") < 0.8
    assert "(0.13 MB)" in found.source


def test_kinds_of_tensors() -> None:
    assert (
        kind_of("model.layers.12.mlp.experts.3.w1.weight")
        == "model.layers.*.mlp.experts.*.w1.weight"
    )
    assert kind_of("h.0") == "h.*"


def test_names_of_tied_weights() -> None:
    tied = {"head": "emb"}
    assert representatives(tied, {"emb", "a"}) == ({"head": "emb"}, set())
    assert representatives(tied, {"head", "a"}) == ({"emb": "head"}, set())
    assert representatives(tied, {"emb", "head"}) == ({"head": "emb"}, {"emb", "head"})
    assert representatives({"b": "a", "c": "a"}, {"c"}) == ({"a": "c", "b": "c"}, set())
