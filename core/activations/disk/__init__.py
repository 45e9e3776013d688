"""Bytes that training keeps for its backward pass, on SSDs, and how long these last."""

from .endurance import DRIVES, Drive, lifespan_days, required_bytes_per_s
from .known_rates import disk_rates
from .kvikio_file import KvikioFile
from .posix_file import PosixFile
from .rates import DiskRates, FileRates, RatePoint, measure_files, measure_rates
from .tensor_file import DiskError, TensorFile
from .tickets import Ticket
from .tier import DiskTier

__all__ = [
    "DRIVES",
    "DiskError",
    "DiskRates",
    "DiskTier",
    "Drive",
    "FileRates",
    "KvikioFile",
    "PosixFile",
    "RatePoint",
    "TensorFile",
    "Ticket",
    "disk_rates",
    "lifespan_days",
    "measure_files",
    "measure_rates",
    "required_bytes_per_s",
]
