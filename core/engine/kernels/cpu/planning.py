"""Counting for a planner, of many candidates at once: the twins of plan.cu.

Each candidate is counted by itself, on one thread. Candidates whose masks turn out the same are
counted once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ..candidates import (
    FIRST,
    POSITIONS,
    UNIFORM,
    VALUES,
    WIDTH,
    CandidateTable,
    check_positional_rows,
)
from .compiling import call
from .constants import chunks_of
from .loading import planning

Array = np.ndarray


def agreed_masks(
    counts: torch.Tensor,
    n_rows: int,
    candidates: CandidateTable,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the masks of candidates: the bits on which enough rows agree, and those of the field.

    Parameters
    ----------
    counts : torch.Tensor
        int64 with an entry for each bit of a row, as `count_bits` returns it for any chunk_bytes:
        the rows that have it set.
    n_rows : int
        Rows that were counted.
    candidates : CandidateTable
        The rules.
    out : torch.Tensor, optional
        What is returned, to write to.

    Returns
    -------
    torch.Tensor
        int64 ``[entries]``, contiguous.
    """
    masks = torch.empty(candidates.entries, dtype=torch.int64) if out is None else out
    bits = counts.view(-1, 8).numpy()
    call(planning().agreed_masks, bits, n_rows, candidates.numbers, masks.numpy().view(np.uint64))
    return masks


def frequent_values(
    rows: torch.Tensor,
    masks: torch.Tensor,
    candidates: CandidateTable,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the most frequent masked chunks of each position, of all positions when uniform.

    Parameters
    ----------
    rows : torch.Tensor
        uint8 ``[N, row_bytes]``, contiguous; N at least 1, and at most POSITIONAL_ROWS where a
        candidate is positional.
    masks : torch.Tensor
        int64 ``[entries]``.
    candidates : CandidateTable
        The rules.
    out : torch.Tensor, optional
        What is returned, to write to.

    Returns
    -------
    torch.Tensor
        int64 ``[VALUES, entries]``, contiguous, most frequent first; equal counts go to the smaller
        value, and where there are fewer values the first one is repeated.
    """
    check_positional_rows(rows.shape[0], candidates)
    if out is None:
        out = torch.empty((VALUES, candidates.entries), dtype=torch.int64)
    values = out.numpy().view(np.uint64)
    all_masks = masks.numpy().view(np.uint64)
    turned: dict[int, Array] = {}
    for width, uniform, entries, same in _distinct(candidates, all_masks):
        if same is not None:
            values[:, entries] = values[:, same]
            continue
        # In 64 bits, whatever the width: compiled once, and hardly slower.
        if width not in turned:
            turned[width] = _columns(rows, width).astype(np.uint64)
        columns = turned[width].reshape(1, -1) if uniform else turned[width]
        # Short chunks are places themselves; the others are spread over twice as many as there are.
        bits = 8 * width if 8 * width <= 16 and uniform else (2 * columns.shape[1]).bit_length()
        direct = bits == 8 * width
        found = np.zeros((VALUES, len(columns)), np.uint64)
        call(
            planning().frequent_values,
            columns,
            all_masks[entries],
            np.empty(1 << bits, np.uint64),
            np.zeros(1 << bits, np.int32),
            np.empty(min(columns.shape[1], 1 << bits), np.int64),
            np.uint64(1) if direct else planning().MIX,
            np.uint64(0 if direct else 64 - bits),
            found,
        )
        values[:, entries] = found
    return out


def sizes_by_option(
    rows: torch.Tensor,
    masks: torch.Tensor,
    values: torch.Tensor,
    candidates: CandidateTable,
    unit_bits: int = 32,
) -> torch.Tensor:
    """Return what rows take packed, under all options of each candidate.

    Parameters
    ----------
    rows : torch.Tensor
        uint8 ``[N, row_bytes]``, contiguous.
    masks, values : torch.Tensor
        As of `agreed_masks` and `frequent_values`.
    candidates : CandidateTable
        The rules.
    unit_bits : {32, 1}
        Unit of the sizes: words, as they are stored, or bits, where `rows` are parts of longer
        rows, whose ends are not to count.

    Returns
    -------
    torch.Tensor
        int64 ``[n, 3, 3]``, by code_bits - 1: the units of all rows, not grouped and grouped, where
        a row that would not shrink counts as it is, and the rows that have exceptions.
    """
    totals = np.zeros((len(candidates), 3, 3), np.int64)
    all_masks, all_values = masks.numpy().view(np.uint64), values.numpy().view(np.uint64)
    room = np.empty((5, rows.shape[0]), np.int32)
    turned: dict[int, Array] = {}
    known: dict[tuple[int, ...], int] = {}
    for c, (width, uniform, entries, same) in enumerate(_distinct(candidates, all_masks)):
        if same is not None:
            totals[c] = totals[known[width, uniform, same.start]]
            continue
        known[width, uniform, entries.start] = c
        if width not in turned:
            turned[width] = _columns(rows, width)
        columns = turned[width]
        call(
            planning().sizes_by_option,
            columns,
            all_masks[entries].astype(columns.dtype),
            all_values[:, entries].astype(columns.dtype),
            bool(uniform),
            unit_bits,
            room,
            totals[c],
        )
    return torch.from_numpy(totals)


def _columns(rows: torch.Tensor, width: int) -> Array:
    """Return rows as ``[positions, N]`` chunks."""
    return np.ascontiguousarray(chunks_of(rows, width).T)


def _distinct(
    candidates: CandidateTable, masks: Array
) -> Iterator[tuple[int, int, slice, slice | None]]:
    """Yield width, uniform and entries of each candidate, and the earlier ones that are the same.

    Masks are so few that comparing them costs nothing beside counting.
    """
    known: dict[tuple[int, int, bytes], slice] = {}
    for numbers in candidates.numbers.tolist():
        width, uniform = numbers[WIDTH], numbers[UNIFORM]
        entries = slice(numbers[FIRST], numbers[FIRST] + numbers[POSITIONS])
        key = (width, uniform, masks[entries].tobytes())
        yield width, uniform, entries, known.get(key)
        known.setdefault(key, entries)
