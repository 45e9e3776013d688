"""Which tables are packed with codec="auto": by what a GPU does with their rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bitslab import CompressedTable
from bitslab.embedding.store import packed_table

GPU = torch.device("cuda", 0)  # of which only the name is read
N_ROWS = 300


def rows_that_pack(ratio: float) -> torch.Tensor:
    """Return rows of random values that pack about so much: bits of float32, the others zero."""
    draw = torch.Generator().manual_seed(0)
    kept = 32 - round(32 / ratio)
    values = torch.randint(1 << 32, (N_ROWS, 64), generator=draw) >> kept
    return values.int().view(torch.float32).nan_to_num_(0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("ratio", "slots", "packed"),
    [
        pytest.param(1.3, 30, False, id="little-coming-and-going"),
        pytest.param(4.0, 30, True, id="much-coming-and-going"),
        pytest.param(1.3, N_ROWS, True, id="little-all-there"),
        pytest.param(1.3, None, True, id="little-not-trained"),
    ],
)
def test_rows_that_are_trained_are_packed_where_that_halves_them(
    ratio: float, slots: int | None, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def advice(*args: Any) -> Any:
        return SimpleNamespace(packed=True)

    monkeypatch.setattr(CompressedTable, "advice", advice)
    rows = rows_that_pack(ratio)
    table, notes = packed_table(rows, "compact", "auto", False, GPU, trained_slots=slots)
    with table:
        assert (table.codec.name != "raw") == packed
        assert torch.equal(table.decoded(0, N_ROWS), rows)
        assert packed == (not notes)
        assert packed or "would be trained on cuda:0 more slowly" in notes[0]
    named, notes = packed_table(rows, "compact", "ibp", False, GPU, trained_slots=slots)
    with named:
        assert named.codec.name == "ibp" and not notes
