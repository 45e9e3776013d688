"""Lengths of codes that are limited, by package-merge: what huffman.codes says, item by item."""

from __future__ import annotations

import numpy as np

from .jit import njit


@njit(nogil=True, cache=True)
def limited_lengths(leaves, limit):
    """Return the length of each leaf's code, int64 ``[leaves]``, of two leaves or more.

    ``leaves`` are int64, rarest first; at most ``2 ** limit`` of them. A level holds, sorted, the
    leaves and the pairs of neighbours of the level before; of equal weights a leaf comes first.
    """
    n = len(leaves)
    level = np.empty(2 * n, np.int64)
    level[:n] = leaves
    size = n
    before = np.empty(2 * n, np.int64)
    # Of each level above the first: where its pairs stand, and how many they are.
    places = np.empty((limit, n), np.int64)
    pairs = np.zeros(limit, np.int64)
    for depth in range(limit - 1):
        before, level = level, before
        count = size // 2
        leaf = 0
        at = 0
        for pair in range(count):
            weight = before[2 * pair] + before[2 * pair + 1]
            while leaf < n and leaves[leaf] <= weight:
                level[at] = leaves[leaf]
                leaf += 1
                at += 1
            level[at] = weight
            places[depth, pair] = at
            at += 1
        while leaf < n:
            level[at] = leaves[leaf]
            leaf += 1
            at += 1
        size = at
        pairs[depth] = count
    # The first items of the last level are taken, and what the pairs among them are made of: a
    # prefix of each level. A leaf's code is as long as the number of levels that it is taken of.
    taken = np.zeros(n + 1, np.int64)
    most = 2 * n - 2
    for depth in range(limit - 2, -1, -1):
        inside = 0
        while inside < pairs[depth] and places[depth, inside] < most:
            inside += 1
        taken[most - inside] += 1
        most = 2 * inside
    taken[most] += 1
    lengths = np.zeros(n, np.int64)
    levels = 0
    for leaf in range(n - 1, -1, -1):
        levels += taken[leaf + 1]
        lengths[leaf] = levels
    return lengths


@njit(nogil=True, cache=True)
def lengths_of_code(counts, limit):
    """Return the lengths of codes, uint8 ``[symbols]``, of symbols that occur so often, int64.

    Symbols that do not occur get 0, a single one 1. At most ``2 ** limit`` occur.
    """
    lengths = np.zeros(len(counts), np.uint8)
    used = np.empty(len(counts), np.int64)
    n = 0
    # The last symbol first: of equal counts it gets the longer code.
    for symbol in range(len(counts) - 1, -1, -1):
        if counts[symbol]:
            used[n] = symbol
            n += 1
    if n == 1:
        lengths[used[0]] = 1
    if n < 2:
        return lengths
    used = used[:n]
    order = used[np.argsort(counts[used], kind="mergesort")]  # rarest first, stable
    lengths[order] = limited_lengths(counts[order], limit)
    return lengths
