"""The planner: the plan of a profiled step under a limit of memory, or of what it may cost."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ....errors import ArgumentError, ArgumentTypeError
from .candidates import Candidate, Choices, Costs
from .needless import without_needless_moves
from .plan import Plan, SitePlan
from .prediction import StepPrediction
from .profile import StepProfile
from .solution import Solution
from .solver import Solver
from .timeline import Timeline

#: Share of a plain step that a plan may cost where no limit of memory is given.
SLOWDOWN = 0.02
#: Share of a plain step's peak that a plan must save then.
LEAST_GAIN = 0.01
#: Halvings of the limit, in search of the least that costs no more.
HALVINGS = 7


class MemoryLimitError(ArgumentError):
    """No plan that was found meets a limit of memory.

    Attributes
    ----------
    least_bytes : int
        The least that one can.
    """

    def __init__(self, message: str, least_bytes: int = 0) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


def make_plan(
    profile: StepProfile, *, memory_bytes: int | None = None, slowdown: float = SLOWDOWN
) -> Plan:
    """Plan what becomes of each tensor that a step saves.

    Parameters
    ----------
    profile : StepProfile
        The step.
    memory_bytes : int, optional
        Most bytes of the device at any moment; the plan is the fastest one found. Left out, the
        plan is the one of least memory found that costs a step no more than `slowdown`.
    slowdown : float
        Share of a plain step.

    Returns
    -------
    Plan
        The same for the same profile. Everything is kept where that fits, and where another plan
        gains nothing; `Plan.reason` says so.

    Raises
    ------
    MemoryLimitError
        When the limit cannot be met, with the least that can.
    ArgumentError, ArgumentTypeError
        For arguments of another kind.

    Examples
    --------
    >>> from bitslab.engine.advisor.planning import drawn_profile, make_plan
    >>> profile = drawn_profile(seed=1, n_sites=20)
    >>> plan = make_plan(profile, memory_bytes=200_000_000)
    >>> plan.prediction.peak_bytes <= 200_000_000 < plan.plain.peak_bytes
    True
    """
    if memory_bytes is not None and (
        not isinstance(memory_bytes, int) or isinstance(memory_bytes, bool)
    ):
        raise ArgumentTypeError(f"memory_bytes: expected an int, got {memory_bytes!r:.60}")
    if not (isinstance(slowdown, int | float) and 0 <= slowdown < math.inf):
        raise ArgumentError(f"slowdown: {slowdown!r:.60}, accepted are numbers from 0")
    timeline = Timeline(profile)
    plain = timeline.predict(timeline.keep_all())
    if memory_bytes is None:
        return _cheap_plan(timeline, plain, float(slowdown))
    if plain.peak_bytes <= memory_bytes:
        reason = f"Declined: all fits, {plain.peak_bytes:,.0f} of {memory_bytes:,} bytes."
        return _kept(timeline, plain, reason, memory_bytes=memory_bytes)
    solver = Solver(timeline)
    least = solver.least()
    unmet = least.prediction.peak_bytes > memory_bytes
    found = None
    if not unmet or timeline.has_limited_room:  # with which a search may find less
        found = solver.solve(memory_bytes)
    if unmet and (found is None or not found.fits):
        least_bytes = math.ceil(least.prediction.peak_bytes)
        # In no variable: its traceback would hold that, and tensors of the callers, in a cycle.
        raise MemoryLimitError(
            f"memory_bytes: {memory_bytes:,}, and the least possible is {least_bytes:,} "
            f"({plain.peak_bytes:,.0f} with everything kept)",
            least_bytes,
        )
    if found is None or not found.fits:  # the plan of least memory does
        found = _under(timeline, least.choices, memory_bytes)
    found = without_needless_moves(found, timeline)
    reason = f"Fits {memory_bytes:,} bytes."
    return described(timeline, found, plain, reason, memory_bytes=memory_bytes)


def least_plan(profile: StepProfile, *, memory_bytes: int) -> Plan:
    """Return the plan that takes as little memory as was found, whatever it costs.

    What computes waits for each copy, so that no device memory is taken by copies on their way.

    Parameters
    ----------
    profile : StepProfile
        The step.
    memory_bytes : int
        The limit that other plans did not keep; this one may not keep it either.
    """
    timeline = Timeline(profile)
    plain = timeline.predict(timeline.keep_all())
    least = Solver(timeline).least()
    limit = max(memory_bytes, math.ceil(least.prediction.peak_bytes))
    reason = "The least memory: each copy is waited for."
    return replace(described(timeline, least, plain, reason, memory_bytes=limit), serial=True)


def predicted_again(plan: Plan, profile: StepProfile) -> Plan:
    """Return a plan with what another profile of the same step predicts of it.

    Parameters
    ----------
    plan : Plan
        Its choices, reason and limits remain.
    profile : StepProfile
        Of the same sites and modules, with other times.

    Raises
    ------
    ArgumentError
        For a profile of another step.
    """
    timeline = Timeline(profile)
    choices = timeline.choices(plan.choices())
    limit = math.inf if plan.memory_bytes is None else float(plan.memory_bytes)
    plain = timeline.predict(timeline.keep_all())
    limits = {"memory_bytes": plan.memory_bytes, "slowdown": plan.slowdown}
    found = _under(timeline, choices, limit)
    return described(timeline, found, plain, plan.reason, **limits)  # type: ignore[arg-type]


def _under(timeline: Timeline, choices: Choices, limit: float) -> Solution:
    prediction, trace = timeline.follow(choices, limit_bytes=limit)
    return Solution(choices, prediction, trace, True, limit)


def _cheap_plan(timeline: Timeline, plain: StepPrediction, slowdown: float) -> Plan:
    """Return the plan of least memory found that costs no more than a share of a step."""
    solver = Solver(timeline)
    allowed_s = plain.step_s * (1 + slowdown)
    low, high = solver.least().prediction.peak_bytes, plain.peak_bytes
    best: Solution | None = None
    for _ in range(HALVINGS):
        limit = (low + high) / 2
        found = solver.solve(limit, coarse=True)
        if found.fits and found.prediction.step_s <= allowed_s:
            best, high = found, min(limit, found.prediction.peak_bytes)
        else:
            low = limit
    # A thorough search may reach what a coarse one missed.
    thorough = solver.solve((3 * low + high) / 4)
    if thorough.fits and thorough.prediction.step_s <= allowed_s:
        best = thorough
    elif best is not None:
        again = solver.solve(best.prediction.peak_bytes)
        if again.better_than(best):
            best = again
    gain = 0.0 if best is None else 1 - best.prediction.peak_bytes / max(plain.peak_bytes, 1.0)
    if best is None or gain < LEAST_GAIN:
        reason = (
            f"Declined: no plan found saves {LEAST_GAIN:.0%} of the peak for {slowdown:.1%} of a "
            "step."
        )
        return _kept(timeline, plain, reason, slowdown=slowdown)
    reason = f"The least memory found for at most {slowdown:.1%} of a step."
    return described(timeline, best, plain, reason, slowdown=slowdown)


def _kept(timeline: Timeline, plain: StepPrediction, reason: str, **limits: float) -> Plan:
    prediction, trace = timeline.follow(timeline.keep_all())
    kept = Solution(timeline.keep_all(), prediction, trace, True, math.inf)
    return described(timeline, kept, plain, reason, **limits)


def described(
    timeline: Timeline, found: Solution, plain: StepPrediction, reason: str, **limits: float
) -> Plan:
    """Return the plan of choices, with reasons."""
    named = timeline.named(found.choices)
    profile = timeline.profile
    sites = []
    for i, site in enumerate(profile.sites):
        candidate = named[site.site]
        costs = timeline.costs[i][int(found.choices.options[i])]
        after = [
            None if at is None else _read_at(timeline, at)
            for at in (found.trace.fetch_at.get(i), found.trace.read_at.get(i))
        ]
        sites.append(SitePlan(site.site, site.nbytes, candidate, _reason(candidate, costs), *after))
    flags = found.choices.checkpointed
    modules = tuple(m.module for m, on in zip(profile.modules, flags, strict=True) if on)
    return Plan(
        sites=tuple(sites),
        modules=modules,
        prediction=found.prediction,
        plain=plain,
        reason=reason,
        budget_bytes=None if profile.disk is None else profile.budget_bytes,
        **limits,  # type: ignore[arg-type]
    )


def _read_at(timeline: Timeline, at: int) -> str:
    """Return the site that is read first from a moment on; "" for the begin of the backward."""
    if at <= timeline.turn:
        return ""
    read = timeline.read
    first = min(np.flatnonzero(read >= at).tolist(), key=lambda i: (read[i], -i))
    return timeline.profile.sites[first].site


def _reason(candidate: Candidate, costs: Costs) -> str:
    """Return what a candidate takes, in words."""
    device_ms = (costs.forward_s + costs.backward_s) * 1e3
    if candidate.action == "keep":
        return "Kept."
    if candidate.action == "checkpoint":
        return "Recomputed with its module."
    if candidate.action == "replay":
        return f"Replayed in {device_ms:.3g} ms."
    codec = "" if candidate.codec is None else f", {device_ms:.3g} ms of its codec"
    if candidate.action == "device":
        return f"Packed to {costs.packed_bytes / 1e6:.3g} MB{codec}."
    where = "host" if candidate.action == "host" else "disk"
    link_ms = max(costs.up_s, costs.write_s) * 1e3, max(costs.down_s, costs.read_s) * 1e3
    return (
        f"To {where}: {costs.moved_bytes / 1e6:.3g} MB, {link_ms[0]:.3g} ms there and "
        f"{link_ms[1]:.3g} ms back{codec}."
    )
