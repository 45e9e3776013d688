"""Room in tiers: what becomes of tensors that a tier has too little of it for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .candidates import Candidate, Choices
from .timeline import Floats, Timeline


def with_room(timeline: Timeline, choices: Choices, held: Floats | None = None) -> Choices:
    """Return choices that tiers have room for.

    What has no room in one tier goes to the other one. Of what has none there those that are saved
    last are kept; with `held` those give way that hold least of the device for their bytes in the
    tier, by the way that holds least of it.

    Parameters
    ----------
    timeline : Timeline
        The step.
    choices : Choices
        What is wanted.
    held : numpy.ndarray, optional
        float64 ``[sites, candidates]``, bytes of the device where memory is short.
    """
    rooms = _Rooms(timeline, choices)
    # What was saved first is read last, so that the disk takes that; what was saved last is moved
    # last, so it remains.
    forward, backward = range(len(timeline.costs)), range(len(timeline.costs) - 1, -1, -1)
    rooms.shift("host", "disk", forward)
    rooms.shift("disk", "host", backward)
    for tier in timeline.room:
        if held is None:
            rooms.keep(tier, backward)
        else:
            rooms.give_way(tier, held)
    return rooms.choices


class _Rooms:
    """The room of each tier, less what choices move there."""

    def __init__(self, timeline: Timeline, choices: Choices) -> None:
        self._timeline = timeline
        self._options = choices.options.copy()
        self.choices = replace(choices, options=self._options)
        self._inside = timeline.inside(choices).tolist()
        self._left = dict(timeline.room)
        for tier in self._left:
            self._left[tier] -= sum(self._moved_bytes(i) for i in self._sites(tier))

    def _sites(self, tier: str) -> list[int]:
        """Return the sites that are moved to a tier."""
        actions = self._timeline.actions
        return [
            i
            for i, k in enumerate(self._options.tolist())
            if actions[i][k] == tier and not self._inside[i]
        ]

    def _moved_bytes(self, i: int) -> float:
        return self._timeline.costs[i][int(self._options[i])].moved_bytes

    def shift(self, tier: str, other: str, order: Iterable[int]) -> None:
        """Move sites of a tier that has too little room to another one, as far as that has."""
        candidates, own = self._timeline.candidates, set(self._sites(tier))
        for i in order:
            if self._left[tier] >= 0:
                return
            if i not in own:
                continue
            nbytes = self._moved_bytes(i)
            same = Candidate(other, candidates[i][int(self._options[i])].codec)  # type: ignore[arg-type]
            if same in candidates[i] and nbytes <= self._left[other]:
                self._left[other] -= nbytes
                self._leave(tier, i, candidates[i].index(same))

    def keep(self, tier: str, order: Iterable[int]) -> None:
        """Keep sites of a tier that has too little room."""
        own = set(self._sites(tier))
        for i in order:
            if self._left[tier] >= 0:
                return
            if i in own:
                self._leave(tier, i, 0)

    def give_way(self, tier: str, held: Floats) -> None:
        """Let sites of a tier that has too little room remain on the device, by what they hold."""
        if self._left[tier] >= 0:
            return
        ranked = []
        for i in self._sites(tier):
            other = min(self._on_device(i), key=lambda k: float(held[i, k]))
            more = float(held[i, other] - held[i, self._options[i]])
            ranked.append((more / max(self._moved_bytes(i), 1.0), -i, other))
        gone: list[tuple[int, int]] = []
        for _, negative, other in sorted(ranked):
            if self._left[tier] >= 0:
                break
            gone.append((-negative, int(self._options[-negative])))
            self._leave(tier, -negative, other)
        for i, before in reversed(gone):  # the last one may have left more room than was needed
            nbytes = self._timeline.costs[i][before].moved_bytes
            if nbytes <= self._left[tier]:
                self._left[tier] -= nbytes
                self._options[i] = before

    def _on_device(self, i: int) -> list[int]:
        """Return the candidates of a site that need no tier, and find what they are made from."""
        own, sources = self._timeline.actions[i], self._timeline.sources[i]
        lost = any(self._inside[s] for s in sources)
        return [
            k for k, a in enumerate(own) if a not in self._left and not (a == "replay" and lost)
        ]

    def _leave(self, tier: str, i: int, option: int) -> None:
        self._left[tier] += self._moved_bytes(i)
        self._options[i] = option
