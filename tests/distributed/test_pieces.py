"""Exchanges in pieces on a CPU, chosen by what exchanges as wholes took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from bitslab.distributed.pieces import PieceTrial
from bitslab.distributed.selection import COMPRESSED, PIECES, PLAIN, Decision, WayRecord, as_floats
from bitslab.engine.advisor import NetworkModel

RAW_BYTES, MOVED_BYTES = 1e6, 1e5
FORWARD, BACKWARD = 0, 1


@dataclass
class Link:
    """Milliseconds of an exchange of RAW_BYTES each way, by how it crosses.

    The stages of pieces take longer than those of a whole, which is why their sum says nothing.
    """

    whole: float
    pieces: float
    plain: float

    @property
    def model(self) -> NetworkModel:
        return NetworkModel(((8.0, 1e-9), (RAW_BYTES, 1e-3 * self.plain)))

    def cross(self, decision: Decision, way: int) -> str:
        """Exchange as `Caller` does on the host; return how rows cross."""
        due = decision.begin(way)
        if decision.mode(way) == PLAIN:
            if due:
                decision.records[way] = WayRecord()
                self._add(decision.records[way], whole=True)
                decision.decide([decision.predictions(self.model, 1)])
            return PLAIN
        in_pieces = decision.takes_pieces(way)
        if due:
            decision.decide([decision.predictions(self.model, 1)])
        took = self.pieces if in_pieces else self.whole
        record = decision.took(way, 1e-3 * took, int(2 * RAW_BYTES), in_pieces=in_pieces)
        self._add(record, whole=not in_pieces)
        return PIECES if in_pieces else COMPRESSED

    def _add(self, record: WayRecord, *, whole: bool) -> None:
        crossing = self.plain * MOVED_BYTES / RAW_BYTES
        record.calls += 1
        record.raw_bytes += RAW_BYTES
        record.moved_bytes += MOVED_BYTES
        record.encode_s += 1e-3 * (self.whole - crossing) * (1 if whole else 2)


#: Pieces are the fastest, and a sum of stages is slower than plain.
GAIN = Link(whole=12.5, pieces=6.0, plain=10.0)


def training(link: Link, decision: Decision, steps: int, ways: tuple[int, ...]) -> Iterator[str]:
    for _ in range(steps):
        for way in ways:
            yield link.cross(decision, way)


@pytest.mark.parametrize("every", [3, 4, 5, 8, 64])
@pytest.mark.parametrize("ways", [(FORWARD,), (FORWARD, BACKWARD)], ids=["forward", "both ways"])
@pytest.mark.parametrize(
    ("link", "best"),
    [
        pytest.param(GAIN, PIECES, id="pieces, stages one after the other would be plain"),
        pytest.param(Link(8.0, 6.0, 20.0), PIECES, id="pieces"),
        pytest.param(Link(6.0, 18.0, 20.0), COMPRESSED, id="whole"),
        pytest.param(Link(6.0, 60.0, 20.0), COMPRESSED, id="whole, pieces are slower than plain"),
        pytest.param(Link(12.0, 11.0, 5.0), PLAIN, id="plain"),
    ],
)
def test_what_is_fastest_is_kept_over_many_decisions(
    link: Link, best: str, ways: tuple[int, ...], every: int
) -> None:
    decision = Decision(ways=len(ways), pieces=4, every=every)
    found = list(training(link, decision, 40 * every, ways))[len(ways) * (every + 9) :]
    assert decision.modes == [best] * len(ways)
    others = [mode for mode in found if mode != best]
    assert len(others) <= len(found) / 4
    assert best == PLAIN or set(others) <= {COMPRESSED, PIECES}


def test_pieces_are_found_again_once_the_link_is_slower() -> None:
    decision = Decision(ways=1, pieces=4, every=8)
    fast = Link(whole=12.5, pieces=6.0, plain=2.0)
    assert set(list(training(fast, decision, 100, (FORWARD,)))[20:]) == {PLAIN}
    found = list(training(Link(12.5, 6.0, 10.0), decision, 100, (FORWARD,)))
    assert found[-1] == PIECES, "as pieces were measured before"


@pytest.mark.parametrize("every", [1, 2])
def test_without_calls_between_decisions_nothing_is_tried(every: int) -> None:
    decision = Decision(ways=1, pieces=4, every=every)
    assert set(training(Link(5.0, 9.0, 100.0), decision, 200, (FORWARD,))) == {PIECES}


def test_nearly_as_fast_changes_nothing() -> None:
    for begin, link in ((PIECES, Link(9.5, 10.0, 100.0)), (COMPRESSED, Link(10.0, 9.5, 100.0))):
        decision = Decision(ways=1, pieces=4)
        decision.modes = [begin]
        list(training(link, decision, 300, (FORWARD,)))
        assert decision.modes == [begin]


def test_a_state_begins_without_what_was_measured() -> None:
    used = Decision(ways=2, pieces=4, every=8)
    list(training(GAIN, used, 56, (FORWARD, BACKWARD)))
    assert used.trials[FORWARD].ratio == pytest.approx(6.0 / 12.5)
    used.load_state_dict(used.state_dict())
    assert [trial.ratio for trial in used.trials] == [1.0, 1.0]
    assert not used.records[FORWARD].calls and not used.in_pieces[FORWARD].calls
    tried = []
    for call in range(56, 64):  # nothing is tried until the ranks agree
        used.begin()
        assert used.takes_pieces()
        tried.append(used.trials[FORWARD].tries(call))
    assert any(tried)


@pytest.mark.parametrize("pieces", [1, 4])
def test_nothing_is_predicted_again_of_the_exchanges_before(pieces: int) -> None:
    decision = Decision(ways=1, pieces=pieces)
    list(training(GAIN, decision, 8, (FORWARD,)))
    known = as_floats(decision.predictions(GAIN.model, 1))
    assert all(seconds > 0 for seconds in known[:1])
    assert all(seconds < 0 for seconds in as_floats(decision.predictions(GAIN.model, 1)))


def test_whole_exchanges_alone_where_there_are_no_pieces() -> None:
    decision = Decision(ways=1)
    assert set(training(Link(5.0, 1.0, 100.0), decision, 300, (FORWARD,))) == {COMPRESSED}


@pytest.mark.parametrize(
    ("first", "every", "tried"),
    [
        (8, 64, [6, 7, 70, 71, 198, 199, 454, 455, 966, 967, 1990, 1991]),
        (5, 5, [3, 4, 8, 9, 18, 19, 38, 39, 78, 79, 158, 159, 238, 239]),
        (3, 3, [2, 5, 11, 23, 47, 95, 143, 191]),
        (2, 2, []),
        (1, 1, []),
    ],
)
def test_the_other_way_is_tried_before_decisions_less_often_later(
    first: int, every: int, tried: list[int]
) -> None:
    trial = PieceTrial(first, every)
    found = [call for call in range(2000) if trial.tries(call)]
    assert found[: len(tried)] == tried and bool(found) == bool(tried)
    assert not any(call >= first and (call - first) % every == 0 for call in found)


def test_first_calls_and_those_that_decide_or_send_nothing_do_not_count() -> None:
    trial = PieceTrial(4, 4)
    for call, n_bytes in ((0, 10), (1, 10), (2, 0), (3, 10), (4, 10), (5, 10), (6, 0), (7, 10)):
        counts = call in (1, 3, 5, 7)
        in_pieces = trial.tries(call)
        # Those that do not count would be the fastest.
        seconds = (0.5 if in_pieces else 1.0) * (1.0 if counts else 1e-3)
        if call == 4:
            trial.compare()
            assert trial.ratio == 0.5
        trial.took(call, seconds, n_bytes, in_pieces=in_pieces)
    trial.compare()
    assert trial.ratio == 0.5


def test_as_many_exchanges_count_of_each_way_and_the_fastest_of_them() -> None:
    trial = PieceTrial(64, 64)
    for call, seconds in enumerate([9.0, 0.1, 5.0, 4.0], 1):
        trial.took(call, seconds, 10, in_pieces=False)
    trial.took(5, 8.0, 10, in_pieces=True)
    trial.compare()
    assert trial.ratio == 2.0
    trial.took(65, 1.0, 10, in_pieces=True)
    trial.compare()
    assert trial.ratio == 2.0, "nothing whole since"
