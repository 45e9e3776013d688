"""What BitslabConfig accepts, and how it is kept in JSON, copies and pickles."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from typing import Any

import pytest
import torch
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

from bitslab.errors import ArgumentError, ArgumentTypeError, BitslabError
from bitslab.integrations.transformers import BitslabConfig, BitslabQuantizer

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "device name": ({"execution_device": "tpu9"}, ArgumentError, "execution_device: 'tpu9'"),
    "device kind": (
        {"execution_device": "meta"},
        ArgumentTypeError,
        "execution_device: meta, accepted are cpu and cuda",
    ),
    "device type": (
        {"execution_device": 1.5},
        ArgumentTypeError,
        "execution_device: 1.5, expected a torch.device",
    ),
    "keep name": ({"keep": "some"}, ArgumentError, "keep: 'some', accepted are None, 'all'"),
    "keep share": ({"keep": 1.5}, ArgumentError, "keep: 1.5"),
    "keep nan": ({"keep": float("nan")}, ArgumentError, "keep: nan"),
    "keep type": ({"keep": [1]}, ArgumentTypeError, "keep: list"),
    "keep bool": ({"keep": True}, ArgumentTypeError, "keep: bool"),
    "keep place": ({"keep": {"a": "gpu"}}, ArgumentError, "keep: 'a' -> 'gpu'"),
    "depth": ({"depth": -1}, ArgumentError, "depth: -1, accepted are integers from 0"),
    "depth type": ({"depth": 2.0}, ArgumentTypeError, "depth: float"),
    "sm_budget": ({"sm_budget": 0}, ArgumentError, "sm_budget: 0"),
    "fused": ({"fused": "always"}, ArgumentError, "fused: 'always', accepted are True, False"),
    "min_bytes": ({"min_bytes": -1}, ArgumentError, "min_bytes: -1"),
    "skip text": ({"skip_modules": "lm_head"}, ArgumentTypeError, "skip_modules: str"),
    "skip number": ({"skip_modules": [3]}, ArgumentTypeError, "skip_modules: 3"),
    "progress": ({"progress": 3}, ArgumentTypeError, "progress: int"),
    "method": ({"quant_method": "gptq"}, ArgumentError, "quant_method: 'gptq'"),
    "disk": ({"disk": 3}, ArgumentTypeError, "disk: int"),
}


@pytest.mark.parametrize(("options", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        BitslabConfig(**options)
    assert isinstance(caught.value, BitslabError)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="bits"):
        BitslabConfig(bits=4)  # type: ignore[call-arg]


OPTIONS: dict[str, Any] = {
    "execution_device": "cpu",
    "keep": {"model.layers.0": "packed"},
    "disk": "packed.safetensors",
    "depth": 3,
    "sm_budget": 32,
    "fused": "auto",
    "min_bytes": 0,
    "skip_modules": ["lm_head"],
}


def test_survives_json_and_pickle() -> None:
    config = BitslabConfig(**OPTIONS)
    for again in (
        BitslabConfig.from_dict(json.loads(json.dumps(config.to_dict()))),
        AutoQuantizationConfig.from_dict(config.to_dict()),
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
    ):
        assert again == config and hash(again) == hash(config)
        assert again.to_dict() == {"quant_method": "bitslab", **OPTIONS}
    assert config != BitslabConfig()
    assert "bitslab" in repr(config)


def test_devices_are_named() -> None:
    assert BitslabConfig(execution_device=1).execution_device == "cuda:1"
    assert BitslabConfig(execution_device=torch.device("cpu")).execution_device == "cpu"


def test_progress_is_shared_by_copies_and_left_out_of_json() -> None:
    lock = threading.Lock()  # what shows progress cannot be copied

    def reported(done: int, total: int | None) -> None:
        with lock:
            pass

    config = BitslabConfig(progress=reported)
    assert copy.deepcopy(config).progress is reported
    assert "progress" not in json.dumps(config.to_dict())


def test_transformers_finds_the_quantizer() -> None:
    quantizer = AutoHfQuantizer.from_config({"quant_method": "bitslab"}, pre_quantized=True)
    assert type(quantizer) is BitslabQuantizer
    assert not quantizer.pre_quantized
    assert quantizer.is_serializable() and quantizer.is_trainable
    assert not quantizer.is_compileable
