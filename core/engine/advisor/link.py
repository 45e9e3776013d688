"""What the link between host memory and a device carries, and how long a gather takes.

The model has two limits. Bytes: the copy engine and a kernel's own reads (zero-copy) have a rate
each. Address translation: a GPU keeps the addresses of about 1 GiB of host memory at hand, and
every row beyond must be looked up first, at 30 to 50 million lookups a second whatever the row's
size. Sorted ids need one lookup for each distinct page of 64 KiB, unsorted ids one for each row;
this alone explains when sorting pays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...devices import checked_device
from ...errors import ArgumentError, ArgumentTypeError, MissingExtraError
from ..kernels.cuda import kernels_on
from ..transfer.lanes import StreamLane

LINK_VARIABLE = "BITSLAB_LINK"

GIB = 1 << 30
LINE_BYTES = 128  # the least that a row costs: one aligned read
STRADDLE_BYTES = 96  # what a row costs more that does not begin at a line (H200: 85 to 114)
PAGE_BYTES = 64 << 10  # fitted: with it, pages of sorted ids cost what rows of unsorted ones do
PROBE_BYTES = 64 << 20
PROBE_ROW_BYTES = 1024
BOTH_WAYS_COPIES = 4  # of half as many bytes, each way, so that both directions are busy for long
REPEATS = 3

# NVIDIA H200, PCIe 5 x16, driver 580, CUDA 13.0, 2026-11, batches of 200,000 to 1,000,000 fresh
# random ids: lookups per second by the size of the table. The first is the limit of bytes (a line
# a row); no table of half a GiB was slower.
H200_RANDOM_ROWS = (
    (GIB // 2, 400e6),
    (1 * GIB, 109e6),
    (2 * GIB, 56e6),
    (4 * GIB, 41e6),
    (8 * GIB, 33e6),
    (16 * GIB, 31e6),
    (32 * GIB, 29.5e6),
)


@dataclass(frozen=True)
class LinkModel:
    """The link of one device, with the figures of an H200 (PCIe 5 x16, 2026-11) as defaults.

    Parameters
    ----------
    host_to_device_bytes_per_s, device_to_host_bytes_per_s : float
        Rates of the copy engine, page-locked memory, large copies.
    zero_copy_bytes_per_s : float
        Rate at which a kernel reads page-locked host memory by itself.
    copy_seconds : float
        What every copy costs in addition to its bytes.
    host_gather_bytes_per_s : float
        Rate at which the host's processors collect scattered rows into one buffer.
    random_rows_per_s : tuple of (int, float)
        Points (table size in bytes, address lookups per second), ascending; between them straight
        in logarithms, beyond them flat. Empty: no such limit.
    page_bytes : int
        What one lookup makes readable.
    repeats_saved : float
        Share of the repeated ids of a sorted batch whose bytes come from the GPU's caches.
    sort_seconds, sort_seconds_per_id : float
        What sorting the ids costs.
    source : str
        Where the figures come from, in words.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        When a figure is no number or not positive (costs: negative).
    """

    host_to_device_bytes_per_s: float = 55.5e9
    device_to_host_bytes_per_s: float = 55.4e9
    zero_copy_bytes_per_s: float = 51e9
    copy_seconds: float = 8.5e-6  # 1 MiB crosses at 38 GB/s, 4 MiB at 50, 16 MiB at 54
    host_gather_bytes_per_s: float = 1.4e9  # torch indexing on 16 cores, then a copy
    random_rows_per_s: tuple[tuple[int, float], ...] = H200_RANDOM_ROWS
    page_bytes: int = PAGE_BYTES
    repeats_saved: float = 0.6  # tables of 0.5 to 4 GiB, 1,000,000 ids: between 0.5 and 0.9
    sort_seconds: float = 75e-6  # 0.1 ms for 200,000 ids, 0.2 ms for 1,000,000
    sort_seconds_per_id: float = 0.125e-9
    source: str = "figures of an H200"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "random_rows_per_s":
                object.__setattr__(self, field.name, _checked_points(value))
            elif field.name == "source":
                if not isinstance(value, str):
                    raise ArgumentTypeError(f"source: expected a str, got {value!r:.60}")
            else:
                may_be_zero = field.name.endswith(("_seconds", "_per_id", "_saved"))
                _check_number(field.name, value, may_be_zero)

    def with_figures(self, given: Mapping[str, Any]) -> LinkModel:
        """Return the model with some fields replaced, by name.

        Raises
        ------
        ArgumentError
            For a name that is no field.
        """
        accepted = [field.name for field in dataclasses.fields(self)]
        unknown = sorted(set(given) - set(accepted))
        if unknown:
            raise ArgumentError(f"given: unknown figures {unknown}, accepted are {accepted}")
        return dataclasses.replace(self, **given)

    def scaled_to(self, zero_copy_bytes_per_s: float) -> LinkModel:
        """Return the model of a link that is faster or slower, lookups in the same proportion."""
        factor = zero_copy_bytes_per_s / self.zero_copy_bytes_per_s
        points = tuple((size, rate * factor) for size, rate in self.random_rows_per_s)
        return dataclasses.replace(
            self, zero_copy_bytes_per_s=zero_copy_bytes_per_s, random_rows_per_s=points
        )

    # Predictions

    def copy_time(self, n_bytes: float) -> float:
        """Return the seconds of one copy of contiguous bytes from host to device."""
        return self.copy_seconds + n_bytes / self.host_to_device_bytes_per_s

    def lookups_per_s(self, table_bytes: float) -> float:
        """Return the address lookups per second in a table of this size; inf: no limit."""
        points = self.random_rows_per_s
        if not points:
            return math.inf
        at = bisect_right([size for size, _ in points], table_bytes)
        if at in (0, len(points)):
            return points[max(0, at - 1)][1]
        (low, slow), (high, fast) = points[at - 1 : at + 1]
        part = math.log(table_bytes / low) / math.log(high / low)
        return float(slow * (fast / slow) ** part)

    def gather_seconds(
        self,
        table_bytes: float,
        row_bytes: float,
        n_rows: int,
        *,
        sorted: bool,
        straddles: bool = False,
    ) -> float:
        """Return the seconds of a zero-copy gather of random rows.

        Parameters
        ----------
        table_bytes : float
            Host memory over which the rows are spread.
        row_bytes : float
            Bytes that cross for a row; less than a line of 128 bytes counts as one.
        n_rows : int
            Ids in the batch, drawn evenly; they may repeat.
        sorted : bool
            Whether the ids are sorted on the device first; the sort counts.
        straddles : bool
            Whether rows begin anywhere, and not at lines of 128 bytes: then each touches most of
            one more.
        """
        if n_rows < 1:
            return 0.0
        fetched = lookups = float(n_rows)
        seconds = 0.0
        if sorted:
            seconds = self.sort_seconds + self.sort_seconds_per_id * n_rows
            lookups = _distinct(n_rows, table_bytes / self.page_bytes)
            repeats = n_rows - _distinct(n_rows, table_bytes / max(1.0, row_bytes))
            fetched -= self.repeats_saved * repeats
        crossing = row_bytes + STRADDLE_BYTES if straddles else row_bytes
        bytes_seconds = fetched * max(crossing, LINE_BYTES) / self.zero_copy_bytes_per_s
        return seconds + max(bytes_seconds, lookups / self.lookups_per_s(table_bytes))

    def pays_to_sort(self, table_bytes: float, row_bytes: float, n_rows: int) -> bool:
        """Return whether sorting the ids saves 5 % or more.

        Less is within the model's error, and where it comes from repeated ids alone, a batch
        without repeats would lose.
        """
        plain = self.gather_seconds(table_bytes, row_bytes, n_rows, sorted=False)
        return self.gather_seconds(table_bytes, row_bytes, n_rows, sorted=True) < 0.95 * plain


def _distinct(draws: float, values: float) -> float:
    """Return the expected number of distinct values among even draws with repeats."""
    values = max(1.0, values)
    return -values * math.expm1(-draws / values)


def _check_number(name: str, value: object, may_be_zero: bool) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name}: expected a number, got {value!r:.60}")
    if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
        least = "from 0 on" if may_be_zero else "above 0"
        raise ArgumentError(f"{name}: {value}, accepted are finite numbers {least}")


def _checked_points(points: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = tuple((size, rate) for size, rate in points)
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"random_rows_per_s: expected pairs (table bytes, rows per second), got {points!r:.60}"
        ) from None
    for pair in pairs:
        for number in pair:
            _check_number("random_rows_per_s", number, may_be_zero=False)
    sizes = [size for size, _ in pairs]
    if sizes != sorted(set(sizes)):
        raise ArgumentError(f"random_rows_per_s: table sizes {sizes}, expected ascending ones")
    return pairs


# Measuring

# On the CPU nothing is looked up by a device, and sorting costs more than it saves.
_CPU = LinkModel(
    copy_seconds=0.0,
    random_rows_per_s=(),
    repeats_saved=0.0,
    sort_seconds=0.0,
    sort_seconds_per_id=70e-9,  # torch.sort of 1,000,000 int64, two cores
)
_RATES = ("host_to_device_bytes_per_s", "device_to_host_bytes_per_s", "zero_copy_bytes_per_s")

_lock = threading.Lock()
_measured: dict[torch.device, LinkModel] = {}
_shares: dict[torch.device, float] = {}


def measure_link(
    device: torch.device | str,
    *,
    given: LinkModel | Mapping[str, Any] | None = None,
    deep_bytes: int | None = None,
) -> LinkModel:
    """Measure the link of a device: once in a process, in some tens of milliseconds.

    Copies of 64 MiB of page-locked memory each way, and rows of 1 KiB read by the project's own
    kernel (compiled at its first use on a machine, which takes longer). The rest is the default
    model, in proportion. Waits for the GPU, so that the first call must not come while a CUDA graph
    is captured. For the CPU, the rate of copies in memory stands for the link.

    Parameters
    ----------
    device : torch.device or str
        A GPU or the CPU.
    given : LinkModel or mapping, optional
        A whole model, which is returned; or figures by the field names of `LinkModel`, which win
        over those of the environment variable BITSLAB_LINK (a JSON object of the same kind), and
        these over measured ones. Nothing is measured when all three rates are known.
    deep_bytes : int, optional
        Measure also random rows out of tables of 512 MiB, 1 GiB, 2 GiB and so on up to this many
        bytes, instead of scaling the curve of an H200. It page-locks as much host memory for
        that time. What it finds replaces the cached measurement.

    Returns
    -------
    LinkModel

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For a figure or device that is not accepted.
    BitslabError
        When there is no such GPU.

    Notes
    -----
    Any thread may call it; the second waits for the first.
    """
    if isinstance(given, LinkModel):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise ArgumentTypeError(
            f"given: expected a LinkModel or a mapping, got {type(given).__name__}"
        )
    figures = {**_figures_of_environment(), **(given or {})}
    LinkModel().with_figures(figures)  # refuses bad ones before anything is measured
    where = checked_device(device)
    if figures.keys() >= set(_RATES) and deep_bytes is None:
        return _with_given(_CPU if where.type == "cpu" else LinkModel(), figures, "given figures")
    with _lock:
        if where not in _measured:
            _measured[where] = _measure_cpu() if where.type == "cpu" else _measure_gpu(where)
        if deep_bytes is not None and where.type == "cuda":
            _measured[where] = _measure_random_rows(_measured[where], where, deep_bytes)
        model = _measured[where]
    return _with_given(model, figures, f"{model.source}, some figures given") if figures else model


def _with_given(model: LinkModel, figures: Mapping[str, Any], source: str) -> LinkModel:
    rate = model.with_figures(figures).zero_copy_bytes_per_s
    return model.scaled_to(rate).with_figures({"source": source, **figures})


def _figures_of_environment() -> Mapping[str, Any]:
    text = os.environ.get(LINK_VARIABLE)
    if not text:
        return {}
    try:
        figures = json.loads(text)
    except ValueError as error:
        raise ArgumentError(f"{LINK_VARIABLE}: not JSON: {error}: {text!r:.60}") from None
    if not isinstance(figures, dict):
        raise ArgumentError(f"{LINK_VARIABLE}: expected a JSON object, got {text!r:.60}")
    try:
        LinkModel().with_figures(figures)
    except (ArgumentError, ArgumentTypeError) as error:
        raise type(error)(f"{LINK_VARIABLE}: {error}") from None
    return figures


def _measure_cpu() -> LinkModel:
    # By numpy: torch's threads hang in a forked child.
    n_bytes = 16 << 20  # some milliseconds
    source, target = np.ones(n_bytes, np.uint8), np.empty(n_bytes, np.uint8)
    seconds = []
    for _ in range(1 + REPEATS):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    rate = n_bytes / min(seconds[1:])  # the first touches fresh memory
    return dataclasses.replace(
        _CPU,
        host_to_device_bytes_per_s=rate,
        device_to_host_bytes_per_s=rate,
        zero_copy_bytes_per_s=rate,
        host_gather_bytes_per_s=rate,
        source="measured copies in memory",
    )


def _measure_gpu(device: torch.device) -> LinkModel:
    from ..memory.host import HostBuffer

    model = LinkModel()
    name = torch.cuda.get_device_name(device)
    with own_stream(device), contextlib.closing(HostBuffer.allocate(PROBE_BYTES)) as buffer:
        host = buffer.tensor
        try:
            here = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            here = None
        if here is None or not buffer.pinned:
            what = "page-locked" if here is not None else "device"
            source = f"{model.source}: {name} has no {what} memory left to measure it"
            return dataclasses.replace(model, source=source)
        down, up = (
            min(
                stream_seconds(target.copy_, source, True) for _ in range(REPEATS)
            )  # True: non_blocking
            for target, source in ((here, host), (host, here))
        )
        down_rate = PROBE_BYTES / max(1e-9, down - model.copy_seconds)
        try:
            zero_copy = _measure_zero_copy(host, here)
        except MissingExtraError:  # no kernels, and nothing that would read by itself either
            zero_copy = down_rate * model.zero_copy_bytes_per_s / model.host_to_device_bytes_per_s
    return dataclasses.replace(
        model.scaled_to(zero_copy),
        host_to_device_bytes_per_s=down_rate,
        device_to_host_bytes_per_s=PROBE_BYTES / max(1e-9, up - model.copy_seconds),
        source=f"measured on {name}, random rows in proportion to an H200's",
    )


def share_both_ways(device: torch.device) -> float:
    """Return the share of its rate that a direction of the link has while both copy, up to 1.

    Measured once in a process, in some tens of milliseconds, by copies of page-locked memory each
    way alone and at once. 1 for a CPU, where there is no link; where BITSLAB_LINK gives all rates,
    so that nothing is measured; and where there is no memory to measure it with.
    """
    if device.type != "cuda" or _figures_of_environment().keys() >= set(_RATES):
        return 1.0
    where = checked_device(device)
    with _lock:
        if where not in _shares:
            _shares[where] = _measure_both_ways(where)
        return _shares[where]


def _measure_both_ways(device: torch.device) -> float:
    from ..memory.host import HostBuffer

    with own_stream(device), contextlib.closing(HostBuffer.allocate(PROBE_BYTES)) as buffer:
        try:
            here = torch.empty(2, PROBE_BYTES // 2, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return 1.0
        if not buffer.pinned:
            return 1.0
        down, up = buffer.tensor.view(2, -1)
        ways = [
            (StreamLane(device), target, source)
            for target, source in ((here[0], down), (up, here[1]))
        ]
        alone = [min(_seconds_at_once([way])[0] for _ in range(REPEATS)) for way in ways]
        return max(share_of_ends(alone, _seconds_at_once(ways)) for _ in range(REPEATS))


def _seconds_at_once(ways: list[tuple[StreamLane, torch.Tensor, torch.Tensor]]) -> list[float]:
    """Return when the copies of each way are over, which all begin now; waits for them."""
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    ends = []
    for lane, _, _ in ways:
        lane.wait(begin)
        ends.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
    for _ in range(BOTH_WAYS_COPIES):  # in turn, so that none is far ahead
        for lane, target, source in ways:
            with lane.on():
                target.copy_(source, non_blocking=True)
    for (lane, _, _), end in zip(ways, ends, strict=True):
        lane.record(end)
    for end in ends:
        end.synchronize()
    return [float(begin.elapsed_time(end) / 1e3) for end in ends]


def share_of_ends(alone_s: list[float], ends_s: list[float]) -> float:
    """Return the mean share of two directions while both were busy, up to 1.

    Parameters
    ----------
    alone_s : list of float
        Seconds that each takes by itself.
    ends_s : list of float
        When each was over that began at once; the later one had the link for itself behind that.
    """
    together_s = max(1e-9, min(ends_s))
    shares = [
        (alone - (end - together_s)) / together_s
        for alone, end in zip(alone_s, ends_s, strict=True)
    ]
    return min(1.0, max(0.05, sum(shares) / len(shares)))


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Work on a stream of its own, whose time is not that of what the caller's has still to do.

    It begins once the caller's stream has done that. On a CPU this does nothing.
    """
    if device.type == "cpu":
        yield
        return
    torch.cuda.current_stream(device).synchronize()
    lane = StreamLane(device)
    with torch.cuda.device(device), lane.on():
        try:
            yield
        finally:  # memory of the caller's stream may be freed now
            lane.synchronize()


def stream_seconds(work: Callable[..., object], *args: Any) -> float:
    """Return how long the current stream takes for ``work(*args)``; waits for it."""
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    work(*args)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end) / 1e3)


def work_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return how long ``work()`` takes on a CPU or, with `own_stream`, on a GPU; waits for it."""
    if device.type == "cuda":
        return stream_seconds(work)
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _measure_zero_copy(host: torch.Tensor, here: torch.Tensor) -> float:
    """Return bytes per second of random rows; every repetition reads rows not read before."""
    kernels = kernels_on(here.device)
    rows = host.view(-1, PROBE_ROW_BYTES)
    out = here.view(-1, PROBE_ROW_BYTES)
    order = torch.randperm(rows.shape[0], device=here.device, generator=_drawn_on(here.device))
    parts = order.chunk(1 + REPEATS)
    seconds = [
        stream_seconds(kernels.copy_rows, rows, PROBE_ROW_BYTES, ids, out[: ids.shape[0]])
        for ids in parts
    ]
    return len(parts[1]) * PROBE_ROW_BYTES / min(seconds[1:])  # the first compiles


def _drawn_on(device: torch.device) -> torch.Generator:
    """Return random numbers of our own: those of torch are the caller's, as for its dropout."""
    return torch.Generator(device).manual_seed(0)


def _measure_random_rows(model: LinkModel, device: torch.device, deep_bytes: int) -> LinkModel:
    """Replace the curve's points up to `deep_bytes` by measured ones and scale the others."""
    from ..memory.host import HostBuffer

    row_bytes, n_ids, points = LINE_BYTES, 200_000, []
    sizes = [size for size, _ in H200_RANDOM_ROWS if size <= deep_bytes]
    if not sizes:
        raise ArgumentError(f"deep_bytes: {deep_bytes}, accepted are numbers from {GIB // 2}")
    kernels = kernels_on(device)
    with own_stream(device), contextlib.closing(HostBuffer.allocate(sizes[-1])) as buffer:
        if not buffer.pinned:
            return model
        table = buffer.tensor.view(-1, row_bytes)
        out = torch.empty((n_ids, row_bytes), dtype=torch.uint8, device=device)
        drawn = _drawn_on(device)
        for size in sizes:
            seconds = []
            for _ in range(REPEATS):  # fresh ids each time; address translations are kept warm
                rows = size // row_bytes
                ids = torch.randint(rows, (n_ids,), device=device, generator=drawn)
                seconds.append(stream_seconds(kernels.copy_rows, table, row_bytes, ids, out))
            points.append((size, n_ids / min(seconds[1:])))
    factor = points[-1][1] / dict(H200_RANDOM_ROWS)[sizes[-1]]
    rest = [(size, rate * factor) for size, rate in H200_RANDOM_ROWS if size > sizes[-1]]
    return dataclasses.replace(
        model,
        random_rows_per_s=(*points, *rest),
        source=f"measured on {torch.cuda.get_device_name(device)}",
    )
