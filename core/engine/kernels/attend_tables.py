"""Lookup tables of coded tiles as attention has them in shared memory: see attend.cu."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .tile_format import FIELD_AT, FIELD_BIAS, SHORT_BITS, ZERO_SYMBOL

#: Codes of pairs of classes up to that radius are whole in the upper byte of a half.
WHOLE_RADIUS = 8
#: How attend.cu reads symbols: see tile_stream.cuh.
SHORT_PAIRS, LONG_PAIRS, SHORT_SINGLES, LONG_SINGLES, WIDE_PAIRS = range(5)
#: Entries are filled up to pieces of 16 bytes, as they are copied.
PIECE_ENTRIES = 4
#: The entry of bits that no code begins with: counts as damage.
NO_CODE = 64


def attend_tables(
    block_class: npt.NDArray[np.uint8],
    radius: npt.NDArray[np.uint8],
    longest: npt.NDArray[np.uint8],
    lookup: npt.NDArray[np.int32],
    *,
    lossless: bool = False,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the lookup tables of all classes, and what each block of positions takes of them.

    Parameters
    ----------
    block_class : numpy.ndarray
        uint8 ``[H, blocks]``.
    radius, longest : numpy.ndarray
        uint8 ``[classes]``: 0 for single codes, else the radius of pairs; bits of the longest code.
    lookup : numpy.ndarray
        int32 ``[classes, 2 ** code_bits]``, as in `TileTables`.
    lossless : bool
        Whether codes are bits of values.

    Returns
    -------
    entries : numpy.ndarray
        int32 ``[n]``: of each class ``2 ** longest`` of them, larger tables first, so that each
        begins at a multiple of its size; by the next bits minus the code's bits in the lower half
        and the codes in the upper one: of single codes a half, of lossless tiles the bits of the
        value that are coded, of pairs the upper bytes of two halves, or, beyond WHOLE_RADIUS, two
        bytes of code + 128.
    blocks : numpy.ndarray
        int32 ``[H, blocks, 4]``: in bytes, where the block's table begins, and the mask of an
        entry's place in it; the bits that a lane needs at an ask; and how symbols are read, above
        five bits that say by how much what the lane has is turned to the right.
    """
    code_bits = int(lookup.shape[1]).bit_length() - 1
    about = np.zeros((len(radius), 4), np.int32)
    parts: list[npt.NDArray[np.uint32]] = []
    at = 0
    for c in np.argsort(-longest.astype(np.int32), kind="stable"):
        bits, reach = int(longest[c]), int(radius[c])
        found = lookup[c, :: 1 << (code_bits - bits)].view(np.uint32)
        parts.append(_entries(found, reach, lossless))
        is_short = bits <= SHORT_BITS
        needed = 2 * bits if is_short else bits
        if reach > WHOLE_RADIUS:
            symbols = WIDE_PAIRS
        else:
            symbols = (SHORT_PAIRS if reach else SHORT_SINGLES) + (not is_short)
        turn = (needed - bits - 2) & 31
        about[c] = 4 * at, 4 * ((1 << bits) - 1), needed, symbols << 5 | turn
        at += 1 << bits
    parts.append(np.full(-at % PIECE_ENTRIES, NO_CODE, np.uint32))
    return np.concatenate(parts).view(np.int32), about[block_class]


def _entries(found: npt.NDArray[np.uint32], radius: int, lossless: bool) -> npt.NDArray[np.uint32]:
    """Return the entries of a class, of what `TileTables.lookup` has."""
    length = found >> 24
    if lossless:
        codes = ((found & 255) - (ZERO_SYMBOL - FIELD_BIAS)) << (16 + FIELD_AT)
    elif radius > WHOLE_RADIUS:
        codes = found << 16
    else:
        halves = _halves()
        codes = halves[found & 255]
        if radius:
            codes = (codes << 8 & 0xFF0000) | (halves[found >> 8 & 255] << 16 & 0xFF000000)
        else:
            codes = codes << 16
    return np.where(length, codes | (-length & 0xFFFF), NO_CODE).astype(np.uint32)


@lru_cache(maxsize=1)
def _halves() -> npt.NDArray[np.uint32]:
    """Return the bits of the halves of codes, by code + 128."""
    codes = np.arange(-ZERO_SYMBOL, 256 - ZERO_SYMBOL, dtype=np.float32)
    return codes.astype(np.float16).view(np.uint16).astype(np.uint32)
