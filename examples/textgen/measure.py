"""Measurements: time to each token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


class Clock:
    """A streamer that records the time of each token of `generate`; the first is for the prompt.

    Parameters
    ----------
    on_token : callable
        Called with the number of tokens so far, 0 for the prompt. Its time is not counted.
    """

    def __init__(self, on_token: Callable[[int], None] = lambda n: None) -> None:
        self.times: list[float] = []
        self._on_token = on_token
        self._lost = 0.0

    def put(self, value: Any) -> None:
        now = time.perf_counter()
        self.times.append(now - self._lost)
        self._on_token(len(self.times) - 1)
        self._lost += time.perf_counter() - now

    def end(self) -> None:
        """Do nothing."""

    @property
    def prefill_seconds(self) -> float:
        """From the beginning to the first token."""
        return self.times[1] - self.times[0]

    @property
    def token_seconds(self) -> float | None:
        """The median of the tokens after the first; None where there is only one."""
        if len(self.times) < 3:
            return None
        steps = zip(self.times[1:], self.times[2:], strict=False)
        return statistics.median(after - before for before, after in steps)
