"""Threads that work on pieces of tensors for the command, each with what it needs of a GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

import torch

from ..engine.transfer import StreamLane, ThreadLane

Item = TypeVar("Item")
Result = TypeVar("Result")

#: More threads wait for each other: for memory, for the file's lock. With a GPU they only copy.
MOST_THREADS, MOST_THREADS_OF_GPU = 16, 8


class Workers:
    """Threads that take work in order, several at a time, by ``with``.

    At the end of the block, work that has not begun is dropped, and the rest is waited for.

    Parameters
    ----------
    device : torch.device
        Where pieces are packed and unpacked.
    threads : int, optional
        Number of threads; as many as torch uses when left out, and with a GPU as the machine has.
    """

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        self.device = device
        if threads is None and device.type == "cpu":
            threads = min(torch.get_num_threads(), MOST_THREADS)
        elif threads is None:
            threads = max(2, min(os.cpu_count() or 1, MOST_THREADS_OF_GPU))
        self._lane = ThreadLane("bitslab-files", threads)
        self._local = threading.local()

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return ``work(item)`` of each, in their order."""
        results: list[Result] = []
        self.each(work, items, lambda _, result: results.append(result))
        return results

    def each(
        self,
        work: Callable[[Item], Result],
        items: Iterable[Item],
        then: Callable[[Item, Result], object],
        key: Callable[[Item], object] | None = None,
    ) -> None:
        """Call ``work(item)`` of each in the threads.

        Parameters
        ----------
        work : callable
            What the threads do.
        items : iterable
            In the order in which they are begun.
        then : callable
            Called with each item and result in this order, in the calling thread.
        key : callable, optional
            Says which items use the same kernels. With a GPU the first item of each key is done in
            the calling thread, before the threads begin: each of them would compile the kernels.

        Notes
        -----
        When anything raises, what has not begun is dropped, and the rest is waited for.
        """
        items = list(items)
        ahead: dict[int, Result] = {}
        if key is not None and self.device.type == "cuda":
            firsts = {key(item): i for i, item in reversed(list(enumerate(items)))}
            ahead = {i: work(items[i]) for i in sorted(firsts.values())}
        tasks = {i: self._lane.submit(work, item) for i, item in enumerate(items) if i not in ahead}
        try:
            for i, item in enumerate(items):
                # What a task made is freed with it.
                then(item, ahead.pop(i) if i in ahead else tasks.pop(i).result())
        finally:
            for task in tasks.values():
                task.cancel()
            for task in tasks.values():
                task.wait()

    def settle(self) -> None:
        """Wait for what the calling thread has queued on the GPU, before the threads use it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def link(self) -> DeviceLink:
        """Return the calling thread's own way to the GPU and back."""
        link: DeviceLink | None = getattr(self._local, "link", None)
        if link is None:
            link = self._local.link = DeviceLink(self.device)
        return link

    def scratch(self, n_bytes: int) -> torch.Tensor:
        """Return uint8 ``[n_bytes]`` of the calling thread, whose next call uses it again."""
        memory: torch.Tensor | None = getattr(self._local, "scratch", None)
        if memory is None or memory.shape[0] < n_bytes:
            memory = self._local.scratch = torch.empty(n_bytes, dtype=torch.uint8)
        return memory[:n_bytes]

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # However long it takes: they write to a file that is closed next.
        self._lane.close(None)


class DeviceLink:
    """A stream, and page-locked memory for one piece each way; for one thread.

    Parameters
    ----------
    device : torch.device
        The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lane = StreamLane(device)
        self._in = _PinnedBuffer()
        self._out = _PinnedBuffer()

    def to_device(self, data: torch.Tensor) -> torch.Tensor:
        """Return a copy of uint8 ``[n]`` on the GPU, made on the stream.

        The one before must have arrived: see `to_host`.
        """
        staged = self._in.first(data.shape[0])
        # By numpy: threads of torch would wait for each other.
        staged.numpy()[:] = data.numpy()
        with self.lane.on():
            return staged.to(self.device, non_blocking=True)

    def to_host(self, data: torch.Tensor) -> torch.Tensor:
        """Return a copy of uint8 ``[n]`` in memory that the next call uses again.

        Waits for all that is queued on the stream.
        """
        staged = self._out.first(data.shape[0])
        with self.lane.on():
            staged.copy_(data, non_blocking=True)
        self.lane.synchronize()
        return staged


class _PinnedBuffer:
    """Page-locked memory that grows to the longest piece."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def first(self, n_bytes: int) -> torch.Tensor:
        """Return the first `n_bytes` of it."""
        if self._memory.shape[0] < n_bytes:
            self._memory = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
        return self._memory[:n_bytes]
