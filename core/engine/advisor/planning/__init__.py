"""Plans of what becomes of the tensors that a step saves: kept, recomputed, packed or moved."""

from .candidates import ACTIONS, CHECKPOINT, KEEP, REPLAY, Candidate
from .prediction import StepPrediction
from .profile import DiskRates, ModuleProfile, Packing, SiteProfile, StepProfile
from .solver import Solution, Solver
from .synthetic import drawn_profile
from .timeline import Choices, Timeline
