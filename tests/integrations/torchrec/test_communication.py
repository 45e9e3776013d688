"""Compressed output dists on two ranks, against TorchRec's own."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchrec", reason="torchrec is not installed")

from bitslab import ArgumentError, ArgumentTypeError
from bitslab.integrations.torchrec import compress_communication, restore_communication
from tests.integrations.torchrec import communication_ranks, ranks

# One process group for all checks: they run on one worker.
pytestmark = pytest.mark.xdist_group("torchrec-communication-ranks")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What each check raised, by rank."""
    return ranks.outcomes_of(communication_ranks, str(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("name", communication_ranks.CHECKS)
def test_ranks(outcomes: dict[str, dict[int, str]], name: str) -> None:
    ranks.check_outcome(outcomes, name)


def test_models_without_sharded_collections_are_refused() -> None:
    with pytest.raises(ArgumentError, match="model: has no sharded collection"):
        compress_communication(torch.nn.Linear(2, 2))
    for function in (compress_communication, restore_communication):
        with pytest.raises(ArgumentTypeError, match="model: expected a torch.nn.Module, got list"):
            function([])  # type: ignore[arg-type]
    assert restore_communication(torch.nn.Linear(2, 2)) == []
