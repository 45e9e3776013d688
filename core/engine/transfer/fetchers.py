"""What a prefetch ring fetches batches with: a lane of a thread on the CPU, of a stream on a GPU.

A fetcher knows nothing of the ring, so that a ring that is no longer used can be collected. It has
`start`, `finish` and `release` for the fetch of one batch, in the order of the batches;
`raise_errors`; `wait_seconds`; and `close`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ArgumentError, ArgumentTypeError, BitslabError
from ..kernels.cuda import kernels_on
from ..tasks import CLOSE_SECONDS, ThreadTask
from .lanes import StreamLane, ThreadLane
from .staging import StagingBuffer

THREAD_NAME = "bitslab-prefetch"

#: A buffer of the ring: its memory grows to the largest batch.
RingBuffer = StagingBuffer[int]


@dataclass(eq=False)
class Fetch:
    """A batch in flight: has a buffer, or an error of the iterable; ends with rows or an error."""

    batch: Any = None
    ids: torch.Tensor | None = None
    buffer: RingBuffer | None = None
    rows: torch.Tensor | None = None
    error: BaseException | None = None
    task: ThreadTask[None] | None = None  # of the thread


class Gatherer:
    """Gathers into ring buffers, which grow to the largest batch seen."""

    def __init__(self, gather: Callable[..., torch.Tensor], device: torch.device) -> None:
        self._gather = gather
        self._device = device
        self._like: torch.Tensor | None = None  # an empty tensor of the rows' shape and dtype
        self._most_rows = 0

    def gather(self, ids: torch.Tensor, buffer: RingBuffer) -> torch.Tensor:
        """Return rows ``[n, *row_shape]`` of ids ``[n]``, in the buffer from the second call on."""
        n = ids.shape[0]
        self._most_rows = max(self._most_rows, n)
        if self._like is None:
            # The first rows say what a row is. They are not kept as a buffer: the source may have
            # returned a view of its own memory.
            rows = self._gather(ids, device=self._device)
        else:
            if buffer.memory is None or buffer.memory.shape[0] < n:
                buffer.memory = self._like.new_empty((self._most_rows, *self._like.shape[1:]))
            rows = self._gather(ids, out=buffer.memory[:n], device=self._device)
        if not isinstance(rows, torch.Tensor) or rows.dim() < 1 or rows.shape[0] != n:
            what = list(rows.shape) if isinstance(rows, torch.Tensor) else type(rows).__name__
            raise ArgumentError(f"source: returned {what} for {n} ids, expected [{n}, ...]")
        if self._like is None:
            self._like = rows.new_empty((0, *rows.shape[1:]))
        return rows


class ThreadFetcher:
    """Fetches in a thread, for the CPU.

    The thread knows nothing of the ring, so that a ring that nobody uses can be collected.
    """

    def __init__(self, gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        self._lane = ThreadLane(THREAD_NAME)
        self._waited = 0.0

    def start(self, fetch: Fetch) -> None:
        """Queue the fetch of a batch."""
        fetch.task = self._lane.submit(_fetch, self._gatherer, fetch)

    def raise_errors(self) -> None:
        """Raise nothing: an error on the CPU belongs to its batch."""

    def finish(self, fetch: Fetch) -> None:
        """Wait until a batch is fetched."""
        assert fetch.task is not None
        begin = time.perf_counter()
        try:
            fetch.task.wait()
        finally:
            self._waited += time.perf_counter() - begin
        if fetch.rows is None and fetch.error is None:  # the task was cancelled
            fetch.error = BitslabError("get: this ring was closed before the batch was fetched")

    def release(self, buffer: RingBuffer) -> None:
        """Nothing to do: the next task for this buffer is queued after this call."""

    def wait_seconds(self) -> float:
        """Return how long `finish` has waited in all."""
        return self._waited

    def close(self) -> None:
        """Fail batches that are not fetched, and end the thread."""
        self._lane.close(CLOSE_SECONDS)


def _fetch(gatherer: Gatherer, fetch: Fetch) -> None:
    assert fetch.ids is not None and fetch.buffer is not None
    try:
        fetch.rows = gatherer.gather(fetch.ids, fetch.buffer)
    except BaseException as error:  # whatever it is, it is the consumer's
        fetch.error = error
        del fetch  # which the error's traceback would hold in a cycle


class StreamFetcher:
    """Fetches on a stream of its own, for a GPU."""

    def __init__(
        self,
        gather: Callable[..., torch.Tensor],
        device: torch.device,
        check: Callable[[torch.Tensor], None] | None,
    ) -> None:
        self._device = device
        self._gatherer = Gatherer(gather, self._device)
        self._check = check
        self._earlier_error: BitslabError | None = None  # by a kernel of a batch that went before
        self._lane = StreamLane(device)
        self._waited = 0.0
        self._timers: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._timing: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def start(self, fetch: Fetch) -> None:
        """Queue the fetch of a batch on the stream, after the last use of its buffer."""
        ids, buffer = fetch.ids, fetch.buffer
        assert ids is not None and buffer is not None
        self._lane.wait(buffer.released)
        current = torch.cuda.current_stream(self._device)
        try:
            with self._lane.on():
                if ids.device.type == "cpu":
                    if self._check is not None:
                        self._check(ids)
                    # A copy from pageable memory would make the host wait for the stream.
                    ids = ids.pin_memory().to(self._device, non_blocking=True)
                elif ids.device == self._device:
                    self._lane.follow(current)  # which may be making the ids
                    self._lane.keep(ids)
                else:
                    raise ArgumentTypeError(
                        f"ids: on {ids.device}, accepted are cpu and {self._device}"
                    )
                self._collect_errors()
                fetch.rows = self._gatherer.gather(ids, buffer)
        except BaseException as error:  # `get` raises it, Ctrl-C too, with the ring consistent
            fetch.error = error
        buffer.ready = self._lane.record(buffer.ready)

    def _collect_errors(self) -> None:
        """Keep the error of an earlier batch's kernel, so that it does not fail this batch."""
        try:
            kernels_on(self._device)
        except BitslabError as error:
            self._earlier_error = self._earlier_error or error

    def raise_errors(self) -> None:
        """Raise the error of an earlier batch's kernel; `get` can be called again after it."""
        error, self._earlier_error = self._earlier_error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # or its traceback would hold it in a cycle

    def finish(self, fetch: Fetch) -> None:
        """Make the current stream wait for the rows of a batch."""
        assert fetch.buffer is not None
        current = torch.cuda.current_stream(self._device)
        before, after = self._timers.pop() if self._timers else (_timer(), _timer())
        before.record(current)
        fetch.buffer.use(current)
        after.record(current)
        self._timing.append((before, after))
        self.wait_seconds()
        if fetch.rows is not None:
            # The memory belongs to the other stream; torch must not hand it out again, when the
            # ring is gone, before this stream is through with it.
            fetch.rows.record_stream(current)

    def release(self, buffer: RingBuffer) -> None:
        """Allow a buffer to be overwritten once the current stream has reached this point."""
        buffer.release(torch.cuda.current_stream(self._device))

    def wait_seconds(self) -> float:
        """Return how long streams have waited in all, as far as the GPU has got."""
        while self._timing and self._timing[0][1].query():  # type: ignore[no-untyped-call]
            before, after = self._timing.popleft()
            self._waited += before.elapsed_time(after) / 1e3
            self._timers.append((before, after))
        return self._waited

    def close(self) -> None:
        """Wait for the stream: the source's memory may be freed as soon as the ring is closed."""
        self._lane.close()


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
