"""The time model: what is fitted, predicted, said to be outside, and corrected."""

from __future__ import annotations

import functools
import json
import math
import random
from typing import Any

import pytest

from bitslab import ArgumentError
from bitslab.engine.advisor import (
    CodecTimes,
    TimeModel,
    TimeSample,
    fit_codec_times,
    relative_absolute_error,
)


def seconds(nbytes: float, share: float) -> tuple[float, float]:
    """Return what a codec takes whose rate depends on the share in two ways."""
    slow = 3e-12 if share < 0.5 else 1e-12
    encode = 20e-6 + nbytes * (1e-12 + slow * share)
    return encode, 10e-6 + nbytes * 2e-12


def samples(n: int = 80, noise: float = 0.0, outliers: int = 0) -> list[TimeSample]:
    random_ = random.Random(0)
    found = []
    for i in range(n):
        nbytes = int(20e6 * 100 ** random_.random())
        share = random_.uniform(0.2, 0.8)
        off = 10.0 if i < outliers else 1 + noise * random_.uniform(-1, 1)
        encode, decode = seconds(nbytes, share)
        found.append(TimeSample(nbytes, share, encode * off, decode * off))
    return random_.sample(found, n)


def mean_error(times: CodecTimes) -> float:
    points = [(20e6 * 1.6**i, 0.25 + 0.09 * j) for i in range(10) for j in range(7)]
    off = [
        abs(predicted / true - 1)
        for point in points
        for predicted, true in zip(times.predict(*point), seconds(*point), strict=True)
    ]
    return sum(off) / len(off)


def test_lines_are_found_again() -> None:
    times = fit_codec_times(samples())
    assert mean_error(times) < 1e-3
    assert max(times.error) < 0.02
    assert len(times.share_edges) > 2, "one line does not fit both halves"
    assert times.n_samples == 80
    line = fit_codec_times([s for s in samples() if s.share > 0.5]).decode[0][0]
    assert line.constant_s == pytest.approx(10e-6, rel=1e-3)


def test_noise_and_interruptions() -> None:
    assert mean_error(fit_codec_times(samples(noise=0.05))) < 0.02
    assert mean_error(fit_codec_times(samples(outliers=6))) < 0.02


@pytest.mark.parametrize("n", [4, 5, 9, 20])
def test_few_samples(n: int) -> None:
    times = fit_codec_times(samples(n))
    assert times.n_samples == n
    assert all(second >= 0 for second in times.predict(1e8, 0.5))


def test_one_size_and_one_share() -> None:
    times = fit_codec_times([TimeSample(1000, 0.5, 1e-3, 2e-3)] * 8)
    assert times.predict(1000, 0.5) == pytest.approx((1e-3, 2e-3))
    assert times.outside(1001, 0.5) and not times.outside(1000, 0.5)


def test_no_prediction_is_negative() -> None:
    # Less than in proportion: a line through the two would begin below 0.
    steep = [TimeSample(10**6 * (1 + i), 0.5, 1e-12 * (1 + i) ** 2, 1e-3) for i in range(20)]
    times = fit_codec_times(steep, n_sizes=1, n_shares=1)
    assert times.predict(1, 0.5)[0] >= 0
    assert times.predict(10**9, 0.5)[0] > times.predict(10**6, 0.5)[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (samples(3), "samples: 3, expected 4 or more"),
        ([*samples(4), TimeSample(100, 0.5, 0.0, 1.0)], "expected sizes, shares and seconds above"),
        ([*samples(4), TimeSample(100, math.nan, 1.0, 1.0)], "expected sizes, shares and seconds"),
    ],
)
def test_bad_samples(given: list[TimeSample], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        fit_codec_times(given)


def test_what_is_kept_is_read_again() -> None:
    times = fit_codec_times(samples(), sm_budget=33)
    text = json.dumps(times.to_config())
    assert CodecTimes.from_config(json.loads(text)) == times


@pytest.mark.parametrize(
    "change",
    [
        {"share_edges": [0.2]},
        {"share_edges": [0.8, 0.2]},
        {"size_edges": [1.0, math.inf]},
        {"encode": []},
        {"encode": [[{"constant_s": 1.0}]]},
        {"encode": [[{"constant_s": -1.0, "s_per_raw_byte": 0.0, "s_per_packed_byte": 0.0}]]},
        {"decode": [[{"constant_s": "x", "s_per_raw_byte": 0.0, "s_per_packed_byte": 0.0}]]},
        {"sm_budget": 0},
        {"error": [1.0]},
        {"n_samples": None},
    ],
)
def test_damaged_figures_are_refused(change: dict[str, Any]) -> None:
    config = fit_codec_times([s for s in samples() if s.share > 0.5], n_shares=1, n_sizes=1)
    with pytest.raises((ValueError, KeyError, TypeError)):
        CodecTimes.from_config({**config.to_config(), **change})


def model() -> TimeModel:
    return TimeModel({("zvc", 4): fitted_to(1), ("zvc", 1): fitted_to(2)})


@functools.cache
def fitted_to(times: int) -> CodecTimes:
    return fit_codec_times([s._replace(encode_s=times * s.encode_s) for s in samples()])


def test_the_nearest_size_of_elements_stands_for_others() -> None:
    ours = model()
    assert ours.predict("zvc", 1e8, 0.5, 8) == ours.predict("zvc", 1e8, 0.5, 4)
    assert ours.predict("zvc", 1e8, 0.5, 2) == ours.predict("zvc", 1e8, 0.5, 4)
    assert ours.predict("zvc", 1e8, 0.5, 1)[0] > 1.9 * ours.predict("zvc", 1e8, 0.5, 4)[0]
    assert ours.outside("zvc", 1e8, 0.5, 4) == ""
    assert ours.outside("zvc", 1e8, 0.5, 8) == "outside the fitted range: elements of 8 B (4)"
    assert ours.sm_budget("zvc") is None
    with pytest.raises(KeyError, match="lz4"):
        ours.predict("lz4", 1e8, 0.5)


def test_outside_the_fitted_range() -> None:
    ours = model()
    low, high = ours.codecs["zvc", 4].size_edges[0], ours.codecs["zvc", 4].size_edges[-1]
    assert 20e6 <= low < high <= 2e9
    said = ours.outside("zvc", 1e6, 0.9)
    assert said == (
        f"outside the fitted range: 1 MB ({low / 1e6:.3g} to {high / 1e6:.3g}), "
        "a share of 0.90 (0.20 to 0.80)"
    )


def test_measured_swaps_correct_it() -> None:
    ours = model()
    before = ours.predict("zvc", 1e8, 0.5)
    for _ in range(30):
        ours.observe("zvc", 1e8, 0.5, encode_s=1.5 * before[0])
    after = ours.predict("zvc", 1e8, 0.5)
    assert after == pytest.approx((1.5 * before[0], before[1]), rel=1e-3)
    # Other sizes learn from it until they have swaps of their own, other elements do not.
    fitted = model()
    assert ours.predict("zvc", 1e9, 0.5)[0] > 1.4 * fitted.predict("zvc", 1e9, 0.5)[0]
    assert ours.predict("zvc", 1e8, 0.5, 1) == fitted.predict("zvc", 1e8, 0.5, 1)
    for _ in range(60):
        ours.observe("zvc", 1e9, 0.5, encode_s=fitted.predict("zvc", 1e9, 0.5)[0], decode_s=1.0)
    assert ours.predict("zvc", 1e9, 0.5) == pytest.approx(
        (fitted.predict("zvc", 1e9, 0.5)[0], 1.0), rel=0.01
    )
    assert ours.predict("zvc", 1e8, 0.5) == pytest.approx(after, rel=1e-3)
    assert set(ours.corrections()) == {("zvc", 4, 27), ("zvc", 4, 30), ("zvc", 4, 0)}


def test_one_interruption_corrects_little() -> None:
    ours = model()
    before = ours.predict("zvc", 1e8, 0.5)[0]
    ours.observe("zvc", 1e8, 0.5, encode_s=1000 * before)
    assert ours.predict("zvc", 1e8, 0.5)[0] <= 1.42 * before  # the fourth root of 4
    for nothing in (0.0, -1.0, math.nan, math.inf):
        now = ours.predict("zvc", 1e8, 0.5)
        ours.observe("zvc", 1e8, 0.5, encode_s=nothing, decode_s=nothing)
        assert ours.predict("zvc", 1e8, 0.5) == now


def test_a_size_that_was_swapped_is_inside() -> None:
    ours = model()
    assert ours.outside("zvc", 1e6, 0.5)
    ours.observe("zvc", 1e6, 0.5, encode_s=1e-3, decode_s=1e-3)
    assert not ours.outside("zvc", 1e6, 0.5)
    assert ours.outside("zvc", 1e5, 0.5)


def test_the_error_of_section_6_3() -> None:
    assert relative_absolute_error([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 0.0
    assert relative_absolute_error([2.0, 2.0, 2.0], [1.0, 2.0, 3.0]) == 1.0
    assert math.isnan(relative_absolute_error([1.0], [2.0]))
