"""Recorded streams: what a GPU would be given to do, and in which order, on a machine without one.

`recorded` replaces torch's streams and events. Work is done at once, on the CPU, and what matters
is kept: which stream waits for how much work of which other one. Two ways to say the same (an event
or `wait_stream`; a wait for what has done nothing yet) give the same record.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

#: (stream, what it does): work, or ``"after NAME:n"``, a wait for the first n works of a stream.
Step = tuple[str, str]


class Recorder:
    """Streams named in the order in which they were made; "current" is torch's default one."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.done: dict[str, int] = {}  # works of each stream
        self.made = 0
        self.stack: list[FakeStream] = [FakeStream(self, "current")]

    @property
    def current(self) -> FakeStream:
        return self.stack[-1]

    def work(self, what: str, stream: str | None = None) -> None:
        """Record work on a stream, the current one when left out."""
        name = stream or self.current.name
        self.steps.append((name, what))
        self.done[name] = self.done.get(name, 0) + 1

    def wait(self, who: str, mark: tuple[str, int] | None) -> None:
        """Record a wait for a stream's first works; not for itself, nor for nothing."""
        if mark is not None and mark[1] and mark[0] != who:
            self.steps.append((who, f"after {mark[0]}:{mark[1]}"))

    def take(self) -> list[Step]:
        """Return the steps so far, and forget them."""
        steps, self.steps = self.steps, []
        return steps


class FakeStream:
    """A stream whose work is done at once."""

    device_index, device_type = 0, 1

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name
        self.cuda_stream = self.stream_id = len(name) + sum(map(ord, name))

    def mark(self) -> tuple[str, int]:
        return self.name, self.recorder.done.get(self.name, 0)

    def wait_event(self, event: FakeEvent) -> None:
        self.recorder.wait(self.name, event.recorded)

    def wait_stream(self, other: FakeStream) -> None:
        self.recorder.wait(self.name, other.mark())

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent(self.recorder)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.recorder.wait("host", self.mark())

    def query(self) -> bool:
        return True


class FakeEvent:
    """An event; it has passed as soon as it was recorded."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.recorded: tuple[str, int] | None = None
        recorder.made += 1

    def record(self, stream: FakeStream | None = None) -> None:
        self.recorded = (stream or self.recorder.current).mark()

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or self.recorder.current).wait_event(self)

    def synchronize(self) -> None:
        self.recorder.wait("host", self.recorded)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1.0


@contextlib.contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Record what is done to streams; copies (`Tensor.copy_`) are work of the current one."""
    recorder = Recorder()
    names = iter(f"stream{n}" for n in range(1000))

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        recorder.stack.append(stream)
        try:
            yield
        finally:
            recorder.stack.pop()

    copy = torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            recorder.work(f"copies {source.nbytes}")
        return copy(self, source)

    def record_stream(self: torch.Tensor, stream: FakeStream) -> None:
        recorder.steps.append((stream.name, f"keeps {self.nbytes}"))

    cuda: Any = torch.cuda
    with monkeypatch.context() as patch:
        patch.setattr(
            cuda, "Stream", lambda device=None, priority=0: FakeStream(recorder, next(names))
        )
        patch.setattr(cuda, "Event", lambda enable_timing=False: FakeEvent(recorder))
        patch.setattr(cuda, "current_stream", lambda device=None: recorder.current)
        patch.setattr(cuda, "stream", on)
        patch.setattr(cuda, "synchronize", lambda device=None: recorder.work("syncs", "host"))
        patch.setattr(cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.Tensor, "copy_", copy_)
        patch.setattr(torch.Tensor, "record_stream", record_stream)
        for name, module in list(sys.modules.items()):
            if name.startswith("bitslab.") and hasattr(module, "on_stream"):
                patch.setattr(module, "on_stream", on)
        yield recorder
