"""Gradients with saved tensors that are moved are those of plain training, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bitslab.activations import Site
from bitslab.activations.policies import blob_codec_names
from bitslab.engine.codecs.registry import get_codec
from tests.activations.bitmap_codec import BitmapCodec
from tests.activations.cases import CASES, Offloaded, Training

POLICIES: dict[str, dict[str, Any]] = {
    "keep": {"policy": "keep"},
    "raw": {"policy": "raw"},
    "raw-in-flight": {"policy": "raw", "in_flight_bytes": 1 << 20},
    "static": {"policy": "static", "codecs": BitmapCodec()},
    "static-in-flight": {"policy": "static", "codecs": BitmapCodec(), "in_flight_bytes": 4096},
    "host": {"policy": "host", "codecs": "zvc"},
    "auto": {"policy": "auto", "profile_every": 1},
}
LOSSLESS = [name for name in blob_codec_names() if get_codec(name).error_bound is None]
#: Views, dtypes and layouts, dropout's masks, changes in place, passes at once.
VARIED = (
    "chunks",
    "channels-last",
    "complex-conjugates",
    "other-dtypes",
    "dropout-and-random-numbers",
    "inplace-relu",
    "in-another-order",
)

pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def plain(name: str, device: str = "cpu") -> list[torch.Tensor]:
    torch.manual_seed(17)
    return [t.detach().clone() for t in CASES[name](Training(device))]


def assert_equal_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"tensor {i}"
        same = a.detach().contiguous().cpu().view(-1).view(torch.uint8)
        assert torch.equal(same, b.contiguous().cpu().view(-1).view(torch.uint8)), f"tensor {i}"


def check_case(name: str, training: Offloaded, moves: bool | None = True) -> None:
    """Run a case plainly and with saved tensors moved, and compare; `moves` is whether any are."""
    expected = plain(name, training.device.type)
    torch.manual_seed(17)
    try:
        assert_equal_bits(CASES[name](training), expected)
        assert moves is None or (training.moved > 0) == moves
    finally:
        training.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_plain_training(
    name: str, policy: str, link: Callable[[float], None], quick_measuring: None
) -> None:
    link(1e6)  # so slow that auto packs
    check_case(name, Offloaded(**POLICIES[policy]), policy != "keep")


@pytest.mark.parametrize("name", CASES)
def test_gradients_when_every_second_tensor_is_selected(name: str) -> None:
    def select(site: Site) -> bool:
        return int(site.name.rsplit(":", 1)[1]) % 2 == 1

    check_case(name, Offloaded(policy="raw", select=select), None)


@pytest.mark.parametrize("codec", LOSSLESS)
@pytest.mark.parametrize("name", VARIED)
def test_every_codec_returns_every_bit(name: str, codec: str) -> None:
    training = Offloaded(policy="static", codecs=codec)
    check_case(name, training)
    packed = {site.choice for each in training.offloads for site in each.report().sites}
    assert codec in packed
