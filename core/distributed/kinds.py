"""Kinds of calls of the function, each with decisions of its own, that all ranks tell apart alike.

Ranks that decide apart would wait for each other: one in torch's own collective, one in the sizes
stage. Rows of one dtype whose elements are between the same two powers of two are a kind, since
ranks must have dtype and row alike. What a rank alone knows (how many rows it has, its bound,
whether it has ids) may not say what a kind is. Calls of one kind that differ in it mostly come in a
cycle: rows, then gradients, say. Each rank looks for one in its own calls, and all agree on a
length that fits on every rank; then each place in the cycle has decisions of its own. Which place a
call has, all know: they count calls alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from .layout import Kept
from .selection import Decision, TableChoice

#: Kinds that are kept; the one that was used longest ago goes first.
MOST_KINDS = 64
#: Places in a cycle, at the most.
MOST_PLACES = 8
#: Calls of a kind before ranks first agree on a cycle; then four times as many, up to the second.
FIRST_AGREEMENT, AGREEMENT_EVERY = 16, 1024
#: Calls in which a cycle is looked for.
SEEN_CALLS = 64


class Kind:
    """What is decided of calls of one kind.

    Attributes
    ----------
    places : int
        Of the cycle; 1: none.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._seen: deque[Hashable] = deque(maxlen=SEEN_CALLS)
        self._begin(1)

    def _begin(self, places: int) -> None:
        self.places = places
        self._decisions = [Decision(ways=1) for _ in range(places)]
        self._choices: list[dict[bool, TableChoice]] = [{} for _ in range(places)]

    def begin(self, own: Hashable) -> bool:
        """Count a call that differs from others by what this rank knows; return whether all agree.

        `agree` is called then, before `decision`.
        """
        self._calls += 1
        self._seen.append(own)
        return _agrees_in(self._calls)

    def misfits(self) -> list[float]:
        """Return for cycles of one place, two and so on: 1 where calls here do not fit, else 0."""
        seen = list(self._seen)
        return [
            float(len(seen) < 2 * n or any(a != b for a, b in zip(seen, seen[n:], strict=False)))
            for n in range(1, MOST_PLACES + 1)
        ]

    def agree(self, misfits: Sequence[float]) -> None:
        """Go on with the cycle that fits the calls of all ranks.

        Where none fits, or that of now does, nothing changes.

        Parameters
        ----------
        misfits : sequence of float
            The largest of all ranks'.
        """
        fitting = [n for n, misfit in enumerate(misfits, 1) if not misfit]
        if fitting and self.places not in fitting:
            self._begin(fitting[0])

    @property
    def decision(self) -> Decision:
        """What is decided of the call that was begun."""
        return self._decisions[self._calls % self.places]

    @property
    def next_decision(self) -> Decision | None:
        """What is decided of the next call; None where ranks agree in it."""
        calls = self._calls + 1
        return None if _agrees_in(calls) else self._decisions[calls % self.places]

    def choice(self, *, bounded: bool) -> TableChoice:
        """Return how rows of the call that was begun are written, within a bound or not."""
        return self._choices[self._calls % self.places].setdefault(bounded, TableChoice())


def _agrees_in(call: int) -> bool:
    """Return whether ranks agree on a cycle in a call of a kind, counted from 1."""
    every = FIRST_AGREEMENT
    while every < AGREEMENT_EVERY and call > every:
        every *= 4
    return call % every == 0


class Kinds:
    """The kinds of calls over one communicator: ranks use them in the same order."""

    def __init__(self) -> None:
        self._kept = Kept[Kind](MOST_KINDS)

    def of(self, key: Hashable) -> Kind:
        """Return a kind, a new one where it is not known, or was too long ago."""
        return self._kept.get(key) or self._kept.keep(key, Kind())

    def next_decision(self, key: Hashable) -> Decision | None:
        """Return what is decided of the next call of a kind, None where that is not known yet."""
        kind = self._kept.peek(key)
        return None if kind is None else kind.next_decision
