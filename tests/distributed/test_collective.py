"""Exchanges of two and three gloo ranks beside torch's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bitslab.distributed.wire import (
    FAILED,
    MOST_BYTES,
    TableTerms,
    Terms,
    checks_of_calls,
    descriptor,
    read_descriptor,
)
from tests import pairwise
from tests.distributed import drawn_ranks
from tests.distributed.device_ranks import ON_DEVICE
from tests.distributed.ranks import run_checks, run_ranks

two_and_three = pytest.mark.parametrize("ranks", [2, 3])
CHECKS = (
    *("lossless", "bounded", "subgroup", "asynchronous", "gradients", "disagreement"),
    *("short_and_long", "few_rows", "longer_buffers", "works"),
    *("encoding_fails", "encoding_there_fails"),
    *("other_pieces", "other_numbers", "decoding_fails", "deciding_fails"),
    "bounds_of_messages",
    "as_on_a_gpu_too",
)

Seen = dict[str, list[Any]]


@pytest.fixture(scope="module")
def seen_by(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Seen]:
    """What two ranks saw, and three."""
    of_two = ("bad_arguments", "schedule")
    return {
        ranks: run_checks(
            CHECKS + (of_two if ranks == 2 else ()), ranks, tmp_path_factory.mktemp("ranks")
        )
        for ranks in (2, 3)
    }


@pytest.fixture(scope="module")
def seen_alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What one rank saw whose rows for itself cross."""
    return run_ranks("alone", 1, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("check", [*ON_DEVICE, "tables", "gradients_of_tables"])
def test_rows_that_are_coded_where_they_are(
    check: str, ranks: int, seen_by: dict[int, Seen], seen_alone: list[Any]
) -> None:
    for seen in seen_by[ranks]["as_on_a_gpu_too"] if ranks > 1 else seen_alone:
        of_check = {**seen.get(check, {"none": True})}
        of_check.pop("error", None)  # of `tables`, where test_tables.py looks
        assert of_check and all(of_check.values()), of_check


@two_and_three
@pytest.mark.parametrize(
    "check", ["lossless", "bounded", "subgroup", "short_and_long", "few_rows", "longer_buffers"]
)
def test_what_comes_is_what_torch_delivers(
    check: str, ranks: int, seen_by: dict[int, Seen]
) -> None:
    for seen in seen_by[ranks][check]:
        assert seen and all(seen.values()), seen


@two_and_three
def test_asynchronous_exchanges_run_beside_other_collectives(
    ranks: int, seen_by: dict[int, Seen]
) -> None:
    expected = {"waited": True, "equal": True, "done": True, "total": float(ranks**4)}
    for seen in by_both(ranks, "asynchronous", seen_by):
        assert seen == [expected] * ranks


def by_both(ranks: int, check: str, seen_by: dict[int, Seen]) -> tuple[list[Any], list[Any]]:
    """Return what ranks saw of a check, and what they saw with rows coded as on a GPU."""
    as_on_a_gpu = [seen[check] for seen in seen_by[ranks]["as_on_a_gpu_too"]]
    return seen_by[ranks][check], as_on_a_gpu


@two_and_three
def test_works_say_how_exchanges_ended(ranks: int, seen_by: dict[int, Seen]) -> None:
    for seen in seen_by[ranks]["works"]:
        assert seen and all(seen.values()), seen


@two_and_three
@pytest.mark.parametrize("check", ["encoding_fails", "encoding_there_fails"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_where_a_rank_cannot_encode_all_raise_at_once(
    pieces: int, check: str, ranks: int, seen_by: dict[int, Seen]
) -> None:
    said = (
        "ExchangeError: sizes stage: this or an earlier exchange failed on rank 1 of the group "
        "(out of memory)"
    )
    for rank, seen in enumerate(seen_by[ranks][check]):
        own = rank == 1
        assert seen[f"failed in {pieces}"] == ("MemoryError: no memory to encode" if own else said)
        begin = "ExchangeError: an earlier exchange failed: "
        assert seen[f"next in {pieces}"].startswith(begin + ("encoding" if own else "sizes stage"))
        assert seen[f"rows in {pieces}"] == 0


@two_and_three
@pytest.mark.parametrize("check", ["encoding_fails", "encoding_there_fails"])
def test_the_function_goes_on_behind_rows_that_were_not_encoded(
    check: str, ranks: int, seen_by: dict[int, Seen]
) -> None:
    for seen in seen_by[ranks][check]:
        assert seen["failed in a function"] != "no error" and seen["function goes on"]


@two_and_three
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("pieces", [1, 5])
def test_ranks_with_other_pieces_all_raise_at_once(
    pieces: int, there: bool, ranks: int, seen_by: dict[int, Seen]
) -> None:
    for rank, seen in enumerate(seen_by[ranks]["other_pieces"]):
        error, other = seen[f"{there} {pieces}"], 1 if rank == 0 else 0
        assert error.startswith(f"ExchangeError: sizes stage: rank {rank} of the group disagrees")
        theirs, ours = (3, pieces) if rank == 0 else (pieces, 3)
        assert f"rank {other}: pieces {theirs}, here it is {ours}" in error
        assert "an earlier exchange failed" in seen[f"{there} {pieces} next"]


@two_and_three
@pytest.mark.parametrize("rows", [8, 2000])
def test_ranks_with_other_numbers_all_raise(
    rows: int, ranks: int, seen_by: dict[int, Seen]
) -> None:
    for rank, seen in enumerate(seen_by[ranks]["other_numbers"]):
        theirs, ours = (0, 6) if rank == 0 else (6, 0)
        text = f"numbers of a decision: {theirs}, here it is {ours}"
        assert seen[f"{rows}"].startswith("ExchangeError: sizes stage") and text in seen[f"{rows}"]
        assert seen[f"{rows} kept"] == "True"


@two_and_three
@pytest.mark.parametrize("there", [False, True])
def test_where_a_rank_cannot_decode_all_raise_in_the_next_call(
    there: bool, ranks: int, seen_by: dict[int, Seen]
) -> None:
    for rank, seen in enumerate(seen_by[ranks]["decoding_fails"]):
        own = rank == 1
        assert seen[f"{there}"] == ("MemoryError: no memory to decode" if own else "no error")
        assert seen[f"{there} next"].startswith(
            "ExchangeError: an earlier exchange failed: decoding: MemoryError"
            if own
            else "ExchangeError: sizes stage: this or an earlier exchange failed on rank 1 "
        )


@two_and_three
def test_a_rank_that_fails_where_ranks_decide_keeps_no_other_waiting(
    ranks: int, seen_by: dict[int, Seen]
) -> None:
    found = seen_by[ranks]["deciding_fails"]
    # Where all go on with torch's own collective, none of the messages says that a rank failed.
    assert len({seen["False 5"].startswith("ExchangeError") for seen in found}) == 1
    for rank, seen in enumerate(found):
        own = rank == 1
        for there in ("False", "True"):
            assert seen[f"{there} 3"] == "no error"
            assert seen[f"{there} mode"] == found[0][f"{there} mode"]
        failed = "MemoryError: no memory to decode"
        assert seen["False 4"] == (failed if own else "no error")
        another = (
            "ExchangeError: sizes stage: this exchange failed on rank 1 of the group "
            "(out of memory)"
        )
        assert seen["True 4"] == (failed if own else another)
        assert seen["True 5"].startswith("ExchangeError: an earlier exchange failed: ")


def test_an_interrupted_stage_is_noticed(tmp_path: Path) -> None:
    other, own = run_ranks("interrupted", 2, tmp_path)
    assert own["first"].startswith("KeyboardInterrupt")
    assert own["second"].startswith("ExchangeError: an earlier exchange failed: sizes stage: Key")
    assert other["first"].startswith("ExchangeError: sizes stage: ")


@two_and_three
def test_gradients_are_those_of_torch(ranks: int, seen_by: dict[int, Seen]) -> None:
    for seen in [s for of_ranks in by_both(ranks, "gradients", seen_by) for s in of_ranks]:
        assert seen["loss"] and seen["equal"] and seen["summed"] and seen["bounded"], seen
        for way in ("forward", "backward"):
            stats = seen["stats"][way]
            assert stats["calls"] == 1 and stats["plain_calls"] == 0
            assert stats["raw_bytes"] > 0 and stats["moved_bytes"] > 0
        # Gradients of copies of a row go back once.
        assert seen["stats"]["backward"]["raw_bytes"] < 9 * 6 * 4 * ranks


@two_and_three
def test_ranks_that_disagree_all_raise_and_go_on(ranks: int, seen_by: dict[int, Seen]) -> None:
    reasons = {
        "rows": ("4 rows expected, 6 are sent", "6 rows sent, 4 are expected"),
        "row": ("2 elements a row, here they are 3", "3 elements a row, here they are 2"),
        "dtype": ("dtype float32, here it is float64", "dtype float64, here it is float32"),
        "version": ("version 5 of the wire, here it is 4", "version 4 of the wire, here it is 5"),
    }
    for found in by_both(ranks, "disagreement", seen_by):
        for what, (first, second) in reasons.items():
            for rank, text in enumerate((first, second)):
                assert found[rank][what].startswith("ExchangeError: sizes stage: rank"), found
                assert text in found[rank][what] and found[rank][f"{what} kept"] == "True"
            # What a third rank receives fits, unless rank 0 has other rows for it too.
            for seen in found[2:]:
                assert (seen[what] == "no error") == (what == "rows")
        check_what_follows(ranks, found)


def check_what_follows(ranks: int, found: list[Any]) -> None:
    for rank, seen in enumerate(found):
        # Where a rank agreed with both, all raise in the next call; else all know at once.
        if ranks == 3 and rank == 2:
            assert seen["rows next"] == (
                "ExchangeError: sizes stage: this or an earlier exchange failed on ranks 0, 1 "
                "of the group (a disagreement)"
            )
        elif ranks == 3:
            assert seen["rows next"].startswith("ExchangeError: an earlier exchange failed: sizes")
        else:
            assert seen["rows next"] == "no error"
        assert seen["later"] == "True"


@two_and_three
def test_an_object_is_of_no_use_behind_a_disagreement(ranks: int, seen_by: dict[int, Seen]) -> None:
    both = by_both(ranks, "disagreement", seen_by)
    for rank, seen in ((rank, seen) for found in both for rank, seen in enumerate(found)):
        if rank == 2:
            assert seen["object"] == "no error"
            assert "an earlier exchange failed on ranks 0, 1" in seen["object next"]
        else:
            assert seen["object"].startswith("ExchangeError: sizes stage: rank")
            assert "an earlier exchange failed: sizes stage" in seen["object next"]
        assert "an earlier exchange failed: sizes stage" in seen["object again"]


@pytest.mark.parametrize(
    ("check", "ranks", "stage"),
    [
        ("dead", 2, ""),
        ("dead", 3, ""),
        ("dead_between", 2, "payload"),
        ("dead_in_payload", 2, "payload"),
        ("dead_in_backward", 2, "sizes"),
    ],
)
def test_a_rank_that_ends_is_noticed(check: str, ranks: int, stage: str, tmp_path: Path) -> None:
    *others, gone = run_ranks(check, ranks, tmp_path, timeout_s=10)
    assert gone is None
    for seen in others:
        assert seen["first"].startswith("ExchangeError: ") and f"{stage} stage: " in seen["first"]
        assert "an earlier exchange failed" in seen["second"] and seen.get("at once", True)


BAD = {
    "bound": "ArgumentError: error_bound: 0.0, accepted are positive finite numbers",
    "bound of integers": "ArgumentTypeError: error_bound: input is torch.int32, bounds are for",
    "bound of raw": "ArgumentError: error_bound: given with codec='raw'",
    "codec": "ArgumentError: codec: 'zip', accepted are auto, compressed, raw",
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
    "integer row_shape": "ArgumentTypeError: row_shape: expected a sequence of int, got 2",
    "negative row_shape": "ArgumentError: row_shape: [-2, -1], expected sizes from 1",
    "float splits": "ArgumentTypeError: input_split_sizes: expected a size for each rank, got [2.5",
    "flat splits": "ArgumentError: input_split_sizes: [3, 5], expected multiples of 2 elements",
    "conjugate": "ArgumentError: output: a conjugate or negative view",
    "list": "ArgumentTypeError: input: expected a torch.Tensor, got list",
    "group": "ArgumentTypeError: group: expected a ProcessGroup of this rank, got 'world'",
    "ids": "ArgumentError: row_ids: 3 ids, input has 4 rows",
    "ids differ": "ContentError: row_ids: rows of one id differ",
    "float ids": "ArgumentTypeError: row_ids: dtype torch.float32",
}


@pytest.mark.parametrize("ranks", [2, 3])
def test_bounds_are_shares_of_messages_and_gradients_follow_the_calls(
    ranks: int, seen_by: dict[int, Seen]
) -> None:
    for seen in seen_by[ranks]["bounds_of_messages"]:
        assert len(seen) == 5 and all(seen.values()), seen


@two_and_three
def test_what_comes_is_what_torch_delivers_whatever_is_drawn(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # That of the run, which make test SEED=... gives again.
    monkeypatch.setenv(drawn_ranks.SEED, str(pairwise.seed))
    for seen in run_ranks("drawn", ranks, tmp_path, timeout_s=60):
        assert not seen["wrong"], seen


def test_all_raise_where_one_rank_has_no_bound(tmp_path: Path) -> None:
    first, *others = run_ranks("schedules_that_fail", 2, tmp_path)
    for way in ("forward", "backward"):
        assert first[way].startswith("ContentError: schedule: -1.0 for iteration 1"), first
        for seen in others:
            assert seen[way].startswith("ExchangeError"), seen


def test_bad_arguments_are_refused_before_anything_is_sent(seen_by: dict[int, Seen]) -> None:
    for seen in seen_by[2]["bad_arguments"]:
        assert seen.keys() == BAD.keys()
        for name, text in BAD.items():
            assert seen[name].startswith(text), (name, seen[name])


@pytest.mark.parametrize("check", [0, 7, (1 << 32) - 1])
@pytest.mark.parametrize("n_bytes", [0, 9, 1 << 31, MOST_BYTES - 1, FAILED])
def test_descriptors_keep_their_numbers(check: int, n_bytes: int) -> None:
    number = descriptor(check, n_bytes)
    assert -(1 << 63) <= number < 1 << 63
    assert read_descriptor(number) == (check, n_bytes)


def test_terms_are_the_same_on_both_sides_or_say_where_they_differ() -> None:
    lower = Terms([TableTerms(0, 8, 4, 5), TableTerms(4, 1, 0, 2)], lower=True)
    higher = Terms([TableTerms(0, 8, 5, 4), TableTerms(4, 1, 2, 0)], lower=False)
    assert lower.check() == higher.check() and lower.numbers() == higher.numbers()
    names = ["users", "items"]
    others = {
        "version 2 of the wire, here it is 5": Terms(higher.tables, False, version=2),
        "pieces 3, here it is 1": Terms(higher.tables, False, pieces=3),
        "numbers of a decision: 6, here it is 0": Terms(higher.tables, False, numbers_beside=6),
        "decide_every 9, here it is none (its codec is not 'auto')": Terms(
            higher.tables, False, decide_every=9
        ),
        "1 tables, here they are 2": Terms(higher.tables[:1], False),
        "table users: dtype bfloat16, here it is float32": _with(higher, 0, (1, 8, 5, 4)),
        "table users: 9 elements a row, here they are 8": _with(higher, 0, (0, 9, 5, 4)),
        "table users: 6 rows sent, 5 are expected here": _with(higher, 0, (0, 8, 6, 4)),
        "table items: 1 rows expected, 0 are sent from here": _with(higher, 1, (4, 1, 2, 1)),
    }
    for text, other in others.items():
        assert other.check() != lower.check()
        assert lower.disagreement(other.numbers(), names) == text
    said = lower.disagreement(higher.numbers(calls=7), names, calls=8)
    assert said == "calls so far: 7, here it is 8"
    assert checks_of_calls([lower.check()], 7) != checks_of_calls([lower.check()], 8)


def _with(terms: Terms, at: int, numbers: tuple[int, int, int, int]) -> Terms:
    tables = list(terms.tables)
    tables[at] = TableTerms(*numbers)
    return Terms(tables, terms.lower)


def test_the_bound_follows_its_schedule(seen_by: dict[int, Seen]) -> None:
    for seen in seen_by[2]["schedule"]:
        limits = [0.09, 0.07, 0.05, 0.03, 0.01]
        for error, limit, next_limit in zip(
            seen["errors"], limits, [*limits[1:], 0.0], strict=True
        ):
            assert next_limit < error <= limit
        assert seen["state"]["version"] == 3 and seen["state"]["iteration"] == 5
        assert 0.03 < seen["third"] <= 0.05
