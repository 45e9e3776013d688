"""A GPU's executor on a CPU whose driver does all at once: what the host calls can be counted.

In which order work may be done is the concern of `delayed_streams`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bitslab.activations.executor import Executor
from bitslab.activations.host_room import HostRoom
from bitslab.engine.kernels.cpu.blob_copy import copy_blob
from bitslab.engine.memory import HostPiece
from bitslab.engine.transfer import StreamLane
from tests.driver import FakeDriver, FakeStream, simulated


def immediate(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Make executors of the CPU work as those of a GPU do, by a driver that does all at once."""
    home = FakeStream()

    def tensor_of(memory: Any) -> torch.Tensor:
        return memory.tensor() if isinstance(memory, HostPiece) else memory

    def copy(source: Any, target: Any, first_byte: int, stream: int) -> None:
        copy_blob(tensor_of(source), tensor_of(target))

    def open_lanes(executor: Any) -> None:
        executor.on_gpu = True
        lanes = (StreamLane(torch.device("cpu", 0)) for _ in range(3))
        executor._encoding, executor._out, executor._in = lanes

    driver, _ = simulated(
        monkeypatch,
        current_stream=lambda device: home,
        kernels_on=lambda device: SimpleNamespace(copy_blob=copy),
    )
    make = HostRoom.__init__
    monkeypatch.setattr(Executor, "_open_lanes", open_lanes)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, stream: None)
    monkeypatch.setattr(HostRoom, "__init__", lambda room, gpu, *rest: make(room, False, *rest))
    return driver
