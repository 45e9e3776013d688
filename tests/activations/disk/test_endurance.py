"""Rates and lifespans, checked against SSDTrain's figures 5.10 and 5.13."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bitslab.activations.disk.endurance import (
    DRIVES,
    Drive,
    lifespan_days,
    required_bytes_per_s,
)
from bitslab.errors import ArgumentError


def years(endurance_bytes: float, rate: float) -> float:
    """Return the years of drives from which steps of any length ask a rate."""
    step_seconds = 7.0
    step_bytes = rate * step_seconds / 2
    assert required_bytes_per_s(step_bytes, step_seconds) == rate
    return lifespan_days(endurance_bytes, step_bytes, step_seconds) / 365


def test_four_data_center_drives_last_three_years_and_more() -> None:
    """Figure 5.10: at the largest rate, 12.1 GB/s, over three years; 3.7 by the formula."""
    drives = replace(DRIVES["d7-p5620"], count=4)
    assert drives.endurance_bytes() == pytest.approx(700.8e15)
    assert years(drives.endurance_bytes(), 12.1e9) == pytest.approx(3.7, abs=0.05)
    # As the data sheet has it, for random writes.
    assert drives.endurance_bytes(write_amplification=2.5) == pytest.approx(
        4 * 3 * 12.8e12 * 365 * 5
    )


def test_four_consumer_drives_with_relaxed_retention_last_two_years_and_more() -> None:
    """Figure 5.13: over two years; 2.7 by the formula."""
    drives = replace(DRIVES["980-pro"], count=4)
    relaxed = drives.endurance_bytes(relaxed_retention=True)
    assert relaxed == pytest.approx(516e15)
    assert years(relaxed, 12.1e9) == pytest.approx(2.7, abs=0.05)
    assert years(drives.endurance_bytes(), 12.1e9) * 365 == pytest.approx(11.5, abs=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected one of both, got None and None"),
        ({"writes_per_day": 1.0, "rated_bytes": 1e12}, "expected one of both"),
        ({"rated_bytes": 0.0}, "rated_bytes: 0.0, expected a number above 0"),
        ({"rated_bytes": 1e12, "count": 0}, "count: 0"),
        ({"rated_bytes": True}, "rated_bytes: True"),
    ],
)
def test_ratings_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Drive(1e12, **options)
    with pytest.raises(ArgumentError, match="step_seconds: -1"):
        required_bytes_per_s(1.0, -1)
