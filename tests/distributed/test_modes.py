"""Inference mode: what is written to rows that were made in it, in every thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import run_ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_cross_in_inference_mode_and_train_afterwards(ranks: int, tmp_path: Path) -> None:
    for seen in run_ranks("in_inference_mode", ranks, tmp_path):
        assert seen and all(seen.values()), [key for key, ok in seen.items() if not ok]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_on_gpus_cross_in_inference_mode(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    for seen in run_ranks("nccl_modes", ranks, tmp_path, timeout_s=120):
        assert seen and all(seen.values()), [key for key, ok in seen.items() if not ok]
