"""A cache of quantised K and V is the same under any default dtype of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from bitslab.integrations.transformers import KVCompCache
from tests.integrations.transformers.models import config_of
from tests.test_default_dtype import default_dtype


@pytest.mark.parametrize("attention", ["sdpa", "bitslab"])
def test_a_cache_fits_its_codes_alike(attention: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of("llama")).eval()
    model.set_attn_implementation(attention)
    ids = torch.randint(
        model.config.vocab_size, (2, 96), generator=torch.Generator().manual_seed(1)
    )

    def run() -> tuple[torch.Tensor, dict[str, Any]]:
        cache = KVCompCache(model.config, window=16, block_tokens=16)
        with torch.no_grad():
            model(ids[:, :80], past_key_values=cache)
            logits = [model(part, past_key_values=cache).logits for part in ids[:, 80:].split(1, 1)]
        return torch.cat(logits, 1), cache.stats()

    expected, stats = run()
    with default_dtype(torch.bfloat16):
        found, others = run()
    assert stats["packed_tokens"] and stats["packed_bytes"] == others["packed_bytes"]
    assert torch.equal(found, expected)
