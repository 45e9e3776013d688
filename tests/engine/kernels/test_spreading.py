"""Bits are spread by one instruction where a processor has it, and by steps where not: the same."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numba
import numpy as np
import pytest
import torch

from bitslab.engine.kernels.cpu import bits, item_ranges, rows
from bitslab.engine.kernels.cpu.constants import constants_of, unsigned
from bitslab.engine.kernels.cuda.source import Variant
from tests.engine.kernels.cases import make_case, pack_on_cpu

WAYS = [True, False] if bits.SPREADS else [False]


def compiled(function: Any, spreads: bool) -> Any:
    """Return a Numba function compiled anew, for a processor with or without the instruction."""
    python = function.py_func
    changed = FunctionType(python.__code__, {**python.__globals__, "SPREADS": spreads})
    return numba.njit(nogil=True)(changed)


@pytest.mark.parametrize("chunk_bytes", [1, 2, 4, 8])
def test_rows_of_any_masks_are_decoded_with_and_without_the_instruction(chunk_bytes: int) -> None:
    decoders = [compiled(rows.decode_row, spreads) for spreads in WAYS]
    for code_bits, grouped, uniform in ((1, False, False), (3, True, False), (2, False, True)):
        variant = Variant("decode", chunk_bytes, code_bits, grouped, uniform)
        case = make_case(variant, n_rows=40)
        storage, _ = pack_on_cpu(case)
        f, constants = case.layout.format, constants_of(case.layout)
        kind = constants.tables.dtype if chunk_bytes == 8 else np.dtype(f"u{chunk_bytes}")
        expected = case.rows.numpy().view(kind)
        words = unsigned(storage.words)
        x, codes, e = (np.zeros(32, kind) for _ in range(3))
        packed = torch.nonzero(storage.lengths)[:, 0].tolist()
        assert packed
        for row in packed:
            place = rows.row_place(
                storage.bases.numpy(), unsigned(storage.lengths), row, f.row_words
            )
            for decode in decoders:
                out = np.full(f.chunks, 0x5A, kind)
                decode(
                    words,
                    place,
                    constants.tables[0],
                    constants.starts[0],
                    code_bits,
                    grouped,
                    uniform,
                    f.keep_section,
                    f.levels,
                    x,
                    codes,
                    e,
                    out,
                )
                assert out.tolist() == expected[row].tolist()


@pytest.mark.parametrize("chunk_bytes", [4, 8])
def test_a_chunk_is_spread_with_and_without_the_instruction(chunk_bytes: int) -> None:
    case = make_case(Variant("decode", chunk_bytes, 1, False, False), n_rows=1)
    f, tables = case.layout.format, constants_of(case.layout).tables[0]
    draw = np.random.default_rng(1)
    for position in range(8):
        mask = tables[0, position]
        kept = ~np.uint64(mask) & np.uint64((1 << 8 * chunk_bytes) - 1)
        steps = np.ascontiguousarray(tables[f.keep_section : f.keep_section + f.levels, position])
        x = np.uint64(draw.integers(0, 1 << 63))
        places = [bit for bit in range(64) if int(kept) >> bit & 1]
        expected = sum((int(x) >> i & 1) << bit for i, bit in enumerate(places))
        for spreads in WAYS:
            spread = compiled(item_ranges.spread, spreads)
            at, size = steps.ctypes.data, steps.itemsize
            assert spread(x, kept, at, size, f.levels, size) == expected
