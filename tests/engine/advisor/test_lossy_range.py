"""The range of P by bisection and its schedules: algorithm 1, equations 1 and 2."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from bitslab import ArgumentError
from bitslab.engine.advisor import (
    CodecTimes,
    Line,
    LossyRange,
    LossySchedule,
    SiteRecord,
    SwapLink,
    TimeModel,
    lossy_range,
)

MB = 1_000_000
LINK = SwapLink(1e9, 1e9)


def model(rate: float) -> TimeModel:
    """Return a codec that takes so many seconds a raw byte, encoding and decoding together."""
    line = ((Line(0.0, rate / 2, 0.0),),)
    return TimeModel({("zfp", 4): CodecTimes((0.0, 1.0), (1.0, 1e9), line, line)})


def dense(megabytes: float, forward: float, backward: float, dtype=torch.float32) -> SiteRecord:
    return SiteRecord(
        site=f"{megabytes}",
        shape=(int(megabytes * MB) // dtype.itemsize,),
        dtype=dtype,
        nbytes=int(megabytes * MB),
        hidden_forward_s=forward,
        hidden_backward_s=backward,
    )


def by_trying(records: list[SiteRecord], ours: TimeModel, max_p: int) -> LossyRange:
    """Return the range by looking at each P, in the words of section 5.2.2."""
    tops, bottoms = [], []
    for record in records:
        pays, hidden = [1], [1]
        for p in range(1, max_p + 1):
            n_bytes = record.nbytes * min(10, p * 4 / max_p / record.dtype.itemsize)
            exposed = max(n_bytes / 1e9 - record.hidden_forward_s, 0) + max(
                n_bytes / 1e9 - record.hidden_backward_s, 0
            )
            raw = max(record.nbytes / 1e9 - record.hidden_forward_s, 0) + max(
                record.nbytes / 1e9 - record.hidden_backward_s, 0
            )
            if raw - exposed >= sum(ours.predict("zfp", record.nbytes, p / max_p)):
                pays.append(p)
            if exposed == 0:
                hidden.append(p)
        tops.append(max(pays))
        bottoms.append(max(hidden))
    return LossyRange(max(tops), min(bottoms), max(tops) > min(bottoms))


CASES: list[tuple[list[SiteRecord], float]] = [
    ([dense(100, 0.03, 0.05)], 1e-10),
    ([dense(100, 0.03, 0.05), dense(300, 0.1, 0.1), dense(20, 0.001, 0.01)], 2e-10),
    ([dense(100, 0.2, 0.2)], 1e-10),  # hidden as it is
    ([dense(100, 0.0, 0.0)], 1e-8),  # the codec is too slow for any P
    ([dense(100, 0.03, 0.05, torch.bfloat16), dense(90, 0.01, 0.02)], 1e-10),
]


@pytest.mark.parametrize("max_p", [128, 64, 1])
@pytest.mark.parametrize(("records", "rate"), CASES)
def test_bisection_finds_what_trying_finds(
    records: list[SiteRecord], rate: float, max_p: int
) -> None:
    found = lossy_range(records, model(rate), LINK, "zfp", max_p=max_p)
    assert found == by_trying(records, model(rate), max_p)


def test_figures_by_hand() -> None:
    # 100 MB take 100 ms; 30 and 50 ms are hidden, so up to P = 38 all is. Packing takes 10 ms and
    # saves 2 x 100 (1 - P/128), down to the 80 ms ... 120 ms that were exposed.
    found = lossy_range([dense(100, 0.03, 0.05)], model(1e-10), LINK, "zfp")
    assert found == LossyRange(top=121, bottom=38, pays=True)
    assert not lossy_range([dense(100, 0.2, 0.2)], model(1e-10), LINK, "zfp").pays
    assert not lossy_range([], model(1e-10), LINK, "zfp").pays


def test_the_example_of_the_paper() -> None:
    schedule = LossySchedule(100, 20, 90)
    assert schedule.step == 1
    values = [schedule.value(epoch) for epoch in range(95)]
    assert values[:3] == [100, 99, 98]
    assert values.index(20) == 80  # the 81st
    assert set(values[80:]) == {20}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("sliding", [64, 56, 48, 40, 32, 32]),
        ("inverse", [32, 40, 48, 56, 64, 64]),
        ("fixed", [32] * 6),
    ],
)
def test_schedules(kind: Any, expected: list[int]) -> None:
    schedule = LossySchedule(64, 32, 4, kind)
    assert [schedule.value(epoch) for epoch in range(6)] == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda: LossySchedule(64, 32, 4, cast(Any, "up")),
            "kind: 'up', accepted are sliding, inverse, f",
        ),
        (lambda: LossySchedule(31, 32, 4), "top, bottom: 31, 32, expected 1 <= bottom <= top"),
        (lambda: LossySchedule(64, 0, 4), "top, bottom: 64, 0"),
        (lambda: LossySchedule(64, 32, 0), "epochs: 0"),
        (lambda: LossySchedule(64, 32, 4).value(-1), "epoch: -1"),
        (lambda: lossy_range([], model(1e-10), LINK, "zfp", max_p=0), "max_p: 0"),
        (lambda: lossy_range([], model(1e-10), LINK, "zfp", max_p=cast(Any, 1.5)), "max_p: 1.5"),
    ],
)
def test_bad_arguments(wrong: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        wrong()
    assert message in str(caught.value)


def test_a_codec_that_is_not_known() -> None:
    with pytest.raises(KeyError):
        lossy_range([dense(100, 0.03, 0.05)], model(1e-10), LINK, "sz")
