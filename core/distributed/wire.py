"""What ranks say to each other of a message before they send it, and the parts of a message.

The sizes stage exchanges one descriptor between each pair of ranks: DESCRIPTOR_NUMBERS int64, in
which these numbers stand from the highest bit down, below a bit 0:

====== ==== ==================================================================================
number bits content
====== ==== ==================================================================================
0      15   MAGIC, with the version of the wire
0      8    the dtype, by its place in DTYPES
0      8    bits of a field that says which row of the body a row is; 0: there are none
0      32   elements of a row
1      31   rows that this rank sends to the other one
1      32   rows that this rank expects from the other one
2      32   bytes of the message
2      31   rows in the body: fewer than are sent where rows of one id are sent once
====== ==== ==================================================================================

A message is these fields, where there are fewer rows in the body, as whole words, and then the
body: as many bytes as the rows have, which are the rows, or fewer, which are a body as
`bitslab.engine.kernels.vector_format` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..dtypes import dtype_name

#: A number that memory seldom holds, and the version.
MAGIC = 0x5B << 8 | 1
DESCRIPTOR_NUMBERS = 3
#: One more than the most rows for a rank, elements of a row, and bytes of a message.
MOST_ROWS, MOST_ELEMENTS, MOST_BYTES = 1 << 31, 1 << 32, 1 << 32
_LOW_8, _LOW_31, _LOW_32 = (1 << 8) - 1, (1 << 31) - 1, (1 << 32) - 1
#: Numbers of dtypes on the wire; new ones are appended.
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


@dataclass(frozen=True)
class Descriptor:
    """The numbers of a message; see the module."""

    magic: int
    dtype: int
    field_bits: int
    row_elements: int
    rows: int
    expected_rows: int
    n_bytes: int
    body_rows: int

    def numbers(self) -> tuple[int, int, int]:
        """Return them as they cross."""
        return (
            self.magic << 48 | self.dtype << 40 | self.field_bits << 32 | self.row_elements,
            self.rows << 32 | self.expected_rows,
            self.n_bytes << 31 | self.body_rows,
        )

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Descriptor:
        """Return the descriptor of DESCRIPTOR_NUMBERS numbers."""
        kind, rows, size = map(int, numbers)
        return cls(
            magic=kind >> 48,
            dtype=kind >> 40 & _LOW_8,
            field_bits=kind >> 32 & _LOW_8,
            row_elements=kind & _LOW_32,
            rows=rows >> 32,
            expected_rows=rows & _LOW_32,
            n_bytes=size >> 31,
            body_rows=size & _LOW_31,
        )

    def disagreement(self, ours: Descriptor) -> str | None:
        """Return why a message does not fit what this rank does with its sender, or None."""
        if self.magic != MAGIC:
            return f"version of the wire {self.magic:#x}, here it is {MAGIC:#x}"
        if self.dtype != ours.dtype:
            return f"dtype {_name(self.dtype)}, here it is {_name(ours.dtype)}"
        if self.row_elements != ours.row_elements:
            return f"{self.row_elements} elements a row, here they are {ours.row_elements}"
        if self.rows != ours.expected_rows:
            return f"{self.rows} rows sent, {ours.expected_rows} are expected here"
        if self.expected_rows != ours.rows:
            return f"{self.expected_rows} rows expected, {ours.rows} are sent from here"
        distinct = self.field_bits == 0 and self.body_rows == self.rows
        by_id = 0 < self.field_bits <= 32 and 0 < self.body_rows < self.rows
        if not distinct and not by_id:
            return f"{self.body_rows} rows in the body of {self.rows}"
        return None


def _name(dtype: int) -> str:
    return dtype_name(DTYPES[dtype]) if 0 <= dtype < len(DTYPES) else f"number {dtype}"
