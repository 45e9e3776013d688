"""Canonical Huffman codes of limited length: lengths, codes, and a table to look codes up in.

A code is stored as the lengths of its symbols alone. Codes of one length are consecutive numbers in
the order of their symbols, shorter ones before longer ones (canonical).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ....errors import ArgumentError, CorruptedDataError
from ...kernels.cpu.compiling import call
from ...kernels.cpu.loading import merging

#: Bits of the longest code of all.
MAX_LIMIT = 32


def code_lengths(counts: npt.ArrayLike, limit: int) -> npt.NDArray[np.uint8]:
    """Return the lengths that code symbols in the fewest bits, none longer than a limit.

    Package-merge (Larmore and Hirschberg, 1990). Where several lengths are as good, symbols that
    are more frequent, or come first, have the shorter ones.

    Parameters
    ----------
    counts : array_like
        ``[symbols]``, integers from 0: how often each symbol occurs. Those of 0 get no code. Their
        sum times `limit` fits int64.
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
    counted, _ = _used(counts, limit)
    lengths: npt.NDArray[np.uint8] = call(merging().lengths_of_code, counted, limit)
    return lengths


def fixed_lengths(counts: npt.ArrayLike, limit: int) -> npt.NDArray[np.uint8]:
    """Return the lengths of plain bit fields: for all symbols that occur the narrowest that serves.

    Canonical codes of one length are numbers from 0 up, in the order of the symbols.

    Parameters
    ----------
    counts, limit
        As in `code_lengths`.

    Returns
    -------
    numpy.ndarray
        uint8 ``[symbols]``; 0 for symbols that do not occur.
    """
    counted, used = _used(counts, limit)
    lengths = np.zeros(len(counted), np.uint8)
    lengths[used] = max((len(used) - 1).bit_length(), 1)
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
        raise CorruptedDataError(
            f"code lengths: {found.dtype} {list(found.shape)}, expected integers, [symbols]"
        )
    if found.size and (int(found.min()) < 0 or int(found.max()) > limit):
        raise CorruptedDataError(
            f"code lengths: {int(found.min())} to {int(found.max())}, accepted are 0 to {limit}"
        )
    of_length = np.bincount(found.astype(np.int64), minlength=limit + 1).tolist()
    if sum(of_length[n] << (limit - n) for n in range(1, limit + 1)) > 1 << limit:
        raise CorruptedDataError("code lengths: they are no prefix code: too many short codes")
    return found.astype(np.uint8)


def canonical_codes(lengths: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """Return the canonical code of each symbol, in the lowest bits; 0 where the length is 0."""
    given = np.asarray(lengths).astype(np.int64)
    order = np.argsort(given, kind="stable")
    order = order[np.searchsorted(given[order], 1) :]
    codes = np.zeros(len(given), np.uint32)
    if len(order):
        sorted_lengths = given[order]
        longest = sorted_lengths[-1]
        # As bits of the longest code, each begins where the one before ends.
        room = np.left_shift(1, longest - sorted_lengths)
        codes[order] = (np.cumsum(room) - room) >> (longest - sorted_lengths)
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
    order = np.argsort(given, kind="stable")
    order = order[np.searchsorted(given[order], 1) :]
    entries = np.repeat(order, np.left_shift(1, bits - given[order].astype(np.int64)))
    symbols = np.full(1 << bits, -1, np.int32)
    found = np.zeros(1 << bits, np.uint8)
    symbols[: len(entries)] = entries
    found[: len(entries)] = given[entries]
    return symbols, found


def _used(counts: npt.ArrayLike, limit: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
    """Return checked counts, and the symbols that occur."""
    counted = np.asarray(counts)
    if counted.ndim != 1 or counted.dtype.kind not in "iu" or (counted < 0).any():
        raise ArgumentError(
            f"counts: {counted.dtype} {list(counted.shape)}, expected integers from 0, [symbols]"
        )
    if type(limit) is not int or not 1 <= limit <= MAX_LIMIT:
        raise ArgumentError(f"limit: {limit!r:.60}, accepted are 1 to {MAX_LIMIT} bits")
    used = np.flatnonzero(counted)
    if len(used) > 1 << limit:
        raise ArgumentError(
            f"limit: {limit} bits, {len(used)} symbols occur: accepted are at least "
            f"{(len(used) - 1).bit_length()}"
        )
    return counted.astype(np.int64), used
