"""Sizes of products with packed weights, for kernel and launcher: cuda/packed_linear.cu."""

from __future__ import annotations

from typing import Protocol

import torch

from ...dtypes import EXPONENT_FIELDS
from .format import GROUP_CHUNKS, RowLayout

#: The most rows of input that are multiplied while the weight is decoded.
MAX_INPUT_ROWS = 16
#: Columns of a row that one entry of the index of its exceptions is for.
CHUNK_COLUMNS = 1024
#: The most words of a packed weight: kernels count them in 32 bits.
MAX_WORDS = (1 << 32) - 1
#: Words of a step of 2048 values in shared memory, and of a chunk's exceptions of a row.
STAGE_WORDS, SLOT_WORDS = 2 * 368, 20


class PackedLinear(Protocol):
    """Products with a packed weight; see `cpu.packed_linear.prepare_linear`."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Multiply rows of input: ``out = x weight^T + bias``.

        Parameters
        ----------
        x : torch.Tensor
            bfloat16 ``[M, K]``, M up to `MAX_INPUT_ROWS`.
        bias : torch.Tensor or None
            bfloat16 ``[N]``, contiguous.
        out : torch.Tensor
            bfloat16 ``[M, N]``, its rows contiguous.
        """
        ...


class LinearShape:
    """What a warp takes of a weight at once, for up to so many rows of input.

    Parameters
    ----------
    x_rows : int
        Rows of input, at the most.
    segments : int
        Pieces of a row of the weight that a warp multiplies at once.

    Attributes
    ----------
    rows : int
        Rows of the weight, of a warp.
    warps, blocks : int
        Warps of a block, and blocks of a multiprocessor.
    warp_words, shared_bytes : int
        Shared memory of a warp, and of a block: stages, and exceptions of chunks under way.
    """

    #: Steps that are copied at once.
    depth = 2

    def __init__(self, x_rows: int, segments: int) -> None:
        self.x_rows = x_rows
        self.segments = segments
        # With pieces of more rows a step takes more registers than 16 warps have.
        self.warps, self.blocks = (8, 2) if segments > 1 else (4, 3)
        self.rows = 16 // segments  # a matrix instruction takes 16
        chunks = (self.depth - 2) // (self.rows // 2) + 2
        self.warp_words = self.depth * STAGE_WORDS + chunks * self.rows * SLOT_WORDS
        self.shared_bytes = 4 * self.warps * self.warp_words

    def settings(self) -> tuple[tuple[str, int], ...]:
        """Return the preprocessor's definitions."""
        return (
            ("X_ROWS", self.x_rows),
            ("SEGMENTS", self.segments),
            ("WARPS", self.warps),
            ("MIN_BLOCKS", self.blocks),
            ("DEPTH", self.depth),
            ("SHARED_WORDS", self.warp_words),
            ("KIND", 0),  # bfloat16, as floats.cuh counts dtypes
            ("CHUNK_BYTES", 2),
            ("LEVELS", 4),
            ("CODE_BITS", 3),
        )


#: By rows of input.
LINEAR_SHAPES = (LinearShape(1, 8), LinearShape(4, 2), LinearShape(8, 1), LinearShape(16, 1))


def is_multiplied_packed(layout: RowLayout, dtype: torch.dtype) -> bool:
    """Return whether weights that are packed like this are multiplied while they are decoded.

    They are bfloat16, in rows of whole groups of 32, packed by the plan of trained weights: codes
    of three bits, not grouped, and the exponent as the mask of all positions.
    """
    f = layout.format
    plain = f.uniform and not f.grouped and f.clusters == 1 and f.code_bits == 3
    exponent = EXPONENT_FIELDS[torch.bfloat16]
    fits = f.chunk_bytes == 2 and f.chunks % GROUP_CHUNKS == 0 and f.chunks > 0
    return dtype is torch.bfloat16 and plain and fits and layout.fields[0] == exponent
