"""Huffman codes: lengths are the best under a limit, codes are canonical, classes save bits."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitslab.engine.codecs.huffman import (
    canonical_codes,
    check_lengths,
    code_lengths,
    entropy_bits,
    expected_bits,
    fixed_lengths,
    group_histograms,
    lookup_table,
)
from bitslab.errors import ArgumentError, CorruptedDataError

COUNTS = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 10**6)), min_size=1, max_size=40)


def room(lengths: np.ndarray, limit: int) -> int:
    """Return how many codes of `limit` bits are left free; negative where there are too many."""
    return (1 << limit) - sum(1 << (limit - int(n)) for n in lengths if n)


def unlimited_bits(counts: list[int]) -> int:
    """Return the bits of Huffman's own algorithm: the sum of all inner nodes of its tree."""
    heap = [c for c in counts if c]
    if len(heap) == 1:
        return heap[0]
    heapq.heapify(heap)
    bits = 0
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        bits += both
        heapq.heappush(heap, both)
    return bits


def fewest_bits(counts: list[int], limit: int) -> int:
    """Return the fewest bits of all prefix codes, by trying all lengths."""
    used = sorted((c for c in counts if c), reverse=True)
    return min(
        sum(c * n for c, n in zip(used, lengths, strict=True))
        for lengths in itertools.combinations_with_replacement(range(1, limit + 1), len(used))
        if sum(2.0**-n for n in lengths) <= 1
    )


@given(COUNTS)
def test_lengths_without_a_binding_limit_are_those_of_huffman(counts: list[int]) -> None:
    lengths = code_lengths(counts, 32)
    assert expected_bits(counts, lengths) == (unlimited_bits(counts) if any(counts) else 0)
    assert ((lengths == 0) == (np.array(counts) == 0)).all()


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(3, 5))
def test_no_other_lengths_within_the_limit_take_fewer_bits(counts: list[int], limit: int) -> None:
    lengths = code_lengths(counts, limit)
    assert lengths.max() <= limit
    assert room(lengths, limit) >= 0
    if any(counts):
        assert expected_bits(counts, lengths) == fewest_bits(counts, limit)


@given(COUNTS, st.integers(6, 12))
def test_rarer_symbols_have_no_shorter_codes(counts: list[int], limit: int) -> None:
    lengths = code_lengths(counts, limit)
    assert room(lengths, limit) >= 0
    used = [i for i in range(len(counts)) if counts[i]]
    for a, b in itertools.pairwise(sorted(used, key=lambda i: (-counts[i], i))):
        assert lengths[a] <= lengths[b]


@given(COUNTS, st.integers(6, 12))
def test_codes_are_canonical_and_found_by_their_bits(counts: list[int], limit: int) -> None:
    lengths = code_lengths(counts, limit)
    codes = canonical_codes(lengths)
    symbols, found = lookup_table(lengths, limit)
    taken = 0
    order = sorted((i for i in range(len(counts)) if lengths[i]), key=lambda i: (lengths[i], i))
    for symbol in order:
        free = limit - int(lengths[symbol])
        # Shorter codes first, those of one length in the order of their symbols, with no gaps.
        assert int(codes[symbol]) << free == taken
        assert (symbols[taken : taken + (1 << free)] == symbol).all()
        assert (found[taken : taken + (1 << free)] == lengths[symbol]).all()
        taken += 1 << free
    assert (symbols[taken:] == -1).all()
    assert not found[taken:].any()


def test_equal_counts_give_the_first_symbols_the_shorter_codes() -> None:
    assert code_lengths([5] * 5, 10).tolist() == [2, 2, 2, 3, 3]
    assert code_lengths([0, 7, 0, 7, 7], 10).tolist() == [0, 1, 0, 2, 2]


def test_few_symbols() -> None:
    assert code_lengths([0, 0, 3], 10).tolist() == [0, 0, 1]
    assert code_lengths([0, 0], 10).tolist() == [0, 0]
    assert code_lengths(np.empty(0, np.int64), 10).tolist() == []
    assert canonical_codes([0, 1, 0]).tolist() == [0, 0, 0]


def test_as_many_symbols_as_the_limit_has_codes() -> None:
    counts = np.arange(1, 1025) ** 3
    assert (code_lengths(counts, 10) == 10).all()
    with pytest.raises(ArgumentError, match="9 bits, 1024 symbols occur.*at least 10"):
        code_lengths(counts, 9)


@pytest.mark.parametrize(
    ("counts", "limit", "message"),
    [
        ([[1, 2]], 10, r"counts: int64 \[1, 2\]"),
        ([1, -1], 10, "counts: int64"),
        ([0.5], 10, "counts: float64"),
        ([1, 2], 0, "limit: 0, accepted are 1 to 32"),
        ([1, 2], 33, "limit: 33"),
        ([1, 2], True, "limit: True"),
    ],
)
def test_counts_and_limits_that_are_refused(counts: list[int], limit: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        code_lengths(counts, limit)
    with pytest.raises(ArgumentError, match=message):
        fixed_lengths(counts, limit)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_lengths_are_refused_just_where_they_are_no_prefix_code(lengths: list[int]) -> None:
    if room(np.array(lengths), 4) >= 0:
        assert check_lengths(lengths, 4).tolist() == lengths
    else:
        with pytest.raises(CorruptedDataError, match="no prefix code"):
            check_lengths(lengths, 4)


@pytest.mark.parametrize("lengths", [[5, 1], [-1, 1], [[1, 1]], [0.5]])
def test_lengths_out_of_range_are_refused(lengths: list[int]) -> None:
    with pytest.raises(CorruptedDataError, match="code lengths"):
        check_lengths(lengths, 4)
    with pytest.raises(CorruptedDataError, match="code lengths"):
        lookup_table(lengths, 4)


@given(COUNTS)
def test_fixed_codes_are_numbers_of_the_symbols(counts: list[int]) -> None:
    lengths = fixed_lengths(counts, 10)
    used = np.flatnonzero(counts)
    assert set(lengths[used].tolist()) <= {max((len(used) - 1).bit_length(), 1)}
    assert canonical_codes(lengths)[used].tolist() == list(range(len(used)))


def test_entropy() -> None:
    assert entropy_bits([[8, 8], [16, 0], [0, 0]]).tolist() == [16, 0, 0]
    counts = np.array([40, 30, 20, 10])
    share = counts / 100
    assert entropy_bits(counts) == pytest.approx(-100 * (share * np.log2(share)).sum())
    assert entropy_bits(counts) <= expected_bits(counts, code_lengths(counts, 10))


def histograms(widths: list[float], values: int = 4000) -> np.ndarray:
    """Return histograms of rounded normal values of some widths."""
    drawn = np.random.default_rng(0).normal(0, widths, (values, len(widths)))
    edges = np.arange(-64.5, 64)
    return np.stack([np.histogram(drawn[:, i].round(), edges)[0] for i in range(len(widths))])


def test_histograms_of_one_width_share_a_class() -> None:
    widths = [3.0, 0.4, 3.0, 9.0, 0.4, 9.0, 0.4]
    labels = group_histograms(histograms(widths), 8, table_bits=1000)
    assert labels.tolist() == [1, 0, 1, 2, 0, 2, 0]  # by entropy
    assert group_histograms(histograms(widths), 2, table_bits=1000).max() == 1


def test_classes_cost_their_tables() -> None:
    counts = histograms([1.0, 1.1, 1.2, 1.3])
    assert not group_histograms(counts, 8, table_bits=1e9).any()
    assert group_histograms(counts, 8).tolist() == [0, 1, 2, 3]


def test_many_histograms_come_close_to_the_best_classes() -> None:
    counts = histograms(np.random.default_rng(1).uniform(0.4, 5, 200).tolist(), 1000)
    labels = group_histograms(counts, 8, table_bits=500)
    bits = sum(entropy_bits(counts[labels == c].sum(axis=0)) for c in range(labels.max() + 1))
    alone, together = entropy_bits(counts).sum(), entropy_bits(counts.sum(axis=0))
    assert alone < bits < alone + 0.1 * (together - alone)
    assert (group_histograms(counts.copy(), 8, table_bits=500) == labels).all()


def test_histograms_of_nothing() -> None:
    assert group_histograms(np.zeros((3, 5)), 8).tolist() == [0, 0, 0]
    assert group_histograms(np.zeros((0, 5)), 8).tolist() == []
