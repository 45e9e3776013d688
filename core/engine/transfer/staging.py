"""Staging buffers: memory that one lane fills and another one drains, in turn.

Bytes that come in go from a file to page-locked host memory (a thread fills, a stream drains), and
from host memory to a GPU (a stream fills; the stream that decodes drains). Bytes that go out take
the same way back: a stream fills page-locked memory from a GPU, and a thread drains it to a file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Generic, Literal, TypeVar, overload

import torch

from ..tasks import ThreadTask
from .lanes import Lane, Mark, record_on

Key = TypeVar("Key", bound=Hashable)


class StagingBuffer(Generic[Key]):
    """A buffer with the marks that order those who fill it and those who use it.

    Parameters
    ----------
    memory : torch.Tensor, optional
        Its memory, on any device.

    Attributes
    ----------
    key : hashable or None
        What it holds, or is being filled with.
    ready : torch.cuda.Event, ThreadTask or None
        When it is filled.
    released : torch.cuda.Event, ThreadTask or None
        When nobody uses its last content any more.
    turn : int
        The ring's number of the time it was filled last.
    """

    __slots__ = ("key", "memory", "ready", "released", "turn")

    def __init__(self, memory: torch.Tensor | None = None) -> None:
        self.memory = memory
        self.key: Key | None = None
        self.ready: Mark | None = None
        self.released: Mark | None = None
        self.turn = 0

    @property
    def data(self) -> torch.Tensor:
        """Its memory, where it has some."""
        assert self.memory is not None
        return self.memory

    @property
    def in_thread(self) -> bool:
        """Whether a thread is filling or draining it, for which the host would wait."""
        ready, released = self.ready, self.released
        return (isinstance(ready, ThreadTask) and not ready.done()) or (
            isinstance(released, ThreadTask) and not released.done()
        )

    def fill(self, lane: Lane, work: Callable[..., Any], /, *args: Any) -> None:
        """Run ``work(*args)``, which fills it, on a lane, after its release; see `StreamLane.run`.

        An error of what drained it is left to who waits for that.
        """
        self.ready = lane.run(work, *args, after=self.released, mark=self.ready)

    def drain(self, lane: Lane, work: Callable[..., Any], /, *args: Any) -> None:
        """Run ``work(*args)``, which takes its content, on a lane, once it is filled.

        An error of a thread that fills it is that of draining it, too.
        """
        if isinstance(self.ready, ThreadTask):
            args, work = (self.ready, work, *args), _checked
        self.released = lane.run(work, *args, after=self.ready, mark=self.released)

    def use(self, stream: torch.cuda.Stream) -> None:
        """Make a stream wait until another one has filled it."""
        if self.ready is not None:
            assert not isinstance(self.ready, ThreadTask)
            self.ready.wait(stream)

    def release(self, stream: torch.cuda.Stream) -> None:
        """Allow it to be filled again once a stream has reached this point."""
        self.released = record_on(stream, self.released)


class StagingRing(Generic[Key]):
    """Buffers that are filled one after the other.

    Which one is filled next: an empty one, or else one whose content is not expected; among these
    the one filled longest ago. What the others held last may still be in flight, and who fills them
    would wait for that.

    Parameters
    ----------
    buffers : sequence of StagingBuffer
        The buffers.
    """

    def __init__(self, buffers: Sequence[StagingBuffer[Key]]) -> None:
        self.buffers = list(buffers)
        self._turn = 0

    def find(self, key: Key) -> StagingBuffer[Key] | None:
        """Return the buffer that holds something, or is being filled with it."""
        for buffer in self.buffers:
            if buffer.key == key:
                return buffer
        return None

    @overload
    def take(self, window: Collection[Key], *, must: Literal[True]) -> StagingBuffer[Key]: ...

    @overload
    def take(self, window: Collection[Key], *, must: bool) -> StagingBuffer[Key] | None: ...

    def take(self, window: Collection[Key], *, must: bool) -> StagingBuffer[Key] | None:
        """Return an empty buffer, to be filled now.

        Parameters
        ----------
        window : collection
            What is expected soon; buffers that hold it are not taken, nor those of a thread that
            is at work.
        must : bool
            Take one of them, if need be.

        Returns
        -------
        StagingBuffer or None
            Its `key` is None, to be set when it is filled or being filled. None where there is no
            buffer to be taken.
        """
        free = [
            b for b in self.buffers if (b.key is None or b.key not in window) and not b.in_thread
        ]
        if not free and not must:
            return None
        buffer = min(free or self.buffers, key=_by_turn)
        buffer.key = None
        self._turn += 1
        buffer.turn = self._turn
        return buffer

    def clear(self) -> None:
        """Forget the buffers."""
        self.buffers.clear()


def copy_pieces(pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy to targets from sources, on torch's current stream, between a GPU and the host."""
    for target, source in pieces:
        target.copy_(source, non_blocking=True)


def _by_turn(buffer: StagingBuffer[Any]) -> tuple[bool, int]:
    return buffer.key is not None, buffer.turn


def _checked(ready: ThreadTask[Any], work: Callable[..., Any], *args: Any) -> Any:
    ready.result()
    return work(*args)
