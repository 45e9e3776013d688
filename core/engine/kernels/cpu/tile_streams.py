"""Numba twins of quantized.cu: the readable definition of the coded tile; see tile_format.py.

Every function works on a range of tiles, holds no lock and starts no thread of its own. A tile is
worked on in two passes: values to codes and back, token by token, in `codes` int8
``[tokens * dim]`` by token and position; and codes to streams and back, in the order of a warp.

Arrays: ``rows`` and ``out`` ``[n, tokens * dim]`` unsigned of the dtype's width; ``words`` uint32,
``halves`` the same memory as uint16; ``units`` uint16; tables as in `TileTables`. ``places`` int32
``[128, 2]`` says for each step i of 4 and each lane where its two values stand in `codes`, from the
first token and position of a group and a block on.
"""

from __future__ import annotations

import numpy as np

from ..tile_format import (
    ESCAPE_SYMBOL,
    MAX_CODE,
    SHORT_BITS,
    TILE_BLOCK,
    TILE_LANES,
    UNIT_BITS,
    ZERO_SYMBOL,
    Granularity,
)
from .floats import FLOAT32, load_values, round_values
from .jit import njit
from .tile_parameters import find_parameters, spread_parameters
from .tile_planes import join_values, split_values, write_plane

CHANNEL = int(Granularity.CHANNEL)
LOSSLESS = int(Granularity.LOSSLESS)

HALF = np.float32(0.5)
ONE = np.float32(1)
ZERO = np.float32(0)
INFINITY = np.float32(np.inf)
#: By kind: half a unit in the last place of 1, and the least normal number.
ROUNDING = np.array([2.0**-8, 2.0**-11, 2.0**-24], np.float32)
LEAST_NORMAL = np.array([2.0**-126, 2.0**-14, 2.0**-126], np.float32)


@njit(nogil=True, cache=True)
def decode_values(codes, steps, centers, values):
    """Write ``center + step * code`` of a token."""
    for p in range(values.shape[0]):
        values[p] = centers[p] + steps[p] * np.float32(codes[p])


@njit(nogil=True, cache=True)
def choose_codes(x, order, steps, centers, limits, kind, given, values, bits, codes, exceptional):
    """Quantise a token: its codes by position, and which of its channels are exceptions.

    Loops do one thing each, so that LLVM makes vectors of them.
    """
    rounding, least_normal = ROUNDING[kind], LEAST_NORMAL[kind]
    for p in range(codes.shape[0]):
        given[p] = x[order[p]]
    for p in range(codes.shape[0]):
        code = np.rint((given[p] - centers[p]) * (ONE / steps[p]))
        codes[p] = np.int8(code if abs(code) <= limits[p] else ZERO)  # not where it is NaN
    decode_values(codes, steps, centers, values)
    round_values(values, kind, bits)
    exceptional[:] = False
    for p in range(codes.shape[0]):
        decoded = values[p]
        code = np.rint((given[p] - centers[p]) * (ONE / steps[p]))
        allowed = HALF * steps[p] + rounding * max(abs(decoded), least_normal)
        near = abs(decoded - given[p]) <= allowed and abs(decoded) < INFINITY
        if not (near and abs(code) <= limits[p]):
            exceptional[order[p]] = True
            codes[p] = 0


@njit(nogil=True, cache=True)
def write_streams(
    codes,
    dim,
    tokens,
    places,
    order,
    block_class,
    radius,
    class_bits,
    table,
    escape,
    exceptional,
    units,
):
    """Write the units of a tile, where `units` has room; return how many.

    Symbols without a code become exceptions, single ones coded as `escape`.
    """
    writing = units.shape[0] > 0
    left = np.zeros(TILE_LANES, np.int64)  # bits that a reader has before the next symbol
    filled = np.zeros(TILE_LANES, np.int64)  # bits in `pending`, of units not yet written
    pending = np.zeros(TILE_LANES, np.int64)
    current = np.zeros(TILE_LANES, np.int64)  # the unit that is being filled, and the one behind
    following = np.zeros(TILE_LANES, np.int64)
    taken = 0
    for b in range(dim // TILE_BLOCK):
        c = block_class[b]
        reach, longest = np.int64(radius[c]), np.int64(class_bits[c])
        short = longest <= SHORT_BITS
        need = 2 * longest if short else longest
        many = 1 if reach else 2  # symbols of two values
        for j in range(tokens // TILE_BLOCK):
            base = j * TILE_BLOCK * dim + b * TILE_BLOCK
            for i in range(4):
                for s in range(many):
                    asked = not short or (i * many + s) % 2 == 0
                    for lane in range(TILE_LANES):
                        place = i * TILE_LANES + lane
                        if reach:
                            first, second = base + places[place, 0], base + places[place, 1]
                            symbol = (np.int64(codes[first]) + reach) * (2 * reach + 1)
                            symbol += np.int64(codes[second]) + reach
                        else:
                            first = base + places[place, s]
                            second = first
                            symbol = np.int64(codes[first]) + ZERO_SYMBOL
                        code = np.int64(table[c, symbol])
                        if code == 0:
                            for at in (first, second):
                                exceptional[(at // dim) * dim + order[at % dim]] = True
                            symbol = reach * (2 * reach + 2) if reach else np.int64(escape)
                            code = np.int64(table[c, symbol])
                        if not writing:
                            if asked and left[lane] < need:
                                left[lane] += UNIT_BITS
                                taken += 1
                            left[lane] -= code >> 16
                            continue
                        if asked and left[lane] < need:
                            if left[lane] + filled[lane]:
                                following[lane] = taken
                            else:
                                current[lane] = taken
                            left[lane] += UNIT_BITS
                            taken += 1
                        count = code >> 16
                        left[lane] -= count
                        filled[lane] += count
                        pending[lane] = (pending[lane] << count) | (code & 0xFFFF)
                        if filled[lane] >= UNIT_BITS:
                            filled[lane] -= UNIT_BITS
                            units[current[lane]] = (pending[lane] >> filled[lane]) & 0xFFFF
                            pending[lane] &= (1 << filled[lane]) - 1
                            current[lane] = following[lane]
    if not writing:
        return taken
    for lane in range(TILE_LANES):
        if left[lane] >= UNIT_BITS and filled[lane]:
            units[following[lane]] = 0
        if filled[lane]:
            units[current[lane]] = pending[lane] << (UNIT_BITS - filled[lane])
        elif left[lane]:
            units[current[lane]] = 0
    return taken


@njit(nogil=True, cache=True)
def read_streams(
    halves, begin, count, codes, dim, tokens, places, block_class, radius, class_bits, lookup, bits
):
    """Read the codes of a tile from its units; return whether there are just as many units."""
    left = np.zeros(TILE_LANES, np.int64)
    window = np.zeros(TILE_LANES, np.int64)  # 32 bits, the next one the highest
    taken = 0
    for b in range(dim // TILE_BLOCK):
        c = block_class[b]
        paired, longest = radius[c] > 0, np.int64(class_bits[c])
        short = longest <= SHORT_BITS
        need = 2 * longest if short else longest
        many = 1 if paired else 2
        for j in range(tokens // TILE_BLOCK):
            base = j * TILE_BLOCK * dim + b * TILE_BLOCK
            for i in range(4):
                for s in range(many):
                    asked = not short or (i * many + s) % 2 == 0
                    for lane in range(TILE_LANES):
                        place = i * TILE_LANES + lane
                        bits_left, ahead = left[lane], window[lane]
                        if asked and bits_left < need:
                            if taken == count:
                                return False
                            unit = np.int64(halves[begin + taken])
                            taken += 1
                            ahead |= unit << (UNIT_BITS - bits_left)
                            bits_left += UNIT_BITS
                        entry = np.int64(lookup[c, ahead >> (32 - bits)])
                        used = (entry >> 24) & 255
                        if used == 0:
                            return False
                        left[lane] = bits_left - used
                        window[lane] = (ahead << used) & 0xFFFFFFFF
                        if paired:
                            codes[base + places[place, 0]] = (entry & 255) - ZERO_SYMBOL
                            codes[base + places[place, 1]] = ((entry >> 8) & 255) - ZERO_SYMBOL
                        else:
                            codes[base + places[place, s]] = (entry & 255) - ZERO_SYMBOL
    return taken == count


@njit(nogil=True, cache=True)
def code_tile(
    row,
    kind,
    granularity,
    tokens,
    dim,
    scale,
    inverse_dim,
    places,
    order,
    fixed_steps,
    fixed_centers,
    level_steps,
    level_squares,
    block_class,
    radius,
    class_bits,
    table,
    x,
    sums,
    parameters,
    steps,
    centers,
    limits,
    given,
    values,
    bits,
    codes,
    exceptional,
    units,
):
    """Write parameters, units and exceptions of a tile; return the numbers of the last two."""
    if granularity == LOSSLESS:
        split_values(row, kind, dim, order, codes, exceptional)
        rounded = 0
    else:
        load_values(row, kind, x)
        find_parameters(
            x, tokens, dim, granularity, order, scale, inverse_dim, level_squares, sums, parameters
        )
        rounded = tokens
    for p in range(dim):
        reach = radius[block_class[p // TILE_BLOCK]]
        limits[p] = reach if reach else MAX_CODE
    for t in range(rounded):
        spread_parameters(
            parameters, granularity, fixed_steps, fixed_centers, level_steps, t, steps, centers
        )
        here = slice(t * dim, (t + 1) * dim)
        choose_codes(
            x[here],
            order,
            steps,
            centers,
            limits,
            kind,
            given,
            values,
            bits,
            codes[here],
            exceptional[here],
        )
    n_units = write_streams(
        codes,
        dim,
        tokens,
        places,
        order,
        block_class,
        radius,
        class_bits,
        table,
        ESCAPE_SYMBOL if granularity == LOSSLESS else ZERO_SYMBOL,
        exceptional,
        units,
    )
    exceptions = 0
    for at in range(exceptional.shape[0]):
        exceptions += exceptional[at]
    return n_units, exceptions


@njit(nogil=True, cache=True)
def encode_tiles(
    rows,
    kind,
    granularity,
    tokens,
    dim,
    heads,
    rows_per_head,
    scale,
    inverse_dim,
    places,
    order,
    fixed_steps,
    fixed_centers,
    level_steps,
    level_squares,
    block_class,
    radius,
    class_bits,
    table,
    parameter_words,
    plane_words,
    row_words,
    lengths,
    bases,
    words,
    halves,
    begin,
    end,
):
    """Write lengths of tiles begin..end where `words` is empty, else the tiles of these lengths.

    Returns -1, or a tile whose length is another one.
    """
    n_values = tokens * dim
    exception_words = 2 if kind == FLOAT32 else 1
    x = np.empty(n_values, np.float32)
    sums = np.empty(TILE_LANES, np.float32)
    parameters = np.empty(parameter_words, np.uint32)
    steps = np.empty(dim, np.float32)
    centers = np.empty(dim, np.float32)
    limits = np.empty(dim, np.float32)
    given = np.empty(dim, np.float32)
    values = np.empty(dim, np.float32)
    bits = np.empty(dim, rows.dtype)
    codes = np.empty(n_values, np.int8)
    exceptional = np.empty(n_values, np.bool_)
    measuring = words.shape[0] == 0
    # No code is longer than a unit.
    units = np.empty(0 if measuring else n_values + 2 * TILE_LANES, np.uint16)
    at = np.int64(0)
    for r in range(begin, end):
        if not measuring:
            if r == begin or r % 32 == 0:
                at = bases[r // 32]
            if lengths[r] == 0:
                for k in range(row_words):
                    if kind == FLOAT32:
                        words[at + k] = rows[r, k]
                    else:
                        halves[2 * (at + k)] = rows[r, 2 * k]
                        halves[2 * (at + k) + 1] = rows[r, 2 * k + 1]
                at += row_words
                continue
        head = (r // rows_per_head) % heads
        fixed = head if granularity == CHANNEL else 0
        n_units, exceptions = code_tile(
            rows[r],
            kind,
            granularity,
            tokens,
            dim,
            scale,
            inverse_dim,
            places,
            order[head],
            fixed_steps[fixed],
            fixed_centers[fixed],
            level_steps,
            level_squares,
            block_class[head],
            radius,
            class_bits,
            table,
            x,
            sums,
            parameters,
            steps,
            centers,
            limits,
            given,
            values,
            bits,
            codes,
            exceptional,
            units,
        )
        unit_words = (n_units + 1) >> 1
        need = 1 + parameter_words + unit_words + plane_words + exceptions * exception_words
        if measuring:
            lengths[r] = need if need < row_words else 0
            continue
        if need != lengths[r]:
            return r
        words[at] = np.uint32(n_units | exceptions << 16)
        at += 1
        for k in range(parameter_words):
            words[at + k] = parameters[k]
        at += parameter_words
        units[n_units] = 0
        for k in range(2 * unit_words):
            halves[2 * at + k] = units[k]
        at += unit_words
        if plane_words:
            write_plane(rows[r], tokens, dim, places, order[head], halves[2 * at :])
            at += plane_words
        for k in range(n_values):
            if exceptional[k]:
                if kind == FLOAT32:
                    words[at] = k
                    words[at + 1] = rows[r, k]
                else:
                    words[at] = np.uint32(k | np.int64(rows[r, k]) << 16)
                at += exception_words
    return -1


@njit(nogil=True, cache=True)
def decode_tiles(
    words,
    halves,
    at,
    lengths,
    rows,
    kind,
    granularity,
    tokens,
    dim,
    heads,
    rows_per_head,
    places,
    order,
    fixed_steps,
    fixed_centers,
    level_steps,
    block_class,
    radius,
    class_bits,
    lookup,
    code_bits,
    parameter_words,
    plane_words,
    row_words,
    out,
    begin,
    end,
):
    """Decode tiles begin..end, raw where the length is 0; return the first damaged one, or -1."""
    n_values = tokens * dim
    exception_words = 2 if kind == FLOAT32 else 1
    steps = np.empty(dim, np.float32)
    centers = np.empty(dim, np.float32)
    values = np.empty(dim, np.float32)
    bits = np.empty(dim, out.dtype)
    codes = np.empty(n_values, np.int8)
    for r in range(begin, end):
        first, length = at[r], lengths[r]
        size = length if length else row_words
        # As differences: a sum of what a damaged table holds might overflow.
        if first < 0 or size < 0 or size > words.shape[0] or first > words.shape[0] - size:
            return r
        if length == 0:
            for k in range(n_values):
                if kind == FLOAT32:
                    out[r, k] = words[first + k]
                else:
                    out[r, k] = halves[2 * first + k]
            continue
        header = np.int64(words[first])
        n_units, exceptions = header & 0xFFFF, header >> 16
        streams = first + 1 + parameter_words
        plane = streams + ((n_units + 1) >> 1)
        behind = plane + plane_words
        if behind + exceptions * exception_words > first + length:
            return r
        head = (rows[r] // rows_per_head) % heads
        places_of, classes = order[head], block_class[head]
        if not read_streams(
            halves,
            2 * streams,
            n_units,
            codes,
            dim,
            tokens,
            places,
            classes,
            radius,
            class_bits,
            lookup,
            code_bits,
        ):
            return r
        parameters = words[first + 1 : streams]
        fixed = head if granularity == CHANNEL else 0
        if plane_words:
            join_values(codes, tokens, dim, places, places_of, halves[2 * plane :], out[r])
        for t in range(0 if plane_words else tokens):
            spread_parameters(
                parameters,
                granularity,
                fixed_steps[fixed],
                fixed_centers[fixed],
                level_steps,
                t,
                steps,
                centers,
            )
            decode_values(codes[t * dim : (t + 1) * dim], steps, centers, values)
            round_values(values, kind, bits)
            token = out[r, t * dim : (t + 1) * dim]
            for p in range(dim):
                token[places_of[p]] = bits[p]
        last = np.int64(-1)
        for e in range(exceptions):
            word = np.int64(words[behind + e * exception_words])
            position = word if kind == FLOAT32 else word & 0xFFFF
            if position <= last or position >= n_values:
                return r
            last = position
            out[r, position] = words[behind + 2 * e + 1] if kind == FLOAT32 else word >> 16
    return -1
