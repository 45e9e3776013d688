"""Gradients with saved tensors that are moved are those of plain training, bit for bit."""

from __future__ import annotations

import functools
import importlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import bitslab
from bitslab.activations import Site
from bitslab.activations.disk import PosixFile
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
#: With a disk; those without `in_flight_bytes` wait for no write, so that much comes from memory.
DISKS: dict[str, dict[str, Any]] = {
    "raw": {"policy": "raw"},
    "raw-forwarded": {"policy": "raw", "in_flight_bytes": None},
    "static": {"policy": "static", "codecs": BitmapCodec()},
    "static-forwarded": {"policy": "static", "codecs": BitmapCodec(), "in_flight_bytes": None},
    "full": {"policy": "raw", "disk_bytes": 8192},
    "no-host": {"policy": "static", "codecs": BitmapCodec(), "tiers": "disk", "disk_bytes": 8192},
    "no-budget": {"policy": "raw", "write_budget": 1e-9},
    "little-host": {"policy": "static", "codecs": BitmapCodec(), "host_bytes": 16384},
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


def varied(name: str) -> tuple[str]:
    """Return what of a case meets every option: its name, one for those that vary less."""
    return (name if name in VARIED else "",)


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


@pytest.mark.drawn(40)
@pytest.mark.pairwise(name=varied)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_plain_training(
    name: str, policy: str, link: Callable[[float], None], quick_measuring: None
) -> None:
    link(1e6)  # so slow that auto packs
    check_case(name, Offloaded(**POLICIES[policy]), policy != "keep")


@pytest.mark.drawn(44)
@pytest.mark.pairwise(name=varied)
@pytest.mark.parametrize("options", DISKS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_when_tensors_go_to_a_disk(
    name: str, options: str, quick_disk: None, tmp_path: Path
) -> None:
    training = Offloaded(disk=tmp_path, **DISKS[options])
    moves = {"full": None, "no-host": None, "little-host": None, "no-budget": False}
    check_case(name, training, moves.get(options, True))
    stats = [offload.stats() for offload in training.offloads]
    written = sum(each["disk_written_bytes"] for each in stats)
    if options in ("raw-forwarded", "static"):  # else encoding may not be over when it is read
        assert written + sum(each["disk_forwarded_bytes"] for each in stats) > 0
    if options == "raw":
        assert written > 0
    if options == "no-budget":
        assert written == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.drawn(11)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_when_writes_and_reads_are_late(
    name: str, seed: int, quick_disk: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = random.Random(seed)

    def delayed(real: Callable[..., None]) -> Callable[..., None]:
        def move(*arguments: Any) -> None:
            time.sleep(late.choice([0.0, 0.0, 0.001, 0.01]))
            real(*arguments)

        return move

    monkeypatch.setattr(PosixFile, "write", delayed(PosixFile.write))
    monkeypatch.setattr(PosixFile, "read", delayed(PosixFile.read))
    in_flight_bytes = late.choice([None, 0, 4096])
    for options in ({"policy": "raw"}, {"policy": "static", "codecs": BitmapCodec()}):
        check_case(name, Offloaded(disk=tmp_path, in_flight_bytes=in_flight_bytes, **options))


@pytest.mark.parametrize("name", CASES)
def test_gradients_when_every_second_tensor_is_selected(name: str) -> None:
    def select(site: Site) -> bool:
        return int(site.name.rsplit(":", 1)[1]) % 2 == 1

    check_case(name, Offloaded(policy="raw", select=select), None)


@pytest.mark.drawn(48)
@pytest.mark.pairwise(name=varied)
@pytest.mark.parametrize("codec", LOSSLESS)
@pytest.mark.parametrize("name", CASES)
def test_every_codec_returns_every_bit(name: str, codec: str) -> None:
    if codec == "lz4":
        importlib.import_module("lz4.block")  # where it is missing, training goes on without
    training = Offloaded(policy="static", codecs=codec)
    check_case(name, training)
    packed = {site.choice for each in training.offloads for site in each.report().sites}
    assert codec in packed


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_real_tensor_that_is_saved_in_a_fake_mode() -> None:
    """What the mode makes has no memory, so that its copy would have none."""
    x = torch.linspace(-1, 1, 1024).requires_grad_()
    offload = bitslab.ActivationOffload("raw", min_bytes=1, in_flight_bytes=0)
    with offload:
        torch.autograd.grad((x * 3).sin().sum(), x)  # takes host memory, outside of the mode
        h = x * 2
        with FakeTensorMode(allow_non_fake_inputs=True):
            made = h.sin()
        y = h.cos()  # which saves what that has saved
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, -2 * (2 * x).sin()) and made.shape == x.shape
    offload.detach()
