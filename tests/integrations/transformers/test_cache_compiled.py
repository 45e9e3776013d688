"""CompressedCache in compiled models: packing is no part of a graph, and export refuses it."""

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


class Fresh(torch.nn.Module):
    """A model that makes its cache itself."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        cache = compressed(self.model.config, **SMALL)
        logits: torch.Tensor = self.model(tokens, past_key_values=cache).logits
        return logits


@pytest.mark.drawn(3)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("made", ["given-empty", "given-filled", "made-inside"])
@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_export_refuses_the_cache_by_name(made: str, strict: bool) -> None:
    model: Any = copy.deepcopy(model_of("llama"))
    module, options = (Fresh(model), {}) if made == "made-inside" else (model, {})
    if made != "made-inside":
        cache = compressed(model.config, **SMALL)
        if made == "given-filled":
            with torch.no_grad():
                model(prompt_of(), past_key_values=cache)
        options = {"past_key_values": cache}
    # Older compilers name what they cannot trace, in words of their own.
    text = "CompressedCache" if strict else "CompressedCache cannot be exported"
    with pytest.raises(Exception, match=text):
        torch.export.export(module, (prompt_of(length=9),), options, strict=strict)


def test_containers_of_caches_keep_them_as_they_are() -> None:
    cache = compressed(model_of("llama").config, **SMALL)
    with torch.no_grad():
        model_of("llama")(prompt_of(), past_key_values=cache)
    found = torch.utils._pytree.tree_map(lambda t: t + 1, {"past": cache, "x": torch.zeros(1)})
    assert found["past"] is cache and found["x"] == 1
