"""Bytes that training keeps for its backward pass, on SSDs, and how long these last."""

from .posix_file import PosixFile
from .rates import DiskRates, RatePoint, disk_rates, measure_rates
from .tensor_file import DiskError, TensorFile
from .tier import DiskTier, Ticket

__all__ = [
    "DiskError",
    "DiskRates",
    "DiskTier",
    "PosixFile",
    "RatePoint",
    "TensorFile",
    "Ticket",
    "disk_rates",
    "measure_rates",
]
