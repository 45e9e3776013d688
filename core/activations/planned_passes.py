"""What passes do that follow a plan: which fetches begin where, and what may be on its way.

On a GPU tensors of a disk are read to host memory ahead of their fetches, in the order in which the
backward pass reads them: when it enters a module, those of the next one are on their way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.advisor.planning import Candidate, Choices, Plan, StepProfile, Timeline
from .pass_record import PassPlan
from .policies import CHECKPOINT, KEEP, RAW, REPLAY, Choice

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

#: Sites that are read first, whose reads begin fetches.
FIRST_READ = 3
#: Modules whose tensors are in host memory on their way back from a disk: the one that the
#: backward pass is in, and the next one.
MODULES_READ = 2


def choice_of(candidate: Candidate, reason: str) -> Choice:
    """Return a plan's candidate as what is done with a tensor."""
    if candidate.action == "keep":
        return Choice(KEEP, reason)
    if candidate.action == "replay":
        return Choice(REPLAY, reason, "device")
    if candidate.action == "checkpoint":
        return Choice(CHECKPOINT, reason, "device")
    return Choice(candidate.codec or RAW, reason, candidate.action)


def packed_bytes(plan: Plan, profile: StepProfile, site: str) -> float:
    """Return the bytes that a site's tensor is expected to be packed to; 0 where it is not."""
    planned = plan.site(site)
    codec = None if planned is None else planned.candidate.codec
    found = next((each for each in profile.sites if each.site == site), None)
    if found is None or codec is None or codec not in found.packings:
        return 0.0
    return found.nbytes * found.packings[codec].share


def read_ahead_bytes(profile: StepProfile, host_bytes: int | None) -> int:
    """Return the host memory for what is read from a disk ahead of its fetch.

    Parameters
    ----------
    profile : StepProfile
        The step.
    host_bytes : int or None
        Most that may be taken; the bytes of two modules behind each other otherwise.
    """
    modules = [
        sum(profile.sites[i].nbytes for i in own)
        for _, own in itertools.groupby(read_order(profile), lambda i: _module_of(profile, i))
    ]
    most = max(
        (sum(modules[k : k + MODULES_READ]) for k in range(len(modules))),
        default=0,
    )
    return most if host_bytes is None else min(most, host_bytes)


def read_order(profile: StepProfile) -> list[int]:
    """Return the numbers of sites in the order of their reads: what was saved last comes first."""
    sites = profile.sites
    return sorted(range(len(sites)), key=lambda i: (sites[i].read_s, -i))


def _module_of(profile: StepProfile, i: int) -> str:
    site = profile.sites[i]
    return site.module or site.site.partition(":")[0]


def pass_plan(
    plan: Plan,
    profile: StepProfile,
    replays: Mapping[str, tuple[Any, ...]],
    views: Mapping[str, str],
    *,
    falls_back_to_keeping: bool,
) -> PassPlan:
    """Return what passes do that follow a plan of a profile."""
    chosen = plan.choices()
    timeline = Timeline(profile)
    names = [profile.sites[i].site for i in read_order(profile)]
    seen = [chosen[name].action != "checkpoint" for name in names]
    place = {name: k for k, name in enumerate(names)}
    #: By site of a checkpointed module, that module: what it reads is not seen, but its begin.
    again = {each.site: each.module for each in profile.sites if each.module in plan.modules}

    def begun(after: Mapping[str, str | None]) -> dict[str, tuple[str, ...]]:
        """Return by site or module that lets others begin, these in the order of their reads."""
        found: dict[str, list[str]] = {}
        for name in names:
            at = after[name]
            if at is None or at == name:  # its own read fetches it
                continue
            if at:
                at = again.get(at) or _seen_site(names, seen, place[at], place[name])
            found.setdefault(at, []).append(name)
        return {name: tuple(sites) for name, sites in found.items()}

    fetches = begun({each.site: each.fetch_after for each in plan.sites})
    reads = begun({each.site: each.read_after for each in plan.sites})
    saved_bytes, read_bytes = _in_flight_bytes(plan, timeline, fetches)
    kept = [name for name in names if chosen[name].action == "keep"]
    begins = fetches.keys() | reads.keys()
    named = ((begins | read_bytes.keys()) - {""}) & set(kept)
    if "" in begins:
        named |= set(kept[:FIRST_READ])
    return PassPlan(
        fetches=fetches,
        reads=reads,
        in_flight_bytes=saved_bytes,
        backward_in_flight_bytes=read_bytes,
        replays={n: s for n, s in replays.items() if n in chosen and chosen[n].action == "replay"},
        modules=frozenset(plan.modules),
        named={n: n for n in named} | {n: of for n, of in views.items() if of in named},
        falls_back_to_keeping=falls_back_to_keeping,
    )


def _seen_site(names: list[str], seen: list[bool], at: int, before: int) -> str:
    """Return a site whose read is seen: the next one, or else the one before; "" for none."""
    tried = itertools.chain(range(at, before), range(at - 1, -1, -1))
    return next((names[k] for k in tried if seen[k]), "")


class _Leaving:
    """Tensors that are moved, in the order of their saves, and when these count alone.

    Until the forward pass gives a tensor up, and from the moment at which it is brought back or
    handed back until it is freed, it counts among what is needed; its packed form never does.
    """

    def __init__(self, timeline: Timeline, choices: Choices, back: Indices) -> None:
        self._timeline, self._choices, self._back = timeline, choices, back
        #: Device memory of each while it is on its way out.
        self.nbytes: list[float] = []
        #: Moments until which, from which, and until which again it counts elsewhere.
        self._elsewhere: list[tuple[int, int, int]] = []

    def add(self, i: int) -> None:
        """Add a tensor that is saved now."""
        timeline = self._timeline
        staged_bytes = timeline.costs[i][int(self._choices.options[i])].staged_bytes
        released = max(int(timeline.released[i]), int(timeline.saved[i]) + 1)
        self.nbytes.append(staged_bytes or float(timeline.nbytes[i]))
        elsewhere = released, int(self._back[i]), int(timeline.freed[i])
        self._elsewhere.append((0, 0, 0) if staged_bytes else elsewhere)

    def allowed_bytes(self, room: Floats, begin: int, until: int) -> float:
        """Return the bytes that may be on their way from a moment until another one.

        Parameters
        ----------
        room : numpy.ndarray
            float64 ``[moments]``, what the limit leaves beside what is needed.
        begin, until : int
            Moments; one at least counts.
        """
        last_first = np.array(self.nbytes[::-1])
        released, back, freed = np.array(self._elsewhere[::-1]).T
        return min(
            _allowed_bytes(room[at], last_first, (at < released) | (back <= at) & (at < freed))
            for at in range(begin, min(max(until, begin + 1), len(room)))
        )


def _in_flight_bytes(
    plan: Plan, timeline: Timeline, fetches: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes that may be on their way out behind saves, and behind reads, by site.

    Saves of what is kept, and reads, only where not all that is on its way may remain: the device
    waits as late as the limit allows, however long copies take.
    """
    if plan.serial:
        moved = [each for each in plan.sites if each.candidate.action in ("host", "disk")]
        return {each.site: 0 for each in moved}, {}
    limit = plan.prediction.peak_bytes
    if plan.memory_bytes is not None:
        limit = max(limit, plan.memory_bytes)
    profile, chosen = timeline.profile, plan.choices()
    choices = timeline.choices(chosen)
    need, read = timeline.needed(choices)
    back, ahead = _fetched(timeline, choices, read, fetches)
    room = limit - need - ahead
    actions = [chosen[each.site].action for each in profile.sites]
    # By the moments of their own reads, not of those that replay others from them.
    order = [i for i in read_order(profile) if actions[i] != "checkpoint"]
    leaving = _Leaving(timeline, choices, back)
    saves: dict[str, int] = {}
    allowed = math.inf
    seen = [i for i, action in enumerate(actions) if action != "checkpoint"]
    for i, following in itertools.zip_longest(seen, seen[1:]):
        is_moved = actions[i] in ("host", "disk")
        if is_moved:
            leaving.add(i)
        if not leaving.nbytes:
            continue
        until = timeline.read[order[0]] if following is None else timeline.saved[following]
        allowed = leaving.allowed_bytes(room, int(timeline.saved[i]), int(until))
        if is_moved or allowed < sum(leaving.nbytes):
            saves[profile.sites[i].site] = max(0, int(allowed))
    reads: dict[str, int] = {}
    for i, following in itertools.zip_longest(order, order[1:]):
        if not leaving.nbytes:
            break
        until = len(need) if following is None else timeline.read[following]
        behind = leaving.allowed_bytes(room, int(timeline.read[i]), int(until))
        if behind < min(allowed, sum(leaving.nbytes)):
            allowed = behind
            reads[profile.sites[i].site] = max(0, int(allowed))
    return saves, reads


def _fetched(
    timeline: Timeline,
    choices: Choices,
    read: Indices,
    fetches: Mapping[str, tuple[str, ...]],
) -> tuple[Indices, Floats]:
    """Return the moments at which fetches begin, ``[sites]``, and what these take, ``[moments]``.

    Until a tensor is read, or decoded; then it counts among what is needed.
    """
    sites = timeline.profile.sites
    number = {each.site: i for i, each in enumerate(sites)}
    moment = {each.site: timeline.read[i] for i, each in enumerate(sites)}
    modules = timeline.profile.modules
    moment |= {each.module: timeline.recomputed[i] for i, each in enumerate(modules)}
    moment[""] = np.intp(timeline.turn)
    begin = read.copy()
    for name, begun in fetches.items():
        for site in begun:
            begin[number[site]] = moment[name]
    ahead = np.zeros(len(timeline.moments))
    for i in range(len(sites)):
        option = int(choices.options[i])
        if timeline.candidates[i][option].action in ("host", "disk"):
            costs = timeline.costs[i][option]
            ahead[int(begin[i]) : int(read[i]) + bool(costs.packed_bytes)] += costs.moved_bytes
    return begin, ahead


def _allowed_bytes(room: float, leaving: Floats, elsewhere: npt.NDArray[np.bool_]) -> float:
    """Return the bytes that may be on their way out at a moment.

    Parameters
    ----------
    room : float
        Bytes that the limit leaves beside what is needed.
    leaving, elsewhere : numpy.ndarray
        ``[n]``, what is moved, the last one first, since the first one is gone first: its bytes,
        and whether these count among what is needed.
    """
    alone = np.cumsum(np.where(elsewhere, 0.0, leaving))
    fitting = int(np.searchsorted(alone, room, side="right"))
    all_of_them = float(leaving[:fitting].sum())
    if fitting == len(leaving):
        return all_of_them
    return all_of_them + room - (float(alone[fitting - 1]) if fitting else 0.0)
