"""What torch's default dtype is changes nothing: models are often made under bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from bitslab.distributed.feedback import ErrorFeedback
from bitslab.distributed.rounding import round_to_codes


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_what_rounding_took_is_kept_alike(dtype: torch.dtype) -> None:
    def added() -> torch.Tensor:
        kept = ErrorFeedback(8, 4)
        ids = torch.tensor([3, 5, 3])
        rows = torch.full((3, 4), 0.1, dtype=torch.float32)
        kept.keep(rows, kept.met(ids))
        loaded = ErrorFeedback(8, 4)
        loaded.load_state_dict(kept.state_dict())
        return loaded.add_to(rows, loaded.met(ids))

    expected = added()
    with default_dtype(dtype):
        found = added()
    assert found.dtype is torch.float32 and torch.equal(found, expected)
