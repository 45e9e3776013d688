"""The order in which copies are read in backward passes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..engine.transfer import Window
from .copies import StoredCopy

#: Copies that are read from a disk before they are fetched, for each that is fetched ahead.
READ_AHEAD = 3


class ReadOrder:
    """The order in which copies are read in backward passes, learnt from the last one.

    Parameters
    ----------
    depth : int
        Number of copies that are fetched ahead.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._window: Window[str] | None = None
        self._lock = threading.Lock()

    def read(
        self,
        copy: StoredCopy,
        fetch: Callable[[StoredCopy], None],
        most_bytes: int,
        read_ahead: Callable[[StoredCopy], None] | None = None,
    ) -> None:
        """Record that a copy is read, and fetch those of its pass that are expected next.

        These have `most_bytes` before packing at most; one is fetched whatever its size. Those that
        follow them, `READ_AHEAD` times as many, are read ahead: from a disk to the host.
        """
        made_in = copy.made_in
        with self._lock:
            window = self._window
            if window is None:  # at first, in reverse of the order they were saved in
                window = self._window = Window(made_in.names()[::-1])
            window.use(copy.name)
            depth = self.depth if read_ahead is None else self.depth * (1 + READ_AHEAD)
            expected = window.expected(depth)
        ahead_bytes = 0
        begin = fetch
        for i, name in enumerate(expected):
            if i == self.depth and read_ahead is not None:
                begin, ahead_bytes = read_ahead, 0
            ref = made_in.copies.get(name)
            following = None if ref is None else ref()
            if following is None:
                continue
            if ahead_bytes and ahead_bytes + following.nbytes > most_bytes:
                if begin is read_ahead or read_ahead is None:
                    return
                begin, ahead_bytes = read_ahead, 0
            ahead_bytes += following.nbytes
            if following.fetched is None:  # most are coming already
                begin(following)
