"""Sizes and offsets of the forms of whole tensors, which both backends read.

A buffer begins with the header that `codecs.blob` describes; its parts begin at multiples of
ALIGN_BYTES.
"""

from __future__ import annotations

from .format import ceil_div

HEADER_BYTES = 32
#: Buffers begin at a multiple of this, and so do the parts of the built-in forms within them.
ALIGN_BYTES = 16


def aligned(n_bytes: int) -> int:
    """Return a number of bytes rounded up to a multiple of ALIGN_BYTES."""
    return ceil_div(n_bytes, ALIGN_BYTES) * ALIGN_BYTES
