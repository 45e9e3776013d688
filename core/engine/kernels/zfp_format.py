"""Fixed-rate zfp in blocks of four values: the arithmetic that both backends read.

Of a block's values the largest gives the exponent that all are aligned to; as integers they pass
zfp's transform and are kept plane of bits by plane, from the highest on, until the block's bits are
spent. Blocks follow each other with no gap; the stream ends with zeros up to a multiple of
STREAM_BYTES. It is that of zfp 1.0 for one dimension, where zfp's own arithmetic does not overflow:
it does in blocks whose values are all below 2**-98 (float32) or 2**-962 (float64), in which here
the same integers are found without.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from .blob_format import HEADER_BYTES
from .format import ceil_div
from .kept_format import COLUMN_BYTES, KeptLayout

BLOCK_VALUES = 4
STREAM_BYTES = 8
#: Bits of a block that are accepted; of four float32 values it has 128.
LEAST_BLOCK_BITS, MOST_BLOCK_BITS = 12, 128
#: Most bits that the code of a plane takes.
PLANE_BITS = 7
#: Bits that a CPU decodes by one look-up; see `plane_runs`.
RUN_BITS = 8
#: zfp's least exponent, of the lowest bit that is kept.
LEAST_EXPONENT = -1074


class FloatKind(NamedTuple):
    """How values of a dtype are taken apart.

    Parameters
    ----------
    number : int
        By which kernels know it.
    fraction_bits, exponent_bits : int
        Of a value.
    integer_bits : int
        Of the integers of a block: 32, or 64 for float64.
    """

    number: int
    fraction_bits: int
    exponent_bits: int
    integer_bits: int

    @property
    def bias(self) -> int:
        """Exponent bias of the dtype."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def block_bias(self) -> int:
        """What is added to the exponent of a block."""
        return 127 if self.integer_bits == 32 else 1023

    @property
    def head_bits(self) -> int:
        """Bits of a block before its planes: a flag and the exponent."""
        return 9 if self.integer_bits == 32 else 12

    @property
    def least_exponent(self) -> int:
        """Exponent of the least number of the dtype, a power of two."""
        return 1 - self.bias - self.fraction_bits

    @property
    def sure_planes(self) -> int:
        """Bits of a block that j whole planes take at most, less 4 j."""
        return self.head_bits + 3


FLOAT_KINDS = {
    torch.bfloat16: FloatKind(0, 7, 8, 32),
    torch.float16: FloatKind(1, 10, 5, 32),
    torch.float32: FloatKind(2, 23, 8, 32),
    torch.float64: FloatKind(3, 52, 11, 64),
}


def stream_bytes(elements: int, block_bits: int) -> int:
    """Return the bytes of the stream of so many values."""
    bits = ceil_div(elements, BLOCK_VALUES) * block_bits
    return ceil_div(bits, 8 * STREAM_BYTES) * STREAM_BYTES


def code_of_plane(known: int, plane: int) -> tuple[int, int, int]:
    """Return the code of a plane: its bits, their number, and values known to be at work.

    Parameters
    ----------
    known : int
        Values from the first on one of which has had a bit 1 in a plane before: their bits follow
        as they are. Behind them a bit says whether there is a further 1, and the bits up to that
        1 follow; the last value's is not written.
    plane : int
        Four bits, one a value.
    """
    code, bits = plane & ((1 << known) - 1), known
    rest = plane >> known
    while known < BLOCK_VALUES:
        more = int(rest != 0)
        code |= more << bits
        bits += 1
        if not more:
            break
        while known < BLOCK_VALUES - 1:
            code |= (rest & 1) << bits
            bits += 1
            if rest & 1:
                break
            rest >>= 1
            known += 1
        rest >>= 1
        known += 1
    return code, bits, known


@cache
def plane_codes() -> np.ndarray[Any, Any]:
    """Return uint16 ``[5 * 16]``: code, its bits from bit 8 on, values known from bit 12 on."""
    entries = [code_of_plane(known, plane) for known in range(5) for plane in range(16)]
    return np.array([code | bits << 8 | known << 12 for code, bits, known in entries], np.uint16)


def plane_of_code(known: int, bits: int, left: int) -> int:
    """Return the plane whose code begins with `left` bits, the last of a block.

    Where they end among the bits up to a further 1, that 1 is taken to come next.
    """
    at = min(known, left)
    plane = bits & ((1 << at) - 1)
    while at < left and known < BLOCK_VALUES:
        more = bits >> at & 1
        at += 1
        if not more:
            break
        while at < left and known < BLOCK_VALUES - 1:
            at += 1
            if bits >> at - 1 & 1:
                break
            known += 1
        plane |= 1 << known
        known += 1
    return plane


@cache
def plane_runs() -> np.ndarray[Any, Any]:
    """Return uint64 ``[2 * 5 * 2**RUN_BITS]``: the planes that the next bits of a block hold.

    The first half has, by values known and the next RUN_BITS bits, the planes whose codes end in
    these. The second has, by values known and the last bits of a block, fewer than RUN_BITS with a
    1 behind them, all the planes that are left. An entry has a byte of each value with its bits,
    that of the last plane lowest; the planes from bit 32 on, the bits of their codes from 36 on,
    the values known after them from 40 on.
    """
    codes = [[code_of_plane(known, plane) for plane in range(16)] for known in range(5)]
    table = np.zeros((2, 5, 1 << RUN_BITS), np.uint64)
    # Of so many bits: the first plane, and the run of the bits behind its code.
    runs: dict[tuple[int, int, int], tuple[int, ...]] = {}
    for width, known in itertools.product(range(RUN_BITS + 1), range(5)):
        for bits in range(1 << width):
            run: tuple[int, ...] = (known << 40, known << 40)
            if width:
                plane = plane_of_code(known, bits, width)
                spread = sum((plane >> value & 1) << 8 * value for value in range(BLOCK_VALUES))
                _, used, after = codes[known][plane]
                if used <= width:
                    begin = (1 << 32) + (used << 36)
                    rest = runs[width - used, after, bits >> used]
                    run = tuple(begin + each + (spread << (each >> 32 & 15)) for each in rest)
                else:
                    run = (known << 40, known << 40 | width << 36 | 1 << 32 | spread)
            runs[width, known, bits] = run
            if width == RUN_BITS:
                table[0, known, bits] = run[0]
            else:
                table[1, known, 1 << width | bits] = run[1]
    return table.reshape(-1)


def zfp_layout(elements: int, dtype: torch.dtype, block_bits: int) -> KeptLayout:
    """Return where the parts are of a tensor whose values that are not finite are kept.

    The stream follows the header. A tensor whose stream takes as many bytes as it is raw.
    """
    before = HEADER_BYTES + stream_bytes(elements, block_bits)
    return KeptLayout(elements, dtype.itemsize, COLUMN_BYTES, before)


def error_of_blocks(most: torch.Tensor, dtype: torch.dtype, block_bits: int) -> torch.Tensor:
    """Return how far values may be from what is decoded, by the largest value of their block.

    In units of a block's integers, two to the power of e - 30 (e - 62 for float64) with all values
    below two to the power of e:

    - j planes are coded in at most 4 j + 3 bits: each takes a bit a value, one to say that there is
      no further 1 or that all are known, and of the four values' firsts ones, one bit is
      implied. So the planes from m on are whole, m = 32 - (P - head - 3) // 4.
    - A coefficient is then wrong by less than 5/6 of 2**m: the bits below m in base -2 make up to
      2/3 of it; when a plane m - 1 ends in the middle, a 1 may be put to a wrong value.
    - The inverse transform adds up to 15/4 times that: 3.125 * 2**m.
    - Halves that are dropped in the transform and its inverse, and what is cut off below a unit,
      make less than 6.
    - With few planes, sums may exceed the integers and come around; a decoded value is no more than
      two times the largest possible then, and the error three times.
    - Rounding to the dtype adds half a unit in the last place, or as much again if that is less:
      the value itself is one of the dtype.

    Parameters
    ----------
    most : torch.Tensor
        float64 ``[n]``, finite: the largest absolute value of each block.
    dtype : torch.dtype
        Of the values.
    block_bits : int
        Bits of a block.

    Returns
    -------
    torch.Tensor
        float64 ``[n]``.
    """
    kind = FLOAT_KINDS[dtype]
    planes = max(0, (block_bits - kind.sure_planes) // BLOCK_VALUES)
    lowest = kind.integer_bits - planes
    highest = kind.integer_bits - 2  # all values are below this power of two
    exponent = most.frexp().exponent.to(torch.int64).clamp(min=1 - kind.block_bias)
    units = 3.125 * 2.0**lowest + 6 if lowest < highest - 1 else 3 * 2.0**highest
    error = _times_power(torch.full_like(most, units * 2.0**-highest), exponent)
    step = exponent + 1 - kind.fraction_bits  # of values below two to the power of exponent + 2
    half = _times_power(torch.ones_like(most), step.clamp(min=kind.least_exponent) - 1)
    bound = (error + error.minimum(half)) * (1 + 2.0**-48) + 2.0**LEAST_EXPONENT
    return bound.where(most > 0, 0)


def _times_power(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Return float64 numbers times powers of two, some of which are no float64 by themselves."""
    half = exponent // 2
    for each in (half, exponent - half):
        x = x * (each + 1023 << 52).view(torch.float64)
    return x
