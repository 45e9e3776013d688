"""Orders of ids by access frequency, for `SlabCache.fill`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

from ..engine.codecs.base import check_indices_argument, check_tensor_argument
from ..errors import ArgumentError, ArgumentTypeError


def by_scores(scores: torch.Tensor) -> torch.Tensor:
    """Order ids by given scores, the highest first.

    Parameters
    ----------
    scores : torch.Tensor
        ``[N]`` of any real dtype, one for each row; equal ones keep the order of the ids.

    Returns
    -------
    torch.Tensor
        int64 ``[N]`` on the CPU.

    Raises
    ------
    ArgumentError
        When `scores` has another shape, is complex or bool, or holds NaN.
    """
    check_tensor_argument("scores", scores)
    if scores.dim() != 1 or scores.dtype == torch.bool or scores.is_complex():
        raise ArgumentError(
            f"scores: {list(scores.shape)} {scores.dtype}, expected one real number for each row"
        )
    numbers = scores.detach().cpu()
    if numbers.is_floating_point():
        if numbers.dtype.itemsize < 4:
            numbers = numbers.float()
        if bool(numbers.isnan().any()):
            raise ArgumentError("scores: some are NaN, which is neither more nor less than others")
    elif numbers.dtype in (torch.uint16, torch.uint32):
        numbers = numbers.to(torch.int64)
    elif numbers.dtype == torch.uint64:
        numbers = numbers.view(torch.int64) ^ torch.iinfo(torch.int64).min
    return torch.argsort(numbers, descending=True, stable=True)


def by_degree(indptr: torch.Tensor, indices: torch.Tensor | None = None) -> torch.Tensor:
    """Order the nodes of a graph by degree, the highest first.

    A sampler that walks against the edges, as those for neighbours do, meets a node as often as it
    is a neighbour of others: that is its number of entries in `indices`. The number of its own
    neighbours, from `indptr` alone, is the same in a graph whose edges go both ways. Degrees that
    are known already go to `by_scores`.

    Parameters
    ----------
    indptr : torch.Tensor
        Integers ``[N + 1]`` of a graph in CSR form: where the neighbours of each node begin.
    indices : torch.Tensor, optional
        Integers ``[E]``: the neighbours.

    Returns
    -------
    torch.Tensor
        int64 ``[N]`` on the CPU.
    """
    begins = check_indices_argument(indptr, "indptr").cpu()
    if begins.numel() < 1 or int(begins[0]) != 0 or bool((begins.diff() < 0).any()):
        raise ArgumentError("indptr: expected 0, then numbers that never fall")
    if indices is None:
        return by_scores(begins.diff())
    neighbours = check_indices_argument(indices, "indices").cpu()
    n = begins.numel() - 1
    if neighbours.numel() != int(begins[-1]):
        raise ArgumentError(
            f"indices: {neighbours.numel()} neighbours, indptr ends at {int(begins[-1])}"
        )
    _check_numbers("indices", neighbours, n)
    return by_scores(torch.bincount(neighbours, minlength=n))


def by_counts(batches: Iterable[torch.Tensor] | Mapping[int, int], n_rows: int) -> torch.Tensor:
    """Order ids by how often some batches request them (pre-sampling), the most frequent first.

    Parameters
    ----------
    batches : iterable of torch.Tensor, or mapping of int to int
        Integers ``[n]``, such as the input nodes of the batches of one epoch, which are counted; or
        the count of each id, such as a `collections.Counter`.
    n_rows : int
        Rows of the table.

    Returns
    -------
    torch.Tensor
        int64 ``[N]`` on the CPU; rows that were never requested come last.
    """
    counts = np.zeros(n_rows, np.int64)
    if isinstance(batches, Mapping):
        try:
            ids = torch.tensor(list(batches.keys()), dtype=torch.int64)
            asked = np.fromiter(batches.values(), np.int64, len(batches))
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ArgumentTypeError(f"batches: expected a count for each id: {error}") from error
        _check_numbers("batches", ids, n_rows)
        counts[ids.numpy()] = asked
        return by_scores(torch.from_numpy(counts))
    for batch in batches:
        if not isinstance(batch, torch.Tensor):
            raise ArgumentTypeError(f"batches: one is a {type(batch).__name__}, expected a tensor")
        ids = check_indices_argument(batch.reshape(-1), "batches").cpu()
        _check_numbers("batches", ids, n_rows)
        counts += np.bincount(ids.numpy(), minlength=n_rows)
    return by_scores(torch.from_numpy(counts))


def _check_numbers(name: str, ids: torch.Tensor, n_rows: int) -> None:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < n_rows:
        raise ArgumentError(
            f"{name}: ids from {int(ids.min())} to {int(ids.max())}, expected 0 to {n_rows - 1}"
        )
