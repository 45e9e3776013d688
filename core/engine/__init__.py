"""The compression engine: bytes in, bytes out; knows no table, no model and no framework."""

from .progress import Progress, ProgressFunction

__all__ = [
    "Progress",
    "ProgressFunction",
]
