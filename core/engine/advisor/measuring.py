"""Measures codecs of whole tensors on a device, to fit a time model: once, then kept on disk.

Sizes are drawn evenly in logarithms and shares of zeros evenly, by a sequence whose every beginning
covers both: so the measuring may stop when its time is up.
"""

from __future__ import annotations

import inspect
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...devices import checked_device
from ...errors import ArgumentError, ArgumentTypeError
from ...version import __version__
from ..codecs.blob import Blob, BlobCodec
from ..progress import Progress, ProgressFunction
from .cache import machine_name, read_cached, write_cached
from .codec_times import CodecTimes, TimeModel, TimeSample, fit_codec_times
from .link import own_stream, work_seconds
from .synthetic import SyntheticTensors

#: A codec that is fitted already, or a class that is fitted to each tensor.
CodecOrClass = BlobCodec | type[BlobCodec]

KIND = "times"  # of files in the cache folder
BUDGET_S = 30.0  # for a device
SPARSITY = (0.2, 0.8)  # of tensors for lossless codecs; dense ones for lossy
MAX_BYTES = {"cpu": 256 << 20, "cuda": 2_000_000_000}
MIN_BYTES = {"cpu": 256 << 10, "cuda": 1 << 20}
PILOT_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
SAMPLES = 60  # of a codec and size of elements
LEAST_SAMPLES = 8  # however long they take
#: Of each sample, of which the shortest counts: a CPU has other things to do now and then.
REPEATS = {"cpu": 4, "cuda": 2}
BUSY_BYTES = 256 << 20  # set to 0 while the host launches what is timed
SLACK = 0.1  # by how much fewer multiprocessors may make a codec slower

_lock = threading.Lock()
_known: dict[str, CodecTimes] = {}


def fit_time_model(
    device: torch.device | str,
    codecs: Sequence[CodecOrClass],
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    budget_s: float = BUDGET_S,
    progress: ProgressFunction | bool | None = None,
    cache: bool = True,
) -> TimeModel:
    """Measure codecs on synthetic tensors and fit a model of their times.

    What was measured on a device before, in this process or another, is taken from the advisor's
    cache folder; only what is missing is measured. On a GPU the times are those of its own work,
    queued, and the fewest multiprocessors are found with which a codec takes at most 10 % longer
    (`TimeModel.sm_budget`).

    Parameters
    ----------
    device : torch.device or str
        A GPU or the CPU.
    codecs : sequence of BlobCodec or their classes
        What to measure. Those of one name, such as a lossy codec at all its rates, make one model
        over their ratios. A class is fitted to each tensor. Codecs that have nothing for the type
        of the device are left out.
    dtypes : sequence of torch.dtype
        Of the tensors, one for each size of elements; those that a codec does not take are left
        out.
    budget_s : float
        Seconds that measuring everything may take, fitting included as far as it can be foreseen;
        kernels that no cache has are compiled before.
    progress : callable, bool or None
        Called with the number of tensors measured and their total; False for silence.
    cache : bool
        Whether the cache folder is read and written.

    Returns
    -------
    TimeModel

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For an argument that is not accepted.

    Notes
    -----
    Any thread may call it; the second waits for the first. Waits for the GPU, so that it must not
    be called while a CUDA graph is captured.
    """
    where = checked_device(device)
    if not (isinstance(budget_s, int | float) and 0 < budget_s < math.inf):
        raise ArgumentError(f"budget_s: {budget_s!r:.60}, accepted are finite numbers above 0")
    sizes = [dtype.itemsize for dtype in dtypes]
    if len(set(sizes)) != len(sizes):
        raise ArgumentError(f"dtypes: elements of {sizes} B, expected one dtype for each size")
    tasks = {
        (name, dtype.itemsize): _Task(where, name, takers, dtype)
        for name, group in _by_name(codecs, where).items()
        for dtype in dtypes
        if (takers := [codec for codec in group if _takes(codec, dtype)])
    }
    with _lock:
        found: dict[tuple[str, int], CodecTimes] = {}
        for place, task in tasks.items():
            times = task.known(cache)
            if times is not None:
                found[place] = times
        missing = {place: task for place, task in tasks.items() if place not in found}
        total = SAMPLES * len(missing)
        with Progress("measuring codecs", total, progress) as bar, own_stream(where):
            for task in missing.values():
                task.compile()
            # Not before: what a process compiles once would leave no time to measure, for ever.
            end = time.monotonic() + budget_s
            for number, (place, task) in enumerate(missing.items()):
                left = (end - time.monotonic()) / (len(missing) - number)
                found[place] = task.measure(left, bar, cache)
    return TimeModel(found, source=f"measured on {machine_name(where)}")


def measure_codec(
    device: torch.device | str,
    codecs: Sequence[CodecOrClass],
    dtype: torch.dtype,
    *,
    n_samples: int = SAMPLES,
    budget_s: float = BUDGET_S,
    progress: ProgressFunction | bool | None = None,
) -> tuple[list[TimeSample], int | None]:
    """Measure codecs of one name on synthetic tensors; nothing is kept.

    Parameters
    ----------
    device, codecs, progress
        As for `fit_time_model`.
    dtype : torch.dtype
        Of the tensors.
    n_samples : int
        Tensors; fewer when the time is up.
    budget_s : float
        Seconds that it may take.

    Returns
    -------
    tuple of (list of TimeSample, int or None)
        What was measured, and the multiprocessors that it was measured with.

    Raises
    ------
    ArgumentError
        When the codecs have several names or none, or have nothing for the device or dtype.
    """
    where = checked_device(device)
    groups = _by_name(codecs, where)
    takers = [codec for group in groups.values() for codec in group if _takes(codec, dtype)]
    if len(groups) != 1 or not takers:
        raise ArgumentError(f"codecs: {sorted(groups)}, expected one that takes {dtype} on {where}")
    task = _Task(where, takers[0].name, takers, dtype)
    with _lock, Progress("measuring codecs", n_samples, progress) as bar, own_stream(where):
        task.compile()
        return task.samples(n_samples, budget_s, bar)


def _by_name(codecs: Sequence[CodecOrClass], device: torch.device) -> dict[str, list[CodecOrClass]]:
    groups: dict[str, list[CodecOrClass]] = {}
    for codec in codecs:
        cls = codec if isinstance(codec, type) else type(codec)
        if not issubclass(cls, BlobCodec):
            raise ArgumentTypeError(f"codecs: expected codecs of whole tensors, got {codec!r:.60}")
        if device.type in codec.device_types:
            groups.setdefault(codec.name, []).append(codec)
    return groups


def _takes(codec: CodecOrClass, dtype: torch.dtype) -> bool:
    if isinstance(codec, type):
        codec = codec.fit(torch.ones(64, dtype=dtype))  # some take what they were fitted to alone
    return codec.takes(dtype)


class _Task:
    """One codec and size of elements on one device, to be measured.

    Parameters
    ----------
    device : torch.device
        Where.
    name : str
        Name of the codecs.
    codecs : list of BlobCodec or their classes
        Which share it, taken in turn.
    dtype : torch.dtype
        Of the tensors.
    """

    def __init__(
        self, device: torch.device, name: str, codecs: list[CodecOrClass], dtype: torch.dtype
    ) -> None:
        self._device, self._codecs, self._dtype = device, codecs, dtype
        plans = [c.name if isinstance(c, type) else c.describe() for c in codecs]
        facts = [machine_name(device), __version__, name, *plans, f"{dtype.itemsize} B"]
        self._key = " | ".join(facts)

    def known(self, cache: bool) -> CodecTimes | None:
        """Return what was measured before."""
        times = _known.get(self._key)
        if times is None and cache:
            kept = read_cached(KIND, self._key)
            if kept is not None:
                try:
                    times = _known[self._key] = CodecTimes.from_config(kept["times"])
                except (ValueError, KeyError, TypeError):
                    return None
        return times

    def compile(self) -> None:
        """Run everything once, which compiles kernels that no cache has."""
        tensors = SyntheticTensors(self._dtype, PILOT_BYTES[self._device.type], self._device)
        for codec in self._codecs:
            self._sample(codec, tensors.make(tensors.max_bytes, 0.5), None)

    def measure(self, budget_s: float, bar: Progress, cache: bool) -> CodecTimes:
        """Measure, fit and keep."""
        samples, sm_budget = self.samples(SAMPLES, budget_s, bar)
        times = _known[self._key] = fit_codec_times(samples, sm_budget=sm_budget)
        if cache:
            write_cached(KIND, self._key, {"times": times.to_config()})
        return times

    def samples(
        self, n_samples: int, budget_s: float, bar: Progress
    ) -> tuple[list[TimeSample], int | None]:
        """Measure until the samples are complete or the time is up; return the launch setting."""
        end = time.monotonic() + budget_s
        largest = self._largest(n_samples, budget_s)
        smallest = min(MIN_BYTES[self._device.type], largest // 4)
        tensors = SyntheticTensors(self._dtype, largest, self._device)
        sm_budget = self._launch_setting(tensors)
        samples: list[TimeSample] = []
        for number in range(n_samples):
            if number >= LEAST_SAMPLES and time.monotonic() > end:
                bar.advance(n_samples - number)
                break
            codec = self._codecs[number % len(self._codecs)]
            # The additive sequence of two dimensions that covers a square most evenly.
            x, y = (0.5 + number * 0.7548776662) % 1, (0.5 + number * 0.5698402910) % 1
            size = int(smallest * (largest / smallest) ** x)
            sparsity = 0.0
            if codec.error_bound is None:
                sparsity = SPARSITY[0] + y * (SPARSITY[1] - SPARSITY[0])
            samples.append(self._sample(codec, tensors.make(size, sparsity), sm_budget))
            bar.advance(1)
        return samples, sm_budget

    def _largest(self, n_samples: int, budget_s: float) -> int:
        """Return the bytes of the largest tensor that memory and time allow."""
        kind = self._device.type
        begin = time.monotonic()
        pilot = SyntheticTensors(self._dtype, PILOT_BYTES[kind], self._device)
        making_s = (time.monotonic() - begin) / pilot.max_bytes
        sample_s = 0.0  # a byte
        for codec in self._codecs[:: max(1, len(self._codecs) // 4)]:
            begin = time.monotonic()
            self._sample(codec, pilot.make(pilot.max_bytes, 0.5), None)
            sample_s = max(sample_s, (time.monotonic() - begin) / pilot.max_bytes)
        largest, smallest = MAX_BYTES[kind], MIN_BYTES[kind]
        if kind == "cuda":  # for making a tensor, the tensor encoded and decoded, and some to spare
            largest = min(largest, torch.cuda.mem_get_info(self._device)[0] // 8)
        while largest > 4 * smallest:
            # Of sizes that are even in logarithms.
            mean = (largest - smallest) / math.log(largest / smallest)
            if making_s * largest + n_samples * sample_s * mean <= 0.7 * budget_s:
                break
            largest = int(largest / 1.1)
        return largest

    def _sample(
        self, codec_or_class: CodecOrClass, t: torch.Tensor, sm_budget: int | None
    ) -> TimeSample:
        codec = codec_or_class
        if isinstance(codec, type):
            codec = codec.fit(t[: 1 << 18])
        room = torch.empty(
            codec.max_encoded_bytes(t.shape, t.dtype), dtype=torch.uint8, device=t.device
        )
        out = torch.empty_like(t)
        setting: Mapping[str, Any] = {} if sm_budget is None else {"sm_budget": sm_budget}
        blob = codec.encode(t, room, **setting)
        share = blob.nbytes / t.nbytes
        encode_s = min(
            self._seconds(lambda: codec.encode(t, room, **setting))
            for _ in range(REPEATS[t.device.type])
        )
        decode_s = min(
            self._seconds(lambda: codec.decode(blob, out, **setting))
            for _ in range(REPEATS[t.device.type])
        )
        return TimeSample(t.nbytes, share, encode_s, decode_s)

    def _seconds(self, work: Callable[[], Blob | torch.Tensor]) -> float:
        """Return the seconds of queued work: a GPU is kept busy until all of it is launched."""
        if self._device.type == "cuda":
            room = min(BUSY_BYTES, torch.cuda.mem_get_info(self._device)[0] // 4)
            busy = torch.empty(room, dtype=torch.uint8, device=self._device)
            for _ in range(8):
                busy.zero_()
        return max(1e-9, work_seconds(self._device, work))

    def _launch_setting(self, tensors: SyntheticTensors) -> int | None:
        """Return the multiprocessors to launch on; None where there is no choice."""
        codec = self._codecs[len(self._codecs) // 2]
        if (
            self._device.type != "cuda"
            or "sm_budget" not in inspect.signature(codec.encode).parameters
        ):
            return None
        properties = torch.cuda.get_device_properties(self._device)
        nbytes = min(tensors.max_bytes, PILOT_BYTES["cuda"])
        t = tensors.make(nbytes, 0.5 if codec.error_bound is None else 0.0)

        def seconds(sm_budget: int) -> float:
            self._sample(codec, t, sm_budget)  # another grid may have to be compiled
            sample = self._sample(codec, t, sm_budget)
            return sample.encode_s + sample.decode_s

        return fewest_multiprocessors(seconds, properties.multi_processor_count)


def fewest_multiprocessors(
    seconds: Callable[[int], float], most: int, *, slack: float = SLACK
) -> int:
    """Return the fewest multiprocessors with which work takes little longer than with all.

    Parameters
    ----------
    seconds : callable
        Measures the work with a number of multiprocessors; called some ten times.
    most : int
        Multiprocessors of the device.
    slack : float
        Share of the best time by which it may take longer.

    Notes
    -----
    What is bound by memory needs few of them, and compute has the others meanwhile. Halves the
    number while that is good enough, then halves the range between the last good and the first bad.
    """
    best = seconds(most)
    good, bad = most, 0
    while good - bad > max(1, most // 16):
        middle = (good + bad) // 2
        took = seconds(middle)
        best = min(best, took)
        if took <= best * (1 + slack):
            good = middle
        else:
            bad = middle
    return good
