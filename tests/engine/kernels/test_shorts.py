"""Rows of short chunks are encoded to the same words as by the general functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bitslab.engine.codecs import InvariantCodec
from bitslab.engine.codecs.invariant.profile import Profile
from bitslab.engine.kernels.cpu import shorts
from bitslab.engine.kernels.cpu.constants import chunks_of, constants_of, unsigned
from bitslab.engine.kernels.cpu.loading import packing
from bitslab.engine.kernels.format import RowFormat
from tests.helpers import packable, random_bits


@pytest.mark.drawn(18)
@pytest.mark.parametrize("columns", [16, 63, 64, 200])
@pytest.mark.parametrize("code_bits", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8], ids=str)
def test_words_equal_those_of_the_general_functions(dtype, code_bits, columns):
    sample = packable(dtype, (70, columns))
    odd = random_bits(dtype, (9, columns))  # rows that are kept raw, or nearly
    rows = torch.cat([sample.view(torch.uint8), odd.view(torch.uint8)]).view(dtype)
    codec = InvariantCodec.fit(
        sample,
        chunk_bytes=dtype.itemsize,
        code_bits=code_bits,
        grouped=False,
        uniform=True,
    )
    check_words(codec, rows, least_packed=70 if columns == 200 else 0)


@pytest.mark.parametrize("columns", [32, 33, 160])
@pytest.mark.parametrize("code_bits", [1, 2, 3])
@pytest.mark.parametrize(
    "mask", [0x7F80, 0xFFFF, 0xFFFE, 0x0F0F, 0x8421, 0x5555, 0x7C00, 0x0001, 0x7FFF], ids=hex
)
def test_words_of_any_mask(mask: int, code_bits: int, columns: int) -> None:
    """Payloads of 0 to 15 bits, in one run or in many; values that repeat."""
    generator = np.random.default_rng(mask)
    count = (1 << code_bits) - 1
    values = generator.integers(0, 1 << 16, (1, 1, count)).astype(np.uint16) & np.uint16(mask)
    values[0, 0, -1] = values[0, 0, 0]
    free = generator.integers(0, 1 << 16, (70, columns)).astype(np.uint16)
    picked = values[0, 0, generator.integers(0, count, (70, columns))]
    chunks = np.where(
        generator.random((70, columns)) < 0.97, picked | (free & np.uint16(0xFFFF ^ mask)), free
    )
    chunks[-3:] = free[-3:]
    f = RowFormat(2 * columns, 2, code_bits, grouped=False, uniform=True)
    profile = Profile(f, np.array([[mask]], np.uint16), values)
    codec = InvariantCodec(profile, (columns,), torch.bfloat16)
    rows = torch.from_numpy(chunks.view(np.int16)).view(torch.bfloat16)
    check_words(codec, rows, least_packed=30 if mask.bit_count() > 8 and columns > 32 else 0)
    assert torch.equal(codec.decode(codec.encode(rows)).view(torch.int16), rows.view(torch.int16))


def check_words(codec: InvariantCodec, rows: torch.Tensor, least_packed: int) -> None:
    """Compare what a codec encodes with what the general functions do."""
    layout = codec.row_layout()
    assert shorts.serves(layout)
    packed = codec.encode(rows)
    f, constants = layout.format, constants_of(layout)
    data = rows.view(torch.uint8).view(len(rows), -1)
    chunks = chunks_of(data, f.chunk_bytes)
    lengths = torch.empty(len(rows), dtype=f.length_dtype)
    clusters: Any = np.empty(0, np.uint8)
    options = (f.code_bits, f.grouped, f.uniform, f.row_words)
    tables = (constants.tables, constants.starts)
    packing().packed_words(chunks, *tables, *options, unsigned(lengths), clusters, 0, len(rows))
    assert torch.equal(lengths, packed.parts["lengths"])
    assert (unsigned(lengths) > 0).sum() >= least_packed  # short rows may all be kept raw
    words = torch.zeros_like(packed.parts["words"])
    out = unsigned(words)
    packing().encode_rows(
        chunks,
        data.numpy(),
        *tables,
        *options,
        f.keep_section,
        f.levels,
        unsigned(lengths),
        clusters,
        packed.parts["bases"].numpy(),
        out,
        out.view(np.uint8),
        0,
        len(rows),
    )
    assert torch.equal(words, packed.parts["words"])
