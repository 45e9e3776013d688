"""What a step of training costs the host, in calls of Python functions: these vary with nothing.

Times are in `benchmarks/embedding.py --only host`. A call takes 0.1 to 0.3 us.
"""

from __future__ import annotations

import gc

import pytest
import torch

from bitslab.integrations.embedding import CachedEmbeddingBag
from tests.embedding.on_device import on_simulated_gpu
from tests.host_calls import calls_of

N_ROWS, IDS = 200, 8
#: Parts of the library whose calls are counted: not kernels, in whose place others stand here.
COUNTED = ("bitslab.embedding", "bitslab.integrations.embedding", "bitslab.tables")
#: Most calls of a lookup, a backward pass and a step of sparse SGD, by the share of resident rows.
MOST = {1.0: (21, 0, 25), 0.2: (54, 33, 36)}


@pytest.mark.parametrize("ratio", MOST, ids=["all-resident", "a-fifth-resident"])
def test_a_step_takes_few_calls_of_the_library(ratio: float) -> None:
    torch.manual_seed(0)
    with on_simulated_gpu(twins=True):
        bag = CachedEmbeddingBag.from_pretrained(
            torch.randn(N_ROWS, 8),
            freeze=False,
            sparse=True,
            cache_ratio=ratio,
            warmup_ratio=1.0,
            codec="raw",
            device="cpu",
        )
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.01)
        offsets, found = torch.arange(IDS), []
        gc.disable()
        try:
            for _ in range(6):  # the first ones take memory, and learn
                optimizer.zero_grad()
                ids, results = torch.randint(N_ROWS, (IDS,)), []
                lookup = calls_of(lambda: results.append(bag(ids, offsets)), COUNTED)  # noqa: B023
                loss = results.pop().sum()
                backward = calls_of(loss.backward, COUNTED)
                found.append((lookup, backward, calls_of(optimizer.step, COUNTED)))
                del loss
        finally:
            gc.enable()
    assert all(calls <= most for calls, most in zip(min(found), MOST[ratio], strict=True)), found
