"""The disk tier on a GPU: page-locked memory that a stream fills, past the page cache and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bitslab.activations.disk import DiskRates, DiskTier
from bitslab.engine.transfer import StreamLane

pytestmark = pytest.mark.gpu

MIB = 1 << 20
RATES = DiskRates(MIB, 2, 2, 1e9, 1e9, 1e9, 1e9, direct=True)


@pytest.mark.parametrize("forward", [False, True], ids=["written", "forwarded"])
def test_bytes_of_a_stream_come_back(forward: bool, tmp_path: Path) -> None:
    device = torch.device("cuda")
    lane = StreamLane(device)
    with DiskTier(tmp_path, rates=RATES, verify=True) as tier:
        source = torch.randint(0, 256, (9 * MIB + 5,), dtype=torch.uint8, device=device)
        right = source.cpu()
        host = tier.host_buffer(len(source))
        assert host.is_pinned()
        lane.follow(torch.cuda.current_stream(device))

        def copy() -> None:
            torch.cuda._sleep(20_000_000)  # the event is still to come when the bytes are stored
            host.copy_(source, non_blocking=True)

        filled = lane.run(copy)
        ticket = tier.store(host, after=filled)
        assert ticket is not None
        if not forward:
            assert tier.drain(60) and not ticket.in_memory
            host.zero_()
        out = tier.host_buffer(len(source))
        assert out.is_pinned()
        back = tier.fetch(ticket, out).result(60).to(device, non_blocking=True)
        assert torch.equal(back, source) and torch.equal(out, right)
        found = tier.stats()
        assert found["read_bytes"] == (0 if forward else len(source))
        assert found["folders"][0]["error"] is None
        if found["folders"][0]["direct"]:
            # Page-locked memory is written as it is.
            assert tier._stripes[0].file.bounced_bytes == 0  # type: ignore[attr-defined]
