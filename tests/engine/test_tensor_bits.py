"""Copies of rows keep every bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bitslab.engine.tensor_bits import as_integers, copy_rows
from tests.helpers import same_bits

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.bool,
]
ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def any_bits(dtype: torch.dtype, rows: int, row: int, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    most = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, most, (rows, row * dtype.itemsize), generator=random)
    return raw.to(torch.uint8).view(dtype)


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copied_rows_have_every_bit(device: str, dtype: torch.dtype) -> None:
    given = [any_bits(dtype, 40, row, row) for row in (1, 6, 33)]
    into = [torch.empty_like(t, device=device) for t in given]
    copy_rows(into, [t.to(device) for t in given])
    assert all(same_bits(a.cpu(), b) for a, b in zip(into, given, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2], ids=str)
def test_small_floats_are_copied_as_integers(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.dtype] = []

    def copied(into: list[Any], given: list[Any]) -> None:
        seen.extend(t.dtype for t in into + given)

    monkeypatch.setattr(torch, "_foreach_copy_", copied)
    t = any_bits(dtype, 4, 3, 1)
    copy_rows([t], [t])
    assert seen and not any(each.is_floating_point for each in seen)


def test_elements_as_integers_share_their_memory() -> None:
    for dtype in (*DTYPES, torch.complex64, torch.complex128):
        t = torch.zeros(5, dtype=dtype)
        as_integers(t).fill_(1)
        assert bool((as_integers(t) == 1).all()) and bool(t.view(torch.uint8).any())
