"""Numba functions of lossless coded tiles: values to codes and a plane of bytes, and back.

See tile_streams.py for the arrays; ``plane`` is uint16, what is left of the tile from its plane on.
A half of it holds the bytes of the two values of a lane at one step.
"""

from __future__ import annotations

import numpy as np

from ..tile_format import FIELD_AT, FIELD_BIAS, TILE_BLOCK, TILE_LANES
from .jit import njit

#: By kind: the least field of values that are not finite.
NOT_FINITE = np.array([255, 248], np.int64)
LOW_BITS = (1 << FIELD_AT) - 1


@njit(nogil=True, cache=True)
def split_values(row, kind, dim, order, codes, exceptional):
    """Write the codes of a tile, by token and position, and which of its values are exceptions."""
    for at in range(codes.shape[0]):
        place = at // dim * dim + order[at % dim]
        field = (np.int64(row[place]) >> FIELD_AT) & 255
        exceptional[place] = field >= NOT_FINITE[kind]
        codes[at] = (0 if field >= NOT_FINITE[kind] else field) - FIELD_BIAS


@njit(nogil=True, cache=True)
def place_in_plane(base, i, lane):
    """Return the half of a lane's values at step i, of the block and group from `base` on."""
    return base + ((i >> 1) * TILE_LANES + lane) * 2 + (i & 1)


@njit(nogil=True, cache=True)
def write_plane(row, tokens, dim, places, order, plane):
    """Write the bytes of all values that are not coded."""
    half = 0
    for b in range(dim // TILE_BLOCK):
        for j in range(tokens // TILE_BLOCK):
            first = j * TILE_BLOCK * dim + b * TILE_BLOCK
            for i in range(4):
                for lane in range(TILE_LANES):
                    both = np.int64(0)
                    for k in range(2):
                        at = first + places[i * TILE_LANES + lane, k]
                        bits = np.int64(row[at // dim * dim + order[at % dim]])
                        both |= ((bits & LOW_BITS) | (bits >> 8 & 128)) << (8 * k)
                    plane[place_in_plane(half, i, lane)] = both
            half += 4 * TILE_LANES


@njit(nogil=True, cache=True)
def join_values(codes, tokens, dim, places, order, plane, out):
    """Write the bits of the values of a tile, of its codes and its plane."""
    half = 0
    for b in range(dim // TILE_BLOCK):
        for j in range(tokens // TILE_BLOCK):
            first = j * TILE_BLOCK * dim + b * TILE_BLOCK
            for i in range(4):
                for lane in range(TILE_LANES):
                    both = np.int64(plane[place_in_plane(half, i, lane)])
                    for k in range(2):
                        at = first + places[i * TILE_LANES + lane, k]
                        byte = both >> (8 * k) & 255
                        field = np.int64(codes[at]) + FIELD_BIAS
                        bits = field << FIELD_AT | (byte & LOW_BITS) | (byte & 128) << 8
                        out[at // dim * dim + order[at % dim]] = bits
            half += 4 * TILE_LANES
