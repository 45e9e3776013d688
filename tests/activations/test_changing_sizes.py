"""Steps whose tensors change their sizes: what is taken, learnt and planned reaches a bound."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import bitslab
from bitslab.activations import limits
from bitslab.engine.codecs import get_codec
from bitslab.engine.memory import Arena, HostBuffer
from bitslab.engine.memory import arena as arenas

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64
ROW_BYTES = 4 * WIDTH


def layers(n: int = 3) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(*(m for _ in range(n) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def train(model: nn.Module, rows: Iterable[int]) -> None:
    for n in rows:
        model(torch.randn(n, WIDTH)).square().mean().backward()


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the buffers that the process's arena makes: a new one, with none."""
    made: list[int] = []
    allocate = HostBuffer.allocate

    def recorded(nbytes: int, **options: Any) -> HostBuffer:
        made.append(nbytes)
        return allocate(nbytes, **options)

    monkeypatch.setattr(HostBuffer, "allocate", recorded)
    monkeypatch.setattr(arenas, "_arena", Arena())
    monkeypatch.setattr(limits, "RESERVED_BYTES", 16 << 10)  # tensors are larger
    return made


@pytest.mark.parametrize(
    "rows",
    [range(512, 1024, 8), range(1024, 512, -8), [(512 + 131 * i % 509) for i in range(64)]],
    ids=["growing", "shrinking", "mixed"],
)
def test_host_memory_of_tensors_that_change_their_size(rows: list[int], buffers: list[int]) -> None:
    model = layers()
    step_bytes = 4 * 1024 * ROW_BYTES  # of three layers and the loss
    offload = bitslab.offload_activations(
        model, policy="raw", min_bytes=1, in_flight_bytes=step_bytes
    )
    train(model, rows)
    offload.detach()
    # Copies in a thread: how many of ended steps are on their way differs from run to run, up to
    # `in_flight_bytes`, the one that is over it and the one that the thread has just done.
    arena = arenas.host_arena()
    (most_taken_bytes,) = arena._most_taken_bytes.values()
    assert most_taken_bytes <= 2 * step_bytes + 2 * 1024 * ROW_BYTES
    assert arena.stats()["reserved_bytes"] <= 2.5 * most_taken_bytes
    # A few of each of eight sizes, where each step would have made some.
    assert len(buffers) <= 64 < 4 * len(rows)


def test_a_size_that_is_learnt_is_a_share_of_the_tensor() -> None:
    """Copies of large tensors behind small ones have room, and are sent once."""
    model = layers()
    offload = bitslab.offload_activations(
        model, policy="static", codecs="zvc", min_bytes=1, in_flight_bytes=0
    )
    sizes = [4096, *[64] * 12] * 3
    train(model, sizes)
    moved = 0
    for site in offload.report().sites:
        assert site.tensors == len(sizes)
        moved += sum(sizes) * ROW_BYTES
    assert offload.stats()["moved_out_bytes"] == moved
    offload.detach()


def test_codecs_are_fitted_once_for_all_sizes(
    monkeypatch: pytest.MonkeyPatch, quick_measuring: None
) -> None:
    fitted: list[int] = []
    codec: Any = get_codec("ibp-blob")
    fit = codec.fit

    def recorded(flat: torch.Tensor, **options: Any) -> Any:
        fitted.append(flat.nbytes)
        return fit(flat, **options)

    monkeypatch.setattr(codec, "fit", recorded)
    model = layers()
    offload = bitslab.offload_activations(
        model, policy="auto", codecs="ibp-blob", min_bytes=1, profile_every=2
    )
    train(model, [256] * 4)
    first = len(fitted)
    assert first
    train(model, [512, 512, 256, 256] * 3)
    assert len(fitted) == first
    decided = [row for row in offload.report().decisions if row["site"] == "0:0"]
    assert {row["nbytes"] for row in decided} == {256 * ROW_BYTES, 512 * ROW_BYTES}
    offload.detach()


@pytest.mark.parametrize(
    "rows",
    [[512, 256] * 10, [256, 512] * 10, [256, 512, 256, 1024] + [256] * 16],
    ids=["large-small", "small-large", "seldom-large"],
)
def test_a_plan_is_that_of_the_largest_of_the_profiled_steps(
    rows: list[int], holds: None, quick_measuring: None
) -> None:
    model = layers(6)
    offload = bitslab.offload_activations(model, min_bytes=1, memory=1 << 20)
    planned = []
    for n in rows:
        train(model, [n])
        if offload.step_profile is not None:
            planned.append(sum(site.nbytes for site in offload.step_profile.sites))
    assert planned and set(planned) == {7 * 512 * ROW_BYTES}  # of six layers and the loss
    offload.detach()


def test_a_plan_is_kept_where_a_later_profile_shows_smaller_steps(
    holds: None, quick_measuring: None
) -> None:
    model = layers(6)
    offload = bitslab.offload_activations(model, min_bytes=1, memory=1 << 18)
    profiles = []
    for n in [256] * 12 + [512] + [64] * 12:
        train(model, [n])
        if offload.step_profile is not None:
            profiles.append(sum(site.nbytes for site in offload.step_profile.sites))
    assert profiles and set(profiles) == {7 * 256 * ROW_BYTES}
    assert offload.plan is not None and not offload.plan.declined
    offload.detach()
