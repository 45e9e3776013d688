"""Training with one input buffer, filled anew while the last step's input may still be packed.

torch allows that: the backward pass is over, and nobody reads the old input any more. What packs it
meets bytes that change, once or in each of its passes over them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bitslab
from bitslab.activations.executor import Executor
from bitslab.engine.codecs.registry import get_codec
from bitslab.engine.transfer import StreamLane, ThreadLane
from tests.activations.test_gradients import LOSSLESS, assert_equal_bits

pytestmark = pytest.mark.usefixtures("one_thread", "quick_measuring", "fits_at_once")

POLICIES: dict[str, dict[str, Any]] = {
    "auto": {"policy": "auto", "profile_every": 1},
    **{codec: {"policy": "static", "codecs": codec} for codec in LOSSLESS},
}
#: Rows and columns of the buffer: packing it takes longer than filling it.
SHAPES = {"cpu": (256, 1024), "cuda": (2048, 4096)}
STEPS = 6


class Training:
    """A model and its input buffer."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(3)
        rows, columns = SHAPES[device]
        layers = nn.Linear(columns, 16), nn.Tanh(), nn.Linear(16, 4)
        self.model = nn.Sequential(*layers).to(device)
        self.buffer = torch.zeros(rows, columns, device=device)
        self.noise = torch.randn(rows, columns, device=device)
        self.inputs = [torch.randn(rows, columns).relu().to(device) for _ in range(2)]
        self.found: list[torch.Tensor] = []

    def step(self, number: int) -> None:
        """Fill the buffer and train with it."""
        self.buffer.copy_(self.inputs[number % 2])
        self.model.zero_grad()
        loss = self.model(self.buffer).square().mean()
        loss.backward()
        gradients = (p.grad.clone() for p in self.model.parameters() if p.grad is not None)
        self.found += [loss.detach(), *gradients]

    def refill(self) -> None:
        """Change the buffer, from what packs to most bytes to what packs to least."""
        self.buffer.copy_(self.noise)
        self.buffer.zero_()


def refill_behind_a_thread(training: Training, executor: Executor, number: int) -> None:
    """Train a step, and refill the buffer for as long as a thread packs."""
    lane = executor._out
    assert isinstance(lane, ThreadLane)
    refilled = threading.Event()

    def hold() -> None:
        refilled.wait(10)

    lane.run(hold)
    training.step(number)
    packed = lane.submit(int)  # behind what the step has packed
    refilled.set()
    while not packed.done():
        training.refill()


def refill_behind_a_stream(training: Training, executor: Executor, number: int) -> None:
    """Train a step, and let a stream pack and another one refill the buffer at the same time."""
    lane, home = executor._encoding, torch.cuda.current_stream()
    assert isinstance(lane, StreamLane)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)  # while the host queues both
        begin = torch.cuda.current_stream().record_event()
    lane.stream.wait_event(begin)
    training.step(number)
    home.wait_event(begin)
    for _ in range(50):
        training.refill()
    torch.cuda.synchronize()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_when_the_input_is_refilled_while_it_is_packed(
    policy: str, device: str, link: Callable[[float], None]
) -> None:
    link(1e4)  # so slow that auto packs
    plain, training = Training(device), Training(device)
    for number in range(STEPS):
        plain.step(number)
    offload = bitslab.offload_activations(
        training.model,
        min_bytes=training.buffer.nbytes,  # the only one, so that no stream waits for its packing
        in_flight_bytes=1 << 30,
        **POLICIES[policy],
    )
    refill = refill_behind_a_thread if device == "cpu" else refill_behind_a_stream
    executor = offload._hooks.executor(training.buffer.device)
    for number in range(STEPS):
        refill(training, executor, number)
    offload.detach()
    bitslab.raise_pending_errors()
    assert_equal_bits(training.found, plain.found)
    assert offload.stats()["moved_tensors"] == STEPS
    (choice,) = {site.choice for site in offload.report().sites if site.choice != "keep"}
    # LZ4 needs nvCOMP on a GPU.
    packs = policy == "auto" or device in get_codec(policy).device_types
    assert (choice in LOSSLESS) == packs
