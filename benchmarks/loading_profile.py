"""Seconds of loading and packing by stage and thread, for ``llm.py --only loading --profile``.

Functions of the library are replaced by ones that keep time, while a measurement runs: a stage's
seconds are its own, those of stages inside it not counted. What a thread does outside of all stages
is idle: it waits for work. A further thread records an event on a stream of its own, each
millisecond: where that takes long, the driver's lock was held, as by cudaHostRegister.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bitslab.engine.codecs import words
from bitslab.engine.memory import host, page_locking
from bitslab.engine.memory.arena import Arena
from bitslab.engine.transfer import upload
from bitslab.offload import codec_choice, device_packing, images, tensor_packer, weight_packer

PROBE_SECONDS = 0.001
SLOW_SECONDS = 0.001
Row = dict[str, Any]

#: What is timed: the stage, what owns the function, the function's name.
STAGES: tuple[tuple[str, Any, str], ...] = (
    ("choose a codec", codec_choice.CodecChooser, "choose"),
    ("choose: take the sample", codec_choice, "_sample"),
    ("choose: measure a codec", codec_choice, "_saved_share"),
    ("choose: ideal of the sample", codec_choice, "ideal_share"),
    ("choose: plan anew", codec_choice, "fit_codec"),
    ("add a weight", weight_packer.WeightPacker, "add"),
    ("add: wait for room", device_packing.DevicePacking, "admit"),
    ("wait for images", weight_packer.WeightPacker, "_collect"),
    ("pack from the GPU", tensor_packer.PackingPlan, "packed"),
    ("pack from host memory", device_packing.DevicePacking, "_uploaded"),
    ("upload: driver calls", upload.RowUploader, "_send"),
    ("upload: wait for a staging buffer", upload, "wait_on_host"),
    ("upload: read rows", np, "copyto"),
    ("take staging buffers", Arena, "reserve"),
    ("encode: launches", words.WordRowCodec, "_encoded"),
    ("encode: wait for sizes", words, "_offsets"),
    ("encode: join pieces", words, "_joined"),
    ("image: wait for weights", device_packing.DevicePacking, "_made"),
    ("image: lay out", weight_packer, "lay_out"),
    ("image: wait to take pages", host.HostBuffer, "allocate"),
    ("image: compare with free memory", host, "check_available"),
    ("image: take pages", host.HostBuffer, "_taken"),
    ("image: lock pages", page_locking.CudaRegistrar, "register"),
    ("image: unlock pages", page_locking.CudaRegistrar, "unregister"),
    ("image: copy down", device_packing.DevicePacking, "fill"),
    ("image: by the host", device_packing, "write_parts"),
    ("image: make", images.HostImage, "__init__"),
)


@dataclass
class _Spent:
    """What a stage took in one thread."""

    calls: int = 0
    seconds: float = 0.0
    longest: float = 0.0


class StageTimes:
    """Seconds by stage and thread, between `__enter__` and `__exit__`; not nested.

    Parameters
    ----------
    device : torch.device
        Where a GPU is, calls of its driver are probed.
    stages : sequence of (str, owner, str)
        Further functions to time.
    """

    def __init__(self, device: torch.device, stages: tuple[tuple[str, Any, str], ...] = ()) -> None:
        self._device = device
        self._stages = (*STAGES, *stages)
        self._spent: dict[tuple[str, int], dict[str, _Spent]] = {}
        self._own = threading.local()
        self._undo: list[Callable[[], None]] = []
        self._probe: list[float] = []
        self._end = threading.Event()
        self._prober: threading.Thread | None = None
        self.seconds = 0.0

    def __enter__(self) -> StageTimes:
        for stage, owner, name in self._stages:
            self._replace(stage, owner, name)
        if self._device.type == "cuda":
            self._prober = threading.Thread(target=self._record_events, daemon=True)
            self._prober.start()
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._begin
        self._end.set()
        if self._prober is not None:
            self._prober.join()
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a block of the calling thread."""
        stack = self._stack()
        begin = time.perf_counter()
        stack.append(0.0)
        try:
            yield
        finally:
            took = time.perf_counter() - begin
            inside = stack.pop()
            if stack:
                stack[-1] += took
            spent = self._of_thread()[name]
            spent.calls += 1
            spent.seconds += took - inside
            spent.longest = max(spent.longest, took - inside)

    def rows(self) -> list[Row]:
        """Return a row for each stage of a thread, the threads of one pool beside each other."""
        rows: list[Row] = []
        for (thread, number), stages in sorted(self._spent.items()):
            busy = sum(spent.seconds for spent in stages.values())
            name = f"{thread} {number}"
            for stage, spent in sorted(stages.items(), key=lambda item: -item[1].seconds):
                rows.append(
                    {
                        "thread": name,
                        "stage": stage,
                        "calls": spent.calls,
                        "ms": 1e3 * spent.seconds,
                        "longest ms": 1e3 * spent.longest,
                        "of the whole": spent.seconds / self.seconds,
                    }
                )
            rows.append(
                {
                    "thread": name,
                    "stage": "(outside of all stages)",
                    "ms": 1e3 * (self.seconds - busy),
                    "of the whole": 1 - busy / self.seconds,
                }
            )
        rows += self._probed()
        return rows

    def _probed(self) -> list[Row]:
        if not self._probe:
            return []
        slow = [took for took in self._probe if took > SLOW_SECONDS]
        row = {
            "thread": "probe",
            "stage": f"an event; median {1e6 * statistics.median(self._probe):.0f} us",
            "calls": len(self._probe),
            "ms": 1e3 * sum(self._probe),
            "longest ms": 1e3 * max(self._probe),
            "of the whole": sum(self._probe) / self.seconds,
        }
        late = row | {
            "stage": "an event, those above 1 ms",
            "calls": len(slow),
            "ms": 1e3 * sum(slow),
            "of the whole": sum(slow) / self.seconds,
        }
        return [row, late]

    def _record_events(self) -> None:
        with torch.cuda.device(self._device):
            stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            while not self._end.wait(PROBE_SECONDS):
                begin = time.perf_counter()
                event.record(stream)
                self._probe.append(time.perf_counter() - begin)

    def _replace(self, stage: str, owner: Any, name: str) -> None:
        found = owner.__dict__[name]
        as_class = isinstance(found, classmethod)
        original = found.__func__ if as_class else found

        @functools.wraps(original)
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.stage(stage):
                return original(*arguments, **options)

        setattr(owner, name, classmethod(timed) if as_class else timed)
        self._undo.append(lambda: setattr(owner, name, found))

    def _stack(self) -> list[float]:
        if not hasattr(self._own, "stack"):
            self._own.stack = []
        stack: list[float] = self._own.stack
        return stack

    def _of_thread(self) -> dict[str, _Spent]:
        if not hasattr(self._own, "stages"):
            thread = threading.current_thread()
            self._own.stages = defaultdict(_Spent)
            self._spent[thread.name, threading.get_ident() % 10**6] = self._own.stages
        stages: dict[str, _Spent] = self._own.stages
        return stages
