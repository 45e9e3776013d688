"""The planner's problem as a mixed integer program for `scipy.optimize.milp`.

A site's candidates and a module's checkpoint are binary; the device's waits before each moment are
continuous. Queues are fluid: of what was sent, the link may have carried part of a tensor, so that
the bytes under way at a moment are linear in all that was sent since any earlier one.

It is solved in two forms. In the cautious one tensors come back from the beginning of the backward
pass on; where the timeline, which moves whole tensors, finds that the plan needs more memory than
allowed, it is solved again with less. In the other one as much as memory holds is handed back there
without crossing: its seconds are a bound for fluid queues, and its own plan may be slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from bitslab.engine.advisor.planning import Choices, StepPrediction, Timeline

#: Seconds of a program's search, and the share of the step by which its plan may miss the optimum.
TIME_LIMIT_S, GAP = 20.0, 1e-3
#: By how much of it the limit is lowered when whole tensors do not fit, and how often.
LOWERED, ATTEMPTS = 0.01, 6


@dataclass
class MilpPlan:
    """A plan of the program, what the timeline makes of it, and whether its search was finished."""

    choices: Choices
    prediction: StepPrediction
    finished: bool


def milp_plan(
    timeline: Timeline, limit: float, time_limit_s: float = TIME_LIMIT_S
) -> tuple[MilpPlan | None, float]:
    """Return the better of both forms' plans that fits on the timeline, and the seconds of a step.

    The seconds are those below which no plan with fluid queues comes, as far as the search proved;
    the plan is None where none was found that fits.
    """
    solved = _Program(timeline, limit, handing_back=True).solve(time_limit_s)
    best, least_s = None, timeline.profile.step_s
    if solved is not None:
        best = _followed(timeline, limit, solved)
        least_s += solved.least_ms / 1e3
    for attempt in range(ATTEMPTS):
        allowed = limit * (1 - LOWERED * attempt)
        solved = _Program(timeline, allowed, handing_back=False).solve(time_limit_s)
        if solved is None:
            break
        found = _followed(timeline, limit, solved)
        if found is not None:
            if best is None or found.prediction.step_s < best.prediction.step_s:
                best = found
            break
    return best, least_s


@dataclass
class _Solved:
    choices: Choices
    least_ms: float
    finished: bool


def _followed(timeline: Timeline, limit: float, solved: _Solved) -> MilpPlan | None:
    prediction = timeline.predict(solved.choices, limit_bytes=limit)
    if prediction.peak_bytes > limit + 0.5 or not timeline.valid(solved.choices):
        return None
    return MilpPlan(solved.choices, prediction, solved.finished)


class _Program:
    def __init__(self, timeline: Timeline, limit: float, *, handing_back: bool) -> None:
        self.t, self.limit = timeline, limit / 1e6  # in megabytes, and milliseconds
        plain = timeline.needed(timeline.keep_all())[0] / 1e6
        tight = np.flatnonzero(plain > self.limit)
        self.forward = [int(g) for g in tight if g < timeline.turn]
        self.back = [int(g) for g in tight if g >= timeline.turn]
        self.reads = sorted({int(r) for r in timeline.read})
        self.first = np.cumsum([0, *(len(own) for own in timeline.candidates)])
        self.y = int(self.first[-1])
        n = self.y + len(timeline.profile.modules)
        self.wait, n = self._numbers([*self.forward, timeline.turn], n)
        self.in_flight, n = self._numbers(self.forward, n)
        self.stall, n = self._numbers(sorted({*self.back, *self.reads}), n)
        self.ahead, n = self._numbers(self.back, n)
        self.handed = -1
        if handing_back:
            self.handed, n = n, n + 1
        self.n = n
        self.rows: list[dict[int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    @staticmethod
    def _numbers(at: list[int], n: int) -> tuple[dict[int, int], int]:
        return {g: n + i for i, g in enumerate(at)}, n + len(at)

    def _add(self, row: dict[int, float], low: float, high: float) -> None:
        self.rows.append(row)
        self.low.append(low)
        self.high.append(high)

    def _options(self, i: int) -> Any:
        own = zip(self.t.actions[i], self.t.costs[i], strict=True)
        return [(int(self.first[i]) + k, action, costs) for k, (action, costs) in enumerate(own)]

    def solve(self, time_limit_s: float) -> _Solved | None:
        t, sites = self.t, range(len(self.t.candidates))
        cost = np.zeros(self.n)
        for i in sites:
            row = {number: 1.0 for number, _, _ in self._options(i)}
            if t.module_of[i] >= 0:
                row[self.y + int(t.module_of[i])] = 1.0
            self._add(row, 1, 1)
            for number, action, costs in self._options(i):
                cost[number] = (costs.forward_s + costs.backward_s) * 1e3
                if action == "replay":
                    for s in t.sources[i]:
                        m = int(t.module_of[s])
                        if m >= 0 and m != t.module_of[i]:
                            self._add({number: 1.0, self.y + m: 1.0}, -np.inf, 1)
        for m, module in enumerate(t.profile.modules):
            cost[self.y + m] = module.checkpoint_s * 1e3
        self._tiers()
        self._forward()
        self._backward()
        cost[self.wait[t.turn]] = 1.0
        cost[self.stall[max(self.stall)]] = 1.0
        binary = np.zeros(self.n)
        binary[: self.y + len(t.profile.modules)] = 1
        upper = np.where(binary > 0, 1.0, np.inf)
        entries = [(r, c, v) for r, row in enumerate(self.rows) for c, v in row.items()]
        places = ([e[0] for e in entries], [e[1] for e in entries])
        matrix = csr_matrix(([e[2] for e in entries], places), (len(self.rows), self.n))
        found = milp(
            cost,
            integrality=binary,
            bounds=Bounds(0, upper),
            constraints=LinearConstraint(matrix, self.low, self.high),
            # The gap is relative to what the plan adds to the step.
            options={"time_limit": time_limit_s, "mip_rel_gap": GAP},
        )
        if found.x is None:
            return None
        choices = t.keep_all()
        for i in sites:
            values = found.x[self.first[i] : self.first[i + 1]]
            choices.options[i] = int(np.argmax(values))
        choices.checkpointed[:] = found.x[self.y : self.y + len(choices.checkpointed)] > 0.5
        choices.options[t.inside(choices)] = 0
        return _Solved(choices, float(found.mip_dual_bound), found.status == 0)

    def _tiers(self) -> None:
        for tier, most in (
            ("host", self.t.profile.host_bytes),
            ("disk", self.t.profile.disk_bytes),
        ):
            if most is None:
                continue
            row = {}
            for i in range(len(self.t.candidates)):
                for number, action, costs in self._options(i):
                    if action == tier:
                        row[number] = costs.moved_bytes / 1e6
            self._add(row, -np.inf, most / 1e6)

    def _memory(self, g: int) -> dict[int, float]:
        """Return the bytes at a moment besides those on their way: of binaries."""
        t = self.t
        row: dict[int, float] = {}
        for i in range(len(t.candidates)):
            saved, read, freed = int(t.saved[i]), int(t.read[i]), int(t.freed[i])
            used = saved <= g < max(int(t.released[i]), saved + 1) or read <= g < freed
            nbytes = float(t.nbytes[i]) / 1e6
            for number, action, costs in self._options(i):
                if action == "keep":
                    alive = nbytes * (saved <= g < freed)
                else:
                    alive = nbytes * used
                    if action == "device":
                        alive += costs.packed_bytes / 1e6 * (saved <= g <= read)
                    elif costs.packed_bytes and g == read:
                        alive += costs.packed_bytes / 1e6
                if alive:
                    row[number] = alive
            m = int(t.module_of[i])
            if m >= 0:
                late = saved <= g < freed and g >= t.recomputed[m]
                if used or late:
                    row[self.y + m] = row.get(self.y + m, 0.0) + nbytes
        for m, module in enumerate(t.profile.modules):
            if module.begin_s <= t.moments[g] < module.backward_end_s:
                column = self.y + m
                row[column] = row.get(column, 0.0) + module.checkpoint_bytes / 1e6
        return row

    def _forward(self) -> None:
        t = self.t
        link, disk = t.profile.link, t.profile.disk
        last = None
        for g in [*self.forward, t.turn]:
            if last is not None:
                self._add({self.wait[g]: 1.0, self.wait[last]: -1.0}, 0, np.inf)
            last = g
        for g in self.forward:
            row = self._memory(g)
            row[self.in_flight[g]] = 1.0
            self._add(row, -np.inf, self.limit - float(t.other[g]) / 1e6)
            if link is None:
                continue
            for begin in sorted({int(s) for s in t.saved if s <= g}):
                queues = [("up_s", link.d2h_bytes_per_s)]
                if disk is not None:
                    queues.append(("write_s", disk.write_bytes_per_s))
                for seconds, rate in queues:
                    self._add_in_flight(g, begin, seconds, rate / 1e9)

    def _add_in_flight(self, g: int, begin: int, seconds: str, rate: float) -> None:
        """In flight at g is what was saved from `begin` on, less what was carried since then."""
        t = self.t
        row = {self.in_flight[g]: 1.0}
        for i in range(len(t.candidates)):
            saved = int(t.saved[i])
            for number, _, costs in self._options(i):
                work = getattr(costs, seconds) * 1e3
                if not work:
                    continue
                held = saved if costs.packed_bytes else max(saved, int(t.released[i]))
                if begin <= saved and held <= g:
                    row[number] = row.get(number, 0.0) - rate * work
                if begin < saved <= g:  # encoding between both delays g
                    row[number] = row.get(number, 0.0) + rate * costs.forward_s * 1e3
        row[self.wait[g]] = row.get(self.wait[g], 0.0) + rate
        before = [f for f in self.forward if f < begin]
        if before:
            at = self.wait[before[-1]]
            row[at] = row.get(at, 0.0) - rate
        elapsed = float(t.moments[g] - t.moments[begin]) * 1e3
        self._add(row, -rate * elapsed, np.inf)

    def _backward(self) -> None:
        t = self.t
        link, disk = t.profile.link, t.profile.disk
        points = sorted(self.stall)
        for a, b in zip(points, points[1:], strict=False):
            self._add({self.stall[b]: 1.0, self.stall[a]: -1.0}, 0, np.inf)
        for g in self.back:
            row = self._memory(g)
            row[self.ahead[g]] = 1.0
            self._add(row, -np.inf, self.limit - float(t.other[g]) / 1e6)
        if self.handed >= 0:
            row = self._memory(t.turn)
            row[self.handed] = 1.0
            self._add(row, -np.inf, self.limit - float(t.other[t.turn]) / 1e6)
        if link is None:
            return
        queues = [("down_s", link.h2d_bytes_per_s)]
        if disk is not None:
            queues.append(("read_s", disk.read_bytes_per_s))
        for seconds, rate in queues:
            for read in self.reads:
                self._add_come_back(-1, read, seconds, rate / 1e9)
                for g in self.back:
                    if g < read:
                        self._add_come_back(g, read, seconds, rate / 1e9)

    def _add_come_back(self, g: int, read: int, seconds: str, rate: float) -> None:
        """What is read after g and up to `read` was there at g, or crosses in between."""
        t = self.t
        row: dict[int, float] = {self.stall[read]: rate}
        if g < 0 and self.handed >= 0:
            row[self.handed] = 1.0
        if g >= 0:
            row[self.ahead[g]] = 1.0
            row[self.stall[g]] = row.get(self.stall[g], 0.0) - rate
        for i in range(len(t.candidates)):
            at = int(t.read[i])
            for number, _, costs in self._options(i):
                work = getattr(costs, seconds) * 1e3
                if work and g < at <= read:
                    row[number] = row.get(number, 0.0) - rate * work
                if costs.backward_s and g < at < read:
                    row[number] = row.get(number, 0.0) + rate * costs.backward_s * 1e3
        for m, module in enumerate(t.profile.modules):
            if g < t.recomputed[m] <= read:
                row[self.y + m] = row.get(self.y + m, 0.0) + rate * module.checkpoint_s * 1e3
        begin = t.profile.turn_s if g < 0 else float(t.moments[g])
        elapsed = (float(t.moments[read]) - begin) * 1e3
        self._add(row, -rate * elapsed, np.inf)
