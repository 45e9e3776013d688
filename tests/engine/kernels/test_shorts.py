"""Rows of short chunks are encoded to the same words as by the general functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bitslab.engine.codecs import InvariantCodec
from bitslab.engine.kernels.cpu import shorts
from bitslab.engine.kernels.cpu.constants import chunks_of, constants_of, unsigned
from bitslab.engine.kernels.cpu.loading import packing
from tests.helpers import packable, random_bits


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
    if columns == 200:  # shorter rows may all be kept raw
        assert (unsigned(lengths) > 0).sum() >= 70
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
