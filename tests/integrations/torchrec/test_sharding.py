"""Sharded packed tables on two ranks, against TorchRec's own and the unsharded model."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torchrec", reason="torchrec is not installed")

from bitslab import ArgumentError, ArgumentTypeError, InvariantCodec
from bitslab.integrations.torchrec import (
    CompressedEmbeddingBagCollectionSharder,
    CompressedEmbeddingCollectionSharder,
)
from tests.integrations.torchrec import ranks

# One process group for all checks: they run on one worker.
pytestmark = pytest.mark.xdist_group("torchrec-ranks")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What each check raised, by rank."""
    return ranks.outcomes_of(ranks, str(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize("name", ranks.CHECKS)
def test_ranks(outcomes: dict[str, dict[int, str]], name: str) -> None:
    ranks.check_outcome(outcomes, name)


@pytest.mark.parametrize(
    "sharder", [CompressedEmbeddingBagCollectionSharder, CompressedEmbeddingCollectionSharder]
)
def test_bad_options_are_refused_at_once(sharder) -> None:
    with pytest.raises(ArgumentError, match="cache_ratio"):
        sharder(cache_ratio=0)
    with pytest.raises(ArgumentError, match="layout"):
        sharder(layout="loose")
    with pytest.raises(ArgumentError, match="cache"):
        sharder(cache="some")
    with pytest.raises(ArgumentTypeError, match="name of a codec"):
        sharder(codec=InvariantCodec.fit(torch.randn(100, 8)))
