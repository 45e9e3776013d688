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
    ahead_bytes : int
        Bytes of them; one is fetched ahead whatever its size.
    """

    def __init__(self, depth: int, ahead_bytes: int) -> None:
        self.depth, self.ahead_bytes = depth, ahead_bytes
        self._window: Window[str] | None = None
        self._lock = threading.Lock()

    def read(self, copy: StoredCopy, fetch: Callable[[StoredCopy], None]) -> None:
        """Record that a copy is read, and fetch those of its pass that are expected next."""
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
            if ahead_bytes and ahead_bytes + following.nbytes > self.ahead_bytes:
                return
            ahead_bytes += following.nbytes
            fetch(following)
