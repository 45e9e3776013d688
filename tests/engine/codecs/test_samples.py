"""Samples of a planner: halves and parts of rows, and the bits that are set in them."""

from __future__ import annotations

import pytest
import torch

from bitslab.engine.codecs.invariant import sample
from bitslab.engine.codecs.invariant.sample import Sample
from bitslab.engine.kernels import cpu


def rows_of(n: int, row_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(0, 256, (n, row_bytes), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(("n", "row_bytes"), [(2, 8), (7, 6), (40, 264), (41, 5)], ids=str)
def test_halves_are_every_second_row(n, row_bytes):
    rows = rows_of(n, row_bytes)
    whole = Sample(rows)
    for first, half in enumerate(whole.halves()):
        expected = rows[first::2].contiguous()
        assert (len(half), half.row_bytes) == expected.shape
        assert half.bit_counts().tolist() == cpu.count_bits(expected, 1).tolist()
        for wanted in (1, len(half) // 2, len(half) + 1):
            found = half.part(max(1, wanted)).rows
            assert torch.equal(found, Sample(expected).part(max(1, wanted)).rows)
        assert torch.equal(half.rows, expected)
    assert whole.bit_counts().tolist() == cpu.count_bits(rows, 1).tolist()


@pytest.mark.parametrize("row_bytes", [16, 24 << 8, (24 << 8) + 4], ids=str)
@pytest.mark.parametrize("n", [3, 60, 401], ids=str)
def test_parts_of_both_halves_are_those_of_each(n, row_bytes, monkeypatch):
    monkeypatch.setattr(sample, "PROBE_BYTES", 3 << 10)
    monkeypatch.setattr(sample, "PROBE_ROWS", 20)
    rows = rows_of(n, row_bytes)
    even, odd = Sample(rows).halves()
    blocks = even.blocks()
    assert (blocks is None) == (row_bytes == 16)
    both = even.probe_with(odd, blocks)
    for first, part in enumerate(both):
        alone = Sample(rows[first::2].contiguous())
        assert torch.equal(part.rows, alone.probe(blocks).rows)
        if blocks is not None:
            counts = cpu.count_bits(alone.rows, 1)
            expected = [counts[256 * b : 256 * b + 256] for b in blocks.array]
            assert torch.equal((even, odd)[first].block_counts(blocks), torch.cat(expected))
