"""Helpers for tests on a GPU: contexts in which waiting raises, held streams, profiles.

`tests/conftest.py` makes fixtures of them. Nothing else in the tests may call torch's sync debug
mode or its profiler: both outlive a test that does not clean up.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

#: A held stream is released after this long, and the test fails: the host waited for it.
HELD_SECONDS = 60.0
#: Device memory for one process of tests; few tests take that much, one 9 GiB.
WORKER_BYTES = 11 << 30


def set_sync_debug_mode(mode: str) -> None:
    """Set what torch does where an operation makes the host wait for the GPU."""
    with warnings.catch_warnings():
        # Once in a process torch says that the mode is a prototype, after it has been set.
        warnings.filterwarnings("ignore", message=".*[Ss]ynchronization debug mode")
        torch.cuda.set_sync_debug_mode(mode)


@contextlib.contextmanager
def waiting_raises() -> Iterator[None]:
    """Raise an error at every torch operation that makes the host wait for the GPU."""
    torch.cuda.synchronize()
    try:
        set_sync_debug_mode("error")
        yield
    finally:
        set_sync_debug_mode("default")


@contextlib.contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Collect the torch operations that make the host wait for the GPU, and waits for events."""
    torch.cuda.synchronize()
    found: list[str] = []
    events: list[str] = []
    wait = torch.cuda.Event.synchronize

    def waited(event: torch.cuda.Event) -> None:
        events.append("waited for an event")  # of which torch's debug mode says nothing
        wait(event)

    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(torch.cuda.Event, "synchronize", waited),
    ):
        warnings.simplefilter("always")
        try:
            set_sync_debug_mode("warn")
            yield found
        finally:
            set_sync_debug_mode("default")
    found += [str(w.message) for w in caught if "synchronizing CUDA operation" in str(w.message)]
    found += events


def run_ahead(work: Callable[[], Any]) -> None:
    """Run some work while the current stream is held: it must neither wait nor synchronise."""
    with held():
        try:
            set_sync_debug_mode("error")
            work()
        finally:
            set_sync_debug_mode("default")


@contextlib.contextmanager
def held(stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Block all work that is queued on a stream (the current one) inside the context.

    A kernel that waits for a flag in host memory occupies the stream. The flag is set at the end;
    where the host waits for the stream inside, after `HELD_SECONDS`, and the test fails. So a test
    shows that the host does not wait, at any speed and load of the machine.
    """
    import cupy

    kernel = _waiting_kernel()
    released = torch.zeros(1, dtype=torch.int32).pin_memory()
    stream = stream or torch.cuda.current_stream()
    host = threading.get_ident()
    waited_at: list[str] = []

    def expire() -> None:
        waited_at.extend(traceback.format_stack(sys._current_frames()[host]))
        released.fill_(1)

    _fill_allocators(stream)
    torch.cuda.synchronize()
    timer = threading.Timer(HELD_SECONDS, expire)
    with cupy.cuda.Stream.from_external(stream):
        kernel((1,), (1,), (cupy.uint64(released.data_ptr()),))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        released.fill_(1)
        torch.cuda.synchronize()
    assert not waited_at, "the host waited for the GPU here:\n" + "".join(waited_at)


def _fill_allocators(stream: torch.cuda.Stream) -> None:
    """Give torch spare memory: asking the driver for more makes the caller wait for the GPU.

    Page-locked memory that is given up is not used again before the GPU is through with it.
    """
    sizes = [1 << k for k in range(21) for _ in range(8)]
    spare = [torch.empty(size, dtype=torch.uint8).pin_memory() for size in sizes]
    with torch.cuda.stream(stream):
        spare += [torch.empty(1 << 19, dtype=torch.uint8, device="cuda") for _ in range(64)]
        spare += [torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]


@functools.cache
def _waiting_kernel() -> Any:
    import cupy

    kernel = cupy.RawKernel(
        'extern "C" __global__ void wait_for(const volatile int* flag)'
        "{ while (*flag == 0) __nanosleep(2000); }",
        "wait_for",
    )
    done = torch.ones(1, dtype=torch.int32).pin_memory()
    with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
        kernel((1,), (1,), (cupy.uint64(done.data_ptr()),))  # compiles and loads it
    torch.cuda.synchronize()
    return kernel


def profiled(work: Callable[[], Any]) -> Any:
    """Run some work under torch's profiler; return the profile, once the GPU is done."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # torch 2.11 says once in a process that its profiler's events are kept for one cycle.
        warnings.filterwarnings("ignore", module="torch.profiler")
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            work()
            torch.cuda.synchronize()
    return found


def kernels_of(profile: Any) -> list[str]:
    """Return the names of the kernels in a profile, in order, without copies and fills."""
    on_gpu = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    return [name for name in on_gpu if not name.startswith("Mem")]


def worker_count() -> int:
    """Return the number of test processes for this machine's GPU memory and processors."""
    free_bytes, _ = torch.cuda.mem_get_info()
    return max(1, min(free_bytes // WORKER_BYTES, len(os.sched_getaffinity(0)) * 3 // 4))
