"""generate() of ten architectures, and of unusual ones, with weights that stream packed."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from accelerate import cpu_offload

from bitslab.integrations.accelerate import compress_offloaded, offload_compressed
from bitslab.offload import OffloadReport, WeightHandle
from tests.helpers import same_bits
from tests.integrations.transformers.models import (
    CONFIGS,
    SMALL,
    UNUSUAL,
    compressed,
    model_of,
    prompt_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 7
MODES: dict[str, dict[str, Any]] = {"greedy": {}, "beam": {"num_beams": 3}}


def offload_plain(model: Any) -> OffloadReport:
    return offload_compressed(model, execution_device="cpu", min_bytes=0)


def compress_dispatched(model: Any) -> OffloadReport:
    cpu_offload(model, execution_device=torch.device("cpu"))
    return compress_offloaded(model, min_bytes=0)


#: The two ways by turns: which of them packed the weights is nothing that a layer could see.
WAYS = list(zip([*CONFIGS, *UNUSUAL], itertools.cycle([offload_plain, compress_dispatched])))


def generate(model: Any, mode: str, cache: Any = None) -> torch.Tensor:
    options = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, **MODES[mode]}
    tokens: torch.Tensor = model.generate(prompt_of(), past_key_values=cache, **options)
    return tokens


@pytest.mark.drawn(5)
@pytest.mark.parametrize(("name", "way"), WAYS, ids=lambda value: getattr(value, "__name__", None))
def test_streamed_weights_give_the_plain_tokens_alone_and_with_a_packed_cache(name, way):
    model = copy.deepcopy(model_of(name))
    expected = {mode: generate(model, mode) for mode in MODES}
    report = way(model)
    assert report.packed_bytes < report.raw_bytes
    assert all(isinstance(parameter, WeightHandle) for parameter in model.parameters())
    for mode, tokens in expected.items():
        assert torch.equal(generate(model, mode), tokens)
        cache = compressed(model.config, **SMALL)
        assert torch.equal(generate(model, mode, cache), tokens)
        assert cache.stats()["packed_tokens"] >= 40
    state = model_of(name).state_dict()
    assert all(same_bits(tensor, state[key]) for key, tensor in model.state_dict().items())
