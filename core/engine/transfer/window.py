"""What comes next: learnt from the order in which units were used."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Unit = TypeVar("Unit", bound=Hashable)


class Window(Generic[Unit]):
    """The units that are expected next: each one's successor is what followed it last time.

    Parameters
    ----------
    order : sequence
        All units, in the order that is expected at first; the first follows the last.

    Notes
    -----
    A cyclic order is learnt in one pass. One thread at a time.

    Examples
    --------
    >>> from bitslab.engine.transfer import Window
    >>> window = Window("abcd")
    >>> for unit in "acbdac":
    ...     window.use(unit)
    >>> window.expected(2)
    ['b', 'd']
    """

    def __init__(self, order: Sequence[Unit]) -> None:
        self._next = dict(zip(order, [*order[1:], *order[:1]], strict=True))
        self._last: Unit | None = None

    def use(self, unit: Unit) -> None:
        """Record that a unit is used."""
        if self._last is not None and self._last != unit:
            self._next[self._last] = unit
        self._last = unit

    def expected(self, depth: int) -> list[Unit]:
        """Return up to `depth` units that come next, without the last used one; each once."""
        window: list[Unit] = []
        unit = self._last
        while unit is not None and len(window) < depth:
            unit = self._next.get(unit)
            if unit is None or unit == self._last or unit in window:
                break
            window.append(unit)
        return window
