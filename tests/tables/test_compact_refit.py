"""compact(refit=True): the codec of a table is fitted again to rows that have changed."""

from __future__ import annotations

import pytest
import torch

from bitslab import CompressedTable
from bitslab.tables.slabs import SlabCache
from tests.helpers import same_bits


def rows(scale: float, n_rows: int = 4000, seed: int = 0) -> torch.Tensor:
    """Return rows whose exponents are near that of a scale."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n_rows, 32, generator=generator).mul_(scale)


@pytest.mark.parametrize("layout", ["compact", "inplace"])
def test_packing_pays_again_after_all_rows_have_moved(layout):
    table = CompressedTable.from_tensor(rows(1e-3), layout)
    first = table.stats()["packed_bytes"]
    codec = table.codec
    moved = rows(1e6, seed=1)
    table.update(torch.arange(4000), moved)
    table.compact()
    assert table.codec is codec
    plain = table.stats()["packed_rows"]
    table.update(torch.tensor([3]), moved[4:5])
    moved[3] = moved[4]
    table.update(torch.arange(4000), moved)
    table.compact(refit=True)
    assert same_bits(table.decoded(0, 4000), moved)
    if layout == "compact":
        assert table.stats()["packed_bytes"] < 1.02 * first
        assert table.overflow_bytes == 0
        assert table.stats()["packed_rows"] > plain
    table.update(torch.tensor([5, 9]), rows(1.0, 2, seed=2))
    assert same_bits(
        table.gather(torch.tensor([5, 9, 3])), torch.cat([rows(1.0, 2, seed=2), moved[3:4]])
    )


def test_a_table_that_packing_does_not_help_any_more_becomes_raw():
    table = CompressedTable.from_tensor(rows(1e-3))
    noise = torch.randint(0, 2**31 - 2**24, (4000, 32), dtype=torch.int32).view(torch.float32)
    table.update(torch.arange(4000), noise)
    assert table.overflow_bytes > 0
    table.compact(refit=True)
    assert same_bits(table.decoded(0, 4000), noise)
    assert table.overflow_bytes == 0
    assert table.nbytes <= noise.nbytes * 1.01
    table.update(torch.tensor([7]), noise[8:9])
    table.compact(refit=True)
    assert same_bits(table.gather(torch.tensor([7])), noise[8:9])


def test_a_cache_over_the_table_gives_right_rows_before_and_after_it_is_filled_again():
    table = CompressedTable.from_tensor(rows(1e-3))
    cache = SlabCache(table, 64_000, ["cpu"])
    cache.fill(torch.arange(4000))
    moved = rows(1e6, seed=1)
    table.update(torch.arange(0, 4000, 2), moved[::2])
    expected = rows(1e-3)
    expected[::2] = moved[::2]
    table.compact(refit=True)
    ids = torch.randint(4000, (500,))
    assert same_bits(cache.gather(ids), expected[ids])
    cache.fill(torch.arange(4000))
    assert same_bits(cache.gather(ids), expected[ids])


def test_a_refit_that_fails_changes_nothing(monkeypatch):
    table = CompressedTable.from_tensor(rows(1e-3))
    moved = rows(1e6, seed=1)
    table.update(torch.arange(4000), moved)
    codec, nbytes = table.codec, table.nbytes
    with monkeypatch.context() as patch:
        patch.setattr("bitslab.tables.table.build_parts", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            table.compact(refit=True)
    assert table.codec is codec
    assert table.nbytes == nbytes
    assert same_bits(table.decoded(0, 4000), moved)
    table.compact(refit=True)
    assert same_bits(table.decoded(0, 4000), moved)
