"""The forms that keep some elements of a tensor: all but zeros, heads of runs, exceptions.

Elements are counted in units of 1, 2, 4 or 8 bytes; one of 16 bytes is two of 8. Every ROW_UNITS
of them are a row, which is one block of threads' work. Of the units that are kept there are the
values, in order, something about the place of each, and for each row how many come before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .blob_format import HEADER_BYTES, aligned
from .format import ceil_div

#: Units of a row; their places fit in 16 bits.
ROW_UNITS = 4096
#: Units of which one is always the head of a run, so that a run's count fits in a byte.
RUN_UNITS = 256
#: What the header has in the place of the number of units kept when the tensor is raw.
RAW = -1

#: Numbers of the forms, as the header has them.
CSR_FORM, RLE_FORM, ZFP_FORM, LZ4_FORM = 16, 17, 18, 19
#: Bytes of the place of a unit: its column in its row, or the count of its run less one.
COLUMN_BYTES, COUNT_BYTES = 2, 1
#: Bytes of a tensor that are one LZ4 block: what nvCOMP recommends for its batches of blocks.
LZ4_BLOCK_BYTES = 64 << 10


def unit_bytes_of(element_bytes: int) -> int:
    """Return the bytes of the units that elements are counted in."""
    return min(element_bytes, 8)


@dataclass(frozen=True)
class KeptLayout:
    """Where the parts of a buffer are that keeps some units of a tensor.

    ======== ================ ==========================================================
    part     begins at        content
    ======== ================ ==========================================================
    starts   `starts_at`      int64 for each row and one more: units kept before it
    values   `values_at`      the units kept, and zeros up to a multiple of ALIGN_BYTES
    places   `places_at`      for each of them a number of `place_bytes`
    ======== ================ ==========================================================

    Byte 24 of the header has the number of units kept, int64, or RAW when the tensor's own bytes
    follow the header, since they are not more. When no unit is kept, there are no parts.

    Parameters
    ----------
    elements : int
        Elements of the tensor.
    element_bytes : int
        Bytes of one.
    place_bytes : int
        Bytes of the place of a unit.
    before_bytes : int
        Bytes before the parts: of the header, and of what belongs to no unit.
    """

    elements: int
    element_bytes: int
    place_bytes: int
    before_bytes: int = HEADER_BYTES

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit."""
        return unit_bytes_of(self.element_bytes)

    @property
    def units(self) -> int:
        """Units of the tensor."""
        return self.elements * (self.element_bytes // self.unit_bytes)

    @property
    def rows(self) -> int:
        """Rows of units; the last one may be shorter."""
        return ceil_div(self.units, ROW_UNITS)

    @property
    def starts_at(self) -> int:
        """First byte of the starts."""
        return aligned(self.before_bytes)

    @property
    def values_at(self) -> int:
        """First byte of the values."""
        return self.starts_at + aligned(8 * (self.rows + 1))

    def places_at(self, kept: int) -> int:
        """Return the first byte of the places, when so many units are kept."""
        return self.values_at + aligned(kept * self.unit_bytes)

    def used_bytes(self, kept: int) -> int:
        """Return the bytes that are used when so many units are kept."""
        if not kept:
            return self.before_bytes
        return self.places_at(kept) + kept * self.place_bytes

    @property
    def raw_bytes(self) -> int:
        """Bytes that are used when the tensor is raw."""
        return HEADER_BYTES + self.units * self.unit_bytes

    @property
    def max_bytes(self) -> int:
        """Bytes of a buffer: as many as a raw tensor takes, and room to count rows in."""
        return max(self.raw_bytes, self.values_at if self.units else HEADER_BYTES)
