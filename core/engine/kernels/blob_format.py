"""Sizes and offsets of the forms of whole tensors, which both backends read.

A buffer begins with the header that `codecs.blob` describes; its parts begin at multiples of
ALIGN_BYTES. `ZvcLayout` says where those of zero-value compression are, `PackedLayout` those of
packed rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from .format import BLOCK_ROWS, PAD_WORDS, RowStorage, ceil_div

HEADER_BYTES = 32
#: Buffers begin at a multiple of this, and so do the parts of the built-in forms within them.
ALIGN_BYTES = 16

#: Bytes of a tensor that are one block of zero-value compression: decoded alone, by one block of
#: threads.
ZVC_BLOCK_BYTES = 8 << 10
#: Bytes of a tensor of one-byte elements from which on its bitmap comes before the starts.
ZVC_BITS_FIRST_BYTES = 64 << 10
#: Numbers of the forms of zero-value compression, as the header has them.
ZVC_FORM, ZVC_BITS_FIRST_FORM = 1, 4
#: Set in the start of a block of one-byte elements that are all 0 or 1: its ones are not stored.
ZVC_ONES = 1 << 31
#: Bytes of elements that are compared with zero; those of 16 bytes are two of 8.
ZVC_UNIT_BYTES = (1, 2, 4, 8)
#: Where a header has the bytes of the values of zero-value compression.
VALUE_BYTES_AT = 24


#: Layouts that are kept, with the sizes and offsets that were asked for.
MOST_LAYOUTS = 4096


def aligned(n_bytes: int) -> int:
    """Return a number of bytes rounded up to a multiple of ALIGN_BYTES."""
    return ceil_div(n_bytes, ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True)
class ZvcLayout:
    """Where the parts of a tensor in zero-value compression are.

    ========== ================== =========================================================
    part       begins at          content
    ========== ================== =========================================================
    header     0                  as in `codecs.blob`; at byte VALUE_BYTES_AT, as uint64, the
                                  bytes of the values
    starts     `starts_at`        uint32 for each block: where its values begin, in units of
                                  ALIGN_BYTES behind `values_at`; bit 31 is ZVC_ONES
    bitmap     `bitmap_at`        uint32 for 32 elements: bit i is 1 where element i has any
                                  bit set
    values     `values_at`        of each block, the elements whose bits are 1, in order, and
                                  zeros up to a multiple of ALIGN_BYTES
    ========== ================== =========================================================

    Starts and bitmap end with zeros up to a multiple of ALIGN_BYTES. Where the values are packed
    once more they lie elsewhere, and what takes their place begins at `values_at`.

    With `bits_first` the bitmap comes before the starts, and the buffer ends with it when there are
    no values: then every block is ones that are not stored, and an element takes one bit.

    Parameters
    ----------
    elements : int
        Elements of the tensor.
    element_bytes : int
        Bytes of one: 1, 2, 4, 8 or 16.
    bits_first : bool
        Whether the bitmap comes before the starts.
    """

    elements: int
    element_bytes: int
    bits_first: bool = False

    @cached_property
    def unit_bytes(self) -> int:
        """Bytes that are compared with zero at once."""
        return min(self.element_bytes, ZVC_UNIT_BYTES[-1])

    @cached_property
    def units(self) -> int:
        """Elements that the bitmap counts."""
        return self.elements * (self.element_bytes // self.unit_bytes)

    @cached_property
    def block_units(self) -> int:
        """Those of a block; the last one has fewer."""
        return ZVC_BLOCK_BYTES // self.unit_bytes

    @cached_property
    def blocks(self) -> int:
        """Number of blocks."""
        return ceil_div(self.units, self.block_units)

    @cached_property
    def bitmap_words(self) -> int:
        """Words of the bitmap."""
        return ceil_div(self.units, 32)

    @cached_property
    def starts_at(self) -> int:
        """First byte of the starts."""
        return HEADER_BYTES + (aligned(4 * self.bitmap_words) if self.bits_first else 0)

    @cached_property
    def bitmap_at(self) -> int:
        """First byte of the bitmap."""
        return HEADER_BYTES + (0 if self.bits_first else aligned(4 * self.blocks))

    @cached_property
    def values_at(self) -> int:
        """First byte of the values."""
        return HEADER_BYTES + aligned(4 * self.blocks) + aligned(4 * self.bitmap_words)

    @cached_property
    def least_bytes(self) -> int:
        """Bytes of a buffer without values; none has fewer."""
        return self.starts_at if self.bits_first else self.values_at

    @cached_property
    def max_bytes(self) -> int:
        """Bytes of a buffer when no element is zero."""
        return self.values_at + self.max_value_bytes

    @cached_property
    def max_value_bytes(self) -> int:
        """Bytes of the values when no element is zero."""
        return aligned(self.units * self.unit_bytes)

    @cached_property
    def sound(self) -> bool:
        """Whether the starts can say where each block's values are."""
        return self.max_value_bytes // ALIGN_BYTES < ZVC_ONES

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, *, chained: bool = False) -> ZvcLayout:
        """Return the layout of a tensor; `chained`: of one whose values are packed once more."""
        elements, element_bytes = math.prod(shape), dtype.itemsize
        bits_first = element_bytes == 1 and elements >= ZVC_BITS_FIRST_BYTES and not chained
        return _zvc_layouts(elements, element_bytes, bits_first)

    @cached_property
    def form(self) -> int:
        """Number of the form of a buffer that holds its values."""
        return ZVC_BITS_FIRST_FORM if self.bits_first else ZVC_FORM


@dataclass(frozen=True)
class PackedLayout:
    """Where the parts of packed rows are in a buffer.

    ========== ============== =============================================================
    part       begins at      content
    ========== ============== =============================================================
    lengths    `lengths_at`   of each row, as in `format.RowStorage`
    bases      `bases_at`     int64, the first word of each block of 32 rows, and the end
    tail       `tail_at`      bytes that are no whole row, as they are
    words      `words_at`     the packed rows back to back, and PAD_WORDS zeros
    ========== ============== =============================================================

    There may be fewer rows than there is room for: the lengths of those behind the last, and the
    bases behind the end, are 0. So are the bytes between parts.

    Parameters
    ----------
    lengths_at : int
        First byte of the lengths.
    n_rows : int
        Rows that there is room for.
    row_words : int
        Words of one that is kept raw.
    length_bytes : int
        Bytes of a length.
    tail_bytes : int
        Bytes that are no whole row.
    """

    lengths_at: int
    n_rows: int
    row_words: int
    length_bytes: int
    tail_bytes: int = 0

    @cached_property
    def blocks(self) -> int:
        """Blocks of 32 rows."""
        return ceil_div(self.n_rows, BLOCK_ROWS)

    @cached_property
    def bases_at(self) -> int:
        """First byte of the bases."""
        return self.lengths_at + aligned(self.n_rows * self.length_bytes)

    @cached_property
    def tail_at(self) -> int:
        """First byte of the tail."""
        return self.bases_at + aligned(8 * (self.blocks + 1))

    @cached_property
    def words_at(self) -> int:
        """First byte of the words; no buffer has fewer bytes than these and PAD_WORDS."""
        return self.tail_at + aligned(self.tail_bytes)

    @classmethod
    def of(
        cls, lengths_at: int, n_rows: int, row_words: int, length_bytes: int, tail_bytes: int = 0
    ) -> PackedLayout:
        """Return a layout, that of an earlier call with these numbers where it is kept."""
        return _packed_layouts(lengths_at, n_rows, row_words, length_bytes, tail_bytes)

    def used_bytes(self, n_words: int) -> int:
        """Return the bytes of a buffer whose rows have so many words."""
        return self.words_at + 4 * (n_words + PAD_WORDS)

    @cached_property
    def max_bytes(self) -> int:
        """Bytes of a buffer when no row shrinks."""
        return self.used_bytes(self.n_rows * self.row_words)

    def storage(self, data: torch.Tensor, length_dtype: torch.dtype) -> RowStorage:
        """Return the rows in a buffer; of the words all that there are."""
        words = data[self.words_at :]
        return RowStorage(
            words[: words.shape[0] // 4 * 4].view(torch.int32),
            data[self.bases_at :][: 8 * (self.blocks + 1)].view(torch.int64),
            data[self.lengths_at :][: self.n_rows * self.length_bytes].view(length_dtype),
            data[:0],
        )

    @cached_property
    def sound(self) -> bool:
        """Whether the kernels can count the words."""
        return self.n_rows * self.row_words < 1 << 32


#: Layouts whose sizes are counted once: training encodes tensors of the same sizes every step.
_zvc_layouts = lru_cache(maxsize=MOST_LAYOUTS)(ZvcLayout)
_packed_layouts = lru_cache(maxsize=MOST_LAYOUTS)(PackedLayout)


def zvc_threads(unit_bytes: int) -> int:
    """Return the threads of a block of zero-value compression.

    A thread has its elements in registers, one in each: of single bytes there are the most.
    """
    return 1024 if unit_bytes == 1 else 256


def zvc_blocks(unit_bytes: int, decodes: bool = False) -> int:
    """Return the blocks of zero-value compression that a multiprocessor has registers for."""
    if unit_bytes == 2:
        return 5 if decodes else 4
    return 1 if unit_bytes == 1 else 6
