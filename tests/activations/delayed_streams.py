"""Streams whose work is done later, in a drawn order that they allow: a GPU's executor on a CPU.

`delayed` replaces torch's streams and events, and what the executor of a GPU launches, by work that
waits in queues. `Streams.progress` does some of it, of any stream that waits for nothing; so a test
sees every order of streams that is not forbidden, and memory that is given up too early.
"""

from __future__ import annotations

import ctypes
import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bitslab.activations import staging
from bitslab.activations.host_room import HostRoom
from bitslab.engine.codecs import Blob, ZvcCodec
from bitslab.engine.kernels.cpu.blob_copy import copy_blob
from bitslab.engine.memory import HostPiece


class Mark:
    """An event."""

    #: Whether the executor records it on the stream that computes.
    begins = False

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.passed = [False]

    def record(self, stream: Stream | None = None) -> None:
        if self.begins:
            self._streams.recorded.append(self)
        self.passed = passed = [False]
        (stream or self._streams.current).queue.append(lambda: passed.__setitem__(0, True))

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._streams.current).queue.append(self.passed)

    def query(self) -> bool:
        self._streams.progress()
        return self.passed[0]

    def synchronize(self) -> None:
        self._streams.drain()

    def elapsed_time(self, end: Mark) -> float:
        return 1.0


class Stream:
    """Work in order, and marks of other streams that are waited for (lists that become true)."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any] | list[bool]] = []

    def step(self) -> bool:
        """Do one piece of work; return whether there was one that waits for nothing."""
        while self.queue:
            first = self.queue[0]
            if isinstance(first, list):
                if not first[0]:
                    return False
                del self.queue[0]
                continue
            del self.queue[0]
            first()
            return True
        return False

    def awaits(self, mark: Any) -> bool:
        """Return whether a mark has passed, or is waited for by what comes next."""
        return mark.passed[0] or any(each is mark.passed for each in self.queue)


class Streams:
    """All streams, the first of which computes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.all = [Stream()]
        #: The events that the stream that computes has recorded, one of them maybe several times.
        self.recorded: list[Mark] = []
        self._stack = [self.all[0]]

    @property
    def current(self) -> Stream:
        return self._stack[-1]

    def later(self, work: Callable[[], Any]) -> None:
        """Queue work on the current stream."""
        self.current.queue.append(work)

    def progress(self) -> None:
        """Do some work."""
        for _ in range(self.random.randrange(4)):
            self.random.choice(self.all).step()

    def drain(self) -> None:
        """Do all work."""
        while any([stream.step() for stream in self.all]):
            pass
        assert not any(stream.queue for stream in self.all), "streams that wait for each other"


class Lane:
    """A `StreamLane`."""

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self.device, self._streams = device, streams
        self.stream = Stream()
        streams.all.append(self.stream)

    def run(self, work: Any, *args: Any, after: Any = None, mark: Any = None) -> Mark:
        if after is not None:
            after.wait(self.stream)
        self._streams._stack.append(self.stream)
        try:
            work(*args)
        finally:
            self._streams._stack.pop()
        return self.record()

    queue = run

    def queue_on(self, work: Any, *args: Any, after: Any = None) -> Mark:
        return self.run(work, self.stream, *args, after=after)

    def copy(
        self, target: int, source: int, nbytes: int, *, after: Any = None, then_after: Any = None
    ) -> Mark:
        for mark in (after, then_after):
            if mark is not None:
                mark.wait(self.stream)
        self.stream.queue.append(lambda: ctypes.memmove(target, source, nbytes))
        return self.record()

    def event(self) -> Mark:
        made = Mark(self._streams)
        made.begins = True
        return made

    def wait(self, mark: Mark) -> None:
        mark.wait(self.stream)

    def record(self, mark: Any = None) -> Mark:
        made = Mark(self._streams)
        made.record(self.stream)
        return made

    def keep(self, *tensors: torch.Tensor) -> None:
        for t in tensors:
            hold(t, self.stream)

    def close(self) -> None:
        self._streams.drain()


def hold(t: torch.Tensor, stream: Stream) -> None:
    """Keep the memory of a tensor until a stream has come so far, as torch's allocator does."""
    stream.queue.append(functools.partial(lambda held: None, t.detach()))


class DelayedZvc(ZvcCodec):
    """Encodes and decodes when the stream comes to it."""

    streams: Streams

    def encode(self, t: torch.Tensor, out: Any = None, *, sm_budget: int | None = None) -> Blob:
        assert out is not None
        self.streams.later(lambda: ZvcCodec().encode(t, out))
        return Blob(out, t.shape, t.dtype)

    def decode(self, blob: Blob, out: Any = None, *, sm_budget: int | None = None) -> torch.Tensor:
        result = torch.empty(blob.shape, dtype=blob.dtype)
        self.streams.later(lambda: ZvcCodec().decode(blob, result))
        return result


class SaidToBeLossy(DelayedZvc):
    """Is always read from its packed copy."""

    error_bound = "0"


def delayed(
    monkeypatch: pytest.MonkeyPatch, seed: int, lossy: bool = False
) -> tuple[Streams, DelayedZvc]:
    """Make executors of the CPU work as those of a GPU do, with delayed streams."""
    streams = Streams(seed)
    codec = SaidToBeLossy() if lossy else DelayedZvc()
    codec.streams = streams

    def record_on(stream: Stream, mark: Any = None) -> Mark:
        made = Mark(streams) if mark is None else mark
        made.record(stream)
        streams.recorded.append(made)
        return made

    def open_lanes(executor: Any) -> None:
        executor.on_gpu = True
        lanes = (Lane(streams, executor.device) for _ in range(3))
        executor._encoding, executor._out, executor._in = lanes

    def copy_used(stream: Stream, source: Any, target: Any, expected_bytes: int) -> None:
        assert stream is streams.current
        streams.later(lambda: copy_blob(tensor_of(source), tensor_of(target)))

    def tensor_of(memory: Any) -> torch.Tensor:
        return memory.tensor() if isinstance(memory, HostPiece) else memory

    def dropped(staged: Any) -> None:
        # Its memory is given back at once: work on it is over, or comes first on its stream.
        if not staged._lanes and staged.sent is not None:
            assert staged.home.awaits(staged.sent), "staged memory was given up too early"
        for stream in [lane.stream for lane in staged._lanes] or [staged.home]:
            hold(staged.data, stream)

    replaced = {
        "StreamLane": Lane,
        "record_on": record_on,
        "current_stream": lambda device: streams.current,
        "copy_blob_on_gpu": copy_used,
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("bitslab.activations."):
            for what, instead in replaced.items():
                if hasattr(module, what):
                    monkeypatch.setattr(module, what, instead)
    executor = sys.modules["bitslab.activations.executor"]
    monkeypatch.setattr(executor.Executor, "_open_lanes", open_lanes)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.Tensor, "record_stream", hold)
    monkeypatch.setattr(staging.StagedBlob, "__del__", dropped)
    make = HostRoom.__init__

    def make_room(room: HostRoom, on_gpu: bool, *rest: Any) -> None:
        make(room, False, *rest)  # not page-locked

    monkeypatch.setattr(HostRoom, "__init__", make_room)
    return streams, codec
