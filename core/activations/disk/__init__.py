"""Bytes that training keeps for its backward pass, on SSDs, and how long these last."""

from .endurance import DRIVES, Drive, lifespan_days, required_bytes_per_s
from .posix_file import PosixFile
from .rates import DiskRates, RatePoint, disk_rates, measure_rates
from .tensor_file import DiskError, TensorFile
from .tickets import Ticket
from .tier import DiskTier

__all__ = [
    "DRIVES",
    "DiskError",
    "DiskRates",
    "DiskTier",
    "Drive",
    "PosixFile",
    "RatePoint",
    "TensorFile",
    "Ticket",
    "disk_rates",
    "lifespan_days",
    "measure_rates",
    "required_bytes_per_s",
]
