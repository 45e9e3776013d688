"""Moments: when work was done, by the clock of the host or by events of a GPU."""

from __future__ import annotations

import time

import torch

from ..engine.kernels.cuda.stream import current_stream

#: A moment: of the clock of the host, or of the stream that computes.
Moment = float | torch.cuda.Event
#: Of so many pieces of work of a kind one is timed: two events cost the host some microseconds. A
#: prime, so that those of a layer take turns.
TIMED_EVERY = 13


def now(device: torch.device) -> Moment:
    """Return the moment at which the work is done that torch's current stream has been given."""
    if device.type != "cuda":
        return time.perf_counter()
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(current_stream(device))
    return event


def has_passed(moment: Moment) -> bool:
    """Return whether a moment has passed; waits for nothing."""
    if isinstance(moment, float):
        return True
    passed: bool = moment.query()  # type: ignore[no-untyped-call]
    return passed


def seconds_between(begin: Moment, end: Moment) -> float:
    """Return the seconds between two moments of one device, 0 where they are in another order."""
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float) and isinstance(end, float)
        return max(0.0, end - begin)
    return max(0.0, float(begin.elapsed_time(end)) / 1e3)
