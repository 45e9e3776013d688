"""Weights that stream packed: for any `torch.nn.Module`, with the same outputs bit for bit."""

from .attached import OffloadedModel, find_offloaded
from .guards import deferred_state_dict
from .handles import WeightHandle
from .offload import attach_weights, offload_report, offload_weights, restore_weights
from .report import OffloadReport, UnitReport
from .store import PackedUnit, PackedWeights
from .stream import WeightStream
from .units import Unit, cut_units
from .weight_packer import WeightPacker

__all__ = [
    "OffloadReport",
    "OffloadedModel",
    "PackedUnit",
    "PackedWeights",
    "Unit",
    "UnitReport",
    "WeightHandle",
    "WeightPacker",
    "WeightStream",
    "attach_weights",
    "cut_units",
    "deferred_state_dict",
    "find_offloaded",
    "offload_report",
    "offload_weights",
    "restore_weights",
]
