"""What a folder's device writes and reads: measured once, in about two seconds, and kept."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.advisor.cache import machine_name, read_cached, write_cached
from ...engine.memory.host import HostBuffer
from ...engine.transfer.lanes import ThreadLane
from ...errors import ArgumentError
from .posix_file import PosixFile, free_bytes
from .tensor_file import DiskError

#: Bytes of a request, and threads that make them at once.
REQUESTS_BYTES = (1 << 20, 8 << 20)
THREADS = (1, 2, 4)
#: The probe writes over a file of so many bytes again and again.
FILE_BYTES = 256 << 20
#: Larger requests and fewer threads, which take less of the CPU, are chosen where they reach this.
CLOSE_ENOUGH = 0.95
SECONDS = 2.0
#: Of the time, for what is chosen in the end.
CHOSEN_SHARE = 0.5
CACHE_KIND = "disk"
_VERSION = 1


@dataclass(frozen=True)
class RatePoint:
    """What one size of requests and number of threads gave.

    Parameters
    ----------
    request_bytes, threads : int
        How it was asked.
    write_bytes_per_s, read_bytes_per_s : float
        What came of it.
    """

    request_bytes: int
    threads: int
    write_bytes_per_s: float
    read_bytes_per_s: float


@dataclass(frozen=True)
class DiskRates:
    """What a folder's device carries, and how it is best asked.

    Parameters
    ----------
    request_bytes : int
        Of one write or read.
    write_threads, read_threads : int
        That write or read at once.
    write_bytes_per_s, read_bytes_per_s : float
        With these, one direction at a time.
    write_while_reading_bytes_per_s, read_while_writing_bytes_per_s : float
        Both at once.
    direct : bool
        Whether the page cache was bypassed; if not, the rates are those of the page cache as well.
    points : tuple of RatePoint
        All that was measured.
    """

    request_bytes: int
    write_threads: int
    read_threads: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    write_while_reading_bytes_per_s: float
    read_while_writing_bytes_per_s: float
    direct: bool
    points: tuple[RatePoint, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("points", "direct"):
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < float("inf"):
                raise ArgumentError(f"{field.name}: {value!r}, expected a positive number")


def disk_rates(folder: str | os.PathLike[str], *, again: bool = False) -> DiskRates:
    """Return what a folder's device carries: as it was measured before, or measured now.

    Figures are kept where the advisor keeps its own, by machine and file system.

    Parameters
    ----------
    folder : str or os.PathLike
        A folder that can be written to.
    again : bool
        Measure in any case.

    Raises
    ------
    DiskError
        When the folder cannot be written to, or has no space for a few requests.
    """
    try:
        device = os.stat(folder).st_dev
    except OSError as error:
        raise DiskError(f"disk: {os.fspath(folder)}: {error.strerror}") from error
    key = f"{_VERSION} {machine_name(torch.device('cpu'))} {os.major(device)}:{os.minor(device)}"
    known = None if again else _known(key)
    if known is not None:
        return known
    with _alone(folder):  # ranks that begin together would measure what is left by the others
        known = None if again else _known(key)
        if known is not None:
            return known
        rates = measure_rates(folder)
        write_cached(CACHE_KIND, key, {"rates": dataclasses.asdict(rates)})
        return rates


def _known(key: str) -> DiskRates | None:
    """Return what was measured before; None where that is of another version, or damaged."""
    found = read_cached(CACHE_KIND, key)
    try:
        return None if found is None else _from_json(found)
    except (ArgumentError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _alone(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Wait until no other process measures in a folder, where its file system has locks."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # measuring says what is wrong with it
        yield
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _from_json(found: Mapping[str, Any]) -> DiskRates:
    figures = dict(found["rates"])
    points = tuple(RatePoint(**point) for point in figures.pop("points"))
    return DiskRates(**figures, points=points)


def measure_rates(
    folder: str | os.PathLike[str],
    *,
    seconds: float = SECONDS,
    requests_bytes: tuple[int, ...] = REQUESTS_BYTES,
    threads: tuple[int, ...] = THREADS,
    file_bytes: int = FILE_BYTES,
) -> DiskRates:
    """Measure what a folder's device carries.

    Parameters
    ----------
    folder : str or os.PathLike
        A folder that can be written to.
    seconds : float
        How long to measure in all.
    requests_bytes, threads : tuple of int
        What is tried.
    file_bytes : int
        Size of the file, at most; less where the file system has less to spare.

    Raises
    ------
    DiskError
        When the folder cannot be written to, or has no space for a few requests.
    """
    begin = time.perf_counter()
    probe = _Probe(folder, max(requests_bytes), max(threads), file_bytes)
    try:
        left_s = max(seconds / 2, seconds - (time.perf_counter() - begin))
        tries = 2 * len(requests_bytes) * len(threads)
        each_s = (1 - CHOSEN_SHARE) * left_s / tries
        points = []
        for request_bytes in requests_bytes:
            for n in threads:
                (write,) = probe.run([(probe.write, n)], request_bytes, each_s)
                (read,) = probe.run([(probe.read, n)], request_bytes, each_s)
                points.append(RatePoint(request_bytes, n, write, read))
        request_bytes, write_threads, read_threads = _best(points)
        # Longer, because devices and virtual disks take what comes first faster than the rest.
        writing, reading = (probe.write, write_threads), (probe.read, read_threads)
        chosen_s = CHOSEN_SHARE * left_s / 3
        (write,) = probe.run([writing], request_bytes, chosen_s)
        (read,) = probe.run([reading], request_bytes, chosen_s)
        together = probe.run([writing, reading], request_bytes, chosen_s)
        return DiskRates(
            request_bytes=request_bytes,
            write_threads=write_threads,
            read_threads=read_threads,
            write_bytes_per_s=write,
            read_bytes_per_s=read,
            write_while_reading_bytes_per_s=together[0],
            read_while_writing_bytes_per_s=together[1],
            direct=probe.file.direct,
            points=tuple(points),
        )
    finally:
        probe.close()


def _best(points: list[RatePoint]) -> tuple[int, int, int]:
    """Return size of requests, and threads that write and read: what costs least CPU."""

    def most(n_bytes: int) -> float:
        some = [p for p in points if p.request_bytes == n_bytes]
        return max(p.write_bytes_per_s for p in some) + max(p.read_bytes_per_s for p in some)

    sizes = sorted({p.request_bytes for p in points}, reverse=True)
    fastest = max(map(most, sizes))
    request_bytes = next(n for n in sizes if most(n) >= CLOSE_ENOUGH * fastest)
    some = sorted((p for p in points if p.request_bytes == request_bytes), key=lambda p: p.threads)

    def least(rate: Callable[[RatePoint], float]) -> int:
        best = max(map(rate, some))
        return next(p.threads for p in some if rate(p) >= CLOSE_ENOUGH * best)

    write = least(lambda p: p.write_bytes_per_s)
    return request_bytes, write, least(lambda p: p.read_bytes_per_s)


#: Writes or reads at an offset, from or to memory.
_Move = Callable[[int, torch.Tensor], None]


class _Probe:
    """A file, memory of each thread, and the threads."""

    def __init__(
        self, folder: str | os.PathLike[str], request_bytes: int, threads: int, file_bytes: int
    ) -> None:
        self.file = PosixFile(folder)
        self._threads = 2 * threads  # both directions at once
        least = self._threads * request_bytes
        size = max(least, min(file_bytes, free_bytes(self.file.path) // 4))
        self.file.grow(size - size % request_bytes)
        self._memory = [
            HostBuffer.allocate(request_bytes, pin=False, private=True)
            for _ in range(self._threads)
        ]
        generator = torch.Generator().manual_seed(0)
        for memory in self._memory:
            memory.tensor.random_(0, 256, generator=generator)  # what no device compresses
        self._lane = ThreadLane("bitslab-probe", self._threads)
        # Blocks that were never written are read with no access to the device.
        for at in range(0, self.file.nbytes, request_bytes):
            self.file.write(at, self._memory[0].tensor)

    def write(self, offset: int, data: torch.Tensor) -> None:
        self.file.write(offset, data)

    def read(self, offset: int, out: torch.Tensor) -> None:
        self.file.read(offset, out)

    def run(
        self, moves: Sequence[tuple[_Move, int]], request_bytes: int, seconds: float
    ) -> list[float]:
        """Return bytes per second of each kind of move, by so many threads, all at once."""
        tasks, begin, index = [], time.perf_counter(), 0
        for move, n in moves:
            row = []
            for _ in range(n):
                memory = self._memory[index].tensor[:request_bytes]
                first = self.file.nbytes // self._threads * index
                first -= first % request_bytes
                row.append(self._lane.submit(self._loop, move, first, memory, begin + seconds))
                index += 1
            tasks.append(row)
        rates = []
        for (move, _), row in zip(moves, tasks, strict=True):
            moved = sum(task.result() for task in row)
            if move == self.write and not self.file.direct:
                self.file.sync()
            rates.append(moved / (time.perf_counter() - begin))
        return rates

    def _loop(self, move: _Move, first: int, memory: torch.Tensor, end: float) -> int:
        """Move along the file, and begin again at its end, until it is time."""
        moved = 0
        while True:
            move((first + moved) % self.file.nbytes, memory)
            moved += memory.shape[0]
            if time.perf_counter() >= end:
                return moved

    def close(self) -> None:
        self._lane.close(None)
        self.file.close()
        for memory in self._memory:
            memory.close()
