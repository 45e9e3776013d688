"""Sharded packed tables on two ranks, against TorchRec's own and the unsharded model."""

from __future__ import annotations

import multiprocessing
import queue
import time

import pytest
import torch

pytest.importorskip("torchrec", reason="torchrec is not installed")

from bitslab import ArgumentError, ArgumentTypeError, InvariantCodec
from bitslab.integrations.torchrec import (
    CompressedEmbeddingBagCollectionSharder,
    CompressedEmbeddingCollectionSharder,
)
from tests.integrations.torchrec import ranks

TIMEOUT_SECONDS = 120

# One process group for all checks: they run on one worker.
pytestmark = pytest.mark.xdist_group("torchrec-ranks")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """Run all checks on both ranks; return what each raised, by rank."""
    # Both ranks begin in forks of one process that has imported TorchRec.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([ranks.__name__])
    folder = str(tmp_path_factory.mktemp("ranks"))
    found: dict[str, dict[int, str]] = {name: {} for name in ranks.CHECKS}
    results = context.Queue()
    workers = [
        context.Process(target=ranks.run, args=(rank, folder, results), daemon=True)
        for rank in range(ranks.WORLD)
    ]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        while time.monotonic() < deadline:
            alive = any(worker.is_alive() for worker in workers)
            try:
                name, rank, failure = results.get(timeout=0.2)
                found[name][rank] = failure
            except queue.Empty:
                if not alive:
                    break
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    return found


@pytest.mark.parametrize("name", ranks.CHECKS)
def test_ranks(outcomes: dict[str, dict[int, str]], name: str) -> None:
    failures = [f"rank {rank}:\n{text}" for rank, text in outcomes[name].items() if text]
    assert not failures, "\n".join(failures)
    assert len(outcomes[name]) == ranks.WORLD, "was not reached: see the check before"


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
