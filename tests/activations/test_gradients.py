"""Gradients with saved tensors that are moved are those of plain training, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.activations.bitmap_codec import BitmapCodec
from tests.activations.cases import CASES, Offloaded, Training

POLICIES: dict[str, dict[str, Any]] = {
    "keep": {"policy": "keep"},
    "raw": {"policy": "raw"},
    "raw-in-flight": {"policy": "raw", "in_flight_bytes": 1 << 20},
    "static": {"policy": "static", "codecs": BitmapCodec()},
    "static-in-flight": {"policy": "static", "codecs": BitmapCodec(), "in_flight_bytes": 4096},
}

pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def plain(name: str) -> list[torch.Tensor]:
    torch.manual_seed(17)
    return [t.detach().clone() for t in CASES[name](Training())]


def assert_equal_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"tensor {i}"
        same = a.detach().contiguous().cpu().view(-1).view(torch.uint8)
        assert torch.equal(same, b.contiguous().view(-1).view(torch.uint8)), f"tensor {i}"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_plain_training(name, policy):
    training = Offloaded(**POLICIES[policy])
    expected = plain(name)
    torch.manual_seed(17)
    try:
        assert_equal_bits(CASES[name](training), expected)
        assert (training.moved > 0) == (policy != "keep")
    finally:
        training.close()
