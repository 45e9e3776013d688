"""What a folder's device writes and reads, by one file or several in turns: two seconds each."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, get_args

import torch

from ...engine.memory.host import HostBuffer
from ...engine.transfer.lanes import ThreadLane
from ...errors import ArgumentError
from .posix_file import PosixFile, free_bytes
from .tensor_file import FileKind

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
class FileRates:
    """What one kind of file gave, asked as it likes best, one direction at a time.

    Parameters
    ----------
    file : str
        "posix" or "kvikio".
    write_bytes_per_s, read_bytes_per_s : float
        What came of it.
    """

    file: FileKind
    write_bytes_per_s: float
    read_bytes_per_s: float

    @property
    def seconds_per_byte(self) -> float:
        """How long a byte takes that is written and read again."""
        return 1 / self.write_bytes_per_s + 1 / self.read_bytes_per_s


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
    file : str
        With which file: "posix", or "kvikio".
    file_reason : str
        Why that one; "" where no other was thought of.
    files : tuple of FileRates
        All that were measured.
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
    file: FileKind = "posix"
    file_reason: str = ""
    files: tuple[FileRates, ...] = ()

    @property
    def own(self) -> FileRates:
        """The rates of the file itself."""
        return FileRates(self.file, self.write_bytes_per_s, self.read_bytes_per_s)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> DiskRates:
        """Return what `dataclasses.asdict` has made a dict of.

        Raises
        ------
        ArgumentError, KeyError, TypeError
            For anything else.
        """
        figures = dict(found)
        points = tuple(RatePoint(**point) for point in figures.pop("points"))
        files = tuple(FileRates(**each) for each in figures.pop("files"))
        return cls(**figures, points=points, files=files)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("points", "direct", "file", "file_reason", "files"):
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < float("inf"):
                raise ArgumentError(f"{field.name}: {value!r}, expected a positive number")
        if self.file not in get_args(FileKind):
            accepted = ", ".join(get_args(FileKind))
            raise ArgumentError(f"file: {self.file!r}, accepted are {accepted}")


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
    (rates,) = measure_files(
        folder,
        [PosixFile],
        seconds=seconds,
        requests_bytes=requests_bytes,
        threads=threads,
        file_bytes=file_bytes,
    )
    return rates


def measure_files(
    folder: str | os.PathLike[str],
    open_files: Sequence[Callable[[str], PosixFile]],
    *,
    seconds: float = SECONDS,
    requests_bytes: tuple[int, ...] = REQUESTS_BYTES,
    threads: tuple[int, ...] = THREADS,
    file_bytes: int = FILE_BYTES,
) -> list[DiskRates]:
    """Measure what a folder's device carries with each of several files, which take turns.

    Parameters as for `measure_rates`; `seconds` and `file_bytes` are those of each file.
    """
    begin = time.perf_counter()
    with ExitStack() as stack:
        probes = []
        for open_file in open_files:
            probe = _Probe(open_file(os.fspath(folder)), max(threads))
            stack.callback(probe.close)
            probes.append(probe)
        for probe in probes:
            probe.fill(max(requests_bytes), file_bytes)
        filled_s = (time.perf_counter() - begin) / len(probes)
        left_s = max(seconds / 2, seconds - filled_s)
        each_s = (1 - CHOSEN_SHARE) * left_s / (2 * len(requests_bytes) * len(threads))
        for request_bytes in requests_bytes:
            for n in threads:
                for probe in probes:
                    probe.measure(request_bytes, n, each_s)
        # Longer, because devices and virtual disks take what comes first faster than the rest.
        found = {id(probe): probe.choose(CHOSEN_SHARE * left_s) for probe in reversed(probes)}
        return [found[id(probe)] for probe in probes]


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
    """A file, memory of each thread, the threads, and what they gave."""

    def __init__(self, file: PosixFile, threads: int) -> None:
        self.file = file
        self.points: list[RatePoint] = []
        self._threads = 2 * threads  # both directions at once
        self._memory: list[HostBuffer] = []
        self._lane = ThreadLane("bitslab-probe", self._threads)

    def fill(self, request_bytes: int, file_bytes: int) -> None:
        """Write the file once: blocks that never were are read with no access to the device."""
        least = self._threads * request_bytes
        size = max(least, min(file_bytes, free_bytes(self.file.path) // 4))
        self.file.grow(size - size % request_bytes)
        generator = torch.Generator().manual_seed(0)
        for _ in range(self._threads):
            memory = HostBuffer.allocate(request_bytes, pin=False, private=True)
            self._memory.append(memory)
            memory.tensor.random_(0, 256, generator=generator)  # what no device compresses
        for at in range(0, self.file.nbytes, request_bytes):
            self.file.write(at, self._memory[0].tensor)

    def measure(self, request_bytes: int, threads: int, seconds: float) -> None:
        """Add the point of one size of requests and number of threads, for so long each way."""
        (write,) = self.run([(self.write, threads)], request_bytes, seconds)
        (read,) = self.run([(self.read, threads)], request_bytes, seconds)
        self.points.append(RatePoint(request_bytes, threads, write, read))

    def choose(self, seconds: float) -> DiskRates:
        """Measure the best of the points again, for so long in all."""
        request_bytes, write_threads, read_threads = _best(self.points)
        writing, reading = (self.write, write_threads), (self.read, read_threads)
        (write,) = self.run([writing], request_bytes, seconds / 3)
        (read,) = self.run([reading], request_bytes, seconds / 3)
        together = self.run([writing, reading], request_bytes, seconds / 3)
        rates = DiskRates(
            request_bytes=request_bytes,
            write_threads=write_threads,
            read_threads=read_threads,
            write_bytes_per_s=write,
            read_bytes_per_s=read,
            write_while_reading_bytes_per_s=together[0],
            read_while_writing_bytes_per_s=together[1],
            direct=self.file.direct,
            points=tuple(self.points),
            file=self.file.kind,
        )
        return dataclasses.replace(rates, files=(rates.own,))

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
