"""Plans of what becomes of the tensors that a step saves: kept, recomputed, packed or moved."""

from .adaptive import AdaptiveOffload, OffloadUnit, adaptive_offload, offload_units
from .candidates import ACTIONS, CHECKPOINT, KEEP, REPLAY, Candidate, Choices, Costs, candidates_of
from .correction import (
    COMPARED_STEPS,
    MOST_CORRECTIONS,
    MOST_FACTOR,
    PEAK_TOLERANCE,
    Correction,
    MeasuredStep,
    as_measured,
    compare,
)
from .plan import PLAN_VERSION, Plan, SitePlan
from .planner import SLOWDOWN, MemoryLimitError, least_plan, make_plan, predicted_again
from .prediction import StepPrediction
from .profile import DiskRates, ModuleProfile, Packing, SiteProfile, StepProfile
from .solution import Solution
from .solver import Solver
from .synthetic import drawn_profile
from .timeline import SIZED_BEHIND, Timeline

__all__ = [
    "ACTIONS",
    "CHECKPOINT",
    "COMPARED_STEPS",
    "MOST_CORRECTIONS",
    "MOST_FACTOR",
    "KEEP",
    "PEAK_TOLERANCE",
    "PLAN_VERSION",
    "REPLAY",
    "SIZED_BEHIND",
    "SLOWDOWN",
    "AdaptiveOffload",
    "Candidate",
    "Choices",
    "Correction",
    "Costs",
    "DiskRates",
    "MeasuredStep",
    "MemoryLimitError",
    "ModuleProfile",
    "OffloadUnit",
    "Packing",
    "Plan",
    "SitePlan",
    "SiteProfile",
    "Solution",
    "Solver",
    "StepPrediction",
    "StepProfile",
    "Timeline",
    "adaptive_offload",
    "as_measured",
    "candidates_of",
    "compare",
    "drawn_profile",
    "least_plan",
    "make_plan",
    "offload_units",
    "predicted_again",
]
