"""A driver of CUDA that does all at once, on the CPU: for lanes and events without a GPU.

Lanes and events are the real ones, and so is what the host calls, up to the driver and torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

#: A call, with its arguments.
Call = tuple[Any, ...]


class FakeDriver:
    """The driver: it records its calls, and copies when it is asked to."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        #: What the next queries return.
        self.answers: list[int] = []

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        self.calls.append(("copy", stream, nbytes))
        ctypes.memmove(target, source, nbytes)
        return 0

    def record(self, event: int, stream: int) -> int:
        self.calls.append(("record", stream, event))
        return 0

    def wait(self, stream: int, event: int, flags: int) -> int:
        self.calls.append(("wait", stream, event))
        return 0

    def query(self, event: int) -> int:
        self.calls.append(("query", event))
        return self.answers.pop(0) if self.answers else 0

    def synchronize(self, event: int) -> int:
        self.calls.append(("synchronize", event))
        return 0

    def check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"CUDA error: {status}")

    def take(self) -> list[Call]:
        """Return the calls so far, and forget them."""
        calls, self.calls = self.calls, []
        return calls


class FakeEvent:
    """An event of torch, which has a number when it was recorded once."""

    numbers = itertools.count(1)

    def __init__(self, enable_timing: bool = False) -> None:
        self.cuda_event = 0

    def record(self, stream: Any = None) -> None:
        self.cuda_event = self.cuda_event or next(self.numbers)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1.0


class FakeStream:
    """A stream of torch."""

    numbers = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device_index = 0 if device is None or device.index is None else device.index
        self.device = device
        self.cuda_stream = next(self.numbers)

    def synchronize(self) -> None:
        """All is done."""


class Nothing:
    """In the place of `on_stream`."""

    def __init__(self, stream: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def simulated(
    monkeypatch: pytest.MonkeyPatch, *, ready: bool = True, **more: Any
) -> tuple[FakeDriver, list[int]]:
    """Give lanes and events a driver that does all at once, and torch's streams that do nothing.

    Parameters
    ----------
    ready : bool
        Whether the thread is ready for the driver, and device 0 the current one.
    **more
        What else is replaced, by its name, in modules of the engine's transfer and of activations.

    Returns
    -------
    FakeDriver, list of int
        The driver, and the devices that a thread was made ready for.
    """
    driver, devices = FakeDriver(), list[int]()
    current, thread = [0], SimpleNamespace(ready=ready)

    @contextlib.contextmanager
    def make_ready(index: int) -> Iterator[None]:
        before = current[0]
        devices.append(index)
        current[0], thread.ready = index, True
        yield
        current[0] = before

    replaced = {
        "driver": lambda: driver,
        "current_device": lambda: current[0],
        "this_thread": thread,
        "ready": make_ready,
        "on_stream": Nothing,
        **more,
    }
    for name, module in list(sys.modules.items()):
        if name.startswith(("bitslab.activations.", "bitslab.engine.transfer.")):
            for what, instead in replaced.items():
                if hasattr(module, what):
                    monkeypatch.setattr(module, what, instead)
    monkeypatch.setattr(sys.modules["bitslab.engine.transfer.events"], "_free", {})
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    return driver, devices
