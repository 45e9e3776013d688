"""Numba functions of the parameters of coded tiles: levels and ranges; see tile_streams.py."""

from __future__ import annotations

import numpy as np

from ..tile_format import LEVELS, TILE_LANES, Granularity
from .floats import brain_bits, float_of_brain
from .jit import njit

CHANNEL = int(Granularity.CHANNEL)
TOKEN_LEVEL = int(Granularity.TOKEN_LEVEL)
BLOCK_RANGE = int(Granularity.BLOCK_RANGE)
CHANNEL_RANGE = int(Granularity.CHANNEL_RANGE)

HALF = np.float32(0.5)
ONE = np.float32(1)
ZERO = np.float32(0)
INFINITY = np.float32(np.inf)


@njit(nogil=True, cache=True)
def level_of(values, inverse_dim, squared_scale, level_squares, sums):
    """Return the level of a token: its values in the order of channels."""
    sums[:] = ZERO
    for c in range(values.shape[0]):
        value = values[c]
        if abs(value) < INFINITY:
            sums[c & (TILE_LANES - 1)] += value * value
    width = TILE_LANES // 2
    while width:
        for lane in range(width):
            sums[lane] += sums[lane + width]
        width >>= 1
    square = (sums[0] * inverse_dim) * squared_scale
    level = 0
    count = LEVELS - 1
    while count:  # how many of the ascending squares are at most this one
        half = count >> 1
        if level_squares[level + half] <= square:
            level += half + 1
            count -= half + 1
        else:
            count = half
    return level


@njit(nogil=True, cache=True)
def range_word(least, largest, scale):
    """Return the parameter of a range: bfloat16 center in the lower half, step in the upper."""
    step = brain_bits(ONE)
    center = np.int64(0)
    if least <= largest:
        found = brain_bits(HALF * least + HALF * largest)
        if (found & 0x7FFF) and (found & 0x7F80) != 0x7F80:
            center = found
        found = brain_bits(scale * (largest - least))
        if 0 < found < 0x7F80:
            step = found
    return step << 16 | center


@njit(nogil=True, cache=True)
def find_parameters(
    x, tokens, dim, granularity, order, scale, inverse_dim, level_squares, sums, parameters
):
    """Write the parameters of a tile, uint32."""
    if granularity == TOKEN_LEVEL:
        parameters[:] = 0
        for t in range(tokens):
            values = x[t * dim : (t + 1) * dim]
            level = level_of(values, inverse_dim, scale, level_squares, sums)
            parameters[t >> 2] |= np.uint32(level << (8 * (t & 3)))
        return
    for n in range(parameters.shape[0]):
        least, largest = INFINITY, -INFINITY
        if granularity == BLOCK_RANGE:
            first, stride, count = np.int64(0), 1, tokens * dim
        elif granularity == CHANNEL_RANGE:
            first, stride, count = np.int64(order[n]), dim, tokens
        else:
            first, stride, count = np.int64(n * dim), 1, dim
        for k in range(count):
            value = x[first + k * stride]
            if abs(value) < INFINITY:
                least = min(least, value)
                largest = max(largest, value)
        parameters[n] = range_word(least, largest, scale)


@njit(nogil=True, cache=True)
def spread_parameters(
    parameters, granularity, fixed_steps, fixed_centers, level_steps, t, steps, centers
):
    """Write step and center of each position of token `t`; those of all tokens are written once."""
    if granularity == CHANNEL:
        if t == 0:
            steps[:] = fixed_steps
            centers[:] = fixed_centers
    elif granularity == TOKEN_LEVEL:
        level = (np.int64(parameters[t >> 2]) >> (8 * (t & 3))) & 255
        steps[:] = level_steps[level]
        centers[:] = ZERO
    elif granularity == CHANNEL_RANGE:
        if t == 0:
            for p in range(steps.shape[0]):
                word = np.int64(parameters[p])
                steps[p] = float_of_brain(word >> 16)
                centers[p] = float_of_brain(word & 0xFFFF)
    elif granularity != BLOCK_RANGE or t == 0:
        word = np.int64(parameters[0 if granularity == BLOCK_RANGE else t])
        steps[:] = float_of_brain(word >> 16)
        centers[:] = float_of_brain(word & 0xFFFF)
