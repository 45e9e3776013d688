"""Encoding rows of chunks of one or two bytes that have one mask at every position.

Most weights are packed so: bfloat16 and float16 by their exponents. Same packed row as
`rows.encode_rows` writes, many times as fast: rows have one pass each to be measured and to be
written, in which `short_groups` works on 32 chunks at once. The last chunks of a row, and those of
masks of many runs, are looked up: a chunk has at most 65,536 values.

As with bits.py, whoever changes short_groups.py has to clear ``__pycache__``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..format import RowLayout
from .bits import GROUP, LOW_WORD, ONE, WORD, ZERO, lowest_bit, popcount
from .constants import runs_of
from .jit import njit
from .memory import address_of, load_64, stack_memory
from .short_groups import (
    CODES,
    MAX_RUNS,
    MOST_VALUES,
    PAYLOADS,
    RESULT_NUMBERS,
    encode_short_group,
    find_exceptions,
    store_byte_payloads,
)

Array = np.ndarray[Any, Any]

DOUBLE = np.uint64(64)
_result_memory = stack_memory(8 * RESULT_NUMBERS)

#: What a chunk that was not stored counts as, at the end of a row's last group.
_NO_CHUNK = ONE


@dataclass(frozen=True, eq=False)
class ShortTables:
    """What each value of a chunk becomes.

    Parameters
    ----------
    codes : numpy.ndarray
        uint8 ``[2 ** bits]``: the participation code.
    payload, masked : numpy.ndarray
        uint16 ``[2 ** bits]``: the bits where the mask is 0, and where it is 1, gathered.
    payload_bits, masked_bits : int
        How many these are.
    mask : int
        The mask.
    values : numpy.ndarray
        uint16 ``[MOST_VALUES]``: the values that have a code, by code; behind them the first one.
    runs : numpy.ndarray
        int64 ``[MAX_RUNS, 2]``, as `short_groups.encode_short_group` takes them.
    together : bool
        Whether groups are encoded at once: the payload has no more runs than that.
    """

    codes: Array
    payload: Array
    masked: Array
    payload_bits: int
    masked_bits: int
    mask: int
    values: Array
    runs: Array
    together: bool


_tables: WeakKeyDictionary[RowLayout, ShortTables] = WeakKeyDictionary()


def serves(layout: RowLayout) -> bool:
    """Return whether rows of a layout are encoded here."""
    f = layout.format
    return f.chunk_bytes <= 2 and f.uniform and not f.grouped and f.clusters == 1


def tables_of(layout: RowLayout) -> ShortTables:
    """Return the tables of a layout, made at its first use."""
    found = _tables.get(layout)
    if found is None:
        f = layout.format
        bits = 8 * f.chunk_bytes
        section = layout.tables[0, :, 0].numpy()
        mask = int(section[0]) & ((1 << bits) - 1)
        codes = np.zeros(1 << bits, np.uint8)
        unmasked = _unmasked(mask, bits)
        # The first of equal values has the code, as in rows.choose_codes.
        for code in range(f.values, 0, -1):
            codes[unmasked | (int(section[code]) & mask)] = code
        values = np.full(MOST_VALUES, int(section[1]) & mask, np.uint16)
        values[: f.values] = section[1 : 1 + f.values] & mask
        found_runs = runs_of(((1 << bits) - 1) & ~mask, bits)
        runs = np.zeros((MAX_RUNS, 2), np.int64)
        together = len(found_runs) <= MAX_RUNS
        if together:
            runs[: len(found_runs)] = np.array(found_runs, np.int64).reshape(-1, 2)
        found = _tables[layout] = ShortTables(
            codes,
            _gathered(~mask & ((1 << bits) - 1), bits),
            _gathered(mask, bits),
            bits - mask.bit_count(),
            mask.bit_count(),
            mask,
            values,
            runs,
            together,
        )
    return found


@lru_cache(maxsize=32)
def _unmasked(mask: int, bits: int) -> Array:
    """Return all chunks whose bits are 0 where the mask is 1; not to be written to."""
    x = np.arange(1 << bits, dtype=np.int64)
    return x[x & mask == 0]


@lru_cache(maxsize=32)
def _gathered(mask: int, bits: int) -> Array:
    """Gather the bits of all chunks where the mask is 1 at the low end; not to be written to.

    Kept, because codecs of one mask and many values follow one another: one for each layer.
    """
    x = np.arange(1 << bits, dtype=np.uint32)
    gathered = np.zeros(len(x), np.uint16)
    at = 0
    for bit in range(bits):
        if mask >> bit & 1:
            gathered |= ((x >> bit & 1) << at).astype(np.uint16)
            at += 1
    return gathered


@njit(nogil=True, cache=True)
def measure_rows(
    rows,
    codes,
    mask,
    values,
    together,
    payload_bits,
    masked_bits,
    code_bits,
    row_words,
    lengths,
    begin,
    end,
):
    """Write the words of each packed row to `lengths`, 0 for a row kept raw."""
    chunks = rows.shape[1]
    fixed = ((payload_bits * chunks + 31) >> 5) + ((chunks + 31) >> 5) * code_bits
    whole = chunks >> 5 if together else 0
    group_bytes = GROUP * rows.itemsize
    values_at = address_of(values)
    for r in range(begin, end):
        misses = 0
        row = rows[r]
        group_at = address_of(rows) + r * chunks * rows.itemsize
        for _ in range(whole):
            misses += popcount(find_exceptions(rows.dtype.type(0), group_at, mask, values_at))
            group_at += group_bytes
        for i in range(whole * GROUP, chunks):
            misses += 1 if codes[row[i]] == 0 else 0
        words = fixed + ((misses * masked_bits + 31) >> 5)
        lengths[r] = words if words < row_words else 0


@njit(nogil=True, cache=True)
def write_rows(
    rows,
    raw,
    codes,
    payload,
    masked,
    mask,
    values,
    runs,
    together,
    payload_bits,
    masked_bits,
    code_bits,
    row_words,
    lengths,
    bases,
    words,
    word_bytes,
    begin,
    end,
):
    """Write rows begin..end, begin a multiple of 32, to `words` where bases says.

    Three streams of bits grow side by side, because where each begins is known. A row that another
    thread has changed since it was measured is cut where it ends; see `rows.write_codes`.
    """
    chunks = rows.shape[1]
    payload_words = (payload_bits * chunks + 31) >> 5
    code_words = ((chunks + 31) >> 5) * code_bits
    k = np.uint64(code_bits)
    p = np.uint64(payload_bits)
    p4 = np.uint64(4 * payload_bits)
    m = np.uint64(masked_bits)
    whole = chunks >> 5 if together else 0
    values_at, runs_at, result = address_of(values), address_of(runs), _result_memory()
    like = rows.dtype.type(0)
    at = np.int64(bases[begin >> 5])
    for r in range(begin, end):
        if lengths[r] == 0:
            row_bytes = raw.shape[1]
            for b in range(4 * row_words):
                word_bytes[4 * at + b] = raw[r, b] if b < row_bytes else 0
            at += row_words
            continue
        row = rows[r]
        payload_at = at
        code_at = at + payload_words
        exception_at = code_at + code_words
        end_at = at + np.int64(lengths[r])
        payload_held = ZERO
        payload_filled = ZERO
        code_held = ZERO
        code_filled = ZERO
        exception_held = ZERO
        exception_filled = ZERO
        group_at = address_of(rows) + r * chunks * rows.itemsize
        for group in range(whole):
            rest = encode_short_group(
                like, group_at, mask, values_at, runs_at, payload_bits, code_bits, result
            )
            group_at += GROUP * rows.itemsize
            if payload_bits == 8:
                store_byte_payloads(result, address_of(words) + 4 * payload_at)
                payload_at += 8
            else:
                for i in range(PAYLOADS, RESULT_NUMBERS):
                    x4 = load_64(result + 8 * i)
                    payload_held |= x4 << payload_filled
                    payload_filled += p4
                    if payload_filled >= DOUBLE:
                        words[payload_at] = payload_held & LOW_WORD
                        words[payload_at + 1] = payload_held >> WORD
                        payload_at += 2
                        payload_filled -= DOUBLE
                        # Two shifts, because one by 64 has no meaning.
                        payload_held = (x4 >> ONE) >> (p4 - payload_filled - ONE)
            low = load_64(result + 8 * CODES)
            words[code_at] = low & LOW_WORD
            if code_bits > 1:
                words[code_at + 1] = low >> WORD
            if code_bits > 2:
                words[code_at + 2] = load_64(result + 8 * (CODES + 1))
            code_at += code_bits
            while rest != ZERO:
                x = row[GROUP * group + lowest_bit(rest)]
                rest &= rest - ONE
                exception_held |= np.uint64(masked[x]) << exception_filled
                exception_filled += m
                if exception_filled >= WORD:
                    if exception_at < end_at:
                        words[exception_at] = exception_held & LOW_WORD
                    exception_at += 1
                    exception_held >>= WORD
                    exception_filled -= WORD
        if payload_filled >= WORD:
            words[payload_at] = payload_held & LOW_WORD
            payload_at += 1
            payload_held >>= WORD
            payload_filled -= WORD
        for i in range(whole * GROUP, chunks):
            x = row[i]
            code = np.uint64(codes[x])
            payload_held |= np.uint64(payload[x]) << payload_filled
            payload_filled += p
            if payload_filled >= WORD:
                words[payload_at] = payload_held & LOW_WORD
                payload_at += 1
                payload_held >>= WORD
                payload_filled -= WORD
            code_held |= code << code_filled
            code_filled += k
            if code_filled >= WORD:
                words[code_at] = code_held & LOW_WORD
                code_at += 1
                code_held >>= WORD
                code_filled -= WORD
            if code == ZERO:
                exception_held |= np.uint64(masked[x]) << exception_filled
                exception_filled += m
                if exception_filled >= WORD:
                    if exception_at < end_at:
                        words[exception_at] = exception_held & LOW_WORD
                    exception_at += 1
                    exception_held >>= WORD
                    exception_filled -= WORD
        for _ in range(chunks, (chunks + GROUP - 1) // GROUP * GROUP):
            code_held |= _NO_CHUNK << code_filled
            code_filled += k
            if code_filled >= WORD:
                words[code_at] = code_held & LOW_WORD
                code_at += 1
                code_held >>= WORD
                code_filled -= WORD
        if payload_filled > ZERO:
            words[payload_at] = payload_held & LOW_WORD
        if exception_filled > ZERO and exception_at < end_at:
            words[exception_at] = exception_held & LOW_WORD
        at = end_at
