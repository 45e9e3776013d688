"""Passes in which all is kept, measured as a whole: what a plan's steps may not be slower than."""

from __future__ import annotations

import torch

from ..engine.advisor.planning import COMPARED_STEPS, StepProfile
from .measured_pass import MeasuredPass

#: By how much a plain pass on a GPU is taken to be longer than a profiled one, at most.
MOST_PLAIN_FACTOR = 1.25
#: Memory that is to be there for a pass in turn with a plan's, over the peak of one that keeps all.
ROOM = 1.1


class PlainPasses:
    """Measures passes in which all is kept, before a profile and in turn with a plan's.

    Those in turn have the machine, its clocks and who else computes on it, as the plan's have it.

    Parameters
    ----------
    may_keep : bool
        Whether all may be kept, as without a limit of memory; else none is measured.
    """

    def __init__(self, *, may_keep: bool) -> None:
        self._may_keep = may_keep
        #: On a GPU, before a pass is profiled, which leaves it idle and its clocks higher.
        self._before: MeasuredPass | None = None
        self._in_turn: list[MeasuredPass] = []
        self._profiled_s = 0.0

    def before_profile(self, device: torch.device) -> MeasuredPass | None:
        """Return what measures a pass, the first time on a GPU; None where none is measured."""
        if not self._may_keep or self._before is not None or device.type != "cuda":
            return None
        self._before = MeasuredPass(device)
        return self._before

    def use_profile(self, profile: StepProfile) -> StepProfile:
        """Return a profile whose passes take as long as the one before it, if that was longer."""
        factor = 1.0
        if self._before is not None and self._before.is_over and profile.step_s:
            factor = self._before.step().step_s / profile.step_s
        profile = profile.scaled(compute=min(max(factor, 1.0), MOST_PLAIN_FACTOR))
        self._profiled_s = profile.step_s
        return profile

    def begin_plan(self) -> None:
        """Measure in turn with a plan that is followed from now on."""
        self._in_turn.clear()

    def in_turn(
        self, device: torch.device, planned_passes: int, peak_bytes: float
    ) -> MeasuredPass | None:
        """Return what measures the next pass, if it is to keep all: one before each compared one.

        Parameters
        ----------
        device : torch.device
            The device.
        planned_passes : int
            Have followed the plan so far, of which the first is not compared.
        peak_bytes : float
            Of the device, what a pass takes that keeps all. A GPU needs room for it, and for what
            plans have allocated since it was profiled.
        """
        if not self._may_keep or len(self._in_turn) >= min(planned_passes, COMPARED_STEPS):
            return None
        if device.type == "cuda" and _own_bytes(device) < ROOM * peak_bytes:
            return None
        self._in_turn.append(MeasuredPass(device))
        return self._in_turn[-1]

    @property
    def step_s(self) -> float:
        """Seconds of the fastest one, or of the profile's step where none is over."""
        measured = [each.step().step_s for each in self._in_turn if each.is_over]
        return min(measured, default=self._profiled_s)


def _own_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that torch has, in use or not, or can have."""
    return int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)
