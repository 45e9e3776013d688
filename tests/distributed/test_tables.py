"""`CompressedAllToAll` between two and three gloo ranks: tables, bounds, gradients, decisions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.ranks import run_checks

two_and_three = pytest.mark.parametrize("ranks", [2, 3])
OF_BOTH = ("tables", "gradients_of_tables", "as_on_a_gpu", "network")
OF_TWO = (
    "adaptive",
    "rounded_gradients",
    "function_by_ids",
    "decisions",
    "decisions_there",
    "of_kept_sizes",
    "timeout",
    "threads",
    "broken_encoding",
    "wrong_tables",
)

Seen = dict[str, list[Any]]


@pytest.fixture(scope="module")
def seen_by(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Seen]:
    """What two ranks saw, and three."""
    checks = {2: OF_BOTH + OF_TWO, 3: OF_BOTH}
    return {n: run_checks(checks[n], n, tmp_path_factory.mktemp("ranks")) for n in checks}


@two_and_three
def test_rows_of_tables_cross_at_once(ranks: int, seen_by: dict[int, Seen]) -> None:
    for rank, seen in enumerate(seen_by[ranks]["tables"]):
        error = seen.pop("error")
        assert all(seen.values()), seen
        if rank < 2:
            assert "table users: " in error and error.startswith("ExchangeError: sizes stage")
        else:
            assert error == "no error"


@two_and_three
def test_gradients_of_tables_are_exact_sums(ranks: int, seen_by: dict[int, Seen]) -> None:
    for seen in seen_by[ranks]["gradients_of_tables"]:
        assert len(seen) == 5 and all(seen.values()), seen


@two_and_three
def test_exchanges_on_a_gpu_with_the_codec_of_the_cpu(ranks: int, seen_by: dict[int, Seen]) -> None:
    for rank, seen in enumerate(seen_by[ranks]["as_on_a_gpu"]):
        wrong, after, at_once = (seen.pop(key) for key in ("wrong", "next", "at once"))
        assert all(seen.values()), seen
        if rank < 2:
            assert wrong.startswith("ExchangeError: sizes stage: rank") and "rows" in wrong
        else:
            assert wrong == "no error" and "failed on ranks 0, 1 of the group" in after
        assert "an earlier exchange failed" in after and "an earlier exchange failed" in at_once


@two_and_three
def test_all_ranks_have_one_model_of_their_network(ranks: int, seen_by: dict[int, Seen]) -> None:
    for seen in seen_by[ranks]["network"]:
        assert seen and all(seen.values()), seen


def test_adaptive_bounds_follow_class_and_iteration(seen_by: dict[int, Seen]) -> None:
    for seen in seen_by[2]["adaptive"]:
        assert seen["classes"] == {"merging": "small", "few": "large"}
        assert seen["indices"]["merging"] > 0.5 and seen["indices"]["few"] == 0
        # Large 0.05, small 0.01; twice that at first, then less, of three steps in a line.
        assert 0.05 * 5 / 3 < seen["first"]["few"] <= 0.1 and seen["first"]["merging"] <= 0.02
        assert 0 < seen["second"]["few"] <= 0.05 * 5 / 3
        assert seen["again"] == seen["second"]
        assert seen["bounds"]["few"] == pytest.approx(0.05 * 4 / 3)
        assert seen["bounds"]["merging"] == pytest.approx(0.01 * 4 / 3)


def test_gradients_are_rounded_stochastically(seen_by: dict[int, Seen]) -> None:
    for seen in seen_by[2]["rounded_gradients"]:
        assert seen.pop("no ids") == (
            "ArgumentError: received_ids: None, error_feedback keeps what was lost by id"
        )
        assert all(seen.values()), seen


def test_rows_of_one_id_cross_once_by_the_function(seen_by: dict[int, Seen]) -> None:
    assert seen_by[2]["function_by_ids"] == [{"equal": True, "distinct": True}] * 2


def test_ranks_agree_on_what_is_faster(seen_by: dict[int, Seen]) -> None:
    for seen in seen_by[2]["decisions"]:
        assert seen["rows"][0] == "compressed" and seen["rows"][1] != "raw"
        assert seen["noise"][0] == "plain"  # whatever was next best by the times of this machine
        assert seen["again"][0] == "compressed" and seen["again"][1] != "raw"
        assert 0 < seen["plain calls"] < 10
        for name in ("rows", "noise", "again"):
            assert seen[f"{name} equal"] and seen[f"{name} agreed"]


def test_both_ways_on_a_gpu_go_on_with_what_whole_exchanges_took(
    seen_by: dict[int, Seen],
) -> None:
    for seen in seen_by[2]["decisions_there"]:
        assert seen.pop("coding") == {"forward": "plain", "backward": "plain"}
        assert seen.pop("link") == {"forward": "compressed", "backward": "compressed"}
        assert len(seen) == 8 and all(seen.values()), seen


KEPT = {
    "dtype": "ArgumentTypeError: inputs: b: torch.int32, planned is torch.float32",
    "width": "ArgumentError: inputs: b: [3, 8], expected [N, 3]",
    "rows": "ArgumentError: input_split_sizes: a: [4, 4], expected sizes from 0 whose sum is 10",
    "unknown": "ArgumentError: input_split_sizes: ['c'], tables are ['a', 'b']",
    "a tensor": "ArgumentTypeError: inputs: a: expected a torch.Tensor, got list",
}


def test_calls_of_known_sizes_are_checked(seen_by: dict[int, Seen]) -> None:
    for rank, seen in enumerate(seen_by[2]["of_kept_sizes"]):
        said = seen.pop("disagreement")
        assert seen.keys() == KEPT.keys()
        for name, text in KEPT.items():
            assert seen[name].startswith(text), (name, seen[name])
        assert said.startswith("ExchangeError: sizes stage: rank") and "table a: " in said, rank


def test_helpers_have_the_timeout_of_their_group(seen_by: dict[int, Seen]) -> None:
    for seen in seen_by[2]["timeout"]:
        assert seen == {"own": True, "once": True, "not its group": True}


def test_a_second_thread_is_refused(seen_by: dict[int, Seen]) -> None:
    for seen in seen_by[2]["threads"]:
        assert "another thread is in a call of this object" in seen["refused"]
        assert seen["later"] == "no error"


def test_a_rank_that_cannot_encode_raises_from_there_on(seen_by: dict[int, Seen]) -> None:
    for seen in seen_by[2]["broken_encoding"]:
        assert seen["first"] == "none left"
        assert seen["later"].startswith("ExchangeError: an earlier exchange failed: encoding: Mem")


WRONG = {
    "planned": "ArgumentError: input: one tensor, tables were planned; call exchange_tables",
    "unplanned": "ArgumentError: inputs: tables, none were planned; give tables=",
    "unknown": "ArgumentError: inputs: ['cities'], tables are ['days', 'items', 'users']",
    "no mapping": "ArgumentTypeError: inputs: expected a mapping by table, got [tensor(",
    "width": "ArgumentError: inputs: users: [2, 3], expected [N, 8]",
    "dtype": "ArgumentTypeError: inputs: users: torch.float64, planned is torch.float32",
    "device": "ArgumentTypeError: inputs: users: on meta, planned is cpu",
    "no backend": "ArgumentTypeError: inputs: users: on meta, accepted are cpu and cuda",
    "no sizes": "ArgumentError: input_split_sizes: users: [0, 0], expected sizes from 0",
    "ids with pieces": "ArgumentError: row_ids: given with pieces=2",
    "feedback": "ArgumentError: received_ids: 1 ids, 2 rows come",
}


def test_wrong_tables_are_refused_before_anything_is_sent(seen_by: dict[int, Seen]) -> None:
    for seen in seen_by[2]["wrong_tables"]:
        assert seen.keys() == WRONG.keys()
        for name, text in WRONG.items():
            assert seen[name].startswith(text), (name, seen[name])
