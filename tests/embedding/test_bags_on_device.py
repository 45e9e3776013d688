"""Bags whose ids come on a GPU: offsets are looked at on the way, gradients followed by result.

The CPU stands for the GPU here, with the GPU's own kernels behind it.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from bitslab.engine.kernels.cuda.runner import OFFSETS_ERROR
from bitslab.errors import BitslabError
from bitslab.integrations.embedding import CachedEmbedding, CachedEmbeddingBag
from tests.helpers import same_bits

N_ROWS = 40
RATIOS = pytest.mark.parametrize("ratio", [1.0, 0.3], ids=["all-resident", "some"])


def made(ratio: float, **given: Any) -> tuple[torch.nn.EmbeddingBag, CachedEmbeddingBag]:
    weight = torch.randn(N_ROWS, 4, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"mode": "sum", "sparse": True, "include_last_offset": False} | given
    plain = torch.nn.EmbeddingBag.from_pretrained(weight.clone(), freeze=False, **options)
    ours = CachedEmbeddingBag.from_pretrained(
        weight,
        freeze=False,
        cache_ratio=ratio,
        warmup_ratio=1.0,
        codec="raw",
        device="cpu",
        **options,
    )
    return plain, ours


@RATIOS
@pytest.mark.parametrize("include_last", [False, True], ids=["", "with-end"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_steps_are_those_of_a_plain_bag(runner, ratio, include_last, dtype, sparse, mode):
    pair = made(ratio, include_last_offset=include_last, sparse=sparse, mode=mode)
    optimizers = [torch.optim.SGD(bag.parameters(), lr=0.5) for bag in pair]
    generator = torch.Generator().manual_seed(3)
    for n in (9, 1, 7, 0, 9):
        ids = torch.randperm(N_ROWS, generator=generator)[:n].to(dtype)
        ends = [0, 0, min(n, 4), n] if include_last else [0, 0, min(n, 4)]
        offsets = torch.tensor(ends, dtype=dtype)
        runner.launched.clear()
        for bag, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            out = bag(ids, offsets)
            (out * torch.arange(1.0, 5)).sum().backward()
            optimizer.step()
        if n:
            kernels = [kernel for _, kernel in runner.launched]
            assert len(kernels) == (1 if ratio == 1 else 5) and "sound_offsets" not in kernels
    assert not runner.mailbox.any()
    assert same_bits(pair[0].weight, pair[1].rows.whole())


@RATIOS
@pytest.mark.parametrize("values", [[1, 2], [0, 5, 4], [0, 9]], ids=["late", "falls", "beyond"])
def test_offsets_that_are_not_sound_are_reported(runner, ratio, values):
    _, bag = made(ratio)
    out = bag(torch.tensor([3, 1, 8, 9, 30, 31]), torch.tensor(values))
    assert runner.mailbox[0] == OFFSETS_ERROR and runner.mailbox[3] == 6
    assert not out[:-1].any()
    assert torch.allclose(out[-1], bag.rows.whole()[[3, 1, 8, 9, 30, 31]].sum(0))
    runner.mailbox.zero_()
    bag(torch.tensor([3, 1]), torch.tensor([0, 1])).sum().backward()
    assert not runner.mailbox.any()


def test_a_gradient_can_come_twice_and_from_two_bags(runner):
    pair = made(0.5)
    optimizers = [torch.optim.SGD(bag.parameters(), lr=0.5) for bag in pair]
    first, second = torch.tensor([3, 1, 8]), torch.tensor([8, 20])
    for _ in range(2):
        for bag, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            loss = bag(first, torch.tensor([0, 1])).sum() + bag(second, torch.tensor([0])).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
    assert torch.allclose(pair[0].weight, pair[1].rows.whole())
    for bag, optimizer in zip(pair, optimizers, strict=True):
        optimizer.zero_grad()
        out = bag(first, torch.tensor([0, 1]))
        (grad,) = torch.autograd.grad(out.sum(), list(bag.parameters()))
        assert grad.coalesce().values().eq(1).all() and grad._nnz() == 3


def test_rows_of_a_result_are_kept_until_it_is_gone(runner):
    pair = made(0.3)
    out = [bag(torch.tensor([3, 1]), torch.tensor([0])) for bag in pair]
    assert len(pair[1].rows.training.live) == 1
    with torch.no_grad():
        for first in range(4, 32, 4):
            pair[1](torch.arange(first, first + 4), torch.tensor([0]))
    for bag, each in zip(pair, out, strict=True):
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.5)
        each.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same_bits(pair[0].weight, pair[1].rows.whole())
    del out, each
    gc.collect()
    assert not pair[1].rows.training.live


def test_a_gradient_for_rows_that_have_left_is_refused(runner):
    _, bag = made(0.3)
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.5)
    loss = bag(torch.tensor([3, 1]), torch.tensor([0])).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    for first in range(4, 40, 4):
        bag(torch.arange(first, first + 4), torch.tensor([0])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(BitslabError, match="have left the cache"):
        loss.backward()


@RATIOS
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_an_embedding_without_bags_follows_its_result_too(runner, ratio, sparse):
    weight = torch.randn(N_ROWS, 4)
    plain = torch.nn.Embedding.from_pretrained(weight.clone(), freeze=False, sparse=sparse)
    ours = CachedEmbedding.from_pretrained(
        weight, freeze=False, sparse=sparse, cache_ratio=ratio, codec="raw", device="cpu"
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, ours)]
    for batch in ([[3, 1], [20, 5]], [[30, 31], [32, 33]], [[3, 30], [1, 2]]):
        for module, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            module(torch.tensor(batch)).square().sum().backward()
            optimizer.step()
    assert same_bits(plain.weight, ours.rows.whole())
