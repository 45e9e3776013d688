"""The disk tier: its rates beside the probe's, and beside what else writes and reads a folder."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from bitslab.activations.disk import (
    DiskError,
    DiskRates,
    DiskTier,
    KvikioFile,
    PosixFile,
    measure_files,
    measure_rates,
)
from bitslab.activations.disk.endurance import required_bytes_per_s

Rows = list[dict[str, Any]]
MB = 1_000_000
#: A tensor of this size is what a layer keeps at once.
TENSOR_BYTES = 32 << 20
#: Seconds of CPU, of all threads and children.
KINDS = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def cpu_seconds() -> float:
    usage = [resource.getrusage(kind) for kind in KINDS]
    return sum(each.ru_utime + each.ru_stime for each in usage)


#: Moves bytes; returns how many, and the seconds where it has taken the time itself.
Move = Callable[[], tuple[int, float | None]]


class Way:
    """A way to write bytes to a folder and to read them again."""

    def __init__(self, name: str, write: Move, read: Move) -> None:
        self.name = name
        self.moves = {"write": write, "read": read}
        self.rates: dict[str, list[float]] = {"write": [], "read": []}
        self.cpu: dict[str, list[float]] = {"write": [], "read": []}

    def run(self) -> None:
        for kind, move in self.moves.items():
            begin, cpu = time.perf_counter(), cpu_seconds()
            n_bytes, seconds = move()
            self.rates[kind].append(n_bytes / (seconds or time.perf_counter() - begin))
            self.cpu[kind].append((cpu_seconds() - cpu) / n_bytes * 1e9)

    def row(self, probe: DiskRates) -> dict[str, Any]:
        write, read = max(self.rates["write"]), max(self.rates["read"])
        return {
            "way": self.name,
            "write GB/s": write / 1e9,
            "of the probe": f"{100 * write / probe.write_bytes_per_s:.0f} %",
            "read GB/s": read / 1e9,
            "of the probe ": f"{100 * read / probe.read_bytes_per_s:.0f} %",
            "CPU s a GB, write": min(self.cpu["write"]),
            "read": min(self.cpu["read"]),
        }


@contextmanager
def of_tier(
    name: str, folder: str, total: int, rates: DiskRates, open_file: type[PosixFile] = PosixFile
) -> Iterator[Way]:
    """Give the disk tier: bytes of page-locked memory, in and out, as a step moves them."""
    tier = DiskTier(folder, rates=rates, queue_bytes=2 * total, open_file=open_file)
    data = [tier.host_buffer(TENSOR_BYTES).random_() for _ in range(total // TENSOR_BYTES)]
    out = [tier.host_buffer(TENSOR_BYTES) for _ in data]
    tickets: list[Any] = []
    # The file grows before it is timed, and blocks that were never written cost more.
    for warm in [tier.store(t) for t in data]:
        assert warm is not None
    tier.drain()

    def write() -> tuple[int, None]:
        for t in data:
            t[:: 1 << 12] += 1  # fresh bytes in every block
        tickets[:] = [tier.store(t) for t in data]
        tier.drain()
        return total, None

    def read() -> tuple[int, None]:
        order = reversed(list(zip(tickets, out, strict=True)))
        for task in [tier.fetch(ticket, t) for ticket, t in order]:
            task.result()
        return total, None

    try:
        yield Way(name, write, read)
        assert all(torch.equal(a, b) for a, b in zip(data, out, strict=True))
    finally:
        tier.close()


@contextmanager
def of_torch(folder: str, total: int) -> Iterator[Way]:
    """Give torch.save and torch.load, a file a tensor, through the page cache and synced."""
    data = [torch.randint(0, 256, (TENSOR_BYTES,), dtype=torch.uint8) for _ in range(2)]
    paths = [Path(folder, f"{i}.pt") for i in range(total // TENSOR_BYTES)]

    def write() -> tuple[int, None]:
        for i, path in enumerate(paths):
            with open(path, "wb") as file:
                torch.save(data[i % 2], file)
                file.flush()
                os.fsync(file.fileno())
        return total, None

    def read() -> tuple[int, None]:
        for path in paths:
            with open(path, "rb") as file:  # not from the page cache, which the write has filled
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            torch.load(path)
        return total, None

    yield Way("torch.save + fsync, torch.load", write, read)


@contextmanager
def of_dd(folder: str, total: int) -> Iterator[Way]:
    """Give dd with O_DIRECT and requests of 8 MiB, one after the other."""
    path, count = Path(folder, "dd"), total >> 23

    def run(*words: str) -> tuple[int, None]:
        subprocess.run(["dd", "bs=8M", f"count={count}", *words], check=True, capture_output=True)
        return count << 23, None

    yield Way(
        "dd, O_DIRECT, 8 MiB",
        lambda: run("if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc"),
        lambda: run(f"if={path}", "of=/dev/null", "iflag=direct"),
    )


@contextmanager
def of_fio(folder: str, total: int, rates: DiskRates) -> Iterator[Way]:
    """Give fio with the probe's requests and threads, by its own time."""

    def run(kind: str, threads: int) -> tuple[int, float]:
        each = max(rates.request_bytes, total // threads)
        done = subprocess.run(
            [
                "fio", f"--rw={kind}", "--name=x", f"--directory={folder}", "--direct=1",
                f"--bs={rates.request_bytes}", f"--numjobs={threads}", f"--size={each}",
                "--ioengine=psync", "--group_reporting", "--output-format=json", "--thread",
            ],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        (job,) = json.loads(done.stdout)["jobs"]
        return each * threads, each * threads / job[kind]["bw_bytes"]

    yield Way(
        "fio, O_DIRECT, as the probe chose",
        lambda: run("write", rates.write_threads),
        lambda: run("read", rates.read_threads),
    )


def disk(arguments: argparse.Namespace, report: Callable[[str], None]) -> dict[str, Rows]:
    """Return the probe's points, and a row for each way, which take turns."""
    total = arguments.mb * MB // TENSOR_BYTES * TENSOR_BYTES
    folder = arguments.folder or os.getcwd()
    with tempfile.TemporaryDirectory(dir=folder) as own:
        report(f"probing {folder}")
        try:
            rates, its = measure_files(own, (PosixFile, KvikioFile))
            second = [of_tier("the same by kvikio", own, total, its, KvikioFile)]
        except DiskError as error:
            report(f"no row of kvikio: {error}")
            rates, second = measure_rates(own), []
        ways = [of_tier("bitslab disk tier", own, total, rates), *second]
        ways += [of_torch(own, total), of_dd(own, total)]
        if shutil.which("fio"):
            ways.append(of_fio(own, total, rates))
        else:
            report("fio is not installed: dd stands for it")
        with ExitStack() as stack:
            opened = [stack.enter_context(way) for way in ways]
            for turn in range(arguments.repetitions):
                report(f"turn {turn + 1} of {arguments.repetitions}")
                for way in opened[turn % len(opened) :] + opened[: turn % len(opened)]:
                    way.run()
        rows: Rows = [way.row(rates) for way in opened]
    points: Rows = [
        {
            "request MiB": point.request_bytes / (1 << 20),
            "threads": point.threads,
            "write GB/s": point.write_bytes_per_s / 1e9,
            "read GB/s": point.read_bytes_per_s / 1e9,
        }
        for point in rates.points
    ]
    chosen = (
        f"{rates.request_bytes >> 20} MiB, {rates.write_threads} and {rates.read_threads} threads; "
        f"both at once {rates.write_while_reading_bytes_per_s / 1e9:.2f} and "
        f"{rates.read_while_writing_bytes_per_s / 1e9:.2f} GB/s"
    )
    direct = "O_DIRECT" if rates.direct else "no O_DIRECT: the page cache counts"
    needed = required_bytes_per_s(arguments.step_gb * 1e9, arguments.step_seconds) / 1e9
    title = f"{total / 1e6:,.0f} MB in {folder}, tensors of {TENSOR_BYTES >> 20} MiB, {direct}"
    ask = f"a step of {arguments.step_seconds:g} s and {arguments.step_gb:g} GB asks {needed:.3g}"
    return {f"Probe: chosen {chosen}": points, f"{title}; {ask} GB/s": rows}
