"""Sizes of products with packed weights, for kernel and launcher: cuda/packed_linear.cu."""

from __future__ import annotations

from typing import Protocol

import torch

from ...dtypes import EXPONENT_FIELDS
from .format import GROUP_CHUNKS, RowLayout

#: The most rows of input that are multiplied while the weight is decoded.
MAX_INPUT_ROWS = 16
#: Warps whose counts of a row are loaded at once: more are not of one block.
COUNTED_WARPS = 8
STEP_COLUMNS = 128  # of a weight, that a warp multiplies at once


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
    """What a block takes of a weight at once, for up to 8 or up to 16 rows of input.

    Parameters
    ----------
    x_rows : int
        8 or 16.

    Attributes
    ----------
    rows : int
        Rows of the weight.
    max_warps, blocks : int
        Warps of a block at the most, and blocks of so many for which there are registers.
    slot_words, stage_words : int
        Words of a row, and of all rows, in a stage of a warp. Slots of neighbouring rows begin four
        words apart among eight, so that lanes of a warp mostly read from banks of their own.
    """

    def __init__(self, x_rows: int) -> None:
        self.x_rows = x_rows
        # With more rows of input each of them is read for twice as many rows of the weight.
        self.row_tiles = x_rows // 8
        # Sums and operands of twice as many rows take more registers than 16 warps have.
        self.max_warps, self.blocks = (8, 2) if self.row_tiles == 1 else (4, 3)
        self.rows = 16 * self.row_tiles
        columns = STEP_COLUMNS * (2 // self.row_tiles)
        # Of 16 bytes; one more, because rows begin at any word.
        self.payload_pieces = columns // 16 + 1
        self.code_pieces = columns * 3 // 128 + 1
        self.slot_words = 4 * ((self.payload_pieces + self.code_pieces) | 1)
        self.stage_words = self.rows * self.slot_words

    def settings(self) -> tuple[tuple[str, int], ...]:
        """Return the preprocessor's definitions."""
        return (
            ("X_ROWS", self.x_rows),
            ("ROW_TILES", self.row_tiles),
            ("PAYLOAD_PIECES", self.payload_pieces),
            ("CODE_PIECES", self.code_pieces),
            ("SLOT_WORDS", self.slot_words),
            ("STAGE_WORDS", self.stage_words),
            ("COUNTED_WARPS", COUNTED_WARPS),
            ("MAX_WARPS", self.max_warps),
            ("MIN_BLOCKS", self.blocks),
            ("KIND", 0),  # bfloat16, as floats.cuh counts dtypes
            ("CHUNK_BYTES", 2),
            ("LEVELS", 4),
            ("CODE_BITS", 3),
        )


#: For up to 8 and up to 16 rows of input.
LINEAR_SHAPES = (LinearShape(8), LinearShape(16))


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
