"""What passes do that follow a plan: which fetches begin where, and what may be on its way.

On a GPU tensors of a disk are read to host memory ahead of their fetches, in the order in which the
backward pass reads them: when it enters a module, those of the next one are on their way.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engine.advisor.planning import Plan, StepProfile, Timeline
from .pass_record import PassPlan

#: Sites that are read first, whose reads begin fetches.
FIRST_READ = 3
#: Modules whose tensors are in host memory on their way back from a disk: the one that the
#: backward pass is in, and the next one.
MODULES_READ = 2


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
    *,
    falls_back_to_keeping: bool,
) -> PassPlan:
    """Return what passes do that follow a plan of a profile."""
    chosen = plan.choices()
    timeline = Timeline(profile)
    names = [profile.sites[i].site for i in read_order(profile)]
    seen = [chosen[name].action != "checkpoint" for name in names]
    place = {name: k for k, name in enumerate(names)}

    def begun(after: Mapping[str, str | None]) -> dict[str, tuple[str, ...]]:
        """Return by site whose read lets others begin, these in the order of their reads."""
        found: dict[str, list[str]] = {}
        for name in names:
            at = after[name]
            if at is None or at == name:  # its own read fetches it
                continue
            if at:  # reads inside of a checkpointed module are not seen
                at = _seen_site(names, seen, place[at], place[name])
            found.setdefault(at, []).append(name)
        return {name: tuple(sites) for name, sites in found.items()}

    fetches = begun({each.site: each.fetch_after for each in plan.sites})
    reads = begun({each.site: each.read_after for each in plan.sites})
    kept = [name for name in names if chosen[name].action == "keep"]
    begins = fetches.keys() | reads.keys()
    named = (begins - {""}) & set(kept)
    if "" in begins:
        named |= set(kept[:FIRST_READ])
    return PassPlan(
        fetches=fetches,
        reads=reads,
        in_flight_bytes=_in_flight_bytes(plan, profile, timeline),
        replays={n: s for n, s in replays.items() if n in chosen and chosen[n].action == "replay"},
        modules=frozenset(plan.modules),
        named=frozenset(named),
        falls_back_to_keeping=falls_back_to_keeping,
    )


def _seen_site(names: list[str], seen: list[bool], at: int, before: int) -> str:
    """Return a site whose read is seen: the next one, or else the one before; "" for none."""
    tried = itertools.chain(range(at, before), range(at - 1, -1, -1))
    return next((names[k] for k in tried if seen[k]), "")


def _in_flight_bytes(plan: Plan, profile: StepProfile, timeline: Timeline) -> dict[str, int]:
    """Return, by site that is saved, the bytes that may be on their way out behind its save.

    Of what is kept only where not all that is on its way may remain: the device waits as late as
    the limit allows.
    """
    limit = plan.prediction.peak_bytes
    if plan.memory_bytes is not None:
        limit = max(limit, plan.memory_bytes)
    chosen = plan.choices()
    choices = timeline.choices(chosen)
    need, read = timeline.needed(choices)
    # What comes back first takes its room while the last copies are on their way out.
    first = {each.site for each in plan.sites if each.fetch_after == ""}
    for i, each in enumerate(profile.sites):
        if each.site in first:
            need[timeline.turn : int(read[i])] += each.nbytes
    actions = [chosen[each.site].action for each in profile.sites]
    seen = [i for i, action in enumerate(actions) if action != "checkpoint"]
    out: list[int] = []
    leaving: list[float] = []
    # Until then a tensor counts among what is needed; its packed form never does. What comes back
    # first is handed back where it has not left, and counts once.
    used_until: list[int] = []
    used_from_turn: list[int] = []
    found = {}
    for i, following in itertools.zip_longest(seen, seen[1:]):
        is_moved = actions[i] in ("host", "disk")
        begin = int(timeline.saved[i])
        if is_moved:
            staged_bytes = timeline.costs[i][int(choices.options[i])].staged_bytes
            out.append(i)
            leaving.append(staged_bytes or profile.sites[i].nbytes)
            used_until.append(0 if staged_bytes else max(int(timeline.released[i]), begin + 1))
            handed_back = profile.sites[i].site in first
            used_from_turn.append(len(need) if handed_back else used_until[-1])
        if not out:
            continue
        if following is not None:
            until = int(timeline.saved[following])
        else:
            until = timeline.turn
            if profile.link is not None:
                room_bytes = max(0.0, limit - float(need[begin : until + 1].max()))
                end_s = profile.turn_s + profile.link.to_host_seconds(room_bytes)
                until = int(np.searchsorted(timeline.moments, end_s)) + 1
        moments = range(begin, min(max(until, begin + 1), len(need)))
        last_first = np.array(leaving[::-1])
        used = np.array(used_until[::-1]), np.array(used_from_turn[::-1])
        allowed = min(
            _allowed_bytes(limit - need[at], at, last_first, used[at >= timeline.turn])
            for at in moments
        )
        if is_moved or allowed < sum(leaving):
            found[profile.sites[i].site] = max(0, int(allowed))
    return found


def _allowed_bytes(
    room: float, at: int, leaving: npt.NDArray[np.float64], used_until: npt.NDArray[np.intp]
) -> float:
    """Return the bytes that may be on their way out at a moment.

    Parameters
    ----------
    room : float
        Bytes that the limit leaves beside what is needed.
    at : int
        The moment.
    leaving, used_until : numpy.ndarray
        ``[n]``, what is moved, the last one first, since the first one is gone first: its bytes,
        and the moment until which it counts among what is needed.
    """
    alone = np.cumsum(np.where(used_until > at, 0.0, leaving))
    fitting = int(np.searchsorted(alone, room, side="right"))
    all_of_them = float(leaving[:fitting].sum())
    if fitting == len(leaving):
        return all_of_them
    return all_of_them + room - (float(alone[fitting - 1]) if fitting else 0.0)
