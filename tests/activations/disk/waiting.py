"""Waiting for what threads give back a moment after their last call has returned."""

from __future__ import annotations

import time

from bitslab.activations.disk import DiskTier

WAIT_S = 60.0


def used_bytes_become(tier: DiskTier, nbytes: int) -> bool:
    """Return whether so many bytes of the files are taken, now or soon."""
    end = time.monotonic() + WAIT_S
    while tier.stats()["used_bytes"] != nbytes:
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True
