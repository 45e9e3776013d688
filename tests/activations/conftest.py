"""What tests of activations share: codecs that are measured in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from bitslab.engine.advisor import measuring
from bitslab.engine.advisor.codec_times import CodecTimes

#: What was measured, kept for all tests of a process.
_KNOWN: dict[str, CodecTimes] = {}


@pytest.fixture
def quick_measuring(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """Measure small tensors, few of them, and write to no cache of the machine."""
    monkeypatch.setenv("BITSLAB_CACHE", str(tmp_path_factory.getbasetemp() / "activations-cache"))
    monkeypatch.setattr(measuring, "_known", _KNOWN)
    monkeypatch.setattr(measuring, "MIN_BYTES", {"cpu": 4 << 10, "cuda": 4 << 10})
    monkeypatch.setattr(measuring, "PILOT_BYTES", {"cpu": 64 << 10, "cuda": 64 << 10})
    monkeypatch.setattr(measuring, "MAX_BYTES", {"cpu": 256 << 10, "cuda": 256 << 10})
    monkeypatch.setattr(measuring, "SAMPLES", 12)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the rate of the link, in bytes per second."""

    def set_rate(rate: float) -> None:
        names = "host_to_device", "device_to_host", "zero_copy", "host_gather"
        figures = {f"{name}_bytes_per_s": rate for name in names}
        monkeypatch.setenv("BITSLAB_LINK", json.dumps(figures))

    return set_rate
