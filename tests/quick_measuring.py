"""Codecs that are measured in milliseconds, for tests that decide by their times."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitslab.engine.advisor import measuring
from bitslab.engine.advisor.codec_times import CodecTimes

#: What was measured, kept for all tests of a process.
_KNOWN: dict[str, CodecTimes] = {}


def measure_quickly(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Measure small tensors, few of them, and write to no cache of the machine."""
    monkeypatch.setenv("BITSLAB_CACHE", str(folder))
    monkeypatch.setattr(measuring, "_known", _KNOWN)
    monkeypatch.setattr(measuring, "MIN_BYTES", {"cpu": 4 << 10, "cuda": 4 << 10})
    monkeypatch.setattr(measuring, "PILOT_BYTES", {"cpu": 64 << 10, "cuda": 64 << 10})
    monkeypatch.setattr(measuring, "MAX_BYTES", {"cpu": 256 << 10, "cuda": 256 << 10})
    monkeypatch.setattr(measuring, "SAMPLES", 12)
