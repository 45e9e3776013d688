"""What comes next: learnt from the order in which units were used."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Unit = TypeVar("Unit", bound=Hashable)


class Window(Generic[Unit]):
    """The units that are expected next: what followed last time.

    Parameters
    ----------
    order : sequence
        All units, in the order that is expected at first; the first follows the last.

    Notes
    -----
    A cyclic order is learnt in one pass, also one in which units come several times: what follows
    a unit depends on the one before it, where the two were seen in this order. One thread at a
    time.

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
        #: What followed a unit, by the one before it.
        self._next_of_two: dict[tuple[Unit, Unit], Unit] = {}
        self._before: Unit | None = None
        self._last: Unit | None = None
        #: What was expected behind two units, by their number, since anything new was learnt.
        self._found: dict[tuple[Unit | None, Unit | None, int], list[Unit]] = {}

    def use(self, unit: Unit) -> None:
        """Record that a unit is used; again and again at once is once."""
        before, last = self._before, self._last
        if last == unit:
            return
        if last is not None:
            if self._next.get(last) != unit:
                self._next[last] = unit
                self._found.clear()
            if before is not None:
                pair = before, last
                if self._next_of_two.get(pair) != unit:
                    self._next_of_two[pair] = unit
                    self._found.clear()
        self._before, self._last = last, unit

    def expected(self, depth: int) -> list[Unit]:
        """Return up to `depth` units that come next, without the last used one; each once."""
        key = self._before, self._last, depth
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._follow(depth)
        return found.copy()

    def _follow(self, depth: int) -> list[Unit]:
        window: list[Unit] = []
        before, unit = self._before, self._last
        seen: set[tuple[Unit, Unit]] = set()
        while unit is not None and len(window) < depth:
            following = None
            if before is not None:
                following = self._next_of_two.get((before, unit))
            if following is None:
                following = self._next.get(unit)
            if following is None or (unit, following) in seen:
                break
            seen.add((unit, following))
            before, unit = unit, following
            if following != self._last and following not in window:
                window.append(following)
        return window
