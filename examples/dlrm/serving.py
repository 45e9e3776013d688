"""Looks up the same requests in tables kept in several ways, and measures how long each takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from common.report import Report

from .clicks import Batch
from .model import Dlrm
from .tables import Memory, Tables, Traffic

#: Percentiles that are reported.
PERCENTILES = (50, 90, 99)
#: Repetitions that are not timed: the first ones compile kernels, fill caches and warm buffers up.
WARM_UPS = 2
#: Requests that are timed at least.
FEWEST = 3

#: Draws a request of so many lines, others each time.
Draw = Callable[[int], Batch]


@dataclass
class Timing:
    """Times of requests of one size in one mode, in seconds."""

    mode: str
    batch_size: int
    n_lookups: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    lookup_seconds: list[float] = field(default_factory=list)
    request_seconds: list[float] = field(default_factory=list)
    requests_that_differ: int = 0

    def percentile(self, percent: int) -> float:
        return percentile(self.lookup_seconds, percent)

    @property
    def request_p50(self) -> float:
        """The median of lookups and scoring together."""
        return percentile(self.request_seconds, 50)

    @property
    def lookups_per_s(self) -> float:
        return self.n_lookups / sum(self.lookup_seconds)

    def as_dict(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "requests": len(self.lookup_seconds),
            "requests_that_differ": self.requests_that_differ,
            "lookups": self.n_lookups,
            "lookups_per_s": self.lookups_per_s,
            "hit_rate": self.traffic.hit_rate,
            "moved_bytes": self.traffic.moved_bytes,
            **{f"p{p}_seconds": self.percentile(p) for p in PERCENTILES},
            "request_p50_seconds": self.request_p50,
        }


def percentile(seconds: Sequence[float], percent: int) -> float:
    """Return the smallest time that `percent` of all do not exceed (nearest rank)."""
    ordered = sorted(seconds)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


@dataclass
class Served:
    """Tables in one mode, their memory, and what requests of each size took."""

    mode: str
    memory: Memory
    codecs: list[str]
    timings: list[Timing]

    def as_dict(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            **asdict(self.memory),
            "ratio": self.memory.ratio,
            "codecs": self.codecs,
            "sizes": [timing.as_dict() for timing in self.timings],
        }


class Server:
    """A model whose tables are kept in several ways at once.

    Parameters
    ----------
    kept : dict of str to Tables
        The tables by mode; the first are what others are compared with.
    model : Dlrm
        A model that has one of them; only its perceptrons are used.
    draw : callable
        Draws requests.
    device : torch.device
        Where it runs.
    """

    def __init__(
        self, kept: dict[str, Tables], model: Dlrm, draw: Draw, device: torch.device
    ) -> None:
        self.kept, self.model, self.draw, self.device = kept, model.eval(), draw, device
        for tables in kept.values():
            # No effect on torch's own modules; a cache does not change its rows then.
            tables.module.eval()

    def serve(
        self, batch_size: int, repeats: int, seconds: float, report: Report | None = None
    ) -> list[Timing]:
        """Answer requests of one size, each in every mode, and compare the rows bit for bit.

        Parameters
        ----------
        batch_size : int
            Lines of a request.
        repeats : int
            Requests to answer at most; each is of fresh ids.
        seconds : float
            Time after which no more are begun, once FEWEST are answered.
        report : callable, optional
            Called with the requests answered, and `repeats`.
        """
        modes = list(self.kept)
        timings = {mode: Timing(mode, batch_size) for mode in modes}
        before: dict[str, Traffic] = {}
        begin = 0.0
        for i in range(-WARM_UPS, repeats):
            if i == 0:
                before = {mode: tables.traffic() for mode, tables in self.kept.items()}
                begin = time.perf_counter()
            if i >= FEWEST and time.perf_counter() - begin > seconds:
                break
            # On the device, where a model's inputs are.
            batch = self.draw(batch_size).to(self.device)
            answers, took = {}, {}
            # Each is first as often: the first one pays for threads that went to sleep.
            for mode in modes[i % len(modes) :] + modes[: i % len(modes)]:
                answers[mode], took[mode] = self.look_up(mode, batch)
            expected = answers[modes[0]]
            scoring = self.score(batch, expected)
            for mode, timing in timings.items():
                timing.requests_that_differ += not same_bits(answers[mode], expected)
                if i >= 0:
                    timing.n_lookups += batch.n_lookups
                    timing.lookup_seconds.append(took[mode])
                    timing.request_seconds.append(took[mode] + scoring)
            if report and i >= 0:
                report(i + 1, repeats)
        for mode, timing in timings.items():
            timing.traffic = self.kept[mode].traffic() - before[mode]
        return list(timings.values())

    @torch.no_grad()
    def look_up(self, mode: str, batch: Batch) -> tuple[torch.Tensor, float]:
        """Return pooled rows, and the seconds that they took."""
        self._synchronise()
        begin = time.perf_counter()
        pooled = self.kept[mode].look_up(batch)
        self._synchronise()
        return pooled, time.perf_counter() - begin

    @torch.no_grad()
    def score(self, batch: Batch, pooled: torch.Tensor) -> float:
        """Return the seconds of what comes after the lookup, the same in all modes."""
        self._synchronise()
        begin = time.perf_counter()
        self.model.scored(batch.dense, pooled).sigmoid()
        self._synchronise()
        return time.perf_counter() - begin

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bit for bit; -0.0 differs from 0.0, and a NaN is equal to itself."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    whole = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))
