"""How long what computes has waited for copies: the stalls of a step, by tier."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Literal

import torch

from ..engine.kernels.cuda.stream import current_stream
from ..engine.tasks import ThreadTask
from ..engine.transfer import Mark, wait_on_host
from .moments import TIMED_EVERY, Moment, has_passed, now, seconds_between

#: Where copies are that a pass may wait for.
StallTier = Literal["host", "disk"]
STALL_TIERS: tuple[StallTier, ...] = ("host", "disk")


class Stalls:
    """Waits of one device for copies on their way; its owner calls it under a lock.

    Parameters
    ----------
    device : torch.device
        Which computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[StallTier, float] = dict.fromkeys(STALL_TIERS, 0.0)
        #: Waits of a GPU's stream until one is timed, which counts for `TIMED_EVERY`.
        self.untimed = TIMED_EVERY - 1
        #: Waits that are timed and not known to be over; see `poll`.
        self.timed: deque[tuple[StallTier, Moment, Moment]] = deque()

    def wait(self, mark: Mark, tier: StallTier, stream: torch.cuda.Stream | None = None) -> None:
        """Make what computes wait for a mark: the host for a thread's work, else a stream.

        Parameters
        ----------
        mark : Event or ThreadTask
            When a copy is where it is wanted.
        tier : str
            Which of `STALL_TIERS` it goes to or comes from.
        stream : torch.cuda.Stream or None
            torch's current one, which is looked up when left out.
        """
        if isinstance(mark, ThreadTask):
            if not mark.done():
                begin = time.perf_counter()
                wait_on_host(mark)
                self.waited(tier, time.perf_counter() - begin)
            return
        if stream is None:
            stream = current_stream(self._device)
        if self.untimed:
            self.untimed -= 1
            mark.wait(stream)
            return
        self.untimed = TIMED_EVERY - 1
        before = now(self._device)
        mark.wait(stream)
        self.timed.append((tier, before, now(self._device)))
        self.poll()  # or nobody does, where nothing is packed and no figures are asked for

    def waited(self, tier: StallTier, seconds: float) -> None:
        """Count a wait of the host."""
        self._seconds[tier] += seconds

    def poll(self) -> None:
        """Count the waits of streams that are over; waits for nothing."""
        while self.timed and has_passed(self.timed[0][2]):
            tier, begin, end = self.timed.popleft()
            self._seconds[tier] += TIMED_EVERY * seconds_between(begin, end)

    def seconds(self, tier: StallTier) -> float:
        """Return how long was waited for a tier, as far as it is known by now."""
        return self._seconds[tier]


def stall_figures(devices: Iterable[Stalls]) -> dict[str, int]:
    """Return microseconds of all devices: those of each tier, and their sum."""
    devices = list(devices)
    found = {
        f"{tier}_stall_us": round(1e6 * sum(each.seconds(tier) for each in devices))
        for tier in STALL_TIERS
    }
    return {"stall_us": sum(found.values()), **found}
