"""Queues that tensors pass on their way out and back, and what is recorded of them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Trace:
    """What a run of the timeline leaves behind besides its prediction.

    Parameters
    ----------
    moments_s, bytes : list of float
        The memory curve: bytes from each moment on.
    fetch_at : dict of int to int
        By site that is fetched, the number of the moment at which that begins.
    read_at : dict of int to int
        By site that is read from the SSD before it is fetched, the number of that moment.
    waited_for : dict of str to list of (int, int)
        By queue ("up", "write", "down", "read"), ranges of the places in it that made the device
        wait: from where the queue began to be busy to what was waited for, inclusive.
    queues : dict of str to list of int
        By queue, its sites in order.
    """

    moments_s: list[float]
    bytes: list[float]
    fetch_at: dict[int, int]
    waited_for: dict[str, list[tuple[int, int]]]
    queues: dict[str, list[int]]
    read_at: dict[int, int] = field(default_factory=dict)


class Opposite:
    """The other direction, which takes its share of the rate while it is busy."""

    def __init__(self, busy_until_s: float = 0.0, share: float = 1.0) -> None:
        self._until_s, self._share = busy_until_s, share

    def end(self, begin_s: float, seconds: float) -> float:
        """Return when so many seconds of work are done that begin then."""
        together = self._until_s - begin_s
        if together <= 0 or self._share >= 1:
            return begin_s + seconds
        if seconds <= together:
            took = seconds / self._share
            self._until_s += took * (1 - self._share)
            return begin_s + took
        self._until_s = begin_s + together / self._share
        return self._until_s + seconds - together


class Queue:
    """One direction of a link or disk: first come, first served."""

    def __init__(self, name: str, trace: Trace) -> None:
        self.free_s = 0.0
        self._order = trace.queues[name]
        self._waits = trace.waited_for[name]
        self._first: list[int] = []
        self._place: dict[int, int] = {}

    def serve(self, site: int, from_s: float, seconds: float, against: Opposite) -> float:
        """Return when a site's bytes are through that may begin at `from_s`."""
        place = len(self._order)
        busy = place > 0 and self.free_s > from_s
        self._first.append(self._first[-1] if busy else place)
        self._place[site] = place
        self._order.append(site)
        self.free_s = against.end(max(self.free_s, from_s), seconds)
        return self.free_s

    def waited(self, site: int) -> None:
        """Record that the device waited for a site."""
        last = self._place[site]
        self._waits.append((self._first[last], last))
