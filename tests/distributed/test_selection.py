"""Ways to write rows, decisions from predicted seconds, parts of messages, rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import bitslab
from bitslab.distributed import AdaptiveBound, CompressedAllToAll, Table, selection
from bitslab.distributed.exchange import _cut
from bitslab.distributed.faults import ExchangeError, Faults
from bitslab.distributed.feedback import ErrorFeedback
from bitslab.distributed.messages import (
    RAW,
    REFERENCES,
    Repeats,
    decode_part,
    encode_part,
    most_part_bytes,
)
from bitslab.distributed.rounding import counter_uniforms, round_stochastically
from bitslab.distributed.selection import (
    COMPRESSED,
    EVERY_BIT,
    PIECES,
    PLAIN,
    WITHIN_BOUND,
    Decision,
    TableChoice,
    WayRecord,
    as_floats,
    as_integers,
)
from bitslab.engine.advisor import NetworkModel
from bitslab.engine.codecs import BoundedVectorCodec

SLOW = NetworkModel(((8.0, 1e-4), (1e6, 1e-2 + 1e-4)))  # 0.1 GB/s
FAST = NetworkModel(((8.0, 1e-6), (1e9, 1e-3)))  # 1 TB/s


def part_of(rows: torch.Tensor, bound: float, candidate: Any, repeats: Repeats | None) -> Any:
    out = np.empty(most_part_bytes(len(rows), rows.shape[1] * rows.element_size()), np.uint8)
    used, by_id = encode_part(rows, bound, candidate, repeats, out)
    return out[:used].copy(), by_id


def test_a_network_model_is_linear_between_its_points():
    model = NetworkModel(((8.0, 1.0), (108.0, 2.0), (1108.0, 4.0)))
    assert [model.seconds(n) for n in (0, 8, 58, 108, 608, 2108)] == [1, 1, 1.5, 2, 3, 6]
    assert model.fixed_s == 1 and model.bytes_per_s == 500


@pytest.mark.parametrize("points", [(), ((1.0, 1.0),), ((2.0, 1.0), (1.0, 2.0)), ((1.0, 0.0),) * 2])
def test_a_network_model_refuses_what_does_not_rise(points):
    with pytest.raises(bitslab.ArgumentError, match="points"):
        NetworkModel(points)


@pytest.mark.parametrize("candidate", WITHIN_BOUND, ids=lambda c: c.name)
@pytest.mark.parametrize("bound", [0.0, 0.01])
@pytest.mark.parametrize("by_id", [False, True])
def test_every_way_to_write_rows_is_read_within_the_bound(candidate, bound, by_id):
    ids = torch.arange(300) % 7
    rows = torch.randn(7, 12, generator=torch.Generator().manual_seed(2))[ids]
    data, used_ids = part_of(rows, bound, candidate, Repeats.of(ids) if by_id else None)
    out = torch.empty_like(rows)
    places = decode_part(data, out)
    exact = bound == 0 or candidate.raw or not candidate.bounded
    assert float((out - rows).abs().max()) <= (0.0 if exact else bound)
    assert used_ids == by_id and (places is not None) == by_id
    if places is not None:
        assert torch.equal(ids[torch.from_numpy(places)], ids)
        assert len(data) < rows.nbytes / 10
    elif candidate is RAW:
        assert len(data) == rows.nbytes


def test_ids_are_left_out_where_they_save_nothing():
    ids = torch.tensor([0, 0, 1, 2, 3])
    noise = np.random.default_rng(1).integers(0, 256, (4, 2), np.uint8)
    rows = torch.from_numpy(noise)[ids]
    data, used_ids = part_of(rows, 0.0, REFERENCES, Repeats.of(ids))
    out = torch.empty_like(rows)
    assert not used_ids and decode_part(data, out) is None and torch.equal(out, rows)


def test_damaged_parts_are_refused_or_decode_within_their_rows():
    ids = torch.arange(200) % 9
    rows = torch.randn(9, 8, generator=torch.Generator().manual_seed(2))[ids]
    generator = np.random.default_rng(5)
    refused = 0
    for repeats in (None, Repeats.of(ids)):
        data, _ = part_of(rows, 0.01, REFERENCES, repeats)
        for _ in range(400):
            bad = data.copy()
            bad[generator.integers(len(bad))] ^= 1 << generator.integers(8)
            bad = bad[: generator.integers(len(bad) + 1)] if generator.random() < 0.3 else bad
            memory = torch.full((202, 8), 7.0)
            try:
                decode_part(bad, memory[1:-1])
            except bitslab.CorruptedDataError:
                refused += 1
            assert bool((memory[0] == 7).all() and (memory[-1] == 7).all())
    assert refused > 200


@pytest.mark.parametrize(("data", "parts"), [([0] * 3, 2), ([9, 0, 0, 0, 1], 2), ([1], 0)], ids=str)
def test_messages_that_are_cut_are_refused(data, parts):
    with pytest.raises(bitslab.CorruptedDataError, match="message: "):
        _cut(np.array(data, np.uint8), parts)


def test_ways_to_write_rows_are_measured():
    rows = torch.randn(30, 64, generator=torch.Generator().manual_seed(1))[torch.arange(4000) % 30]
    choice = TableChoice()
    choice.choose(rows, 0.1, SLOW)
    assert set(choice.measured) == {c.name for c in WITHIN_BOUND}
    ratios = {name: found.ratio for name, found in choice.measured.items()}
    assert ratios["references"] > ratios["codes"] > ratios["fixed-width"] > 4
    assert ratios["raw"] == 1
    assert all(m.encode_s_per_byte > 0 < m.decode_s_per_byte for m in choice.measured.values())
    every_bit = TableChoice()
    every_bit.choose(rows, 0.0, SLOW)
    assert set(every_bit.measured) == {c.name for c in EVERY_BIT}
    nothing = TableChoice()
    nothing.choose(rows[:0], 0.1, SLOW)
    assert nothing.candidate is REFERENCES and not nothing.measured


def test_rows_are_written_as_is_fastest_on_the_link(monkeypatch):
    found = {
        "references": selection.Measured(20.0, 2e-9, 1e-9),
        "window": selection.Measured(10.0, 2e-9, 1e-9),
        "codes": selection.Measured(8.0, 1e-9, 1e-9),
        "fixed-width": selection.Measured(6.0, 3e-10, 3e-10),
        "lossless": selection.Measured(2.0, 1e-9, 1e-9),
        "raw": selection.Measured(1.0, 1e-11, 1e-11),
    }
    monkeypatch.setattr(selection, "measure", lambda rows, bound, c, repeats: found[c.name])
    rows, choice = torch.ones(10, 4), TableChoice()

    def chosen_at(bytes_per_s: float) -> str:
        model = NetworkModel(((1.0, 1e-9), (1.0 + bytes_per_s, 1.0 + 1e-9)))
        choice.choose(rows, 0.1, model)
        return choice.candidate.name

    assert chosen_at(1e7) == "references"
    assert chosen_at(1e10) == "raw"
    assert chosen_at(5e8) == "fixed-width"
    del found["fixed-width"]
    monkeypatch.setattr(
        selection, "WITHIN_BOUND", [c for c in WITHIN_BOUND if c.name != "fixed-width"]
    )
    assert chosen_at(2e8) == "codes"
    # A little less is no reason to change.
    found["references"] = selection.Measured(8.5, 1e-9, 1e-9)
    assert chosen_at(2e8) == "codes"


def test_short_messages_are_predicted_to_cross_with_their_descriptors():
    record = WayRecord(1, 4e6, 1000.0, 0.0, 0.0)
    together, raw = record.predicted(SLOW, 1, 1000)
    apart, _ = record.predicted(SLOW, 1, 999)
    assert together == SLOW.seconds(1008) and apart == SLOW.seconds(8) + SLOW.seconds(1000)
    assert raw == SLOW.seconds(4e6)


def decided(*records: tuple[NetworkModel, WayRecord], begin: str = "") -> str:
    decision = Decision(ways=1)
    decision.modes = [begin or decision.modes[0]]
    numbers = []
    for model, record in records:
        decision.records = [record]
        numbers.append(decision.predictions(model, 7))
    decision.decide(numbers)
    return decision.modes[0]


def test_the_slowest_rank_decides_and_small_gains_change_nothing():
    gains = WayRecord(2, 2e6, 2e5, 2e-3, 2e-3)
    slow_codec = WayRecord(1, 1e6, 1e5, 1.0, 0.1)
    assert decided((SLOW, gains)) == COMPRESSED
    assert decided((SLOW, gains), begin=PLAIN) == COMPRESSED
    assert decided((SLOW, slow_codec)) == PLAIN
    assert decided((SLOW, gains), (SLOW, slow_codec)) == PLAIN
    assert decided((FAST, gains)) == PLAIN
    # 5 % less is no reason to change.
    equal = WayRecord(1, 1e6, 0.94e6, 0.0, 0.0)
    assert decided((SLOW, equal)) == COMPRESSED
    assert decided((SLOW, equal), begin=PLAIN) == PLAIN
    assert decided((SLOW, WayRecord())) == COMPRESSED


def test_decisions_are_made_in_the_same_calls():
    decision = Decision(ways=2, every=5)
    assert [i for i in range(20) if decision.begin()] == [5, 10, 15]
    usual = Decision(ways=2)
    assert [i for i in range(150) if usual.begin()] == [8, 72, 136]
    resumed = Decision(ways=2)
    resumed.load_state_dict(usual.state_dict())
    resumed.agreed()
    assert [i for i in range(150, 300) if resumed.begin()] == [200, 264]
    both = Decision(ways=2, every=5)
    assert [i for i in range(20) if (both.begin(0), both.begin(1))[1]] == [5, 10, 15]
    numbers = [1.5, -1.0, 1e-9]
    assert as_floats(as_integers(numbers)) == numbers


def test_measured_exchanges_decide_at_once_then_by_much_and_ever_more_seldom():
    decision = Decision(ways=2, every=5)
    slower, faster = [1.05, -1.0, 1.0], [0.95, -1.0, 1.0]
    decision.decide_way(1, slower)
    assert decision.modes == [COMPRESSED, PLAIN]
    decision.decide_way(1, faster)
    assert decision.modes == [COMPRESSED, PLAIN], "5 % less is no reason to change"
    decision.decide_way(1, [0.5, -1.0, 1.0])
    assert decision.modes == [COMPRESSED, COMPRESSED]
    decided = []
    for i in range(1000):
        if decision.is_due(0):
            decided.append(i)
            decision.decide_way(0, slower if i < 900 else [0.5, -1.0, 1.0])
    gaps = [b - a for a, b in zip(decided, decided[1:], strict=False)]
    # None is passed over behind a change; then one, three and so on, up to 15.
    assert decided[0] == 5 and gaps[:6] == [5, 10, 20, 40, 80, 80]
    last = next(i for i, at in enumerate(decided) if at >= 900)
    assert gaps[last : last + 1] in ([5], []) and decision.modes[0] == COMPRESSED


def test_numbers_are_drawn_by_counter():
    drawn = counter_uniforms(3, 4, 20_000, torch.device("cpu"))
    assert torch.equal(drawn[:7], counter_uniforms(3, 4, 7, torch.device("cpu")))
    assert not torch.equal(drawn[:7], counter_uniforms(3, 5, 7, torch.device("cpu")))
    assert bool((drawn >= 0).all() and (drawn < 1).all())
    counts = torch.histc(drawn, 10, 0, 1)
    assert abs(float(drawn.mean()) - 0.5) < 0.01 and bool((counts - 2000).abs().max() < 200)
    # Golden: the same numbers on every device and for ever.
    assert [f"{x:.6f}" for x in drawn[:3].tolist()] == GOLDEN


GOLDEN = ["0.778923", "0.377170", "0.698171"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_within_two_bounds_unbiased_and_kept_by_the_codec(dtype):
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(500, 8, generator=generator).to(dtype)
    rows[0, :3] = torch.tensor([float("nan"), float("inf"), 0.0])
    rows[1, 0] = 6e4  # no code in 16 bits
    bound = 0.01
    found = [round_stochastically(rows, bound, 1, i) for i in range(30)]
    errors = (torch.stack(found).double() - rows.double())[:, 1:]
    assert float(errors.abs().max()) <= 2 * bound
    assert float(errors.mean(0).abs().max()) < 2 * bound and abs(float(errors.mean())) < 2e-4
    assert torch.equal(found[0][0].isfinite(), rows[0].isfinite()) and found[0][1, 0] == rows[1, 0]
    codec = BoundedVectorCodec(bound)
    decoded = codec.decode(codec.encode(found[0]))
    assert torch.equal(torch.nan_to_num(decoded), torch.nan_to_num(found[0]))


def test_error_feedback_keeps_the_rows_that_were_met_last():
    kept = ErrorFeedback(3, 2)

    def keep(lost: list[list[float]], *ids: int) -> None:
        kept.keep(torch.tensor(lost), kept.met(torch.tensor(ids)))

    def added(of: ErrorFeedback, *ids: int) -> list[list[float]]:
        found: list[list[float]] = of.add_to(
            torch.zeros(len(ids), 2), of.met(torch.tensor(ids))
        ).tolist()
        return found

    keep([[1.0, 0], [2, 0], [3, 0]], 5, 9, 5)
    assert [row[0] for row in added(kept, 9, 5, 5)] == [2, 4, 0]
    keep([[1.0, 1], [1, 1]], 7, 1)
    assert len(kept) == 3  # 9 was met longest ago, as was 5
    assert [row[1] for row in added(kept, 1, 7, 5)] == [1, 1, 0]
    assert [row[0] for row in added(kept, 5, 9, 2)] == [4, 0, 0]
    other = ErrorFeedback(3, 2)
    other.load_state_dict(kept.state_dict())
    assert added(other, 1, 7, 5) == added(kept, 1, 7, 5)
    with pytest.raises(bitslab.CorruptedDataError, match="error feedback"):
        ErrorFeedback(3, 4).load_state_dict(kept.state_dict())


def test_a_broken_collective_lasts_and_a_reported_disagreement_does_not():
    def fail() -> None:
        raise RuntimeError("peer gone")

    once = Faults(lasting=False)
    once.failed("rows", known_to_all=True)
    once.check()
    once.failed("rows", known_to_all=False)
    once.check()
    assert once.to_report and "rows" in str(once.pending())
    once.reported()
    once.check()
    with pytest.raises(ExchangeError, match="payload stage: peer gone"):
        once.stage("payload", fail)
    with pytest.raises(ExchangeError, match="an earlier exchange failed: payload stage: peer gone"):
        once.check()


def test_a_state_has_when_ranks_decide_next() -> None:
    """A rank that begins anew decides in the same calls as those that went on."""
    kept, anew = Decision(ways=2, every=2), Decision(ways=2, every=2)
    for _ in range(30):
        if kept.is_due(1):
            kept.decide_way(1, [0.5, -1.0, 1.0])
    anew.load_state_dict(kept.state_dict())
    anew.agreed(1)
    due = []
    for decision in (kept, anew):
        of_one = []
        for _ in range(80):
            of_one.append(decision.is_due(1))
            if of_one[-1]:
                decision.decide_way(1, [0.5, -1.0, 1.0])
        due.append(of_one)
    assert due[0] == due[1] and 0 < sum(due[0]) < 40


def test_only_auto_goes_on_in_the_mode_of_a_state() -> None:
    auto = CompressedAllToAll(tables=[Table("a", 2)])
    state = auto.state_dict()
    state["decision"]["modes"] = ["plain", "plain"]
    for codec, plain in (("auto", True), ("compressed", False)):
        exchange = CompressedAllToAll(tables=[Table("a", 2)], codec=codec)
        exchange.load_state_dict(state)
        # The first exchange each way is compressed: ranks find there whether their states differ.
        assert not exchange._caller.is_plain(0) and not exchange._caller.is_plain(1)
        for way in (0, 1):
            exchange._caller.decision.agreed(way)
            assert exchange._caller.is_plain(way) is plain


@pytest.mark.parametrize(
    ("codec", "pieces", "mode"),
    [
        ("raw", 1, PLAIN),
        ("raw", 3, PLAIN),
        ("compressed", 1, COMPRESSED),
        ("compressed", 3, PIECES),
        ("auto", 1, COMPRESSED),
        ("auto", 3, PIECES),
    ],
)
def test_stats_say_how_rows_cross(codec: str, pieces: int, mode: str) -> None:
    exchange = CompressedAllToAll(codec=codec, pieces=pieces)
    assert exchange.stats()["modes"] == {"forward": mode, "backward": mode}


def test_states_of_other_tables_are_refused():
    one = CompressedAllToAll(tables=[Table("a", 2)], error_bound="adaptive")
    state = one.state_dict()
    other = CompressedAllToAll(tables=[Table("b", 2)])
    with pytest.raises(bitslab.CorruptedDataError, match="tables"):
        other.load_state_dict(state)
    changes: dict[str, Any] = {
        "version": 1,
        "iteration": -1,
        "tables": {"a": {"class": "huge"}},
        "decision": {"modes": ["fast", "plain"], "calls": 0},
        "feedback": {"a": {}},
    }
    for name, value in changes.items():
        with pytest.raises(bitslab.CorruptedDataError, match="state: "):
            one.load_state_dict(state | {name: value})
    wrong = state["tables"]["a"] | {"codec": "zip"}
    with pytest.raises(bitslab.CorruptedDataError, match="'zip' is no way to write rows"):
        one.load_state_dict(state | {"tables": {"a": wrong}})


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Table("", 2), "name: expected a str that is not empty"),
        (lambda: Table("a", 0), "row_elements: 0"),
        (lambda: Table("a", 2, torch.float8_e5m2), "dtype: torch.float8_e5m2, accepted are float"),
        (lambda: Table("a", 2, error_bound="loose"), "error_bound: 'loose'"),
        (lambda: Table("a", 2, torch.int64, 0.1), "error_bound: of torch.int64"),
        (lambda: AdaptiveBound(-1.0), "error_bound: -1.0"),
        (lambda: AdaptiveBound(thresholds=(1.0, 0.5)), "thresholds: (1.0, 0.5)"),
        (lambda: AdaptiveBound(sample_rows=1), "sample_rows: 1"),
        (lambda: CompressedAllToAll(tables=[]), "tables: none given"),
        (lambda: CompressedAllToAll(tables=[Table("a", 2)] * 2), "tables: two of the name 'a'"),
        (lambda: CompressedAllToAll(tables=["a"]), "tables: expected a Table, got 'a'"),  # type: ignore[list-item]
        (
            lambda: CompressedAllToAll(backward="lossy"),
            "backward: 'lossy', accepted are 'lossless'",
        ),
        (lambda: CompressedAllToAll(error_feedback=3), "error_feedback: given with backward='loss"),
        (lambda: CompressedAllToAll(codec="raw", error_bound=0.1), "a bound with codec='raw'"),
        (lambda: CompressedAllToAll(pieces=0), "pieces: 0"),
        (lambda: CompressedAllToAll(seed=-1), "seed: -1"),
        (lambda: CompressedAllToAll(decide_every=0), "decide_every: 0"),
    ],
    ids=lambda x: x.split(":")[0] if isinstance(x, str) else None,
)
def test_bad_arguments_are_refused(call, text):
    with pytest.raises(bitslab.BitslabError) as caught:
        call()
    assert text in str(caught.value)


def test_capture_is_refused(monkeypatch):
    from bitslab.distributed.checks import refuse_capture

    class OnGpu:
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(bitslab.ArgumentError, match="a CUDA graph is being captured"):
        refuse_capture(OnGpu())  # type: ignore[arg-type]
    refuse_capture(torch.ones(1))
