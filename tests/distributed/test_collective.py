"""Exchanges of two and three gloo ranks beside torch's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bitslab.distributed.wire import MAGIC, Descriptor
from tests.distributed.ranks import run_ranks

two_and_three = pytest.mark.parametrize("ranks", [2, 3])


@two_and_three
@pytest.mark.parametrize("check", ["lossless", "bounded", "subgroup"])
def test_what_comes_is_what_torch_delivers(check: str, ranks: int, tmp_path: Path) -> None:
    for seen in run_ranks(check, ranks, tmp_path):
        assert seen and all(seen.values()), seen


@two_and_three
def test_asynchronous_exchanges_run_beside_other_collectives(ranks: int, tmp_path: Path) -> None:
    expected = {"waited": True, "equal": True, "done": True, "total": float(ranks**4)}
    assert run_ranks("asynchronous", ranks, tmp_path) == [expected] * ranks


@two_and_three
def test_gradients_are_those_of_torch(ranks: int, tmp_path: Path) -> None:
    for seen in run_ranks("gradients", ranks, tmp_path):
        assert seen["loss"] and seen["equal"] and seen["summed"] and seen["bounded"], seen
        for way in ("forward", "backward"):
            stats = seen["stats"][way]
            assert stats["calls"] == 1 and stats["plain_calls"] == 0
            assert stats["raw_bytes"] > 0 and stats["moved_bytes"] > 0
        # Gradients of copies of a row go back once.
        assert seen["stats"]["backward"]["raw_bytes"] < 9 * 6 * 4 * ranks


@two_and_three
def test_ranks_that_disagree_all_raise_and_go_on(ranks: int, tmp_path: Path) -> None:
    found = run_ranks("disagreement", ranks, tmp_path)
    reasons = {
        "rows": ("4 rows expected, 6 are sent", "6 rows sent, 4 are expected"),
        "row": ("2 elements a row, here they are 3", "3 elements a row, here they are 2"),
        "dtype": ("dtype float32, here it is float64", "dtype float64, here it is float32"),
    }
    for what, (first, second) in reasons.items():
        for rank, text in enumerate((first, second)):
            assert found[rank][what].startswith("ExchangeError: sizes stage: rank"), found
            assert text in found[rank][what] and found[rank][f"{what} kept"] == "True"
        # What a third rank receives fits, unless rank 0 has other rows for it too.
        for seen in found[2:]:
            assert (seen[what] == "no error") == (what == "rows")
    for seen in found:
        assert seen["later"] == "True"
        assert "ExchangeError: sizes stage" in seen["object"]
        assert "an earlier exchange failed: sizes stage" in seen["object again"]


@two_and_three
def test_a_rank_that_ends_before_the_sizes_is_noticed(ranks: int, tmp_path: Path) -> None:
    *others, gone = run_ranks("dead", ranks, tmp_path, timeout_s=10)
    assert gone is None
    for seen in others:
        assert seen["first"].startswith("ExchangeError: ") and " stage: " in seen["first"]
        assert seen["seconds"] < 25
        assert "an earlier exchange failed" in seen["second"] and seen["at once"]


def test_a_rank_that_ends_between_the_stages_is_noticed(tmp_path: Path) -> None:
    first, gone = run_ranks("dead_between", 2, tmp_path, timeout_s=10)
    assert gone is None and first["first"].startswith("ExchangeError: payload stage: ")


BAD = {
    "bound": "ArgumentError: error_bound: 0.0, accepted are positive finite numbers",
    "bound of integers": "ArgumentTypeError: error_bound: input is torch.int32, bounds are for",
    "bound of raw": "ArgumentError: error_bound: given with codec='raw'",
    "codec": "ArgumentError: codec: 'zip', accepted are auto, raw",
    "sum": "ArgumentError: input_split_sizes: [3, 3], expected sizes from 0 whose sum is 4",
    "count": "ArgumentError: output_split_sizes: 1 sizes, the group has 2 ranks",
    "negative": "ArgumentError: output_split_sizes: [5, -1], expected sizes from 0",
    "uneven": "ArgumentError: input: 3 along the first dimension for 2 ranks",
    "overlap": "ArgumentError: output: shares memory with input",
    "dtype": "ArgumentTypeError: output: dtype torch.float64, input has torch.float32",
    "strange dtype": "ArgumentTypeError: input: dtype torch.float8_e5m2, accepted are float32",
    "strides": "ArgumentError: output: not contiguous",
    "rows": "ArgumentError: output: rows of [3], of input 2 elements",
    "row_shape": "ArgumentError: row_shape: [3], rows are [2]",
    "flat splits": "ArgumentError: input_split_sizes: [3, 5], expected multiples of 2 elements",
    "list": "ArgumentTypeError: input: expected a torch.Tensor, got list",
    "group": "ArgumentTypeError: group: expected a ProcessGroup of this rank, got 'world'",
    "ids": "ArgumentError: row_ids: 3 ids, input has 4 rows",
    "ids differ": "ArgumentError: row_ids: rows of one id differ",
    "float ids": "ArgumentTypeError: row_ids: dtype torch.float32",
}


def test_bad_arguments_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    for seen in run_ranks("bad_arguments", 2, tmp_path):
        assert seen.keys() == BAD.keys()
        for name, text in BAD.items():
            assert seen[name].startswith(text), name


def test_descriptors_keep_their_numbers() -> None:
    largest = Descriptor(
        MAGIC, 255, 32, (1 << 32) - 1, (1 << 31) - 1, (1 << 31) - 1, (1 << 32) - 1, 7
    )
    for given in (
        largest,
        Descriptor(MAGIC, 1, 2, 3, 4, 5, 6, 4),
        Descriptor(MAGIC, 0, 0, 0, 0, 0, 0, 0),
    ):
        numbers = torch.tensor(given.numbers(), dtype=torch.int64).tolist()
        assert Descriptor.of(numbers) == given
    ours = Descriptor(MAGIC, 0, 0, 8, 4, 4, 9, 4)
    assert ours.disagreement(ours) is None
    changed = {
        "magic": 1,
        "dtype": 1,
        "row_elements": 9,
        "rows": 5,
        "expected_rows": 5,
        "body_rows": 3,
    }
    for name, value in changed.items():
        assert replace(ours, **{name: value}).disagreement(ours)


def test_the_bound_follows_its_schedule(tmp_path: Path) -> None:
    for seen in run_ranks("schedule", 2, tmp_path):
        limits = [0.09, 0.07, 0.05, 0.03, 0.01]
        for error, limit, next_limit in zip(
            seen["errors"], limits, [*limits[1:], 0.0], strict=True
        ):
            assert next_limit < error <= limit
        assert seen["state"] == {"version": 1, "iteration": 5}
        assert 0.03 < seen["third"] <= 0.05
