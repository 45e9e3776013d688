"""A packed cache whose row that pads is not among those that wait for a step."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.embedding.support import N, assert_same, bags, lookup, loss_of, singles

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


@pytest.mark.parametrize("cache_ratio", [0.02, 1.0])
@pytest.mark.parametrize("padding_idx", [0, N - 1], ids=["first", "last"])
@pytest.mark.parametrize("make", [bags, singles])
def test_rows_that_wait_for_a_step_are_not_taken_for_the_one_that_pads(
    make, padding_idx, cache_ratio
):
    pair = make(cache="packed", padding_idx=padding_idx, cache_ratio=cache_ratio)
    ids = torch.tensor([3, 7])
    for module in pair:
        loss_of(lookup(module, ids)).backward()
    for training in (True, False):
        with torch.no_grad():
            plain, ours = (lookup(module.train(training), ids) for module in pair)
        assert_same(ours, plain)


@pytest.mark.parametrize("make", [bags, singles])
def test_sparse_gradients_of_rows_that_wait_for_a_step_are_all_there(make):
    pair = make(cache="packed", padding_idx=0, sparse=True)
    ids = torch.tensor([3, 7])
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in pair]
    for module, optimizer in zip(pair, optimizers, strict=True):
        for _ in range(2):
            loss_of(lookup(module, ids)).backward()
        optimizer.step()
    assert_same(pair[1].rows.whole(), pair[0].weight.detach())
