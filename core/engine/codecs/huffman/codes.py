"""Canonical Huffman codes of limited length: lengths, codes, and a table to look codes up in.

A code is stored as the lengths of its symbols alone. Codes of one length are consecutive numbers in
the order of their symbols, shorter ones before longer ones (canonical).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ....errors import ArgumentError, CorruptedDataError


def code_lengths(counts: npt.ArrayLike, limit: int) -> npt.NDArray[np.uint8]:
    """Return the lengths that code symbols in the fewest bits, none longer than a limit.

    Package-merge (Larmore and Hirschberg, 1990). Where several lengths are as good, symbols that
    are more frequent, or come first, have the shorter ones; so equal counts give equal lengths.

    Parameters
    ----------
    counts : array_like
        ``[symbols]``, integers from 0: how often each symbol occurs. Those of 0 get no code.
    limit : int
        Bits of the longest code, 1 to 32.

    Returns
    -------
    numpy.ndarray
        uint8 ``[symbols]``: bits of each symbol's code, 0 for none. A single symbol takes 1 bit.

    Raises
    ------
    ArgumentError
        For counts that are not such integers, and a limit that is out of range or leaves too few
        codes for the symbols.
    """
    counted = np.asarray(counts)
    if counted.ndim != 1 or counted.dtype.kind not in "iu" or (counted < 0).any():
        raise ArgumentError(
            f"counts: {counted.dtype} {list(counted.shape)}, expected integers from 0, [symbols]"
        )
    if type(limit) is not int or not 1 <= limit <= 32:
        raise ArgumentError(f"limit: {limit!r:.60}, accepted are 1 to 32 bits")
    used = np.flatnonzero(counted)
    lengths = np.zeros(len(counted), np.uint8)
    if len(used) > 1 << limit:
        raise ArgumentError(
            f"limit: {limit} bits, {len(used)} symbols occur: accepted are at least "
            f"{(len(used) - 1).bit_length()}"
        )
    if len(used) == 1:
        lengths[used] = 1
    if len(used) < 2:
        return lengths
    # Rarest first; of equal counts the last symbol first, so that it gets the longer code.
    order = used[np.lexsort((-used, counted[used]))]
    leaves = [(int(counted[s]), (i,)) for i, s in enumerate(order)]
    taken = np.zeros(len(order), np.int64)
    level: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(limit):
        pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = sorted(leaves + pairs, key=lambda item: item[0])  # stable: leaves come first
    for _, members in level[: 2 * len(order) - 2]:
        for i in members:
            taken[i] += 1
    # The lengths are right as a multiset; canonical order needs none of a rarer symbol shorter.
    lengths[order] = np.sort(taken)[::-1]
    return lengths


def check_lengths(lengths: npt.ArrayLike, limit: int) -> npt.NDArray[np.uint8]:
    """Return the lengths of a prefix code, or refuse those of none.

    Raises
    ------
    CorruptedDataError
        For lengths beyond `limit`, or of more codes than there is room for.
    """
    found = np.asarray(lengths)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise CorruptedDataError(f"code lengths: {found.dtype} {list(found.shape)}")
    if found.size and (int(found.min()) < 0 or int(found.max()) > limit):
        raise CorruptedDataError(
            f"code lengths: up to {int(found.max())}, accepted are 0 to {limit}"
        )
    room = (1 << limit) - sum(1 << (limit - int(n)) for n in found[found > 0])
    if room < 0:
        raise CorruptedDataError("code lengths: they are no prefix code: too many short codes")
    return found.astype(np.uint8)


def canonical_codes(lengths: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """Return the canonical code of each symbol, in the lowest bits; 0 where the length is 0."""
    given = np.asarray(lengths)
    codes = np.zeros(len(given), np.uint32)
    code = length = 0
    for symbol in np.lexsort((np.arange(len(given)), given)):
        n = int(given[symbol])
        if n:
            code <<= n - length
            codes[symbol], length = code, n
            code += 1
    return codes


def lookup_table(
    lengths: npt.ArrayLike, bits: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Return which symbol the next bits begin with.

    Parameters
    ----------
    lengths : array_like
        ``[symbols]``: bits of each symbol's code, none more than `bits`; 0 for none.
    bits : int
        Bits that are looked up, the first one the highest.

    Returns
    -------
    symbols : numpy.ndarray
        int32 ``[2 ** bits]``; -1 where no code begins so.
    lengths : numpy.ndarray
        uint8 ``[2 ** bits]``: bits of its code; 0 where there is none.
    """
    given = check_lengths(lengths, bits)
    symbols = np.full(1 << bits, -1, np.int32)
    found = np.zeros(1 << bits, np.uint8)
    codes = canonical_codes(given)
    for symbol in np.flatnonzero(given):
        free = bits - int(given[symbol])
        at = int(codes[symbol]) << free
        symbols[at : at + (1 << free)] = symbol
        found[at : at + (1 << free)] = given[symbol]
    return symbols, found
