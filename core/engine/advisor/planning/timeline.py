"""What a plan makes of a step: its seconds, its waits and its memory at any moment.

The device computes, and queues serve what leaves it and comes back: the link each way and the SSD
each way, first come, first served. The device waits in three cases: its memory would exceed the
limit while copies are under way (until enough of them are done), a tensor is read that is not back
yet, and never otherwise.

A tensor is fetched as early as the limit allows: from the first point of the backward pass on from
which there is room for it, besides all that will be needed until it is read. Of a checkpointed
module none but its begin is such a point, for what it reads is not seen. One that is still on its
way out then is handed back without crossing.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ....errors import ArgumentError
from .candidates import CHECKPOINT, Candidate, Choices, Costs, candidates_of
from .prediction import StepPrediction
from .profile import StepProfile
from .queues import Opposite, Queue, Trace

#: Tensors packed on the device whose sizes the host does not wait for before it packs another.
SIZED_BEHIND = 2

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


class Timeline:
    """Predicts what plans make of a profiled step.

    Parameters
    ----------
    profile : StepProfile
        The step.

    Attributes
    ----------
    candidates : list of tuple of Candidate
        Of each site, `KEEP` first.
    room : dict of str to float
        Bytes that the tiers "host" and "disk" take at most.
    runs : int
        How often a plan was followed through.
    """

    def __init__(self, profile: StepProfile) -> None:
        self.profile = profile
        self.runs = 0
        tables = [candidates_of(site, profile) for site in profile.sites]
        self.candidates = [tuple(table) for table in tables]
        self.costs = [tuple(table.values()) for table in tables]
        self.actions = [[each.action for each in own] for own in self.candidates]
        self._place_moments()
        self._number = {site.site: i for i, site in enumerate(profile.sites)}
        self.sources = [[self._number[s] for s in site.replay_from] for site in profile.sites]
        most = {"host": profile.host_bytes, "disk": profile.most_disk_bytes}
        self.room = {tier: math.inf if n is None else n for tier, n in most.items()}
        self._pad_tables()

    def _place_moments(self) -> None:
        """Give a number to each moment at which anything begins or ends."""
        profile, sites = self.profile, self.profile.sites
        found = {0.0, profile.turn_s, profile.end_s}
        for site in sites:
            found |= {site.saved_s, site.released_s, site.read_s, site.freed_s}
        for each in profile.modules:
            found |= {each.begin_s, each.backward_begin_s, each.backward_end_s}
        found |= {min(at, profile.end_s) for at, _ in profile.other_bytes}
        moments = sorted(found)
        at = {moment: i for i, moment in enumerate(moments)}
        self.moments = np.array(moments)
        self.seconds: list[float] = np.diff(self.moments, append=profile.end_s).tolist()
        self.turn = at[profile.turn_s]
        self.nbytes = np.array([site.nbytes for site in sites], np.float64)
        self.saved = np.array([at[site.saved_s] for site in sites], np.intp)
        self.released = np.array([at[site.released_s] for site in sites], np.intp)
        self.read = np.array([at[site.read_s] for site in sites], np.intp)
        # What is read is there for one segment at least.
        freed = np.array([at[site.freed_s] for site in sites], np.intp)
        self.freed = np.maximum(freed, self.read + 1)
        module = {each.module: i for i, each in enumerate(profile.modules)}
        self.module_of = np.array([module.get(site.module, -1) for site in sites], np.intp)
        self._begins = [at[each.begin_s] for each in profile.modules]
        self.recomputed = np.array([at[m.backward_begin_s] for m in profile.modules], np.intp)
        self.ends = [max(at[m.backward_end_s], at[m.begin_s] + 1) for m in profile.modules]
        other = np.full(len(moments), float(profile.unprofiled_bytes))
        for moment, nbytes in profile.other_bytes:
            other[bisect_left(moments, min(moment, profile.end_s)) :] = (
                nbytes + profile.unprofiled_bytes
            )
        self.other = other

    def _pad_tables(self) -> None:
        """Lay the candidates' kinds and packed bytes out as ``[sites, most candidates]``."""
        most = max((len(own) for own in self.candidates), default=1)
        self._gone = np.zeros((len(self.candidates), most), bool)
        self._packed_here = np.zeros((len(self.candidates), most))
        #: Beside the raw bytes: while they are encoded, and while they are decoded.
        self.staged_out = np.zeros((len(self.candidates), most))
        self.staged_in = np.zeros((len(self.candidates), most))
        self._sized_late = np.zeros((len(self.candidates), most), bool)
        for i, (own, costs) in enumerate(zip(self.actions, self.costs, strict=True)):
            for k, action in enumerate(own):
                self._gone[i, k] = action != "keep"
                self.staged_out[i, k] = costs[k].staged_bytes
                self._sized_late[i, k] = costs[k].sized_late
                if action == "device":
                    self._packed_here[i, k] = costs[k].packed_bytes
                elif action in ("host", "disk"):
                    self.staged_in[i, k] = costs[k].packed_bytes
        self._rows = np.arange(len(self.candidates))
        #: Of each site, the number of the candidate that replays it; -1 for none.
        self._replay = np.array(
            [own.index("replay") if "replay" in own else -1 for own in self.actions], np.intp
        )

    @property
    def has_limited_room(self) -> bool:
        """Whether a tier takes no more than so many bytes."""
        return any(math.isfinite(room) for room in self.room.values())

    # Choices

    def keep_all(self) -> Choices:
        """Return the choices that change nothing."""
        n, m = len(self.candidates), len(self.profile.modules)
        return Choices(np.zeros(n, np.intp), np.zeros(m, bool))

    def choices(self, chosen: Mapping[str, Candidate]) -> Choices:
        """Return choices by number.

        Parameters
        ----------
        chosen : mapping of str to Candidate
            By site; those that are not named are kept. `CHECKPOINT` of a site is that of its
            module, and holds for all of its sites.

        Raises
        ------
        ArgumentError
            For a site that is not known, and a candidate that is none of its.
        """
        made = self.keep_all()
        for name, candidate in chosen.items():
            i = self._number.get(name)
            if i is None:
                raise ArgumentError(f"choices: {name!r} is no site of the profile")
            if candidate == CHECKPOINT and self.module_of[i] >= 0:
                made.checkpointed[self.module_of[i]] = True
            elif candidate in self.candidates[i]:
                made.options[i] = self.candidates[i].index(candidate)
            else:
                accepted = ", ".join(map(str, self.candidates[i]))
                raise ArgumentError(f"choices: {candidate} of {name!r}, accepted are {accepted}")
        return made

    def named(self, choices: Choices) -> dict[str, Candidate]:
        """Return choices by site."""
        found = zip(self.candidates, choices.options, self.inside(choices), strict=True)
        named = (CHECKPOINT if inside else own[option] for own, option, inside in found)
        return dict(zip(self._number, named, strict=True))

    def inside(self, choices: Choices) -> npt.NDArray[np.bool_]:
        """Return which sites lie in a checkpointed module, ``[sites]``."""
        if not len(choices.checkpointed):
            return np.zeros(len(self.candidates), bool)
        return (self.module_of >= 0) & choices.checkpointed[self.module_of]

    # Memory

    def needed(self, choices: Choices) -> tuple[Floats, Indices]:
        """Return the least memory of a plan at each moment, and when each site is read first.

        What leaves the device is away at once, and what comes back is there when it is read.

        Returns
        -------
        numpy.ndarray, numpy.ndarray
            float64 ``[moments]``, bytes from each moment to the next; intp ``[sites]``.
        """
        inside = self.inside(choices)
        gone = self._gone[self._rows, choices.options] & ~inside
        read, freed = self._replays(choices, gone)
        begins, ends, sizes = [self.saved], [], [self.nbytes]
        end = np.where(gone | inside, np.maximum(self.released, self.saved + 1), freed)
        late = np.flatnonzero(self._sized_late[self._rows, choices.options] & ~inside)
        if len(late):
            end[late] = np.maximum(end[late], self._sized(late))
        back = read
        if inside.any():
            again = np.minimum(self.recomputed[self.module_of], read)
            back = np.where(inside, again, read)
        away = gone | inside
        ends.append(np.where(away, np.minimum(end, back), end))
        begins.append(back)
        ends.append(np.where(away, np.maximum(freed, back), back))
        sizes.append(self.nbytes)
        packed = self._packed_here[self._rows, choices.options] * gone
        begins.append(self.saved)
        ends.append(read + 1)
        sizes.append(packed)
        n = len(self.moments) + 1
        change = np.bincount(np.concatenate(begins), np.concatenate(sizes), n)
        change -= np.bincount(np.concatenate(ends), np.concatenate(sizes), n)
        for m in np.flatnonzero(choices.checkpointed).tolist():
            kept = self.profile.modules[m].checkpoint_bytes
            change[self._begins[m]] += kept
            change[self.ends[m]] -= kept
        return np.cumsum(change[:-1]) + self.other, read

    def _sized(self, late: Indices) -> Indices:
        """Return when the host knows the sizes of what it packs on the device, ``[late]``.

        It waits for all but the last two, and for these at the end of the forward pass.
        """
        known = np.full(len(late), self.turn)
        known[:-SIZED_BEHIND] = self.saved[late[SIZED_BEHIND:]]
        return known

    def floor(self, choices: Choices) -> Floats:
        """Return the bytes of each moment that no waiting saves, ``[moments]``.

        Those of `needed`, and packed tensors beside their raw bytes while they are encoded and
        decoded.
        """
        need, read = self.needed(choices)
        seen = ~self.inside(choices)
        out = self.staged_out[self._rows, choices.options] * seen
        back = self.staged_in[self._rows, choices.options] * seen
        need += np.bincount(self.saved, out, len(need))
        return need + np.bincount(read, back, len(need))

    def _replays(self, choices: Choices, gone: npt.NDArray[np.bool_]) -> tuple[Indices, Indices]:
        """Return when sites are read first and freed, by what is computed again from them too."""
        read, freed = self.read, self.freed
        replayed = np.flatnonzero(gone & (choices.options == self._replay))
        if not len(replayed):
            return read, freed
        read, freed = read.copy(), freed.copy()
        # Sources are saved before: from the last to the first, so that chains add up.
        for i in replayed[::-1].tolist():
            for s in self.sources[i]:
                read[s] = min(read[s], read[i])
                freed[s] = max(freed[s], read[i] + 1)
        return read, freed

    def valid(self, choices: Choices) -> bool:
        """Return whether replays find their sources, and tiers have room."""
        inside = self.inside(choices)
        for i, k in enumerate(choices.options.tolist()):
            if self.actions[i][k] == "replay" and not inside[i]:
                if any(inside[s] for s in self.sources[i]):
                    return False
        return not self.overfull(choices)

    def overfull(self, choices: Choices) -> frozenset[str]:
        """Return the tiers that have too little room for a plan."""
        inside = self.inside(choices)
        moved = dict.fromkeys(self.room, 0.0)
        for i, k in enumerate(choices.options.tolist()):
            action = self.actions[i][k]
            if action in moved and not inside[i]:
                moved[action] += self.costs[i][k].moved_bytes
        return frozenset(tier for tier in moved if moved[tier] > self.room[tier])

    # Time

    def predict(self, choices: Choices, **limits: float) -> StepPrediction:
        """Return what a plan makes of a step; `limits` are those of `follow`."""
        return self.follow(choices, **limits)[0]

    def follow(
        self,
        choices: Choices,
        *,
        limit_bytes: float = math.inf,
        in_flight_bytes: float = math.inf,
        ahead_bytes: float = math.inf,
    ) -> tuple[StepPrediction, Trace]:
        """Follow a plan through a step.

        Parameters
        ----------
        choices : Choices
            The plan.
        limit_bytes : float
            The device waits for copies that are under way rather than exceed it.
        in_flight_bytes, ahead_bytes : float
            Bytes on their way out, and fetched before they are read, at most.
        """
        self.runs += 1
        need, read = self.needed(choices)
        run = _Run(self, choices, need, read)
        run.limit, run.in_flight_limit = limit_bytes, in_flight_bytes
        run.forward()
        run.place_fetches(ahead_bytes)
        run.place_reads(self.profile.read_ahead_bytes)
        run.backward()
        return run.result()


class _Run:
    """One plan on its way through a step."""

    def __init__(self, timeline: Timeline, choices: Choices, need: Floats, read: Indices) -> None:
        self._timeline, self._need = timeline, need
        self.limit = self.in_flight_limit = math.inf
        names = ("up", "write", "down", "read")
        waits: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
        self.trace = Trace([], [], {}, waits, {name: [] for name in names})
        self._up, self._write, self._down, self._reading = (Queue(n, self.trace) for n in names)
        inside = timeline.inside(choices).tolist()
        options = choices.options.tolist()
        self._read = read.tolist()
        self._costs = [own[k] for own, k in zip(timeline.costs, options, strict=True)]
        self._action = [
            "checkpoint" if inside[i] else timeline.actions[i][k] for i, k in enumerate(options)
        ]
        self._saves: dict[int, list[int]] = {}
        self._joins: dict[int, list[int]] = {}
        self._reads: dict[int, list[int]] = {}
        self._recomputes: dict[int, float] = {}
        #: By moment the first one from it on at which fetches may begin.
        self._next_begin = list(range(len(need) + 1))
        modules = np.flatnonzero(choices.checkpointed)
        for m in sorted(modules.tolist(), key=timeline.recomputed.__getitem__, reverse=True):
            at, end = int(timeline.recomputed[m]), timeline.ends[m]
            self._next_begin[at + 1 : end] = [self._next_begin[end]] * (end - at - 1)
            seconds = timeline.profile.modules[m].checkpoint_s
            self._recomputes[at] = self._recomputes.get(at, 0.0) + seconds
        changed = [i for i, a in enumerate(self._action) if a not in ("keep", "checkpoint")]
        for i in self._where("device", "host", "disk"):
            self._saves.setdefault(int(timeline.saved[i]), []).append(i)
        # Those of one moment: what was saved last is read first.
        for i in sorted(changed, key=lambda i: (self._read[i], -i)):
            self._reads.setdefault(self._read[i], []).append(i)
        self._now = 0.0
        self._end: dict[int, float] = {}
        #: By site, what is through last on its way out and back.
        self._slow_out: dict[int, Queue] = {}
        self._slow_in: dict[int, Queue] = {}
        self._in_flight: list[tuple[float, int, float]] = []
        self._in_flight_bytes = 0.0
        self._handed_back: set[int] = set()
        #: By moment, those that are freed then, and may be on their way out still.
        self._freed: dict[int, list[int]] = {}
        self._ahead = np.zeros(len(need))
        self._fetches: dict[int, list[int]] = {}
        #: Sites that are read from the SSD before they are fetched, and when they are there.
        self._reads_ahead: dict[int, list[int]] = {}
        self._was_read: dict[int, float] = {}
        self._stalls = [0.0, 0.0]
        self._codec_s = self._encode_s = self._recompute_s = self._peak = 0.0

    def forward(self) -> None:
        """Follow the forward pass."""
        need: list[float] = self._need.tolist()
        for at in range(self._timeline.turn):
            self._step(at, need[at], 0)

    def _step(self, at: int, need: float, which: int) -> None:
        """Save what is saved at a moment, wait for memory, and compute up to the next one."""
        if at in self._saves or at in self._joins:
            self._save_all(at, need, which)
        if self._in_flight:
            self._wait_for_memory(need, which)
        self._compute(at, need)

    def _save_all(self, at: int, need: float, which: int) -> None:
        for i in self._saves.get(at, ()):
            staged = self._costs[i].staged_bytes
            if staged:  # beside the raw bytes
                if self._in_flight:
                    self._wait_for_memory(need + staged, which)
                self._peak = max(self._peak, need + staged + self._in_flight_bytes)
            self._save(i, at)
        for i in self._joins.pop(at, ()):
            if i not in self._handed_back:
                self._join(i)

    def _compute(self, at: int, need: float) -> None:
        used = need + self._in_flight_bytes
        self._peak = max(self._peak, used)
        self.trace.moments_s.append(self._now)
        self.trace.bytes.append(used)
        self._now += self._timeline.seconds[at]

    def _save(self, i: int, at: int) -> None:
        costs = self._costs[i]
        self._now += costs.forward_s
        self._codec_s += costs.forward_s
        self._encode_s += costs.forward_s
        if self._action[i] == "device":
            return
        alone = Opposite()
        begin = max(self._now, self._up.free_s)
        end = self._up.serve(i, self._now, costs.up_s, alone)
        self._slow_out[i] = self._up
        if costs.write_s:
            written = self._write.serve(i, begin, costs.write_s, alone)
            if written > end:
                end, self._slow_out[i] = written, self._write
        self._end[i] = end
        if costs.packed_bytes:
            self._join(i)
            return
        # Until then it counts among what is needed.
        held = max(int(self._timeline.released[i]), at + 1)
        self._joins.setdefault(held, []).append(i)

    def _join(self, i: int) -> None:
        """Count a copy that is under way, and that nothing else holds."""
        if self._end[i] > self._now:
            nbytes = self._leaving_bytes(i)
            heapq.heappush(self._in_flight, (self._end[i], i, nbytes))
            self._in_flight_bytes += nbytes

    def _leaving_bytes(self, i: int) -> float:
        """Return the device memory of a tensor that is on its way out."""
        costs: Costs = self._costs[i]
        return costs.staged_bytes or costs.moved_bytes

    def _wait_for_memory(self, need: float, which: int) -> None:
        flying = self._in_flight
        while flying:
            end, i, nbytes = flying[0]
            if i not in self._handed_back:
                if end > self._now:
                    fits = need + self._in_flight_bytes <= self.limit
                    if fits and self._in_flight_bytes <= self.in_flight_limit:
                        return
                    self._slow_out[i].waited(i)
                    self._stalls[which] += end - self._now
                    self._now = end
                self._in_flight_bytes -= nbytes
            heapq.heappop(flying)
        self._in_flight_bytes = 0.0

    def place_fetches(self, ahead_bytes: float) -> None:
        """Find from which moment on there is room for each tensor that comes back."""
        turn, ahead = self._timeline.turn, self._ahead
        room = np.minimum(self.limit - self._need, ahead_bytes)  # less what is fetched ahead
        first = turn
        for at in sorted(self._reads):
            for i in self._reads[at]:
                if self._action[i] not in ("host", "disk"):
                    continue
                nbytes = self._costs[i].moved_bytes
                full = np.flatnonzero(room[first:at] < nbytes)
                first = first + int(full[-1]) + 1 if len(full) else min(first, at)
                first = min(self._next_begin[first], at)
                until = at + 1 if self._costs[i].packed_bytes else at
                ahead[first:until] += nbytes
                room[first:until] -= nbytes
                self._fetches.setdefault(first, []).append(i)
                self.trace.fetch_at[i] = first

    def place_reads(self, ahead_bytes: float) -> None:
        """Find from which moment on each tensor is read from the SSD, to host memory."""
        if not ahead_bytes:
            return
        held: deque[tuple[int, float]] = deque()
        held_bytes, first = 0.0, self._timeline.turn
        for at in sorted(self._reads):
            for i in self._reads[at]:
                if self._action[i] != "disk":
                    continue
                nbytes = self._costs[i].moved_bytes
                while held and held_bytes + nbytes > ahead_bytes:
                    until, given_up = held.popleft()
                    first, held_bytes = max(first, until), held_bytes - given_up
                held.append((at, nbytes))
                held_bytes += nbytes
                begin = min(first, self.trace.fetch_at[i])
                self._reads_ahead.setdefault(begin, []).append(i)
                self.trace.read_at[i] = begin

    def backward(self) -> None:
        """Follow the backward pass."""
        timeline = self._timeline
        need: list[float] = (self._need + self._ahead).tolist()
        link = Opposite(self._up.free_s, timeline.profile.link_share_both_ways)
        disk = Opposite(self._write.free_s, timeline.profile.disk_share_both_ways)
        arrived: dict[int, float] = {}
        for at in range(timeline.turn, len(need)):
            fetched: list[int] = []
            for i in self._freed.get(at, ()):
                self._leaves_again(i)
            for i in self._reads_ahead.get(at, ()):
                self._read_ahead(i, disk)
            if at in self._saves or at in self._joins:
                self._save_all(at, need[at], 1)
            for i in self._fetches.get(at, ()):
                if self._end[i] > self._now:
                    self._hand_back(i)
                else:
                    fetched.append(i)
            if self._in_flight:
                self._wait_for_memory(need[at], 1)
            for i in fetched:
                arrived[i] = self._fetch(i, link, disk)
            self._recompute(at)
            for i in self._reads.get(at, ()):
                self._use(i, arrived)
            self._compute(at, need[at])

    def _hand_back(self, i: int) -> None:
        """Give a tensor back whose copy is still under way."""
        self._handed_back.add(i)
        self._freed.setdefault(int(self._timeline.freed[i]), []).append(i)
        if any(each[1] == i for each in self._in_flight):
            self._in_flight_bytes -= self._leaving_bytes(i)

    def _leaves_again(self, i: int) -> None:
        """Count a tensor that was handed back and freed: its memory is in use until it has left."""
        self._handed_back.discard(i)
        if any(each[1] == i for each in self._in_flight):
            self._in_flight_bytes += self._leaving_bytes(i)
        else:
            self._join(i)

    def _read_ahead(self, i: int, disk: Opposite) -> None:
        """Read a tensor to host memory, from which what is not written yet comes at once."""
        self._was_read[i] = self._now
        if self._end[i] <= self._now:
            self._was_read[i] = self._reading.serve(i, self._now, self._costs[i].read_s, disk)
            self._slow_in[i] = self._reading

    def _fetch(self, i: int, link: Opposite, disk: Opposite) -> float:
        """Return when a tensor is back whose fetch begins now."""
        costs = self._costs[i]
        begin, was_read = self._now, 0.0
        if i in self._was_read:  # it crosses when all of it is there
            late = self._was_read[i] > self._now
            came = self._down.serve(i, max(self._now, self._was_read[i]), costs.down_s, link)
            if not late:
                self._slow_in[i] = self._down
            return came
        if costs.read_s:
            begin = max(begin, self._reading.free_s)
            was_read = self._reading.serve(i, self._now, costs.read_s, disk)
        # The first pieces of a tensor cross while its last ones are read.
        came = self._down.serve(i, begin, costs.down_s, link)
        self._slow_in[i] = self._reading if was_read > came else self._down
        return max(was_read, came)

    def _recompute(self, at: int) -> None:
        seconds = self._recomputes.get(at, 0.0)
        self._now += seconds
        self._recompute_s += seconds

    def _use(self, i: int, arrived: dict[int, float]) -> None:
        costs = self._costs[i]
        back = arrived.get(i, 0.0)
        if back > self._now:
            self._slow_in[i].waited(i)
            self._stalls[1] += back - self._now
            self._now = back
        self._now += costs.backward_s
        if self._action[i] != "replay":
            self._codec_s += costs.backward_s

    def _where(self, *actions: str) -> list[int]:
        return [i for i, action in enumerate(self._action) if action in actions]

    def result(self) -> tuple[StepPrediction, Trace]:
        """Return what came of it."""
        moved, written = self._where("host", "disk"), self._where("disk")
        costs = self._costs
        replay_s = math.fsum(costs[i].backward_s for i in self._where("replay"))
        link_bytes = sum(costs[i].moved_bytes for i in moved)
        written_bytes = sum(costs[i].moved_bytes for i in written)
        return (
            StepPrediction(
                step_s=self._now + self._timeline.profile.rest_s,
                peak_bytes=self._peak,
                forward_stall_s=self._stalls[0],
                backward_stall_s=self._stalls[1],
                codec_s=self._codec_s,
                encode_s=self._encode_s,
                recompute_s=self._recompute_s + replay_s,
                replay_s=replay_s,
                link_bytes=link_bytes,
                written_bytes=written_bytes,
                up_s=sum(costs[i].up_s for i in moved),
                write_s=sum(costs[i].write_s for i in written),
                host_bytes=link_bytes - written_bytes,
            ),
            self.trace,
        )
