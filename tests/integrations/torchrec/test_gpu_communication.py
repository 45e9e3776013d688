"""Compressed output dists on two GPUs, over NCCL, against TorchRec's own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchrec", reason="torchrec is not installed")

from tests.integrations.torchrec import communication_ranks, ranks

pytestmark = pytest.mark.gpu
#: Of all checks together; kernels are compiled first.
TIMEOUT_S = 300
#: FBGEMM need not have kernels of inference mode there: distributed/test_modes.py is of that.
NAMES = [name for name in communication_ranks.CHECKS if "inference" not in name]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What each check raised, by rank."""
    if torch.cuda.device_count() < ranks.WORLD:
        pytest.skip(f"needs {ranks.WORLD} GPUs")
    folder = str(tmp_path_factory.mktemp("ranks"))
    return ranks.outcomes_of(communication_ranks, folder, "nccl", timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_on_gpus(outcomes: dict[str, dict[int, str]], name: str) -> None:
    ranks.check_outcome(outcomes, name)
