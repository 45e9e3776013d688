"""Damage of the tiles that were written once: each bit of each golden file."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from bitslab.engine.codecs import TileCodec
from bitslab.engine.kernels.tile_format import Granularity
from tests import pairwise
from tests.engine.codecs import tile_model
from tests.engine.codecs.test_golden import NAMES, decoded_of, read
from tests.engine.codecs.test_tiles import Decoder, tiles_of
from tests.helpers import same_bits

TILES = [name for name in NAMES if name.startswith("tiles")]
#: So many flipped bits of each tile are decoded by the model too, which is slow.
MODELLED = 24
#: Behind so many words, whose bits are all flipped, the seed draws one bit in so many.
WHOLE_WORDS, ONE_IN = 4, 5


def test_golden_tiles_are_of_every_dtype_and_granularity() -> None:
    formats = [codec.plan.format for codec, *_ in map(read, TILES) if isinstance(codec, TileCodec)]
    assert len({fmt.dtype for fmt in formats}) == 3
    assert {fmt.granularity for fmt in formats} == {*Granularity}


@pytest.mark.parametrize("name", TILES)
def test_every_flipped_bit_of_a_golden_tile_is_found_or_harmless(name: str) -> None:
    codec, rows, parts, _ = read(name)
    assert isinstance(codec, TileCodec)
    packed = codec.adopt(len(rows), parts)
    model = tile_model.Model(codec.to_config())
    coded = parts["lengths"].nonzero().flatten().tolist()
    assert len(coded) == 3
    for r in coded:
        words = np.array(tiles_of(packed, codec.row_bytes // 4)[r], np.uint32)
        decode = Decoder(codec, r)
        assert decode(words)
        values = decode.out.view(rows.dtype).view(rows.shape[1:])
        assert same_bits(values, decoded_of(name)[r])
        bits = 32 * len(words)
        modelled = set(range(0, bits, bits // MODELLED + 1))
        rng = random.Random(f"flipped {pairwise.seed}")
        flipped = [
            bit
            for bit in range(bits)
            if pairwise.FULL
            or bit in modelled
            or bit < 32 * WHOLE_WORDS
            or rng.randrange(ONE_IN) == 0
        ]
        sound = 0
        for bit in flipped:
            damaged = words.copy()
            damaged[bit // 32] ^= np.uint32(1 << bit % 32)
            found = decode(damaged)
            sound += found
            if bit in modelled:
                try:
                    expected = model.decode(damaged.tolist(), r)
                except tile_model.Damaged:
                    assert not found, bit
                else:
                    same = torch.from_numpy(model.raw(values.flatten()) == expected)
                    # What a damaged step makes NaN has no certain bits.
                    assert found and bool((same | values.flatten().isnan()).all()), bit
        assert 0 < sound < len(flipped)
