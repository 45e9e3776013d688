"""A rank that fails, or differs, before its sizes crossed: the others know at once, and why."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.early_ranks import FUNCTION_PLACES, PLACES
from tests.distributed.ranks import run_checks

two_and_three = pytest.mark.parametrize("ranks", [2, 3])
CHECKS = (
    *("fails_before", "function_fails_before", "fails_to_measure", "fails_while_plain"),
    *("other_decisions", "resumed"),
)

Seen = dict[str, list[Any]]


@pytest.fixture(scope="module")
def seen_by(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Seen]:
    """What two ranks saw, and three."""
    return {n: run_checks(CHECKS, n, tmp_path_factory.mktemp("ranks")) for n in (2, 3)}


def said_by_rank_1(what: str, cause: str) -> str:
    return f"ExchangeError: sizes stage: {what} failed on rank 1 of the group ({cause})"


@two_and_three
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_fails_before_its_sizes_keeps_nobody_waiting(
    place: str, ranks: int, seen_by: dict[int, Seen]
) -> None:
    error = PLACES[place][2]
    cause = "an error there" if place == "bug" else "out of memory"
    said = said_by_rank_1("this or an earlier exchange", cause)
    for rank, seen in enumerate(seen_by[ranks]["fails_before"]):
        of_place = [found for key, found in seen.items() if key.split()[0] == place]
        assert of_place
        for found in of_place:
            own = f"{type(error).__name__}: {error}"
            assert found["failed"] == (own if rank == 1 else said)
            assert found["next"].startswith("ExchangeError: an earlier exchange failed: ")
            assert found["again"] == found["next"]
            assert found["prompt"] and found["outputs"] == 0 and not found["grad"]
            assert found["lent"] == 0


@two_and_three
@pytest.mark.parametrize("codec", ["compressed", "auto"])
@pytest.mark.parametrize("async_op", [False, True], ids=["at once", "asynchronous"])
@pytest.mark.parametrize(
    "place", FUNCTION_PLACES, ids=lambda of: f"{of[1]}-{'there' if of[0] else 'here'}"
)
def test_the_function_goes_on_behind_a_rank_that_failed_before_its_sizes(
    place: tuple[bool, str],
    async_op: bool,
    codec: str,
    ranks: int,
    seen_by: dict[int, Seen],
) -> None:
    error = FUNCTION_PLACES[place][2]
    own = f"{type(error).__name__}: {error}"
    for rank, seen in enumerate(seen_by[ranks]["function_fails_before"]):
        found = seen[f"{place[0]} {place[1]} {async_op} {codec}"]
        said = said_by_rank_1("this or an earlier exchange", "out of memory")
        assert found == {"said": own if rank == 1 else said, "kept": True, "next": True}


@two_and_three
def test_a_rank_that_cannot_measure_keeps_nobody_waiting(
    ranks: int, seen_by: dict[int, Seen]
) -> None:
    for rank, seen in enumerate(seen_by[ranks]["fails_to_measure"]):
        assert len(seen) == 10
        for key, found in seen.items():
            there, plain, _ = key.split()
            in_messages = there == "False" and plain == "False"
            what = "this or an earlier exchange" if in_messages else "this exchange"
            own = "MemoryError: no memory to measure"
            said = own if rank == 1 else said_by_rank_1(what, "out of memory")
            assert found["said"] == said, key
            assert found["next"].startswith("ExchangeError: an earlier exchange failed: ")
            assert found["prompt"]


def test_a_rank_that_fails_before_a_plain_exchange_meets_no_later_one(
    seen_by: dict[int, Seen],
) -> None:
    for seen in seen_by[2]["fails_while_plain"]:
        assert seen["rows"] == "MemoryError: none left"
        assert seen["buffers"].startswith("ExchangeError: an earlier exchange failed: encoding: M")


@two_and_three
@pytest.mark.parametrize("there", [False, True], ids=["here", "there"])
@pytest.mark.parametrize("what", ["every", "codec", "state", "both"])
def test_ranks_that_decide_otherwise_all_raise_in_their_first_call(
    what: str, there: bool, ranks: int, seen_by: dict[int, Seen]
) -> None:
    none = "none (its codec is not 'auto')"
    differ = {
        "every": ("decide_every {}, here it is {}", 3, 1),
        "both": ("decide_every {}, here it is {}", 3, 1),
        "codec": ("decide_every {}, here it is {}", 3, none),
        "state": ("calls so far: {}, here it is {}", 0, 12),
    }
    text, others, first = differ[what]
    for rank, seen in enumerate(seen_by[ranks]["other_decisions"]):
        key = f"{there} {what}"
        expected = text.format(*((others, first) if rank == 0 else (first, others)))
        assert seen[key].startswith(f"ExchangeError: sizes stage: rank {rank} of the group disagre")
        assert expected in seen[key] and seen[f"{key} prompt"]
        assert "an earlier exchange failed" in seen[f"{key} next"]


@two_and_three
def test_ranks_go_on_from_a_state_by_what_was_decided(ranks: int, seen_by: dict[int, Seen]) -> None:
    for seen in seen_by[ranks]["resumed"]:
        assert seen == {"False": [1, 2], "True": [1, 2]}
