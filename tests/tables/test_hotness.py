"""Orders of ids by hotness, compared with numpy."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bitslab import ArgumentError, ArgumentTypeError, SlabCache
from bitslab.tables.hotness import by_counts, by_degree, by_scores
from tests.helpers import DTYPES, dtype_id
from tests.tables.kinds import make, weights

REAL = [d for d in DTYPES if not d.is_complex and d != torch.bool]


def order(scores) -> list[int]:
    """Return ids by score, highest first, equal ones in their own order."""
    values = np.asarray(scores).tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


@pytest.mark.parametrize("dtype", REAL, ids=dtype_id)
def test_scores_of_every_dtype_order_ids_and_ties_keep_theirs(dtype):
    numbers = torch.tensor([3, 1, 4, 1, 5, 0, 2, 6, 5, 3] * 5)
    got = by_scores(numbers.to(dtype))
    assert got.dtype == torch.int64 and got.tolist() == order(numbers)


def test_scores_beyond_the_signed_range_and_below_zero():
    assert by_scores(torch.tensor([1, (1 << 64) - 1, 1 << 63], dtype=torch.uint64)).tolist() == [
        1,
        2,
        0,
    ]
    inf = float("inf")
    scores = torch.tensor([-1.0, -inf, inf, 0.0, 5.0], requires_grad=True)
    assert by_scores(scores).tolist() == [2, 4, 3, 0, 1]
    assert by_scores(torch.tensor([])).tolist() == []


@pytest.mark.parametrize(
    ("scores", "error", "says"),
    [
        (torch.zeros(2, 2), ArgumentError, r"scores: \[2, 2\]"),
        (torch.tensor([True]), ArgumentError, "expected one real number"),
        (torch.tensor([1j]), ArgumentError, "expected one real number"),
        (torch.tensor([1.0, float("nan")]), ArgumentError, "some are NaN"),
        ([1, 2], ArgumentTypeError, "scores: expected a torch.Tensor"),
    ],
    ids=["2-d", "bool", "complex", "nan", "list"],
)
def test_scores_that_are_none_are_refused(scores, error, says):
    with pytest.raises(error, match=says):
        by_scores(scores)


@given(
    n=st.integers(0, 12), edges=st.lists(st.integers(0, 11), max_size=60), seed=st.integers(0, 9)
)
def test_degrees_are_those_of_the_graph(n, edges, seed):
    neighbours = np.array([e for e in edges if e < n], np.int64)
    cuts = np.random.default_rng(seed).integers(0, len(neighbours) + 1, max(0, n - 1))
    indptr = np.array([0, *sorted(cuts), len(neighbours)] if n else [0])
    begins = torch.from_numpy(indptr)
    assert by_degree(begins).tolist() == order(np.diff(indptr))
    asked = by_degree(begins.int(), torch.from_numpy(neighbours))
    assert asked.tolist() == order(np.bincount(neighbours, minlength=n))


@pytest.mark.parametrize(
    ("indptr", "indices", "says"),
    [
        ([], None, "indptr: expected 0, then"),
        ([1, 2], None, "indptr: expected 0, then"),
        ([0, 3, 2], None, "indptr: expected 0, then"),
        ([0, 1, 3], [0, 1], "indices: 2 neighbours, indptr ends at 3"),
        ([0, 1, 2], [0, 2], "indices: ids from 0 to 2, expected 0 to 1"),
        ([0, 1, 2], [0, -1], "indices: ids from -1 to 0"),
    ],
    ids=["empty", "begin", "falls", "count", "large", "negative"],
)
def test_a_graph_that_is_none_is_refused(indptr, indices, says):
    begins = torch.tensor(indptr, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=says):
        by_degree(begins, None if indices is None else torch.tensor(indices))


@given(st.lists(st.lists(st.integers(0, 19), max_size=30), max_size=8))
def test_counts_are_those_of_the_batches(batches):
    tensors = [torch.tensor(batch, dtype=torch.int64) for batch in batches]
    together = np.array([i for batch in batches for i in batch], np.int64)
    assert by_counts(iter(tensors), 20).tolist() == order(np.bincount(together, minlength=20))


def test_batches_of_other_shapes_and_dtypes_count_too():
    grid = torch.tensor([[1, 2], [2, 2]], dtype=torch.int32)
    assert by_counts([grid, torch.tensor(0, dtype=torch.uint8)], 4).tolist() == [2, 0, 1, 3]
    refused: list[tuple[Any, type[Exception], str]] = [
        ([torch.tensor([4])], ArgumentError, "ids from 4 to 4, expected 0 to 3"),
        ([torch.tensor([-1])], ArgumentError, "ids from -1"),
        ([[1]], ArgumentTypeError, "one is a list"),
        ([torch.tensor([0.5])], ArgumentTypeError, "batches: dtype"),
    ]
    for bad, error, says in refused:
        with pytest.raises(error, match=says):
            by_counts(bad, 4)


def test_what_is_hot_is_what_a_cache_keeps():
    x = weights(200, 16)
    table = make(x, "raw")
    scores = torch.rand(200)
    cache = SlabCache(table, 20 * 64, ["cpu"])
    assert cache.fill(by_scores(scores)) == 20
    cache.gather(torch.topk(scores, 20).indices)
    assert cache.stats()["hit_rate"] == 1.0


def test_counts_may_come_as_a_counter():
    drawn = [7, 3, 7, 0, 3, 7]
    counter = collections.Counter(drawn)
    from_batches = by_counts([torch.tensor(drawn)], 9)
    assert torch.equal(by_counts(counter, 9), from_batches)
    assert by_counts(counter, 9)[:3].tolist() == [7, 3, 0]
    assert by_counts({}, 3).tolist() == [0, 1, 2]
    with pytest.raises(ArgumentError, match="ids from 0 to 7, expected 0 to 6"):
        by_counts(counter, 7)
    with pytest.raises(ArgumentTypeError, match="a count for each id"):
        by_counts({"a": 1}, 7)  # type: ignore[arg-type]
