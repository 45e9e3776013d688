"""What tests of activations share: codecs that are measured in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bitslab.activations import planned as planned_module
from bitslab.activations.disk import DiskRates, tier
from bitslab.engine.advisor.planning import Correction
from bitslab.engine.codecs import ChainCodec, InvariantBlobCodec
from tests.quick_measuring import measure_quickly


@pytest.fixture
def quick_measuring(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """Measure small tensors, few of them, and write to no cache of the machine."""
    measure_quickly(monkeypatch, tmp_path_factory.getbasetemp() / "activations-cache")


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every plan hold, whatever else the machine does."""
    monkeypatch.setattr(
        planned_module, "compare", lambda *_, **__: Correction("holds", "The plan holds.")
    )


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the rate of the link, in bytes per second."""

    def set_rate(rate: float) -> None:
        names = "host_to_device", "device_to_host", "zero_copy", "host_gather"
        figures = {f"{name}_bytes_per_s": rate for name in names}
        monkeypatch.setenv("BITSLAB_LINK", json.dumps(figures))

    return set_rate


@pytest.fixture
def fits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fit codecs to the first tensor of a site, for which the host waits, so that it is packed."""
    monkeypatch.setattr(InvariantBlobCodec, "learns", False)
    monkeypatch.setattr(ChainCodec, "learns", False)


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take folders for fast disks, without measuring: requests are small, and threads several."""
    rates = DiskRates(64 << 10, 2, 2, 1e9, 1e9, 1e9, 1e9, direct=True)
    monkeypatch.setattr(tier, "disk_rates", lambda folder: rates)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run torch's operators so that two runs give the same bits, as far as they can."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before
