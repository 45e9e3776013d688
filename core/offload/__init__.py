"""Weights that stream packed, for any `torch.nn.Module`, with the same outputs bit for bit."""

from ..engine.transfer.unit_report import UnitReport
from .attached import OffloadedModel, find_offloaded
from .fused import Fused, check_fused
from .guards import deferred_state_dict
from .handles import WeightHandle
from .images import DeviceImage
from .offload import (
    attach_weights,
    bring_inputs,
    move_unpacked,
    offload_report,
    offload_weights,
    restore_weights,
    split_units,
    stored_names,
)
from .report import OffloadReport
from .residence import MIN_UNIT_BYTES, JsonKeep, Keep, Tier, choose_tiers
from .store import PackedUnit, PackedWeights
from .stream import WeightStream, check_counts
from .tensor_packer import MIN_PACKED_BYTES, CodecName, TensorPacker
from .units import ParameterRef, Predicate, Unit, cut_units
from .weight_packer import WeightPacker

__all__ = [
    "CodecName",
    "DeviceImage",
    "Fused",
    "JsonKeep",
    "Keep",
    "MIN_PACKED_BYTES",
    "MIN_UNIT_BYTES",
    "OffloadReport",
    "OffloadedModel",
    "PackedUnit",
    "PackedWeights",
    "Predicate",
    "ParameterRef",
    "TensorPacker",
    "Tier",
    "Unit",
    "UnitReport",
    "WeightHandle",
    "WeightPacker",
    "WeightStream",
    "attach_weights",
    "bring_inputs",
    "check_counts",
    "check_fused",
    "choose_tiers",
    "cut_units",
    "deferred_state_dict",
    "find_offloaded",
    "move_unpacked",
    "offload_report",
    "offload_weights",
    "restore_weights",
    "split_units",
    "stored_names",
]
