"""From a profile to the tables that the kernels read."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from ...kernels.format import RowFormat, RowLayout

Array = np.ndarray


def move_steps(mask: Array, levels: int) -> Array:
    """Return the steps that gather the bits of `mask` into the low end, and spread them back.

    Step ``l`` holds the bits that move by ``2**l`` positions, after the steps before it (parallel
    suffix method; a bit moves by the number of 0 bits of the mask below it).

    Parameters
    ----------
    mask : numpy.ndarray
        Unsigned integers of any shape, of exactly ``2**levels`` bits.
    levels : int
        Number of steps, log2 of the bits of a chunk.

    Returns
    -------
    numpy.ndarray
        ``[levels, *mask.shape]`` of the mask's dtype.
    """
    one = mask.dtype.type(1)
    left = mask.copy()
    below = (~mask) << one  # the 0 bits under each place, one place up
    steps = np.empty((levels, *mask.shape), mask.dtype)
    for level in range(levels):
        parity = below.copy()  # bit i: whether an odd number of 0 bits lies under place i
        for distance in range(levels):
            parity ^= parity << mask.dtype.type(1 << distance)
        steps[level] = parity & left
        left = (left ^ steps[level]) | (steps[level] >> mask.dtype.type(1 << level))
        below &= ~parity
    return steps


def _steps_of_one(mask: Array, levels: int) -> Array:
    """Return the steps of a single mask, kept for codecs that differ in their values alone."""
    return _kept_steps(mask.dtype.str, mask.tobytes(), levels).reshape(levels, *mask.shape)


@lru_cache(maxsize=64)
def _kept_steps(dtype: str, mask: bytes, levels: int) -> Array:
    return move_steps(np.frombuffer(mask, dtype), levels)


def run_of_ones(mask: int) -> tuple[int, int]:
    """Return the lowest bit and the width of a mask that is one run of ones, else (0, 0)."""
    if mask == 0:
        return 0, 0
    low = (mask & -mask).bit_length() - 1
    width = mask.bit_length() - low
    return (low, width) if mask == ((1 << width) - 1) << low else (0, 0)


def build_layout(fmt: RowFormat, masks: Array, values: Array) -> RowLayout:
    """Build the kernels' tables on the CPU.

    Parameters
    ----------
    fmt : RowFormat
        Sizes of the packed row.
    masks : numpy.ndarray
        Unsigned integers of chunk_bytes, ``[clusters, positions]``; bit 1 = invariant.
    values : numpy.ndarray
        The same dtype, ``[clusters, positions, 2**code_bits - 1]``; no bit outside the mask.

    Returns
    -------
    RowLayout
    """
    wide = np.uint64 if fmt.chunk_bytes == 8 else np.uint32
    signed = np.int64 if fmt.chunk_bytes == 8 else np.int32
    tables = np.empty((fmt.clusters, fmt.sections, fmt.positions), wide)
    tables[:, 0] = masks
    tables[:, 1 : 1 + fmt.values] = values.transpose(0, 2, 1)
    steps = _steps_of_one if masks.size == 1 else move_steps
    tables[:, fmt.keep_section : fmt.mask_section] = steps(~masks, fmt.levels).swapaxes(0, 1)
    tables[:, fmt.mask_section :] = steps(masks, fmt.levels).swapaxes(0, 1)
    keep_bits = 8 * fmt.chunk_bytes - np.bitwise_count(masks).astype(np.int64)
    starts = np.zeros((fmt.clusters, fmt.positions + 1), np.int32)
    np.cumsum(keep_bits, axis=1, out=starts[:, 1:])
    fields, byte_fields = [], []
    for mask in map(int, masks[:, 0]):
        byte = mask & 255
        repeated = mask == byte * (((1 << 8 * fmt.chunk_bytes) - 1) // 255)
        fields.append(run_of_ones(mask) if fmt.uniform else (0, 0))
        byte_fields.append(run_of_ones(byte) if fmt.uniform and repeated else (0, 0))
    return RowLayout(
        fmt,
        torch.from_numpy(tables.view(signed)),
        torch.from_numpy(starts),
        tuple(fields),
        tuple(byte_fields),
    )
