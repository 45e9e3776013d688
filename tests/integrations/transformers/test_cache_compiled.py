"""CompressedCache in compiled models: packing is no part of a graph, and tokens stay the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from bitslab.integrations.accelerate import offload_compressed
from tests.integrations.transformers.models import SMALL, compressed, model_of, prompt_of

NEW = 4


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_with_packed_weights_gives_the_same_tokens() -> None:
    model: Any = copy.deepcopy(model_of("llama"))
    options: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    expected = model.generate(prompt_of(), **options)
    offload_compressed(model, execution_device="cpu", min_bytes=0)
    model.forward = torch.compile(model.forward, backend="eager")
    cache = compressed(model.config, **SMALL)
    with torch._dynamo.config.patch(recompile_limit=40, fail_on_recompile_limit_hit=True):
        found = model.generate(prompt_of(), past_key_values=cache, **options)
    assert torch.equal(found, expected)
    assert cache.stats()["packed_tokens"] > 40
