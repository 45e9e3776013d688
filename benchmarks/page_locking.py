"""Measure how fast host memory is taken and page-locked for a GPU, by one thread and by several.

python benchmarks/page_locking.py                # 4 GiB, 1 to 8 threads
python benchmarks/page_locking.py --gib 1 --json

Every repetition maps new memory: of a file (memfd, 4 KB pages), of a file whose taken pages are
collapsed to huge ones where the system does so quickly, as images of weights are, and private (huge
pages where the system has some, as the arena's are). "huge MB" says how much of it is. Ways:

- register: cudaHostRegister of as many disjoint ranges as there are threads, of pages that nobody
  has touched, and of pages that were taken before (whose time is in its own column);
- taken by threads, one register: what bitslab does;
- ring, then locked: bytes of the GPU come by a page-locked ring of 3 x 16 MiB and a memcpy into
  ordinary pages, which are locked afterwards; the time of the copies is in its own column.

The peer is the driver's own page-locked allocation of the same size (cudaHostAlloc). Figures are
medians, in GB/s of memory that is ready at the end. Then calls of the driver are made by one thread
while another one locks pages that were taken before: how many a second, beside as many without. At
last a copy from the GPU into two ranges that were registered apart is tried. Without a GPU only the
taking of pages is measured, beside one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import add_output, print_tables

from bitslab.engine.memory.host import HostBuffer
from bitslab.engine.memory.page_taking import take_pages

KINDS = ("file", "huge file", "private")
PIECE_BYTES, RING = 16 << 20, 3
PORTABLE_MAPPED = 1 | 2
HUGE_PAGE_BYTES = 2 << 20
Row = dict[str, Any]


class Mapping:
    """New memory of a kind, unlocked and unmapped at the end."""

    def __init__(self, kind: str, nbytes: int) -> None:
        self._fd = -1
        if kind == "huge file":
            fd = os.memfd_create("page-locking")
            os.ftruncate(fd, nbytes)
            # It has the descriptor, and begins where a huge page may.
            self._map: Any = HostBuffer(
                fd, nbytes, "page-locking", False, owner=True
            ).tensor.numpy()
        elif kind == "file":
            self._fd = os.memfd_create("page-locking")
            os.ftruncate(self._fd, nbytes)
            self._map = mmap.mmap(self._fd, nbytes)
        else:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes, self.collapse = nbytes, kind == "huge file"
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        self._registered: list[int] = []

    def parts(self, count: int) -> list[tuple[int, int]]:
        """Return address and size of disjoint ranges, cut between huge pages."""
        step = -(-self.nbytes // (count * HUGE_PAGE_BYTES)) * HUGE_PAGE_BYTES
        begins = range(0, self.nbytes, step)
        return [(self.address + at, min(step, self.nbytes - at)) for at in begins]

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock a range."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        result = runtime.cudaHostRegister(address, nbytes, PORTABLE_MAPPED)
        if result != runtime.cudaError.success:
            raise RuntimeError(f"cudaHostRegister: {runtime.cudaGetErrorString(result)}")
        self._registered.append(address)

    def close(self) -> None:
        """Unlock and unmap."""
        if self._registered:
            torch.cuda.synchronize()
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            for address in self._registered:
                runtime.cudaHostUnregister(address)
        self._registered.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def mapped(kind: str, nbytes: int) -> Iterator[Mapping]:
    """Give new memory."""
    memory = Mapping(kind, nbytes)
    try:
        yield memory
    finally:
        memory.close()


def huge_bytes() -> int:
    """Return the bytes of this process that lie in huge pages."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = [line.split()[1] for line in lines if line.startswith(("AnonHuge", "ShmemPmdMapped"))]
    return 1024 * sum(map(int, sizes))


def timed(run: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def register_by_threads(memory: Mapping, threads: int) -> None:
    """Page-lock disjoint ranges, each by a thread of its own."""
    device = torch.cuda.current_device()

    def lock(part: tuple[int, int]) -> None:
        with torch.cuda.device(device):
            memory.register(*part)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lock, memory.parts(threads)))


def by_ring(memory: Mapping, source: torch.Tensor, ring: list[torch.Tensor]) -> None:
    """Bring bytes of the GPU to ordinary pages by a page-locked ring."""
    target = memory.tensor.numpy()
    events: list[torch.cuda.Event] = []
    pieces = [
        (at, min(PIECE_BYTES, memory.nbytes - at)) for at in range(0, memory.nbytes, PIECE_BYTES)
    ]

    def drain(number: int) -> None:
        at, size = pieces[number]
        events[number].synchronize()
        np.copyto(target[at : at + size], ring[number % RING].numpy()[:size])

    for number, (at, size) in enumerate(pieces):
        if number >= RING:
            drain(number - RING)
        ring[number % RING][:size].copy_(source[at : at + size], non_blocking=True)
        events.append(torch.cuda.current_stream().record_event())
    for number in range(max(0, len(pieces) - RING), len(pieces)):
        drain(number)


def measure(kind: str, way: str, threads: int, nbytes: int, tools: dict[str, Any]) -> Row:
    """Return seconds of one way: taking, locking and copying."""
    row: Row = {}
    with mapped(kind, nbytes) as memory:
        if way in ("taken", "register, taken", "taken by threads, one register"):
            row["take s"] = timed(
                lambda: take_pages(memory.address, nbytes, threads, collapse=memory.collapse)
            )
            row["huge MB"] = huge_bytes() / 1e6
        if way.startswith("register"):
            row["lock s"] = timed(lambda: register_by_threads(memory, threads))
        if way == "taken by threads, one register":
            row["lock s"] = timed(lambda: memory.register(memory.address, nbytes))
        if way == "ring, then locked":
            row["copy s"] = timed(lambda: by_ring(memory, tools["source"], tools["ring"]))
            row["lock s"] = timed(lambda: memory.register(memory.address, nbytes))
    return row


def allocation_seconds(nbytes: int) -> float:
    """Return the seconds of the driver's own allocation of page-locked memory."""
    import cupy

    runtime = cupy.cuda.runtime
    begin = time.perf_counter()
    address = runtime.hostAlloc(nbytes, PORTABLE_MAPPED)
    seconds = time.perf_counter() - begin
    runtime.freeHost(address)
    return seconds


def lock_until_done(memory: Mapping, device: int, done: threading.Event) -> None:
    """Page-lock memory in eight calls, as units of a model are, and say so."""
    with torch.cuda.device(device):
        for part in memory.parts(8):
            memory.register(*part)
    done.set()


def calls_beside_locking(nbytes: int) -> list[Row]:
    """Measure calls of the driver by one thread while another one page-locks memory."""
    staged = torch.empty(PIECE_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cuda")
    small = torch.zeros(32, device="cuda")
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def copy() -> None:
        target.copy_(staged, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    calls: dict[str, Callable[[], object]] = {
        "record an event": event.record,
        "launch a kernel": lambda: small.add_(1),
        "copy 16 MiB to the GPU and wait": copy,
    }
    rows: list[Row] = []
    for what, call in calls.items():
        row: Row = {"call": what}
        for way in ("alone", "beside locking"):
            with mapped("file", nbytes) as memory:
                take_pages(memory.address, nbytes)
                stop = threading.Event()
                place = torch.cuda.current_device()
                locker = threading.Thread(target=lock_until_done, args=(memory, place, stop))
                begin = time.perf_counter()
                if way == "alone":
                    threading.Timer(nbytes / 4e9, stop.set).start()
                else:
                    locker.start()
                count, longest = 0, 0.0
                while not stop.is_set():
                    longest = max(longest, timed(call))
                    count += 1
                seconds = time.perf_counter() - begin
                torch.cuda.synchronize()
                if way != "alone":
                    locker.join()
            row |= {f"{way}: a second": count / seconds, f"{way}: longest ms": 1e3 * longest}
        row["seconds of locking"] = seconds
        rows.append(row)
    return rows


def spanning_copy(nbytes: int = 8 << 20) -> Row:
    """Try a copy from the GPU that reaches from one registered range into another."""
    with mapped("private", nbytes) as memory:
        for part in memory.parts(2):
            memory.register(*part)
        data = torch.randint(256, (nbytes,), dtype=torch.uint8, device="cuda")
        try:
            memory.tensor.copy_(data, non_blocking=True)
            torch.cuda.synchronize()
            result = "equal" if torch.equal(memory.tensor, data.cpu()) else "DIFFERENT"
        except RuntimeError as error:
            result = str(error).splitlines()[0]
    return {"copy into two ranges registered apart": result}


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=4.0, help="default: %(default)s")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repetitions", type=int, default=3, help="default: %(default)s")
    add_output(parser)
    arguments = parser.parse_args()
    nbytes = int(arguments.gib * 2**30) // mmap.PAGESIZE * mmap.PAGESIZE
    on_gpu = torch.cuda.is_available()
    ways: list[tuple[str, int]] = [("taken", n) for n in arguments.threads]
    tools: dict[str, Any] = {}
    peer, peer_seconds = "taken by one thread", 0.0
    if on_gpu:
        tools["source"] = torch.randint(256, (nbytes,), dtype=torch.uint8, device="cuda")
        tools["ring"] = [
            torch.empty(PIECE_BYTES, dtype=torch.uint8).pin_memory() for _ in range(RING)
        ]
        by_threads = ("register", "register, taken", "taken by threads, one register")
        ways = [(way, n) for way in by_threads for n in arguments.threads]
        ways.append(("ring, then locked", 1))
        peer = "cudaHostAlloc"
    rows: list[Row] = []
    for kind in KINDS:
        found: dict[tuple[str, int], list[Row]] = {way: [] for way in ways}
        pinned: list[float] = []
        for repetition in range(arguments.repetitions + 1):
            for key in ways:
                row = measure(kind, *key, nbytes, tools)
                if repetition:
                    found[key].append(row)
            if on_gpu:
                # As torch allocates it without its cache, which would give the same memory again.
                torch._C._host_emptyCache()
                pinned.append(
                    timed(lambda: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
                )
        for (name, threads), measured in found.items():
            seconds = {part: statistics.median(m[part] for m in measured) for part in measured[0]}
            whole = statistics.median(
                sum(value for part, value in m.items() if part.endswith(" s")) for m in measured
            )
            if on_gpu:
                peer_seconds = statistics.median(pinned[1:])
            elif threads == arguments.threads[0]:
                peer_seconds = whole
            rows.append(
                {
                    "memory": kind,
                    "way": name,
                    "threads": threads,
                    **seconds,
                    "GB/s": nbytes / whole / 1e9,
                    "peer": peer,
                    "peer GB/s": nbytes / peer_seconds / 1e9,
                    "times faster than the peer": peer_seconds / whole,
                }
            )
    where = torch.cuda.get_device_name() if on_gpu else "no GPU"
    tables = {f"Taking and page-locking {nbytes / 2**30:g} GiB, {where}": rows}
    if on_gpu:
        tables["Calls of the driver while another thread locks pages"] = calls_beside_locking(
            nbytes
        )
        tables["A copy over two registrations"] = [spanning_copy()]
    print_tables(tables, arguments.json, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
