"""The disk tier between trainings: what is given up, what is not tried again, what is taken."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import torch

from bitslab.activations.disk import DiskTier
from tests.activations.disk.test_tier import MIB, RATES, Faulty, random_bytes, stored
from tests.activations.disk.waiting import WAIT_S, used_bytes_become


def test_rest_gives_up_what_holds_nothing(tmp_path: Path) -> None:
    with DiskTier(tmp_path, rates=RATES) as tier:
        names = {"bitslab-store", "bitslab-load"}
        data = random_bytes(3 * MIB)
        ticket = stored(tier, data)
        tier.rest()  # which waits for what is being written
        assert not ticket.in_memory and not ticket.pending
        assert not names & {thread.name for thread in threading.enumerate()}
        assert tier.stats()["disk_bytes"] > 0  # the ticket's bytes are there
        out = torch.empty(3 * MIB, dtype=torch.uint8)
        asked = []

        def room(nbytes: int) -> torch.Tensor:
            asked.append(nbytes)
            return out

        assert tier.fetch(ticket, room=room).result(WAIT_S) is out
        assert asked == [3 * MIB] and torch.equal(out, data)
        tier.forget(ticket)
        assert used_bytes_become(tier, 0)
        tier.rest()
        assert tier.stats()["disk_bytes"] == 0
        assert torch.equal(tier.fetch(stored(tier, data)).result(WAIT_S), data)


def test_a_folder_that_failed_is_not_tried_again_after_a_rest(tmp_path: Path) -> None:
    made: list[Faulty] = []

    def open_file(path: str) -> Faulty:
        made.append(Faulty(path))
        return made[-1]

    with DiskTier(tmp_path, rates=RATES, open_file=open_file) as tier:
        made[0].error = OSError(errno.EIO, "Input/output error")
        ticket = stored(tier, random_bytes(MIB))
        tier.wait(ticket)
        assert "Input/output error" in str(ticket.error) and ticket.in_memory
        del ticket
        assert used_bytes_become(tier, 0)
        tier.rest()
        assert not tier.takes(1) and tier.store(random_bytes(MIB)) is None
        assert len(made) == 1
        (folder,) = tier.stats()["folders"]
        assert "Input/output error" in folder["error"]
        assert tier.stats()["refused_bytes"]["failed"] == 1 + MIB


def test_takes_says_what_store_would_do(tmp_path: Path) -> None:
    opened = []

    def open_file(path: str) -> Faulty:
        opened.append(Faulty(path))
        return opened[-1]

    with DiskTier(tmp_path, rates=RATES, queue_bytes=MIB, open_file=open_file) as tier:
        opened[0].gate.clear()
        assert tier.takes(4 * MIB)  # one waits, whatever its size
        ticket = stored(tier, random_bytes(MIB))
        assert not tier.takes(1)
        assert tier.stats()["refused_bytes"]["behind"] == 1
        opened[0].gate.set()
        tier.wait(ticket)
        assert not ticket.in_memory and tier.takes(MIB)
    assert not tier.takes(1)
