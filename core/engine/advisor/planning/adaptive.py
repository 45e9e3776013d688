"""Adaptive offloading of SSDTrain (section 5.3.5): how much may be written, by one formula."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ....errors import ArgumentError
from .candidates import Candidate
from .profile import SiteProfile, StepProfile

#: What the backward pass takes of the forward pass's time where it is not known.
BACKWARD_SHARE = 2.0


@dataclass(frozen=True)
class OffloadUnit:
    """A module or tensor of a profiled forward pass.

    Parameters
    ----------
    name : str
        Its name.
    nbytes : int
        Bytes that it saves.
    begin_s : float
        When its first tensor is saved, since the step began.
    forward_s : float
        Seconds of its forward pass.
    backward_s : float, optional
        Seconds of its backward pass; twice the forward where it is not known.
    """

    name: str
    nbytes: int
    begin_s: float
    forward_s: float
    backward_s: float | None = None


@dataclass(frozen=True)
class AdaptiveOffload:
    """What the formula says.

    Parameters
    ----------
    moved, kept : tuple of str
        Units up to the last one to be moved, and those behind it.
    required_bytes_per_s : float
        What the last one's bytes, there and back, and those of all before it ask of the bandwidth;
        0 with none.
    bandwidth_bytes_per_s : float
        What there is.
    """

    moved: tuple[str, ...]
    kept: tuple[str, ...]
    required_bytes_per_s: float
    bandwidth_bytes_per_s: float

    def choices(self, sites: Iterable[SiteProfile], candidate: Candidate) -> dict[str, Candidate]:
        """Return `candidate` for the sites of units that are moved, by their module or name."""
        moved = set(self.moved)
        return {
            each.site: candidate
            for each in sites
            if each.movable and (each.site in moved or (each.module and each.module in moved))
        }


def adaptive_offload(
    units: Sequence[OffloadUnit], turn_s: float, bandwidth_bytes_per_s: float
) -> AdaptiveOffload:
    """Return which units of a step are moved, so that nothing waits for them.

    The last one, m, is the largest with ``sum of S_i for i < m, + 2 S_m <= bandwidth x time``: all
    before it are written, and it is written and read, from the first tensor to the beginning of
    m's backward pass.

    Parameters
    ----------
    units : sequence of OffloadUnit
        In the order of the forward pass; backward passes run in reverse.
    turn_s : float
        When the backward pass begins.
    bandwidth_bytes_per_s : float
        Measured while the forward pass writes.

    Raises
    ------
    ArgumentError
        For a bandwidth that is not above 0, and units in another order.
    """
    if not (math.isfinite(bandwidth_bytes_per_s) and bandwidth_bytes_per_s > 0):
        raise ArgumentError(
            f"bandwidth_bytes_per_s: {bandwidth_bytes_per_s}, accepted are finite numbers above 0"
        )
    begins = [each.begin_s for each in units]
    if begins != sorted(begins) or (begins and begins[-1] > turn_s):
        raise ArgumentError("units: expected in the order of the forward pass, before turn_s")
    last, required = -1, 0.0
    before = sum(each.nbytes for each in units)
    backward_s = 0.0  # of the units behind
    for m in range(len(units) - 1, -1, -1):
        unit = units[m]
        before -= unit.nbytes
        seconds = turn_s + backward_s - begins[0]
        nbytes = before + 2 * unit.nbytes
        if nbytes <= bandwidth_bytes_per_s * seconds:
            last, required = m, nbytes / seconds if seconds else 0.0
            break
        own = unit.backward_s
        backward_s += BACKWARD_SHARE * unit.forward_s if own is None else own
    names = tuple(each.name for each in units)
    return AdaptiveOffload(names[: last + 1], names[last + 1 :], required, bandwidth_bytes_per_s)


def offload_units(profile: StepProfile) -> list[OffloadUnit]:
    """Return the units of a profiled step: its modules, and each site that is in none."""
    sites = [each for each in profile.sites if each.movable]
    inside: dict[str, list[SiteProfile]] = {}
    for each in sites:
        inside.setdefault(each.module, []).append(each)
    units = []
    for module in profile.modules:
        own = inside.get(module.module, [])
        if own:
            units.append(
                OffloadUnit(
                    module.module,
                    sum(each.nbytes for each in own),
                    own[0].saved_s,
                    module.checkpoint_s,
                    module.backward_end_s - module.backward_begin_s,
                )
            )
    # Of a tensor on its own: the time up to the read of the one that was saved before it.
    alone = inside.get("", [])
    until_s = [profile.end_s, *(each.read_s for each in alone)]
    for each, end_s in zip(alone, until_s, strict=False):
        backward_s = max(0.0, end_s - each.read_s)
        units.append(OffloadUnit(each.site, each.nbytes, each.saved_s, 0.0, backward_s))
    return sorted(units, key=lambda unit: unit.begin_s)
