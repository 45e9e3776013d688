"""The whole table of cached rows: loaded, packed anew, moved; and what is counted of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bitslab import ArgumentError, ArgumentTypeError, BitslabError, CompressedTable
from bitslab.embedding import CachedRows, RowsModule
from bitslab.engine.codecs import InvariantCodec
from tests.embedding.support import Pair, check_map
from tests.helpers import same_bits


def some(n_rows: int, dim: int = 4) -> torch.Tensor:
    """Draw rows."""
    return torch.randn(n_rows, dim, generator=torch.Generator().manual_seed(n_rows))


@pytest.mark.parametrize("options", [{}, {"cache": "packed"}, {"cache_rows": 40}], ids=str)
@pytest.mark.parametrize("sizes", [[40], [1, 0, 38, 1], [20, 20]], ids=str)
def test_all_rows_are_loaded_from_batches(sizes, options):
    pair = Pair(optimizer="adagrad", **options)
    pair.train((1, 2, 3), range(20), (38, 39))
    fresh = some(40)
    pair.plain.data.copy_(fresh)
    pair.rows.load(iter(fresh.double().split(sizes)))
    check_map(pair.rows)
    pair.check()
    pair.train((1, 2, 3), (20, 39))
    pair.check()


BATCHES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "none": (lambda: [], ArgumentError, "weight: batches of 0 rows in all, accepted are 40"),
    "too-few": (lambda: [some(39)], ArgumentError, "batches of 39 rows in all"),
    "too-many": (lambda: [some(40), some(1)], ArgumentError, "batches of 41 rows in all"),
    "dim": (lambda: [some(39), some(1, 5)], ArgumentError, r"weight: \[1, 5\], accepted are"),
    "flat": (lambda: [some(39), torch.zeros(4)], ArgumentError, r"weight: \[4\], accepted are"),
    "integers": (lambda: [some(40).long()], ArgumentTypeError, "weight: torch.int64, accepted"),
    "lists": (lambda: [[1.0] * 4] * 40, ArgumentTypeError, "weight: expected a torch.Tensor"),
    "number": (lambda: 7, ArgumentTypeError, "weight: expected a torch.Tensor, got int"),
}


@pytest.mark.parametrize("bad", BATCHES)
def test_batches_that_do_not_fit_change_nothing(bad):
    make, error, message = BATCHES[bad]
    pair = Pair(optimizer="adagrad")
    pair.train((1, 2, 3))
    table = pair.rows.table
    with pytest.raises(error, match=message):
        pair.rows.load(make())
    assert pair.rows.table is table
    pair.check()


def test_batches_that_fail_midway_change_nothing():
    pair = Pair()

    def batches() -> Iterator[torch.Tensor]:
        yield some(20)
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        pair.rows.load(batches())
    with pytest.raises(ArgumentError, match="begin: 3, accepted with batches is 0"):
        pair.rows.load([some(37)], 3)
    pair.check()


def test_integers_are_no_rows():
    pair = Pair()
    with pytest.raises(ArgumentTypeError, match="weight: torch.int64"):
        pair.rows.load(torch.zeros(2, 4, dtype=torch.int64))
    pair.check()


def test_closed_rows_neither_load_nor_warm_up():
    rows = Pair().rows
    rows.close()
    calls: list[Callable[[], object]] = [
        rows.warm_up,
        rows.whole,
        rows.stats,
        lambda: rows.load(some(40)),
        lambda: rows.load([some(40)]),
    ]
    for call in calls:
        with pytest.raises(BitslabError, match="rows: are closed"):
            call()


# Rows that are written again


def smooth(n_rows: int, dim: int) -> torch.Tensor:
    """Return rows that pack well: small multiples of one number."""
    return torch.arange(n_rows * dim).remainder(50).view(n_rows, dim).float()


def rewrite(rows: CachedRows, fresh: torch.Tensor) -> None:
    """Give all rows new values a few at a time, as training does."""
    for begin in range(0, len(fresh), 300):
        rows.load(fresh[begin : begin + 300], begin)


@pytest.mark.parametrize("begin", ["flush", "update"])
def test_a_codec_that_was_given_is_kept(begin):
    n_rows, dim = (400, 16) if begin == "flush" else (6000, 128)
    weight, fresh = smooth(n_rows, dim), some(n_rows, dim)
    given = InvariantCodec.fit(weight)
    by_name = CachedRows.from_tensor(weight, cache_rows=8, device="cpu", codec="ibp")
    rows = CachedRows.from_tensor(weight, cache_rows=8, device="cpu", codec=given)
    fitted = by_name.table.codec
    for each in (rows, by_name):
        rewrite(each, fresh)
        if begin == "flush":
            assert each.stats()["overflow_bytes"] > 0
            each.flush()
            assert each.stats()["overflow_bytes"] == 0
        else:
            # Less than what all rows take that outgrew their place: they were packed anew.
            assert each.stats()["overflow_bytes"] < 0.5 * fresh.nbytes
        assert same_bits(each.whole(), fresh)
    assert rows.table.codec is given
    assert by_name.table.codec is not fitted
    # Nor is another one fitted when all rows are loaded.
    rows.load(weight)
    assert rows.table.codec is given
    assert same_bits(rows.whole(), weight)


# What is counted


@pytest.mark.parametrize("n_missing", [0, 2, 9], ids="{}-missing".format)
def test_packed_rows_on_a_cpu_are_counted_once(n_missing):
    rows = CachedRows.from_tensor(some(400), cache_rows=40, cache="packed", device="cpu")
    assert rows.row_store.slabs is not None
    cached = rows.row_store.slabs.stats()["cached_rows"]
    assert 10 <= cached < 391
    ids = torch.cat([torch.arange(10), torch.arange(391, 391 + n_missing)])
    assert same_bits(rows.read(ids), some(400)[ids])
    stats = rows.stats()
    assert (stats["lookups"], stats["hits"], stats["misses"]) == (len(ids), 10, n_missing)
    assert stats["hit_rate"] == 10 / len(ids)
    # A batch that trains counts by its different rows.
    weight, index = rows.lookup(torch.cat([ids, ids]), train=True)
    assert same_bits(weight.detach()[index], some(400)[torch.cat([ids, ids])])
    stats = rows.stats()
    assert (stats["hits"], stats["misses"]) == (20, 2 * n_missing)
    assert stats["hit_rate"] == 10 / len(ids)


# Moving


class Two(RowsModule):
    """A module with two tables."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("a", "b"):
            weight = some(40) if name == "a" else some(30)
            self.own(name, CachedRows.from_tensor(weight, cache_rows=8, device="cpu"))


def test_a_move_that_fails_for_one_table_leaves_both_of_use(monkeypatch):
    module = Two()
    first, second = module._rows_of.values()
    build = CompressedTable.from_tensor
    calls: list[int] = []

    def fails_at_first(*args: Any, **options: Any) -> CompressedTable:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError
        return build(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(CompressedTable, "from_tensor", fails_at_first)
        with pytest.raises(MemoryError):
            module.double()
    assert (first.dtype, second.dtype) == (torch.float32, torch.float64)
    for rows, weight in ((first, some(40)), (second, some(30).double())):
        assert same_bits(rows.whole(), weight)
        assert rows.parameter.dtype == rows.dtype
        weight_of, index = rows.lookup(torch.arange(20), train=True)
        assert same_bits(weight_of.detach()[index], weight[:20])
    module.float()
    assert same_bits(second.whole(), some(30))
