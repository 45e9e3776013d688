"""Host memory that GPUs read: page-locked, shared or mapped, and the locks on it."""

from .arena import Arena, host_arena
from .host import HostBuffer
from .pieces import HostPiece, Reservation
from .readonly import ReadOnlyTensor, keep_from_compiler, plain, read_only

__all__ = [
    "Arena",
    "HostBuffer",
    "HostPiece",
    "ReadOnlyTensor",
    "Reservation",
    "host_arena",
    "keep_from_compiler",
    "plain",
    "read_only",
]
