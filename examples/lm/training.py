"""The loop that trains a model in any way, and what it measures."""

from __future__ import annotations

import argparse
import gc
import statistics
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from common.memory import MemoryPeak, resident_bytes  # next to this package
from common.report import Report

from .models import SIZES, batches, make_model
from .ways import Way, disk_of, give_memory_back, use

#: Steps whose times do not count.
WARM_UP_STEPS = 1
#: Seconds between two points of the curve of memory.
CURVE_EVERY_S = 0.002
#: What `ActivationOffload.stats` counts, where a way has it.
COUNTED = (
    "moved_out_bytes",
    "crossed_out_bytes",
    "moved_in_bytes",
    "disk_written_bytes",
    "disk_read_bytes",
    "disk_forwarded_bytes",
    "host_stall_us",
    "disk_stall_us",
)


@dataclass
class Run:
    """Results of training in one way."""

    way: str
    losses: list[float]
    step_seconds: list[float]
    cpu_seconds: list[float]
    tokens: int
    peak_bytes: int
    counted: dict[str, int]
    #: Seconds of the last step, and the bytes in use then, beyond what was there before training.
    curve: list[tuple[float, int]]
    notes: list[str] = field(default_factory=list)
    has_disk: bool = False
    equal: bool | None = None

    @property
    def seconds(self) -> float:
        """The median step."""
        return statistics.median(self.step_seconds[WARM_UP_STEPS:] or self.step_seconds)

    @property
    def cpu(self) -> float:
        """CPU seconds of the cheapest step: other processes only ever add."""
        return min(self.cpu_seconds[WARM_UP_STEPS:] or self.cpu_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def a_step(self, name: str) -> float:
        """Return a count of `COUNTED` for a step."""
        return self.counted.get(name, 0) / len(self.losses)

    @property
    def on_host_bytes(self) -> float:
        """Bytes of a step that went to the host, and no further."""
        return self.a_step("crossed_out_bytes") - self.a_step("disk_written_bytes")

    def as_dict(self) -> dict[str, Any]:
        return {
            "way": self.way,
            "losses": self.losses,
            "losses_equal_first": self.equal,
            "step_seconds": self.seconds,
            "cpu_seconds": self.cpu,
            "tokens_per_second": self.tokens_per_second,
            "peak_bytes": self.peak_bytes,
            **{f"{name}_per_step": self.a_step(name) for name in COUNTED},
            "host_bytes_per_step": self.on_host_bytes,
            "curve": self.curve,
            "notes": self.notes,
        }


class MemoryCurve:
    """Looks at the memory in use, again and again, in a thread."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory curve", daemon=True)
        self.points: list[tuple[float, int]] = []

    def bytes_in_use(self) -> int:
        if self._on_gpu:
            return torch.cuda.memory_allocated(self._device)
        return resident_bytes()[0]

    def _look(self) -> None:
        while not self._done.wait(CURVE_EVERY_S):
            self._take()

    def _take(self) -> None:
        self.points.append((time.perf_counter() - self._begin, self.bytes_in_use()))

    def __enter__(self) -> MemoryCurve:
        self._begin = time.perf_counter()
        self._take()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        self._take()


class Trainer:
    """Trains a model from the same weights, with the same batches, in one way.

    Parameters
    ----------
    way : str
        One of `ways.WAYS`.
    options : argparse.Namespace
        See `options.py`.
    device : torch.device
        Where it trains.
    """

    def __init__(self, way: str, options: argparse.Namespace, device: torch.device) -> None:
        self.way, self.options, self.device = way, options, device
        self.model = make_model(
            options.model, SIZES[options.size], options.tokens, options.seed, device
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr, foreach=False)
        # Gradients and states are none of what is compared: they are there before.
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.optimizer.step()
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.cpu: list[float] = []

    def train(self, text: torch.Tensor, report: Report) -> Run:
        """Train on batches of a text."""
        options = self.options
        drawn = batches(
            options.model, text, options.steps, options.batch_size, options.tokens, options.seed
        )
        torch.manual_seed(options.seed)  # of dropout
        gc.collect()
        give_memory_back()
        curve = MemoryCurve(self.device)
        before = curve.bytes_in_use()
        with use(self.way, self.model, options) as way, MemoryPeak(self.device) as peak:
            for number, inputs in enumerate(drawn, 1):
                with curve if number == options.steps else nullcontext():
                    self.step(way, inputs)
                report(number, options.steps)
            stats, notes = way.stats(), way.notes()
        peak_bytes = peak.host_bytes
        if self.device.type == "cuda":
            peak_bytes = peak.device_bytes - before
        return Run(
            self.way,
            self.losses,
            self.seconds,
            self.cpu,
            options.batch_size * options.tokens,
            peak_bytes,
            {name: int(stats.get(name, 0)) for name in COUNTED},
            [(at, nbytes - before) for at, nbytes in curve.points],
            notes,
            disk_of(self.way, options) is not None,
        )

    def step(self, way: Way, inputs: dict[str, torch.Tensor]) -> None:
        """Train on one batch, and measure."""
        begin, began = time.process_time(), time.perf_counter()
        self.optimizer.zero_grad(set_to_none=False)
        with way.step():
            loss = self.model(**{name: t.to(self.device) for name, t in inputs.items()}).loss
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())  # waits for the device
        self.cpu.append(time.process_time() - begin)
        self.seconds.append(time.perf_counter() - began)
