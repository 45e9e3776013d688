"""How much may be written a day."""

from __future__ import annotations

import time
from collections.abc import Callable

DAY_S = 86400.0
#: What of a day's bytes may be written at once: an hour's.
BURST_S = 3600.0


class WriteBudget:
    """A limit on the bytes that are written a day.

    The bytes of a day come evenly over it, and those of an hour may be saved up; a process begins
    with an hour's. One thread at a time.

    Parameters
    ----------
    bytes_per_day : float
        The limit.
    clock : callable
        Returns seconds.
    """

    def __init__(self, bytes_per_day: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s = bytes_per_day / DAY_S
        self._clock = clock
        self._left = self.bytes_per_s * BURST_S
        self._at = clock()

    @property
    def left_bytes(self) -> float:
        """Bytes that may be written now."""
        now = self._clock()
        more = (now - self._at) * self.bytes_per_s
        self._left, self._at = min(self.bytes_per_s * BURST_S, self._left + more), now
        return self._left

    def take(self, nbytes: int) -> bool:
        """Take bytes that are going to be written; return False, and take none, for too many."""
        if nbytes > self.left_bytes:
            return False
        self._left -= nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Give bytes back that were not written after all."""
        self._left += nbytes
