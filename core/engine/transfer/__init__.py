"""Moving bytes between host, device and file."""

from .gather import gather_copied_rows, gather_packed_rows
from .ring import PrefetchRing

__all__ = [
    "PrefetchRing",
    "gather_copied_rows",
    "gather_packed_rows",
]
