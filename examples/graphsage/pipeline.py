"""Prepares the next batches while one trains, as Legion does, and measures both threads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

#: Samplers with a random generator for each thread, as DGL's, give the same batches again only if
#: all sampling of a process is done by one thread. So there is one, whether it works ahead or not.
_SAMPLER = ThreadPoolExecutor(1, thread_name_prefix="graphsage-sampler")
_END = object()


@dataclass
class Spent:
    """Seconds of an epoch: two of the thread that prepares batches, and what its user waited."""

    sampling: float = 0.0
    fetching: float = 0.0
    waiting: float = 0.0


def prepared(
    start: Callable[[], Iterator[Any]],
    fetch: Callable[[Any], Any],
    ahead: int,
    spent: Spent,
    device: torch.device,
) -> Generator[Any, None, None]:
    """Yield batches in order, the next ones prepared meanwhile.

    Close it (`contextlib.closing`) to be sure that nothing is under way afterwards: batches that
    were not begun are dropped. An error of `start`, its iterator or `fetch` is raised where its
    batch would have come.

    Parameters
    ----------
    start : callable
        Called in the sampling thread; returns an iterator of sampled batches.
    fetch : callable
        Takes a sampled batch and returns it with features: `Fetched`.
    ahead : int
        Batches prepared ahead in the thread, on a GPU on a stream of its own; with 0 fetching is
        done here, after sampling.
    spent : Spent
        The seconds are added to it.
    device : torch.device
        Device of the batches.
    """
    iterators: list[Iterator[Any]] = []
    on_gpu = device.type == "cuda"
    stream = torch.cuda.Stream(device) if on_gpu and ahead else None

    def wait_for_gpu() -> None:
        # Times must include the GPU's work; the training thread does not wait here.
        if on_gpu:
            torch.cuda.current_stream(device).synchronize()

    def sample() -> Any:
        begin = time.perf_counter()
        if not iterators:
            iterators.append(start())
        sampled = next(iterators[0], _END)
        wait_for_gpu()
        spent.sampling += time.perf_counter() - begin
        return sampled

    def timed_fetch(sampled: Any) -> Any:
        begin = time.perf_counter()
        fetched = fetch(sampled)
        wait_for_gpu()
        spent.fetching += time.perf_counter() - begin
        return fetched

    def prepare() -> Any:
        with ExitStack() as stack:
            if on_gpu:
                stack.enter_context(torch.cuda.device(device))
                if stream:
                    stack.enter_context(torch.cuda.stream(stream))
            sampled = sample()
            return sampled if sampled is _END or not ahead else timed_fetch(sampled)

    waiting: deque[Future[Any]] = deque()
    try:
        while True:
            begin = time.perf_counter()
            while len(waiting) < max(ahead, 1):
                waiting.append(_SAMPLER.submit(prepare))
            batch = waiting.popleft().result()
            if ahead and batch is not _END:
                # Only now: the one that was taken made room for another.
                waiting.append(_SAMPLER.submit(prepare))
            if not ahead and batch is not _END:
                batch = timed_fetch(batch)
            spent.waiting += time.perf_counter() - begin
            if batch is _END:
                return
            if stream:
                batch.record_stream(torch.cuda.current_stream(device))
            yield batch
    finally:
        for future in waiting:
            future.cancel()
        for future in waiting:
            if not future.cancelled():
                future.exception()
        # Ends the loader's worker processes.
        iterators.clear()
