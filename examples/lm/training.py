"""The loop that trains a model in any way, and what it measures."""

from __future__ import annotations

import argparse
import gc
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from textgen.memory import MemoryPeak, resident_bytes  # next to this package

from .models import SIZES, batches, make_model
from .ways import Way, give_memory_back, use

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
    "stall_us",
)

Report = Callable[[int, int], None]


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
        begin = time.perf_counter()
        while True:
            self.points.append((time.perf_counter() - begin, self.bytes_in_use()))
            if self._done.wait(CURVE_EVERY_S):
                return

    def __enter__(self) -> MemoryCurve:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()


def train(
    way: str,
    options: argparse.Namespace,
    text: torch.Tensor,
    device: torch.device,
    report: Report,
) -> Run:
    """Train a model from the same weights, with the same batches, in one way."""
    model = make_model(options.model, SIZES[options.size], options.tokens, options.seed, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=False, foreach=False)
    # Gradients and states are none of what is compared: they are there before.
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    drawn = batches(
        options.model, text, options.steps, options.batch_size, options.tokens, options.seed
    )
    torch.manual_seed(options.seed)  # of dropout
    losses: list[float] = []
    seconds: list[float] = []
    cpu: list[float] = []
    gc.collect()
    give_memory_back()
    curve = MemoryCurve(device)
    before = curve.bytes_in_use()
    with use(way, model, options) as used, MemoryPeak(device) as peak:

        def step(inputs: dict[str, torch.Tensor]) -> None:
            begin, began = time.process_time(), time.perf_counter()
            optimizer.zero_grad(set_to_none=False)
            with used.step():
                loss = model(**{name: t.to(device) for name, t in inputs.items()}).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())  # waits for the device
            cpu.append(time.process_time() - begin)
            seconds.append(time.perf_counter() - began)

        for number, inputs in enumerate(drawn, 1):
            if number == options.steps:
                with curve:
                    step(inputs)
            else:
                step(inputs)
            report(number, options.steps)
        stats, notes = used.stats(), used.notes()
    peak_bytes = peak.host_bytes
    if device.type == "cuda":
        peak_bytes = peak.device_bytes - before
    points = [(at, nbytes - before) for at, nbytes in curve.points]
    del model, optimizer, used
    gc.collect()
    tokens = options.batch_size * options.tokens
    counted = {name: int(stats.get(name, 0)) for name in COUNTED}
    return Run(way, losses, seconds, cpu, tokens, peak_bytes, counted, points, notes)


__all__ = ["COUNTED", "Run", "Way", "train"]
