"""What may differ between processes that run the same code: memory, copies, streams."""

from __future__ import annotations

import gc
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bitslab.engine.memory import host_arena

Facts = dict[str, Any]
COPY_BYTES = 64 << 20


def facts(cache: Any, device: torch.device) -> Facts:
    """Return what is known of this process, behind the last request of a cache."""
    found: Facts = {
        "cpu": _cpu(),
        "memory by node": _nodes_of_memory(),
        "huge pages MB": _huge_bytes() / 1e6,
        "arena MB": host_arena().stats()["reserved_bytes"] / 1e6,
        "arena buffers": host_arena().stats()["buffers"],
        "gc": "/".join(map(str, gc.get_threshold())),
    }
    if device.type == "cuda":
        [reader] = cache._histories.readers.values()
        streams = reader.link.streams
        found |= {
            "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default"),
            "MHz": _clock_mhz(device),
            **_rates(device),
        }
        for name, lane in (("copies", streams.copies), ("decodes", streams.decodes)):
            found[f"{name}: stream"] = f"{lane.stream.stream_id:#x}, {lane.stream.priority}"
            found[f"{name}: overlap"] = _overlap(lane.stream, device)
            found[f"{name}: holds up"] = _holds_up(lane.stream, device)
    return found


def _cpu() -> str:
    """Return the processor that this thread is on, and its NUMA node."""
    try:
        cpu = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[36])
    except (OSError, ValueError, IndexError):
        return "unknown"
    nodes = Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node*")
    return ", ".join([str(cpu), *(each.name for each in nodes)])


def _nodes_of_memory() -> str:
    """Return the share of this process's pages on each NUMA node."""
    try:
        text = Path("/proc/self/numa_maps").read_text()
    except OSError:
        return "unknown"
    pages: Counter[str] = Counter()
    for node, count in re.findall(r" N(\d+)=(\d+)", text):
        pages[node] += int(count)
    whole = sum(pages.values()) or 1
    return ", ".join(f"{node}: {count / whole:.2f}" for node, count in sorted(pages.items()))


def _huge_bytes() -> int:
    try:
        text = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"AnonHugePages:\s+(\d+) kB", text)
    return 1024 * int(found[1]) if found else 0


def _clock_mhz(device: torch.device) -> float:
    """Return the clock of the multiprocessors, by the time of a kernel that counts cycles."""
    cycles = 20_000_000
    torch.cuda._sleep(cycles)
    return cycles / 1e3 / _milliseconds(lambda: torch.cuda._sleep(cycles), device)


def _milliseconds(work: Callable[[], object], device: torch.device) -> float:
    times: list[float] = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def _rates(device: torch.device) -> Facts:
    """Return the rates of copies between the arena's memory and the device."""
    host = host_arena().reserve(COPY_BYTES).cut(COPY_BYTES)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    up = _milliseconds(lambda: there.copy_(host, non_blocking=True), device)
    down = _milliseconds(lambda: host.copy_(there, non_blocking=True), device)
    return {"up GB/s": COPY_BYTES / 1e6 / up, "down GB/s": COPY_BYTES / 1e6 / down}


def _overlap(stream: torch.cuda.Stream, device: torch.device) -> float:
    """Return how far a stream runs beside the current one: 1 wholly, 0 one after the other."""
    current = torch.cuda.current_stream(device)
    cycles = 5_000_000

    def both() -> None:
        stream.wait_stream(current)
        torch.cuda._sleep(cycles)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
        current.wait_stream(stream)

    alone = _milliseconds(lambda: torch.cuda._sleep(cycles), device)
    return 2 - _milliseconds(both, device) / alone


def _holds_up(stream: torch.cuda.Stream, device: torch.device) -> float:
    """Return how long the current stream waits behind a wait of another: 0 not, 1 all the time.

    Streams are mapped to fewer queues of the device (CUDA_DEVICE_MAX_CONNECTIONS). Where two have
    the same, what one waits for holds up the other.
    """
    third = torch.cuda.Stream(device)
    cycles = 20_000_000

    def seconds(waits: bool) -> float:
        torch.cuda.synchronize(device)
        with torch.cuda.stream(third):
            torch.cuda._sleep(cycles)
        if waits:
            stream.wait_stream(third)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1)
        begin = time.perf_counter()
        done = torch.cuda.Event()
        torch.cuda._sleep(1)
        done.record()
        done.synchronize()
        found = time.perf_counter() - begin
        torch.cuda.synchronize(device)
        return found

    alone = _milliseconds(lambda: torch.cuda._sleep(cycles), device) / 1e3
    before = statistics.median(seconds(False) for _ in range(3))
    return (statistics.median(seconds(True) for _ in range(3)) - before) / alone
