"""Host memory that GPUs read: page-locked, shared or mapped, and the locks on it."""

from .host import HostBuffer
from .readonly import ReadOnlyTensor, keep_from_compiler, plain, read_only

__all__ = [
    "HostBuffer",
    "ReadOnlyTensor",
    "keep_from_compiler",
    "plain",
    "read_only",
]
