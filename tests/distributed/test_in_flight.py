"""Rows of tables under way while other work runs: `CompressedAllToAll.begin_tables`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.in_flight_ranks import check_met_late
from tests.distributed.ranks import run_checks, run_ranks

two_and_three = pytest.mark.parametrize("ranks", [2, 3])
EQUAL = (
    *("several_at_once", "several_as_on_a_gpu", "begun_before_others", "as_torch_has_it"),
    "ids_as_on_a_gpu",
)


@pytest.fixture(scope="module")
def seen_by(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list[Any]]]:
    """What two ranks saw, and three."""
    checks = (*EQUAL, "failures", "plain_failures", "failed_before_ranks_meet")
    return {n: run_checks(checks, n, tmp_path_factory.mktemp("ranks")) for n in (2, 3)}


@two_and_three
@pytest.mark.parametrize("check", EQUAL)
def test_what_is_under_way_is_as_if_it_were_waited_for_at_once(
    check: str, ranks: int, seen_by: dict[int, dict[str, list[Any]]]
) -> None:
    for seen in seen_by[ranks][check]:
        assert seen and all(seen.values()), seen


@two_and_three
def test_failures_are_raised_where_ranks_wait(
    ranks: int, seen_by: dict[int, dict[str, list[Any]]]
) -> None:
    for rank, seen in enumerate(seen_by[ranks]["failures"]):
        assert seen["an argument"].startswith("ArgumentError: input_split_sizes: users: [4,")
        assert "row_ids: ['x'], tables are ['users']" in seen["another table"]
        assert seen["goes on"] == "no error"
        elsewhere = "ExchangeError: sizes stage: this or an earlier exchange failed on rank 1 of"
        own = rank == 1
        differ = "ContentError: row_ids: users: rows of one id differ"
        assert seen["ids"].startswith(differ if own else elsewhere)
        assert seen["ids again"] == seen["ids"]
        assert "an earlier exchange failed" in seen["ids next"]
        for key in ("memory", "memory back"):
            assert seen[key].startswith("MemoryError: none left" if own else elsewhere), seen
            assert own or "(out of memory)" in seen[key]
        assert "disagrees with rank" in seen["disagreement"]


@two_and_three
def test_rows_that_were_not_written_are_returned_by_no_later_wait(
    ranks: int, seen_by: dict[int, dict[str, list[Any]]]
) -> None:
    for seen in seen_by[ranks]["plain_failures"]:
        assert seen.pop("first") == seen.pop("second") == "MemoryError: none left"
        assert set(seen) == {"next", "buffers"} and all(seen.values()), seen


@two_and_three
def test_a_rank_that_learns_late_of_a_failure_meets_no_other_before_it(
    ranks: int, seen_by: dict[int, dict[str, list[Any]]]
) -> None:
    check_met_late(seen_by[ranks]["failed_before_ranks_meet"])


def test_a_rank_alone_finds_what_it_would_send_to_others(tmp_path: Path) -> None:
    (seen,) = run_ranks("alone_in_flight", 1, tmp_path)
    assert seen and all(seen.values()), seen


@pytest.mark.parametrize(("check", "ranks"), [("dead_in_flight", 3), ("dead_in_flight_back", 2)])
def test_a_rank_that_ends_is_noticed_where_others_wait(
    check: str, ranks: int, tmp_path: Path
) -> None:
    *others, gone = run_ranks(check, ranks, tmp_path, timeout_s=10)
    assert gone is None
    for seen in others:
        assert seen["first"].startswith("ExchangeError: sizes stage: "), seen
        assert "an earlier exchange failed" in seen["second"] and seen.get("at once", True)
