"""Rows of tables on GPUs under way while other work runs, over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.in_flight_ranks import check_met_late
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_on_gpus_are_under_way_while_other_work_runs(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    for seen in run_ranks("nccl_in_flight", ranks, tmp_path, timeout_s=120):
        assert seen and all(seen.values()), seen


def test_ranks_on_gpus_learn_of_a_failure_before_they_meet(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    check_met_late(run_ranks("nccl_failed_before_ranks_meet", 2, tmp_path, timeout_s=60))
