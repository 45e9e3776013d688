"""How many bits symbols take, and which histograms share a code."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Histograms, sorted, that are taken apart exactly; more are joined to so many before.
_RUNS = 16
#: Rounds in which histograms move to the class that codes them in fewer bits.
_ROUNDS = 8


def entropy_bits(counts: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the bits that an ideal coder takes for all that is counted.

    Parameters
    ----------
    counts : array_like
        ``[..., symbols]``, from 0.

    Returns
    -------
    numpy.ndarray
        float64 ``[...]``: of each histogram the sum over its symbols, not the mean.
    """
    counted = np.asarray(counts, np.float64)
    total = counted.sum(axis=-1)
    parts = (counted * np.log2(np.maximum(counted, 1))).sum(axis=-1)
    return np.asarray(np.maximum(total * np.log2(np.maximum(total, 1)) - parts, 0))


def expected_bits(counts: npt.ArrayLike, lengths: npt.ArrayLike) -> float:
    """Return the bits that codes of these lengths take for all that is counted.

    Symbols without a code count nothing: the caller says what they cost.
    """
    return float(np.asarray(counts, np.float64) @ np.asarray(lengths, np.float64))


def group_histograms(
    counts: npt.ArrayLike, classes: int, *, table_bits: float = 0
) -> npt.NDArray[np.int64]:
    """Return which histograms share a code, so that all symbols and tables take the fewest bits.

    Histograms are sorted by entropy and cut into runs, the best cuts of all; then each moves to the
    class that codes it in the fewest bits, until none moves. The same counts give the same classes.

    Parameters
    ----------
    counts : array_like
        ``[histograms, symbols]``, from 0.
    classes : int
        Codes, at the most.
    table_bits : float
        What a further code costs.

    Returns
    -------
    numpy.ndarray
        int64 ``[histograms]``: classes from 0, each used, in the order of their entropies.
    """
    counted = np.asarray(counts, np.float64)
    if not len(counted):
        return np.empty(0, np.int64)
    counted = counted[:, counted.any(axis=0)]
    total = np.maximum(counted.sum(axis=1), 1)
    order = np.argsort(entropy_bits(counted) / total, kind="stable")
    runs = min(_RUNS, len(order))
    edges = np.arange(runs + 1) * len(order) // runs
    sums = np.zeros((runs + 1, counted.shape[1]))
    sums[1:] = np.cumsum(counted[order], axis=0)[edges[1:] - 1]
    cuts = edges[_best_cuts(sums, classes, table_bits)]
    labels = np.zeros(len(order), np.int64)
    labels[order] = np.searchsorted(cuts, np.arange(len(order)), "right") - 1
    for _ in range(_ROUNDS):
        moved = _nearest(counted, labels)
        if (moved == labels).all():
            break
        labels = moved
    # A class that nothing is left in is dropped.
    return np.asarray(np.unique(labels, return_inverse=True)[1], np.int64)


def _best_cuts(
    sums: npt.NDArray[np.float64], classes: int, table_bits: float
) -> npt.NDArray[np.int64]:
    """Return where the runs of the best classes begin, of ``[runs + 1, symbols]`` summed up."""
    runs = len(sums) - 1
    bits = np.full((runs, runs + 1), np.inf)
    begin, last = np.triu_indices(runs)
    bits[begin, last + 1] = entropy_bits(sums[last + 1] - sums[begin])
    # least[k][n]: bits of the first n runs in k classes; begins[k][n]: where the last one begins.
    least = [np.where(np.arange(runs + 1) == 0, 0.0, np.inf)]
    begins: list[npt.NDArray[np.intp]] = []
    for _ in range(min(classes, runs)):
        joined = least[-1][:runs, None] + bits
        begins.append(joined.argmin(axis=0))
        least.append(joined.min(axis=0))
    costs = [least[k][runs] + k * table_bits for k in range(1, len(least))]
    cuts, end = [], runs
    for k in range(int(np.argmin(costs)), -1, -1):
        end = int(begins[k][end])
        cuts.append(end)
    return np.array(cuts[::-1], np.int64)


def _nearest(
    counted: npt.NDArray[np.float64], labels: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return for each histogram the class whose sum codes it in the fewest bits."""
    # Sums of integers: exact in any order.
    summed = (labels == np.arange(int(labels.max()) + 1)[:, None]).astype(np.float64) @ counted
    # What a class has not seen costs much, but not for ever.
    share = (summed + 0.1) / (summed.sum(axis=1, keepdims=True) + 0.1 * summed.shape[1])
    return np.asarray((counted @ -np.log2(share).T).argmin(axis=1), np.int64)
