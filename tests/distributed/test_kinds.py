"""What ranks decide by, alike on all of them; outputs and gradients that are changed in place."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest

from bitslab.distributed.kinds import MOST_KINDS, MOST_PLACES, Kind, Kinds
from bitslab.distributed.selection import COMPRESSED, PLAIN, Decision, WayRecord, as_floats
from bitslab.engine.advisor import NetworkModel
from tests.distributed.ranks import run_checks

two_and_three = pytest.mark.parametrize("ranks", [2, 3])
here_and_there = pytest.mark.parametrize("there", [False, True], ids=["here", "there"])
CHECKS = (
    *("kinds_of_calls", "calls_of_no_kind", "rows_of_any_size", "a_dtype_apart"),
    *("memory_of_tables", "shapes"),
)
OF_TWO = ("ids_decide", "ids_decide_there", "where_rows_are")

Seen = dict[str, list[Any]]


@pytest.fixture(scope="module")
def seen_by(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Seen]:
    """What two ranks saw, and three."""
    return {
        n: run_checks(CHECKS + (OF_TWO if n == 2 else ()), n, tmp_path_factory.mktemp("ranks"))
        for n in (2, 3)
    }


@two_and_three
@here_and_there
def test_kinds_of_calls_and_their_turns_are_decided_apart(
    there: bool, ranks: int, seen_by: dict[int, Seen]
) -> None:
    for seen in seen_by[ranks]["kinds_of_calls"]:
        assert seen[f"{there}"] == {
            "equal": True,
            "agreed": True,
            "places": [2, 1],
            "modes": [[COMPRESSED, PLAIN], [PLAIN]],
        }


@two_and_three
@here_and_there
def test_what_each_rank_alone_knows_parts_no_ranks(
    there: bool, ranks: int, seen_by: dict[int, Seen]
) -> None:
    for seen in seen_by[ranks]["calls_of_no_kind"]:
        assert seen[f"{there}"] == {"within": True, "agreed": True, "places": 1}


@two_and_three
@here_and_there
def test_rows_of_another_size_in_each_call_are_decided_of(
    there: bool, ranks: int, seen_by: dict[int, Seen]
) -> None:
    for seen in seen_by[ranks]["rows_of_any_size"]:
        # On the host the ninth call decides for those behind it.
        assert seen[f"{there}"] == [True, 7 if there else 6]


@two_and_three
@here_and_there
def test_calls_go_on_behind_one_of_another_dtype_which_is_named(
    there: bool, ranks: int, seen_by: dict[int, Seen]
) -> None:
    for rank, seen in enumerate(seen_by[ranks]["a_dtype_apart"]):
        found = seen[f"{there}"]
        own, other = ("float64", "float32") if rank == 1 else ("float32", "float64")
        assert f"dtype {other}, here it is {own}" in found["said"]
        assert found["behind"] == ["no error"]
        assert found["plain"] == (12 if there else 11)


def places_of(calls: Sequence[Hashable], *others: Sequence[Hashable]) -> list[int]:
    """Return the cycles that ranks of these calls agree on, one behind the other."""
    kinds = [Kind() for _ in (calls, *others)]
    found = []
    for own in zip(calls, *others, strict=True):
        if {kind.begin(of_rank) for kind, of_rank in zip(kinds, own, strict=True)} == {True}:
            misfits = [max(each) for each in zip(*(k.misfits() for k in kinds), strict=True)]
            for kind in kinds:
                kind.agree(misfits)
            assert len({kind.places for kind in kinds}) == 1
            found.append(kinds[0].places)
    return found


@pytest.mark.parametrize(
    ("calls", "others", "places"),
    [
        ("a" * 64, "a" * 64, [1, 1]),
        ("ab" * 32, "aa" * 32, [2, 2]),
        ("aab" * 22, "aaa" * 22, [3, 3]),
        ("ab" * 32, "aab" * 21 + "a", [6, 6]),
        ("abcdefghi" * 8, "abcdefghi" * 8, [1, 1]),
        ("ab" * 8 + "abc" * 16, "ab" * 8 + "abc" * 16, [2, 2]),
        ("ab" * 32 + "abc" * 64, "ab" * 32 + "abc" * 64, [2, 2, 3]),
    ],
    ids=["alike", "two", "three", "of both", "too long", "not all", "another"],
)
def test_cycles_fit_the_calls_of_all_ranks(calls: str, others: str, places: list[int]) -> None:
    assert places_of(calls, others) == places
    assert max(places) <= MOST_PLACES


def test_kinds_are_bounded_and_known_before_they_are_used() -> None:
    kinds = Kinds()
    first = kinds.of(0)
    first.begin("own")
    known = kinds.next_decision(0)
    assert known is first.decision and kinds.next_decision(1) is None
    for key in range(1, MOST_KINDS):
        kinds.of(key)
    assert kinds.of(0) is first
    kinds.of(MOST_KINDS)
    assert kinds.of(0) is first and kinds.next_decision(1) is None


@pytest.mark.parametrize(
    ("what", "mode"),
    [
        ("1.0 True False", COMPRESSED),
        ("1.0 False False", PLAIN),
        ("0.0 True True", COMPRESSED),
        ("0.0 True False", PLAIN),
        ("0.0 False True", PLAIN),
    ],
    ids=["saves forward", "no ids", "saves back", "no gradient", "gradient without ids"],
)
def test_decisions_while_plain_count_ids(what: str, mode: str, seen_by: dict[int, Seen]) -> None:
    for seen in seen_by[2]["ids_decide"]:
        assert seen[what] == [mode, "True" in what.split()[1]]


def test_measured_exchanges_count_what_ids_save_back(seen_by: dict[int, Seen]) -> None:
    for seen in seen_by[2]["ids_decide_there"]:
        assert seen == {
            "True True": [COMPRESSED, True],
            "True False": [PLAIN, True],
            "False True": [PLAIN, False],
        }


def test_gradients_that_need_not_come_back_are_predicted_as_they_cross_now() -> None:
    model = NetworkModel(((8.0, 1e-4), (1e6, 1e-2 + 1e-4)))  # 0.1 GB/s

    def seconds(saved: float, back: WayRecord | None = None, mode: str = PLAIN) -> list[float]:
        decision = Decision(ways=2)
        decision.modes[1] = mode
        decision.records = [WayRecord(2, 2e6, 2e6, saved_back_bytes=saved), back or WayRecord()]
        return as_floats(decision.predictions(model, 1))

    without, plain = seconds(0.0), seconds(1e6)
    assert plain[:2] == without[:2] and plain[2] > without[2]
    assert plain[2] - without[2] == pytest.approx(model.seconds(1e6) - model.seconds(5e5))
    # Compressed ten times, a tenth of that; of a way whose exchanges are not known, as plain.
    back = WayRecord(1, 1e6, 1e5)
    assert seconds(1e6, back, COMPRESSED)[2] - without[2] < 0.2 * (plain[2] - without[2])
    assert seconds(1e6, None, COMPRESSED)[2] == plain[2]


@two_and_three
@pytest.mark.parametrize("codec", ["compressed", "raw"])
def test_tables_of_one_width_are_changed_in_place_alone(
    codec: str, ranks: int, seen_by: dict[int, Seen]
) -> None:
    for seen in seen_by[ranks]["memory_of_tables"]:
        assert seen[f"{codec} outputs"] and seen[f"{codec} others"]
        assert seen[f"{codec} gradients"] == [3.0, 1.0, 1.0]
        assert seen[f"{codec} added"] == [4.0, 10.0, 2.0]


@two_and_three
def test_outputs_of_any_shape_are_changed_in_place(ranks: int, seen_by: dict[int, Seen]) -> None:
    for seen in seen_by[ranks]["shapes"]:
        assert len(seen) == 8 and all(seen.values()), seen


def test_a_rank_without_inputs_asks_where_rows_are(seen_by: dict[int, Seen]) -> None:
    for seen in seen_by[2]["where_rows_are"]:
        assert seen.pop("unknown") == (
            "ArgumentError: inputs: none on this rank, and the group has cpu:gloo,cuda:nccl: give "
            "device= where tables are planned"
        )
        assert seen.pop("no device").startswith("ArgumentError: device: cuda:99, but torch sees ")
        assert seen == {"given": "cpu", "seen": "cpu", "gloo": "cpu", "known": True}
