"""The order in which copies are read in backward passes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..engine.transfer import Window
from .copies import StoredCopy


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

    def read(self, copy: StoredCopy, fetch: Callable[[StoredCopy], None], most_bytes: int) -> None:
        """Record that a copy is read, and fetch those of its pass that are expected next.

        These have `most_bytes` before packing at most; one is fetched whatever its size.
        """
        with self._lock:
            if self._window is None:  # at first, in reverse of the order they were saved in
                self._window = Window(copy.made_in.names()[::-1])
            self._window.use(copy.name)
            expected = self._window.expected(self.depth)
        ahead_bytes = 0
        for name in expected:
            following = copy.made_in.copy_of(name)
            if following is None:
                continue
            if ahead_bytes and ahead_bytes + following.nbytes > most_bytes:
                return
            ahead_bytes += following.nbytes
            if not following.is_here:
                fetch(following)
