"""Exchanges of tensors on GPUs, over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_on_gpus_cross_by_nccl(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    for seen in run_ranks("nccl", ranks, tmp_path, timeout_s=120):
        assert "a CUDA graph is being captured" in seen.pop("capture")
        stats = seen.pop("stats")
        assert all(seen.values()), seen
        for way in ("forward", "backward"):
            assert stats[way]["calls"] + stats[way]["plain_calls"] == 5
        if ranks > 1:
            assert stats["forward"]["calls"] >= 2
            assert stats["forward"]["moved_bytes"] < stats["forward"]["raw_bytes"]
