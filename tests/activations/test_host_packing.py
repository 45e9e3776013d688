"""``policy="host"``: copies cross raw, and the CPU packs those with many zeros."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import bitslab
from bitslab.activations import host_packing
from bitslab.activations.host_room import HostMemoryError, HostRoom
from bitslab.engine.memory import host_arena
from tests.activations.bitmap_codec import BitmapCodec

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = 64, 256
NBYTES = 64 * 256 * 4


def used_bytes() -> int:
    return host_arena().stats()["used_bytes"]


def saved(zeros: float, **options: Any) -> tuple[bitslab.ActivationOffload, torch.Tensor, Any]:
    """Return an offload that has saved a tensor with a share of zeros, the loss, and the input."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SHAPE, generator=generator)
    x[torch.rand(SHAPE, generator=generator) < zeros] = 0
    x.requires_grad_()
    given: dict[str, Any] = {"policy": "host", "codecs": "zvc", "min_bytes": 1}
    given |= {"in_flight_bytes": 0} | options
    offload = bitslab.ActivationOffload(**given)
    with offload:
        loss = (x * 2).square().sum()
    return offload, loss, x


def packed(offload: bitslab.ActivationOffload) -> int:
    return offload.stats()["packed_on_host_tensors"]


@pytest.mark.parametrize(("zeros", "expected"), [(0.5, 0), (0.9, 1)])
def test_what_has_many_zeros_is_packed_after_it_crossed(zeros: float, expected: int) -> None:
    before = used_bytes()
    offload, loss, x = saved(zeros)
    offload.detach()  # waits for the CPU
    held = used_bytes() - before
    assert packed(offload) == expected
    assert held < NBYTES / 4 if expected else held == NBYTES
    loss.backward(retain_graph=True)
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, 16 * x)
    stats = offload.stats()
    assert stats["moved_out_bytes"] == stats["crossed_out_bytes"] == NBYTES
    assert stats["moved_in_bytes"] == stats["crossed_in_bytes"] == 2 * NBYTES
    (site,) = offload.report().sites
    assert (site.choice, site.reason) == (
        "host",
        "Raw, packed by the CPU (zvc) above 60% zeros: policy 'host'.",
    )
    del loss
    offload.detach()
    assert used_bytes() == before


class Waiting(BitmapCodec):
    """Waits until it may encode."""

    name = "test-waiting"

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def encode(self, *args: Any, **more: Any) -> Any:
        self.begun.set()
        self.go.wait(10)
        return super().encode(*args, **more)


def test_a_copy_that_is_read_while_it_is_packed() -> None:
    codec = Waiting()
    offload, loss, x = saved(0.9, codecs=codec)
    assert codec.begun.wait(10)
    loss.backward(retain_graph=True)
    codec.go.set()
    offload.detach()
    assert packed(offload) == 1
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, 16 * x)
    offload.detach()


def test_a_copy_that_nobody_wants_is_not_packed() -> None:
    codec = Waiting()
    offload, loss, x = saved(0.9, codecs=codec)
    assert codec.begun.wait(10)
    with offload:
        dropped = (x * 3).square().sum()
    del dropped
    codec.go.set()
    offload.detach()
    assert packed(offload) == 1
    loss.backward()
    offload.detach()


@pytest.mark.parametrize("fault", ["codec", "memory", "dtype"])
def test_what_cannot_be_packed_is_left_raw(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    class Failing(BitmapCodec):
        name = "test-failing-on-the-host"

        def encode(self, *args: Any, **more: Any) -> Any:
            raise ValueError("on purpose")

    class Picky(BitmapCodec):
        name = "test-picky"

        def takes(self, dtype: torch.dtype) -> bool:
            return False

    real = HostRoom.cut

    def cut(room: HostRoom, nbytes: int, events: Any) -> torch.Tensor:
        if nbytes < NBYTES:
            raise HostMemoryError("on purpose")
        return real(room, nbytes, events)

    codec = {"codec": Failing, "memory": BitmapCodec, "dtype": Picky}[fault]()
    if fault == "memory":
        monkeypatch.setattr(HostRoom, "cut", cut)
    offload, loss, x = saved(0.9, codecs=codec)
    offload.detach()
    assert packed(offload) == 0
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, 8 * x)
    offload.detach()


def test_a_packed_copy_that_is_damaged_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    offload, loss, _ = saved(0.9)
    offload.detach()

    def unpack(*args: Any) -> None:
        raise bitslab.CorruptedDataError("on purpose")

    monkeypatch.setattr(host_packing, "_unpack", unpack)
    for _ in range(2):
        with pytest.raises(bitslab.CorruptedDataError, match="on purpose"):
            loss.backward(retain_graph=True)
    monkeypatch.undo()
    loss.backward()
    offload.detach()
