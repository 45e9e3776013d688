"""Tables share a packed table as far as that costs no bytes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchrec", reason="torchrec is not installed")

from bitslab import RowCodec
from bitslab.integrations.torchrec.grouping import (
    SAMPLE_BYTES,
    TOLERANCE,
    Sample,
    group_tables,
    sample_of,
)
from bitslab.tables.build import choose_codec
from bitslab.tables.parts import Layout, items_per_row


def normal(rows: int, dim: int = 32, scale: float = 0.05, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, dim, generator=generator) * scale


def noise(rows: int, dim: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    bits = torch.randint(-(2**31), 2**31 - 1, (rows, dim), generator=generator)
    return bits.to(torch.int32).view(torch.float32)


def groups_of(*tables: torch.Tensor, **options) -> list[list[int]]:
    samples = [Sample(t.shape[0], sample_of(t)) for t in tables]
    return [group.tables for group in group_tables(samples, **options)]


def test_tables_alike_lie_together() -> None:
    tables = [normal(n, seed=n) for n in (2000, 300, 1000)]
    assert groups_of(*tables) == [[0, 1, 2]]


def test_rows_of_other_shapes_and_dtypes_lie_apart() -> None:
    tables = [normal(500), normal(500, dim=16), normal(500).half(), normal(500, seed=1)]
    assert groups_of(*tables) == [[0, 3], [1], [2]]


def test_frozen_tables_lie_apart() -> None:
    rows = normal(500)
    samples = [Sample(500, rows), Sample(500, rows, trainable=False), Sample(500, rows)]
    assert [group.tables for group in group_tables(samples)] == [[0, 2], [1]]


def test_tables_that_gain_nothing_are_raw_together() -> None:
    tables = [noise(400), normal(2000), noise(300)]
    samples = [Sample(t.shape[0], t) for t in tables]
    raw, packed = group_tables(samples)
    assert (raw.tables, raw.codec) == ([0, 2], "raw")
    assert packed.tables == [1]


def test_a_table_with_a_plan_of_its_own_lies_apart() -> None:
    """Counts have most bits in common, which a plan for noisy weights does not use."""
    counts = normal(3000, scale=3.0).round().abs()
    weights = [normal(3000, seed=i) for i in range(2)]
    assert groups_of(weights[0], counts, weights[1]) == [[0, 2], [1]]


def test_sharing_costs_no_more_than_stated() -> None:
    tables = [normal(400 * (i + 1), scale=0.01 * 3**i, seed=i) for i in range(5)]
    samples = [Sample(t.shape[0], t) for t in tables]
    together = 0.0
    for group in group_tables(samples):
        assert not isinstance(group.codec, str)
        together += group.codec.profile_bytes
        together += sum(samples[i].nbytes(group.codec) for i in group.tables)
    apart = 0.0
    for sample in samples:
        codec = choose_codec(sample.rows, "auto", sample.n_rows, {"seed": 0})
        apart += sample.nbytes(codec) + codec.profile_bytes
    assert together <= (1 + TOLERANCE) * apart


def test_a_small_table_joins_a_large_one() -> None:
    """Whatever its rows are like: all of it is less than what sharing may cost."""
    assert groups_of(normal(5000), normal(3, scale=40.0)) == [[0, 1]]


def test_a_named_codec_is_used_for_all() -> None:
    samples = [Sample(t.shape[0], t) for t in (noise(400), normal(2000))]
    (group,) = group_tables(samples, "ibp")
    assert (group.tables, group.codec) == ([0, 1], "ibp")


def test_tables_without_rows_are_planned_too() -> None:
    """The shard of a rank may be empty."""
    assert groups_of(normal(0), normal(500)) == [[0], [1]]
    assert groups_of(normal(0)) == [[0]]


def test_samples_are_small_and_in_order() -> None:
    rows = torch.arange(200_000.0)[:, None].expand(-1, 16).contiguous()
    sample = sample_of(rows)
    assert sample.nbytes <= SAMPLE_BYTES
    assert bool((sample[1:, 0] > sample[:-1, 0]).all())
    assert torch.equal(sample_of(rows.numpy()), sample)


def test_tables_in_place_never_pack_rows_alone_that_are_no_whole_words() -> None:
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randint(7, (4000, 9), generator=generator).short() for _ in range(2)]
    samples = [Sample(4000, t) for t in tables]
    layouts: tuple[tuple[Layout, int], ...] = (("compact", 1), ("inplace", 16))
    for layout, each in layouts:
        (group,) = group_tables(samples, layout=layout)
        assert group.tables == [0, 1] and isinstance(group.codec, RowCodec)
        assert items_per_row(group.codec, (9,)) == each
