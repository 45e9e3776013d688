"""Rows of one id that are found where the rows are, beside those that the host finds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies

from bitslab.distributed.device_repeats import FoundRepeats, RowsById
from bitslab.distributed.faults import ContentError
from bitslab.distributed.messages import Repeats
from tests.gpu import waiting_raises

SIZES = strategies.lists(strategies.integers(0, 20), min_size=3, max_size=3)


def tables_of(
    sizes: list[list[int]], seed: int, device: torch.device | str = "cpu"
) -> list[RowsById]:
    """Return tables of several widths, one of none, with ids of all signs."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, send_rows in enumerate(sizes):
        of_row = torch.randint(13, (sum(send_rows),), generator=generator)
        rows = torch.randn(13, number, generator=generator)[of_row]
        ids = (of_row - 4) * (1 << 40)
        found.append(RowsById(f"t{number}", rows.to(device), send_rows, ids.to(device)))
    return found


def check_found(tables: list[RowsById], found: FoundRepeats) -> None:
    for number, table in enumerate(tables):
        parts = torch.split(table.ids.cpu(), list(table.send_rows))
        for repeats, part in zip(found.of(number), parts, strict=True):
            expected = Repeats.of(part) if len(part) else None
            assert (repeats is None) == (expected is None)
            if repeats is not None and expected is not None:
                assert repeats.places.tolist() == expected.places.tolist()
                assert repeats.first.tolist() == expected.first.tolist()
                assert repeats.first_on(table.rows.device).tolist() == expected.first.tolist()


@given(sizes=strategies.lists(SIZES, min_size=1, max_size=4), seed=strategies.integers(0, 99))
def test_what_a_device_finds_is_what_the_host_finds(sizes: list[list[int]], seed: int) -> None:
    tables = tables_of(sizes, seed)
    check_found(tables, FoundRepeats(tables))


def test_rows_of_one_id_that_differ_are_refused_by_the_table() -> None:
    tables = tables_of([[3, 4], [5, 6], [30, 20]], 1)
    tables[2].rows[int((tables[2].ids[:30] == tables[2].ids[29]).nonzero()[0])] += 1.0
    assert len(tables[2].ids[:30].unique()) < 30
    found = FoundRepeats(tables)
    with pytest.raises(ContentError, match="row_ids: t2: rows of one id differ"):
        found.of(0)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_what_is_found_on_a_gpu() -> None:
    tables = tables_of([[30, 20], [0, 0], [500, 600]], 1, "cuda")
    FoundRepeats(tables)
    with waiting_raises():
        found = FoundRepeats(tables)
    check_found(tables, found)


@pytest.mark.gpu
def test_what_is_found_is_read_by_the_host_whatever_torchs_default_device() -> None:
    tables = tables_of([[30, 20], [500, 600]], 1, "cuda")
    with torch.device("cuda"):
        found = FoundRepeats(tables)
    check_found(tables, found)
