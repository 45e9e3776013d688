"""Helpers, buffers and threads of groups go when these are destroyed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from bitslab.distributed import CompressedAllToAll, all_to_all_single
from tests.distributed.ranks import run_checks, run_ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_destroyed_groups_leave_nothing_behind(ranks: int, tmp_path: Path) -> None:
    for seen in run_ranks("destroyed", ranks, tmp_path, timeout_s=60):
        for key, found in seen.items():
            assert found is True, (key, found)


def test_helpers_that_end_or_cannot_be_made_say_so(tmp_path: Path) -> None:
    checks = ("of_pending_calls", "not_made", "of_devices")
    seen_by: dict[str, list[Any]] = run_checks(checks, 2, tmp_path)
    for check in checks:
        for seen in seen_by[check]:
            assert seen and all(seen.values()), (check, seen)


def test_all_groups_may_be_destroyed_and_made_anew() -> None:
    threads = []
    for _ in range(5):
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        t, found = torch.randn(4, 2), torch.zeros(4, 2)
        all_to_all_single(found, t, async_op=True).wait()
        assert torch.equal(found, t) and torch.equal(CompressedAllToAll()(t), t)
        dist.destroy_process_group()
        threads.append(sum(each.name == "bitslab-exchange" for each in threading.enumerate()))
    assert max(threads) <= 1
