"""Times of a unit's transfer, decoding and use; a unit is whatever crosses a link at once."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

#: What is timed: bytes cross, bytes are decoded, compute waits for them, compute runs.
SPANS = ("transfer", "decode", "stall", "compute")


@dataclass
class UnitTimes:
    """Milliseconds that a unit took in the last pass that used it.

    Parameters
    ----------
    transfer_ms, decode_ms : float
        How long its bytes crossed, and were decoded; 0 where they did not.
    stall_ms : float
        How long its compute waited for them.
    compute_ms : float
        How long it was in use, up to its release.
    """

    transfer_ms: float = 0.0
    decode_ms: float = 0.0
    stall_ms: float = 0.0
    compute_ms: float = 0.0


class HostClock:
    """Times one unit by the clock of the CPU."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        self._ms = dict.fromkeys(SPANS, 0.0)

    def begin(self, *spans: str) -> None:
        """Start spans, all at the same time."""
        now = time.perf_counter()
        for span in spans:
            self._began[span] = now

    def end(self, *spans: str) -> None:
        """End those of the spans that were started, all at the same time."""
        now = time.perf_counter()
        for span in spans:
            if span in self._began:
                self._ms[span] = 1e3 * (now - self._began.pop(span))

    def clear(self, *spans: str) -> None:
        """Set spans to 0: they did not take place this time."""
        for span in spans:
            self._ms[span] = 0.0

    def read(self) -> UnitTimes:
        """Return the times."""
        return UnitTimes(**{f"{span}_ms": self._ms[span] for span in SPANS})


class DeviceClock:
    """Times one unit by events on a GPU's streams; the host waits for none.

    Parameters
    ----------
    device : torch.device
        The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: dict[tuple[str, bool], torch.cuda.Event] = {}
        self._taken: set[tuple[str, bool]] = set()

    def mark(self, span: str, end: bool, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record the begin or the end of a span on a stream; return the event."""
        key = (span, end)
        event = self._events.get(key)
        if event is None:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._events[key] = event
        event.record(stream)
        self._taken.add(key)
        return event

    def clear(self, *spans: str) -> None:
        """Set spans to 0: they did not take place this time."""
        for span in spans:
            self._taken -= {(span, False), (span, True)}

    def read(self) -> UnitTimes:
        """Return the times; waits for the GPU."""
        torch.cuda.synchronize(self._device)
        times = UnitTimes()
        for span in SPANS:
            if {(span, False), (span, True)} <= self._taken:
                begin, end = self._events[span, False], self._events[span, True]
                setattr(times, f"{span}_ms", max(0.0, begin.elapsed_time(end)))
        return times
