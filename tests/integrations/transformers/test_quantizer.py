"""from_pretrained with BitslabConfig: the same model, packed while it is loaded."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import core_model_loading

from bitslab.errors import ArgumentError, BitslabError
from bitslab.integrations.transformers import BitslabConfig
from bitslab.offload.residence import Tier
from bitslab.offload.weight_packer import WeightPacker
from tests.helpers import same_bits

from .quantizer_models import (
    CONFIGS,
    auto_class,
    inputs,
    logits,
    make_model,
    weights_file,
    write_model,
)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def load(
    folder: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Any:
    config = options.pop("config", None) or BitslabConfig(min_bytes=0)
    return auto_class(kind).from_pretrained(
        folder, dtype=dtype, quantization_config=config, **options
    )


def plain(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Any:
    return auto_class(kind).from_pretrained(folder, dtype=dtype)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", CONFIGS)
def test_model_is_the_plain_one(kind: str, tmp_path: Path) -> None:
    write_model(kind, tmp_path / "saved")
    expected = plain(tmp_path / "saved", kind)
    model, reported = load(tmp_path / "saved", kind, output_loading_info=True)
    assert not any(reported.values())
    assert same_bits(logits(model), logits(expected))
    found = model.state_dict()
    assert list(found) == list(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        assert same_bits(found[name], tensor), name
    report = model.hf_quantizer.report
    assert report.packed_bytes < report.raw_bytes
    assert set(report.places.values()) == {"host"}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", CONFIGS)
def test_saved_files_are_those_of_the_plain_model(kind: str, tmp_path: Path) -> None:
    write_model(kind, tmp_path / "saved")
    plain(tmp_path / "saved", kind).save_pretrained(tmp_path / "plain")
    model = load(tmp_path / "saved", kind)
    model.save_pretrained(tmp_path / "packed")
    assert weights_file(tmp_path / "packed") == weights_file(tmp_path / "plain")
    assert (tmp_path / "packed" / "config.json").read_text() == (
        tmp_path / "plain" / "config.json"
    ).read_text()
    again = load(tmp_path / "packed", kind)
    assert same_bits(logits(again), logits(plain(tmp_path / "packed", kind)))
    assert same_bits(logits(again), logits(model))


def test_shards_are_saved_and_loaded(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "saved")
    model = load(tmp_path / "saved")
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    plain(tmp_path / "saved").save_pretrained(tmp_path / "plain", max_shard_size="100KB")
    names = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors*"))
    assert len(names) > 3
    for name in names:
        assert (tmp_path / "shards" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert same_bits(logits(load(tmp_path / "shards")), logits(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_weights_are_cast_as_they_are_loaded(dtype: torch.dtype, tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    model = load(tmp_path, dtype=dtype)
    assert model.dtype == dtype
    assert same_bits(logits(model), logits(plain(tmp_path, dtype=dtype)))


def test_parameters_of_another_dtype_keep_it(tmp_path: Path) -> None:
    write_model("opt", tmp_path)
    cls = transformers.OPTForCausalLM
    kept = cls._keep_in_fp32_modules_strict
    try:
        cls._keep_in_fp32_modules_strict = {"final_layer_norm", "fc1"}
        model, expected = load(tmp_path, "opt"), plain(tmp_path, "opt")
        found = model.state_dict()
        assert found["model.decoder.layers.1.fc1.weight"].dtype == torch.float32
        for name, tensor in expected.state_dict().items():
            assert same_bits(found[name], tensor), name
    finally:
        cls._keep_in_fp32_modules_strict = kept


def test_generates_the_same_tokens(tmp_path: Path) -> None:
    write_model("gemma", tmp_path)
    model, expected = load(tmp_path, "gemma"), plain(tmp_path, "gemma")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    found = model.generate(**inputs(), **options)
    assert torch.equal(found, expected.generate(**inputs(), **options))
    assert model.device == torch.device("cpu")


def test_dequantize_gives_the_plain_model_back(tmp_path: Path) -> None:
    write_model("gemma", tmp_path)
    model, expected = load(tmp_path, "gemma"), plain(tmp_path, "gemma")
    model = model.dequantize()
    assert not getattr(model, "is_quantized", False) and not hasattr(model, "hf_quantizer")
    assert all(type(p) is torch.nn.Parameter and p.device.type == "cpu" for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, tensor in expected.state_dict().items():
        assert same_bits(model.state_dict()[name], tensor)
    assert same_bits(logits(model), logits(expected))
    assert load(tmp_path, "gemma").dequantize(torch.float32).dtype == torch.float32


@pytest.mark.parametrize("device_map", [None, "cpu", {"": "cpu"}, "auto", "sequential"], ids=str)
def test_device_maps_without_a_gpu(device_map: Any, tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    config = BitslabConfig(min_bytes=0, execution_device="cpu")
    model = load(tmp_path, config=config, device_map=device_map)
    assert set(model.hf_quantizer.report.places.values()) == {"host"}
    assert not hasattr(model, "_hf_hook")
    assert same_bits(logits(model), logits(plain(tmp_path)))


@pytest.mark.parametrize("keep", ["all", "packed", 0.5, {"model.layers.1": "device"}], ids=str)
def test_what_is_kept(keep: Any, tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    model = load(tmp_path, config=BitslabConfig(keep=keep, execution_device="cpu", min_bytes=0))
    places = model.hf_quantizer.report.places
    if keep == "all":
        assert set(places.values()) == {"device"}
        assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    elif keep == "packed":
        assert set(places.values()) == {"packed"}
    elif keep == 0.5:
        assert {"device", "host"} == set(places.values())
    else:
        assert [unit for unit, place in places.items() if place == "device"] == [*keep]
        assert type(model.model.layers[1].mlp.up_proj.weight) is torch.nn.Parameter
    assert same_bits(logits(model), logits(plain(tmp_path)))


def test_skipped_modules_remain_as_they_are(tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    config = BitslabConfig(min_bytes=0, skip_modules=["lm_head", "model.layers.0.mlp"])
    model = load(tmp_path, config=config)
    for module in (model.lm_head, model.model.layers[0].mlp.up_proj):
        assert type(module.weight) is torch.nn.Parameter and not module.weight.is_meta
    assert type(model.model.layers[0].self_attn.q_proj.weight) is not torch.nn.Parameter
    assert same_bits(logits(model), logits(plain(tmp_path)))


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    write_model("gemma", tmp_path)
    reported: list[tuple[int, int | None]] = []
    config = BitslabConfig(min_bytes=0, progress=lambda done, total: reported.append((done, total)))
    model = load(tmp_path, "gemma", config=config)
    done = [d for d, _ in reported]
    assert done == sorted(done) and done[-1] == reported[-1][1]
    assert done[-1] == model.hf_quantizer.report.raw_bytes


def test_weights_that_the_checkpoint_lacks_are_new_ones(tmp_path: Path) -> None:
    model = make_model("llama")
    model.model.save_pretrained(tmp_path)  # without the head
    found, reported = load(tmp_path, output_loading_info=True)
    assert reported["missing_keys"] == {"lm_head.weight"}
    state = found.state_dict()
    assert state["lm_head.weight"].float().std() > 0.01
    for name, tensor in model.model.state_dict().items():
        assert same_bits(state[f"model.{name}"], tensor), name
    assert "lm_head" in found.hf_quantizer.report.places


@pytest.mark.parametrize("same", [True, False], ids=["the same", "another"])
def test_tied_weights_of_which_both_are_in_the_file(same: bool, tmp_path: Path) -> None:
    write_model("gemma", tmp_path, tie_word_embeddings=False)
    path = tmp_path / "model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    if same:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(text | {"tie_word_embeddings": True}))
    model, expected = load(tmp_path, "gemma"), plain(tmp_path, "gemma")
    assert same_bits(logits(model), logits(expected))
    for name, tensor in expected.state_dict().items():
        assert same_bits(model.state_dict()[name], tensor), name
    model.save_pretrained(tmp_path / "packed")
    expected.save_pretrained(tmp_path / "plain")
    assert weights_file(tmp_path / "packed") == weights_file(tmp_path / "plain")


def test_head_of_a_tied_model_that_has_only_that(tmp_path: Path) -> None:
    write_model("gemma", tmp_path)
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path, {"format": "pt"})
    model = load(tmp_path, "gemma")
    assert same_bits(logits(model), logits(plain(tmp_path, "gemma")))


def test_other_shapes_are_refused_as_for_a_plain_model(tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(text | {"intermediate_size": 96}))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(tmp_path)
    model = load(tmp_path, ignore_mismatched_sizes=True)
    assert model.state_dict()["model.layers.0.mlp.up_proj.weight"].shape == (96, 64)
    assert torch.isfinite(logits(model)).all()


def test_checkpoint_that_names_the_method(tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    named = {"quantization_config": {"quant_method": "bitslab", "depth": 3}}
    (tmp_path / "config.json").write_text(json.dumps(text | named))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.hf_quantizer.config.depth == 3
    assert model.hf_quantizer.report.ratio > 1
    expected = make_model("llama")
    assert same_bits(logits(model), logits(expected))


def test_checkpoint_of_another_method_is_refused(tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    named = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}
    (tmp_path / "config.json").write_text(json.dumps(text | named))
    with pytest.raises(ValueError, match="FineGrainedFP8Config.*BitslabConfig"):
        load(tmp_path)


def test_weights_on_disk(tmp_path: Path) -> None:
    write_model("gemma", tmp_path / "saved")
    file = tmp_path / "packed.safetensors"
    model = load(tmp_path / "saved", "gemma", config=BitslabConfig(disk=file, min_bytes=0))
    report = model.hf_quantizer.report
    assert report.packed_bytes < file.stat().st_size < report.raw_bytes
    assert same_bits(logits(model), logits(plain(tmp_path / "saved", "gemma")))
    file.unlink()
    with pytest.raises(BitslabError, match="removed"):
        logits(model)


def test_files_that_are_written_over(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "saved")
    file = tmp_path / "packed.safetensors"
    config = BitslabConfig(disk=file, min_bytes=0)
    first = load(tmp_path / "saved", config=config)
    with pytest.raises(ArgumentError, match="disk: .* a model is using"):
        load(tmp_path / "saved", config=config)
    expected = logits(plain(tmp_path / "saved"))
    assert same_bits(logits(first), expected)
    del first
    again = load(tmp_path / "saved", config=config)
    assert same_bits(logits(again), expected)
    taken = tmp_path / "saved" / "model.safetensors"
    before = taken.read_bytes()
    with pytest.raises(ArgumentError, match="disk: .* exists and holds no packed weights"):
        load(tmp_path / "saved", config=BitslabConfig(disk=taken))
    assert taken.read_bytes() == before


def test_loading_that_fails_leaves_no_file(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "saved")
    config = tmp_path / "saved" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 96}))
    (tmp_path / "packed").mkdir()
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(
            tmp_path / "saved",
            config=BitslabConfig(disk=tmp_path / "packed" / "file", min_bytes=0),
        )
    gc.collect()
    assert list((tmp_path / "packed").iterdir()) == []


def test_adapters_are_loaded_on_top(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    write_model("llama", tmp_path / "base")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    files, found = [], []
    for number, model in enumerate((plain(tmp_path / "base"), load(tmp_path / "base"))):
        torch.manual_seed(3)
        model.add_adapter(config)
        found.append(logits(model))
        model.save_pretrained(tmp_path / f"adapter-{number}")
        files.append((tmp_path / f"adapter-{number}" / "adapter_model.safetensors").read_bytes())
    assert same_bits(found[0], found[1])
    assert files[0] == files[1]
    model = load(tmp_path / "base")
    model.load_adapter(str(tmp_path / "adapter-1"))
    assert same_bits(logits(model), found[0])


def test_host_memory_that_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitslab.engine.memory.host import HostBuffer

    write_model("llama", tmp_path)
    allocate, sizes = HostBuffer.allocate, []

    def refuse(nbytes: int, **options: Any) -> HostBuffer:
        sizes.append(nbytes)
        if len(sizes) > 2:
            raise BitslabError(f"{nbytes} bytes of host memory cannot be had")
        return allocate(nbytes, **options)

    monkeypatch.setattr(HostBuffer, "allocate", refuse)
    with pytest.raises(BitslabError, match=r"host memory ran out.*are needed in all"):
        load(tmp_path)
    monkeypatch.undo()
    assert same_bits(logits(load(tmp_path)), logits(plain(tmp_path)))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft 0.21.2
def test_adapters_train_on_top(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    write_model("llama", tmp_path)
    model = load(tmp_path)
    expected = logits(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    assert same_bits(logits(adapted), expected)
    adapted.train()
    loss = adapted(**inputs(), labels=inputs()["input_ids"]).loss
    loss.backward()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert trained and any(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)


def test_modules_that_are_not_there(tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    with pytest.raises(ArgumentError, match="skip_modules: the model has no module 'mlp'"):
        load(tmp_path, config=BitslabConfig(skip_modules=["mlp"]))
    with pytest.raises(ArgumentError, match="keep: no units .'model.layers.9'"):
        load(tmp_path, config=BitslabConfig(keep={"model.layers.9": "device"}))


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32], ids=["as saved", "cast"])
def test_each_unit_is_packed_before_the_next_one_is_read(
    saved: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model("llama", tmp_path, dtype=saved)
    reported: list[tuple[str, int]] = []
    complete = []
    read, add = core_model_loading._materialize_copy, WeightPacker.add

    def watched_read(*args: Any, **options: Any) -> torch.Tensor:
        found: torch.Tensor = read(*args, **options)
        reported.append(("read", found.nbytes))
        return found

    def watched_add(self: WeightPacker, name: str, tensor: torch.Tensor) -> bool:
        reported.append(("packed", tensor.nbytes))
        done = add(self, name, tensor)
        if done:
            complete.append(len(self._incomplete))
        return done

    monkeypatch.setattr(core_model_loading, "_materialize_copy", watched_read)
    monkeypatch.setattr(WeightPacker, "add", watched_add)
    model = load(tmp_path)
    # One tensor is read, and packed before the next one is.
    assert [what for what, _ in reported] == ["read", "packed"] * (len(reported) // 2)
    assert sum(size for what, size in reported if what == "read") == raw_bytes(model)
    assert len(complete) == len(model.hf_quantizer.report.places) and not any(complete)


def raw_bytes(model: Any) -> int:
    report: int = model.hf_quantizer.report.raw_bytes
    return report


def test_plan_is_made_with_the_sizes_that_come_out(tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    config = BitslabConfig(min_bytes=0, execution_device="cpu")
    report = load(tmp_path, config=config, device_map="auto").hf_quantizer.report
    assert "bfloat16" in report.planned_with and "samples" in report.planned_with
    assert report.planned_bytes == pytest.approx(report.packed_bytes, rel=0.05)


@pytest.mark.parametrize("skipped", ["lm_head", "model.embed_tokens"])
def test_what_is_tied_to_a_skipped_module_remains(skipped: str, tmp_path: Path) -> None:
    write_model("gemma", tmp_path)
    model = load(tmp_path, "gemma", config=BitslabConfig(min_bytes=0, skip_modules=[skipped]))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.lm_head.weight) is torch.nn.Parameter
    assert "model.embed_tokens" not in model.hf_quantizer.report.places
    assert same_bits(logits(model), logits(plain(tmp_path, "gemma")))


def test_place_of_a_tied_unit_is_that_of_the_weight(tmp_path: Path) -> None:
    write_model("gemma", tmp_path)
    keeps: list[dict[str, Tier]] = [
        {"lm_head": "device"},
        {"model.embed_tokens": "device", "lm_head": "host"},
    ]
    for keep in keeps:
        model = load(tmp_path, "gemma", config=BitslabConfig(min_bytes=0, keep=keep))
        assert model.hf_quantizer.report.places["model.embed_tokens"] == "device"
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert same_bits(logits(model), logits(plain(tmp_path, "gemma")))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no such GPU": ({"execution_device": "cuda:63"}, {}, "cuda:63|no CUDA GPU"),
    "disk without a file": (
        {"execution_device": "cpu"},
        {"device_map": {"model": "disk", "lm_head": "cpu"}},
        r"device_map: \d of \d units are on disk",
    ),
    "half a map": (
        {"execution_device": "cpu"},
        {"device_map": {"model": "cpu"}},
        "device_map: has no place for lm_head.weight",
    ),
    "no folder": ({"disk": "nowhere/at/all"}, {}, "disk: nowhere/at/all, but there is no folder"),
}


@pytest.mark.parametrize(("config", "options", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_reported_by_its_own_error(
    config: dict[str, Any], options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    write_model("llama", tmp_path)
    with pytest.raises(ArgumentError, match=text):
        load(tmp_path, config=BitslabConfig(**config), **options)
