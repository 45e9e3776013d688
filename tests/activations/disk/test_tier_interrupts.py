"""Ctrl-C at any line of the disk tier: nothing waits in its queues, and what follows is right."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch

from bitslab.activations.disk import DiskTier
from tests.activations.disk.test_tier import KIB, RATES, random_bytes, stored
from tests.activations.disk.waiting import WAIT_S
from tests.interrupts import interrupt_often


@pytest.mark.parametrize("drained", [False, True], ids=["from-memory", "from-file"])
def test_interrupts_at_any_line_leave_nothing_under_way(drained: bool, tmp_path: Path) -> None:
    data = random_bytes(150 * KIB)  # three pieces
    with DiskTier(tmp_path, rates=RATES) as tier:
        known = stored(tier, data)  # starts the threads
        assert tier.drain(WAIT_S)
        assert torch.equal(tier.fetch(known).result(WAIT_S), data)

        def move() -> None:
            ticket = known if drained else tier.store(data)
            if ticket is not None:
                tier.fetch(ticket)

        interrupts = interrupt_often(move, 1.5, 5e-6)
        gc.collect()
        assert interrupts > 100
        assert tier.drain(WAIT_S)
        assert tier.stats()["queued_bytes"] == 0
        with tier._counters.lock:
            assert tier._counters.idle.wait_for(lambda: not tier._counters.reads, WAIT_S)
        again = stored(tier, data)
        for each in (known, again):
            assert torch.equal(tier.fetch(each).result(WAIT_S), data)
        begin = time.monotonic()
    assert time.monotonic() - begin < 20  # to close takes no longer than what was under way
