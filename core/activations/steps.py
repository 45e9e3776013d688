"""Passes: the tensors that one run of a model saves, by site, and the order they are read in."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from ..engine.transfer import Window
from .copies import StoredCopy


class Pass:
    """One forward pass: what it has saved so far.

    Parameters
    ----------
    number : int
        From 0, of all passes.
    parameters : set of int
        Numbers of the storages that are left alone.
    """

    def __init__(self, number: int, parameters: set[int]) -> None:
        self.number = number
        self.parameters = parameters
        self._counts: dict[str, int] = {}
        self._copies: dict[str, weakref.ref[StoredCopy]] = {}

    def next_name(self, module: str) -> str:
        """Return the name of the site at which a module saves now."""
        number = self._counts.get(module, 0)
        self._counts[module] = number + 1
        return f"{module}:{number}"

    def add(self, copy: StoredCopy) -> None:
        """Record the copy that a site made."""
        self._copies[copy.name] = weakref.ref(copy)

    def copy_of(self, name: str) -> StoredCopy | None:
        """Return the copy that a site made, while anybody wants it."""
        ref = self._copies.get(name)
        return None if ref is None else ref()

    def names(self) -> list[str]:
        """Return the sites that made copies, in order."""
        return list(self._copies)


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

    def read(self, copy: StoredCopy, fetch: Callable[[StoredCopy], None]) -> None:
        """Record that a copy is read, and fetch those of its pass that are expected next."""
        with self._lock:
            if self._window is None:  # at first, in reverse of the order they were saved in
                self._window = Window(copy.made_in.names()[::-1])
            self._window.use(copy.name)
            expected = self._window.expected(self.depth)
        for name in expected:
            following = copy.made_in.copy_of(name)
            if following is not None:
                fetch(following)
