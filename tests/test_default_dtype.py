"""What torch's default dtype is changes nothing: models are often made under bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from bitslab.distributed.rounding import round_to_codes
from tests.integrations.transformers.models import config_of


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_rows_are_rounded_alike() -> None:
    rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    expected = round_to_codes(rows, 0.01)
    with default_dtype(torch.bfloat16):
        found = round_to_codes(rows, 0.01)
    assert torch.equal(found, expected)
    assert (found - rows).abs().max() <= 0.01


@pytest.mark.parametrize("attention", ["sdpa", "bitslab"])
def test_a_cache_fits_its_codes_alike(attention: str) -> None:
    from bitslab.integrations.transformers import KVCompCache

    transformers: Any = pytest.importorskip("transformers")
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
