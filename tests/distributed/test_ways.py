"""How each table's rows are written where they are: as on a CPU, by measured sizes and rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bitslab.distributed.device_selection import Trial, choose_on_device
from bitslab.distributed.layout import Rows
from bitslab.distributed.selection import TableChoice
from bitslab.engine.advisor import NetworkModel
from tests.distributed.ranks import run_ranks


def check_ways(seen: dict[str, Any]) -> None:
    assert seen["ways"] and all(seen["ways"].values()), seen["ways"]
    chosen = dict(seen["chosen"])
    assert set(chosen.pop("fast").values()) == {"raw"}
    slow = chosen.pop("slow")
    assert slow["repeats"] == slow["halves"] == "references" and slow["within"] != "raw"
    assert all(chosen.values()), chosen


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_are_written_on_their_device_as_is_fastest_on_the_link(
    ranks: int, tmp_path: Path
) -> None:
    for seen in run_ranks("ways_as_on_a_gpu", ranks, tmp_path):
        check_ways(seen)


@pytest.mark.gpu
def test_rows_on_gpus_are_written_as_is_fastest_on_the_link(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    for seen in run_ranks("nccl_ways", 2, tmp_path, timeout_s=120):
        check_ways(seen)


class Tries:
    """Sizes and seconds by candidate; which ones were tried, together."""

    def __init__(self, tables: list[Rows]) -> None:
        self._tables = tables
        self.tried: list[list[str]] = []

    def trial(self) -> Trial:
        names = [table.candidate.name for table in self._tables]
        self.tried.append(names)
        seconds = 3.0 if "references" in names else 1.0
        moved = {"references": 10, "window": 20, "codes": 25, "lossless": 50, "raw": 100}
        moved["fixed-width"] = 40
        return Trial(seconds, seconds, [100, 300, 0], [moved[names[0]], 3 * moved[names[1]], 0])


def test_tables_share_the_seconds_of_one_pipeline_by_their_bytes() -> None:
    t = torch.zeros(1, 1)
    tables = [Rows(t, t, [1], [1], bound) for bound in (0.1, 0.0, 0.0)]
    choices = [TableChoice() for _ in tables]
    tries = Tries(tables)
    choose_on_device(tries, tables, choices, NetworkModel(((1.0, 1.0), (2.0, 2.0))))
    assert tries.tried == [
        ["references", "references", "references"],
        ["window", "references", "references"],
        ["codes", "codes", "codes"],
        ["fixed-width", "codes", "codes"],
        ["lossless", "references", "references"],
        ["raw", "raw", "raw"],
    ]
    found = choices[0].measured
    assert set(found) == {"references", "window", "codes", "fixed-width", "lossless", "raw"}
    assert found["codes"].ratio == 4 and found["codes"].encode_s_per_byte == 1 / 400
    assert found["raw"].ratio == 1 and found["raw"].encode_s_per_byte == 0
    assert set(choices[1].measured) == {"references", "codes", "raw"}
    assert choices[1].measured["references"].decode_s_per_byte == 3 / 400
    assert not choices[2].measured  # of no rows nothing is known
    assert [choice.candidate.name for choice in choices] == ["references"] * 3
    # Exchanges that are measured next are written so.
    assert [table.candidate for table in tables] == [choice.candidate for choice in choices]
