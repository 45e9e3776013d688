"""from_pretrained with BitslabConfig on a GPU: what is planned, streamed and kept there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bitslab.integrations.transformers import BitslabConfig
from bitslab.offload import weight_packer
from tests.helpers import same_bits

from .quantizer_models import inputs, weights_file, write_model

pytestmark = pytest.mark.gpu  # tests/conftest.py skips these where there is no GPU


def load(folder: Path, **options: Any) -> Any:
    config = options.pop("config", None) or BitslabConfig(min_bytes=0)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config, **options
    )


def plain(folder: Path) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.cuda()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(**{k: v.cuda() for k, v in inputs().items()}).logits
    return found


def raw_bytes(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize("kind", ["llama", "gemma", "opt", "mixtral"])
@pytest.mark.parametrize("keep", [None, "packed", "all", 0.5], ids=str)
def test_results_are_those_of_the_plain_model(kind: str, keep: Any, tmp_path: Path) -> None:
    write_model(kind, tmp_path / "saved")
    model = load(tmp_path / "saved", config=BitslabConfig(keep=keep, min_bytes=0))
    assert model.device.type == "cuda"
    expected = plain(tmp_path / "saved")
    for _ in range(3):
        assert same_bits(logits(model).cpu(), logits(expected).cpu())
    model.save_pretrained(tmp_path / "packed")
    expected.save_pretrained(tmp_path / "plain")
    assert weights_file(tmp_path / "packed") == weights_file(tmp_path / "plain")


@pytest.mark.parametrize("in_threads", [False, True])
def test_places_of_device_maps(
    in_threads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_threads:
        monkeypatch.setattr(weight_packer, "MIN_UPLOAD_BYTES", 1)
    write_model("llama", tmp_path, num_hidden_layers=8)
    expected = logits(plain(tmp_path)).cpu()
    size = raw_bytes(tmp_path)
    # Of several GPUs the one with most room, which is the last one where transformers balances.
    last = torch.cuda.device_count() - 1
    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({}, {"host"}),
        ({"device_map": "cuda"}, {"device"}),
        ({"device_map": {"": 0}}, {"device"}),
        ({"device_map": "auto"}, {"device"}),
        ({"device_map": "auto", "max_memory": {0: size // 2, "cpu": 10 * size}}, {"host"}),
        ({"device_map": {"model": 0, "lm_head": "cpu"}}, {"device", "host"}),
    ]
    for options, places in cases:
        model = load(tmp_path, **options)
        assert set(model.hf_quantizer.report.places.values()) >= places, options
        balanced = options == {"device_map": "auto"}
        assert model.hf_quantizer.report.device == torch.device("cuda", last if balanced else 0)
        assert same_bits(logits(model).cpu(), expected), options
        del model


def test_dequantize_leaves_the_model_on_the_gpu(tmp_path: Path) -> None:
    write_model("gemma", tmp_path)
    model = load(tmp_path).dequantize()
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert same_bits(logits(model).cpu(), logits(plain(tmp_path)).cpu())


def test_generates_the_same_tokens(tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    given = {k: v.cuda() for k, v in inputs().items()}
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    found = load(tmp_path).generate(**given, **options)
    assert torch.equal(found, plain(tmp_path).generate(**given, **options))
