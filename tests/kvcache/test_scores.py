"""Scores and the choice of tokens, against plain computations."""

from __future__ import annotations

import math

import pytest
import torch

from bitslab.errors import ArgumentError, ArgumentTypeError
from bitslab.kvcache.scores import (
    HeavyScores,
    PartialKeys,
    TokenScores,
    check_share,
    probability_sums,
    skew_of,
)
from bitslab.kvcache.scores import heavy as heavy_module
from bitslab.kvcache.scores.base import TokenBuffer
from bitslab.kvcache.selection import Selection, best_groups, spread


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def orthogonal(heads: int, dim: int) -> torch.Tensor:
    basis: torch.Tensor = torch.linalg.qr(randn(heads, dim, dim, seed=9)).Q
    return basis


def test_best_groups_are_in_the_order_of_time() -> None:
    scores = torch.tensor([[[0.0, 5.0, 1.0, 7.0], [3.0, 2.0, 9.0, 1.0]]])
    found = best_groups(scores, 8, 2, 2)
    assert found is not None
    assert found.groups.tolist() == [[[1, 3], [0, 2]]]
    assert found.tokens == 4
    assert found.positions().tolist() == [[[2, 3, 6, 7], [0, 1, 4, 5]]]
    assert best_groups(scores, 8, 2, 4) is None


def test_spread_of_single_tokens_is_the_tokens() -> None:
    groups = torch.tensor([[[1, 4]]])
    assert spread(groups, 1) is groups


@pytest.mark.parametrize("heavy", [0.5, 4])
def test_heavy_tokens_are_those_with_the_largest_sums(heavy: float) -> None:
    scores = HeavyScores(heavy)
    assert not scores.ready
    probabilities = randn(2, 3, 10).abs()
    scores.add(probabilities, None, 10)
    chosen = scores.choose(8, 2)
    assert chosen is not None and chosen.packed == 8
    by_group = probabilities[:, :, :8].unflatten(2, (4, 2)).sum(3)
    expected = by_group.topk(2, dim=2).indices.sort(dim=2).values
    assert torch.equal(chosen.groups, expected)


def test_sums_go_to_the_tokens_that_were_attended() -> None:
    scores = HeavyScores(0.5)
    first = randn(1, 2, 10).abs()
    scores.add(first, None, 10)
    chosen = Selection(torch.tensor([[[0, 3], [1, 2]]]), 2, 8)
    # Four chosen tokens, the two behind the packed ones, and a new one.
    later = randn(1, 2, 7, seed=1).abs()
    scores.add(later, chosen, 1)
    expected = torch.cat([first, torch.zeros(1, 2, 1)], dim=2)
    for head, tokens in enumerate(chosen.positions()[0].tolist()):
        for place, token in enumerate([*tokens, 8, 9, 10]):
            expected[0, head, token] += later[0, head, place]
    torch.testing.assert_close(scores.sums, expected)
    assert scores.length == 11


@pytest.mark.parametrize("heavy", [1.0, 4, 100])
def test_all_heavy_tokens_are_all_tokens(heavy: float) -> None:
    scores = HeavyScores(heavy)
    scores.add(randn(1, 2, 4).abs(), None, 4)
    assert scores.choose(4, 1) is None


@pytest.mark.parametrize("kind", ["heavy", "partial"])
def test_scores_follow_the_sequences(kind: str) -> None:
    heavy = HeavyScores(0.5)
    heavy.add(randn(3, 2, 10).abs(), None, 10)
    partial = PartialKeys(orthogonal(2, 8), partial=0.5, budget=0.5, alpha=None)
    partial.see(randn(3, 4, 10, 8), randn(3, 2, 10, 8, seed=1))
    scores: TokenScores = heavy if kind == "heavy" else partial
    before = [t.clone() for t in scores.tensors()]
    index = torch.tensor([2, 0])
    scores.take(lambda t, dim: t.index_select(dim, index))
    assert all(torch.equal(a, b[index]) for a, b in zip(scores.tensors(), before, strict=True))
    scores.crop(6)
    assert scores.length == 6
    assert torch.equal(scores.tensors()[0], before[0][index][:, :, :6])
    scores.crop(20)
    assert scores.length == 6
    scores.reset()
    assert scores.length == 0 and not scores.ready


def partial_keys(
    keys: torch.Tensor,
    query: torch.Tensor,
    *,
    partial: float = 0.5,
    budget: float = 0.25,
    alpha: float | None = None,
) -> PartialKeys:
    """Return scores that have seen keys, with queries like the one to come."""
    heads = keys.shape[1]
    prompt = query.expand(-1, -1, keys.shape[2], -1)
    prompt = prompt + 0.1 * randn(*prompt.shape, seed=5).to(keys)
    by_head = prompt.unflatten(1, (heads, -1)).float()
    skew = skew_of(torch.einsum("bhgqd,bhgqe->hde", by_head, by_head))
    scores = PartialKeys(skew, partial=partial, budget=budget, alpha=alpha)
    scores.see(prompt, keys)
    return scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_columns_find_a_needle(dtype: torch.dtype) -> None:
    keys, query = randn(2, 2, 64, 32), randn(2, 4, 1, 32, seed=1)
    for head in range(2):  # the second query head of each K/V head looks for it
        keys[:, head, 17 + head] = 3 * query[:, 2 * head + 1, 0]
    keys, query = keys.to(dtype), query.to(dtype)
    scores = partial_keys(keys, query, partial=0.1, budget=1 / 60)
    scores.speculate(query, 32**-0.5)
    chosen = scores.choose(60, 1)
    assert chosen is not None
    assert chosen.groups.tolist() == [[[17], [18]]] * 2


def test_all_columns_give_the_scores_of_attention() -> None:
    keys, query = randn(1, 2, 40, 16), randn(1, 4, 3, 16, seed=1)
    scores = PartialKeys(orthogonal(2, 16), partial=1.0, budget=0.25, alpha=None)
    scores.see(query, keys[:, :, :30])
    scores.see(query, keys[:, :, 30:])
    scores.speculate(query, 0.25)
    logits = query.unflatten(1, (2, 2)) @ keys[:, :, None].mT * 0.25
    ranks = logits.log_softmax(-1).amax((2, 3))
    chosen = scores.choose(32, 2)
    expected = ranks[:, :, :32].unflatten(2, (16, 2)).amax(3).topk(4).indices.sort().values
    assert chosen is not None and torch.equal(chosen.groups, expected)


def test_skewed_columns_hold_more_of_the_queries() -> None:
    basis = randn(1, 4, 32, seed=3)
    queries = randn(1, 200, 4) @ basis  # of rank 4
    skew = skew_of(queries.mT @ queries)
    torch.testing.assert_close(skew @ skew.mT, torch.eye(32)[None])
    skewed = queries @ skew
    assert skewed[..., :4].square().sum() > 0.999 * queries.square().sum()


def test_alpha_takes_the_mean_number_of_tokens_near_the_highest() -> None:
    keys = torch.zeros(1, 2, 40, 4)
    keys[:, :, :, 0] = -10
    keys[0, 0, 5, 0] = keys[0, 0, 30, 0] = 0
    keys[0, 1, 6:10, 0] = 0
    query = torch.zeros(1, 2, 1, 4)
    query[..., 0] = 1
    scores = PartialKeys(torch.eye(4).expand(2, 4, 4), partial=1.0, budget=0.5, alpha=2.0)
    scores.see(query, keys)
    scores.speculate(query, 1.0)
    chosen = scores.choose(40, 1)
    assert chosen is not None and chosen.tokens == 3  # of 2 and 4
    assert set(chosen.groups[0, 1].tolist()) < {6, 7, 8, 9}
    assert {5, 30} < set(chosen.groups[0, 0].tolist())
    tight = PartialKeys(torch.eye(4).expand(2, 4, 4), partial=1.0, budget=0.025, alpha=2.0)
    tight.see(query, keys)
    tight.speculate(query, 1.0)
    chosen = tight.choose(40, 1)
    assert chosen is not None and chosen.tokens == 1


def test_tokens_that_may_not_be_attended_are_not_chosen() -> None:
    keys, query = randn(2, 2, 40, 16), randn(2, 4, 1, 16, seed=1)
    keys[:, :, 3] = 5 * query.unflatten(1, (2, 2))[:, :, 0, 0]
    allowed = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    allowed[0, :, :, :8] = False
    scores = partial_keys(keys, query, budget=0.1)
    scores.speculate(query, 0.25, allowed)
    chosen = scores.choose(32, 1)
    assert chosen is not None
    assert int(chosen.groups[0].min()) >= 8
    assert (chosen.groups[1] == 3).any(-1).all()
    allowed[0] = False
    scores.speculate(query, 0.25, allowed)
    assert scores.choose(32, 1) is not None


def test_a_query_serves_one_forward_pass() -> None:
    keys, query = randn(1, 2, 40, 16), randn(1, 4, 1, 16, seed=1)
    scores = partial_keys(keys, query)
    assert scores.choose(32, 1) is None
    scores.speculate(query, 0.25)
    assert scores.ready and scores.choose(32, 1) is not None
    scores.see(query, keys[:, :, :1])
    assert scores.choose(32, 1) is None and scores.length == 41


def test_other_heads_than_fitted_are_refused() -> None:
    scores = PartialKeys(orthogonal(2, 8), partial=0.5, budget=0.5, alpha=None)
    with pytest.raises(ArgumentError, match="fitted to 2 K/V heads of 8, the model has 3 of 8"):
        scores.see(randn(1, 3, 4, 8), randn(1, 3, 4, 8))


MASKS = ["none", "bool", "float"]


@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("n_queries", [1, 7])
def test_probability_sums(
    mask_kind: str, extra: str, n_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heavy_module, "PROBABILITY_BYTES", 1500)  # several pieces
    query, key = randn(2, 4, n_queries, 8), randn(2, 2, 20, 8, seed=1)
    causal = torch.arange(20) <= torch.arange(20 - n_queries, 20)[:, None]
    allowed = causal.expand(2, 1, -1, -1).clone()
    if mask_kind != "none":
        allowed[1, :, :, :5] = False
    mask = {
        "none": None,
        "bool": allowed,
        "float": torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo().min),
    }[mask_kind]
    softcap = 2.0 if extra == "softcap" else None
    sinks = randn(4, seed=2) if extra == "sinks" else None
    logits = query @ key.repeat_interleave(2, dim=1).mT * 0.3
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~allowed, -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, 4, 1, 1).expand(2, 4, n_queries, 1)], dim=-1)
    weights = logits.softmax(-1)[..., :20]
    for last in (None, 3):
        counted = weights if last is None else weights[:, :, -last:]
        expected = counted.unflatten(1, (2, 2)).sum((2, 3))
        found = probability_sums(
            query, key, mask, 0.3, softcap=softcap, sinks=sinks, last_queries=last
        )
        torch.testing.assert_close(found, expected)


def test_a_buffer_grows() -> None:
    buffer = TokenBuffer()
    pieces = [randn(2, 3, n, 4, seed=n) for n in (5, 1, 1, 1, 30, 2)]
    for i, piece in enumerate(pieces):
        buffer.append(piece)
        assert torch.equal(buffer.tokens, torch.cat(pieces[: i + 1], dim=2))


@pytest.mark.parametrize("value", [0, -0.5, 1.5, math.nan])
def test_shares_out_of_range(value: float) -> None:
    with pytest.raises(ArgumentError, match="heavy: .*accepted are shares above 0 and up to 1"):
        check_share("heavy", value)


@pytest.mark.parametrize("value", [None, "0.5", True])
def test_shares_of_other_types(value: object) -> None:
    with pytest.raises(ArgumentTypeError, match="budget: expected a number"):
        check_share("budget", value)
