"""Counting for a planner, of many candidates at once: the twins of plan.cu and count.cu.

Each candidate is counted by itself, on one thread. Candidates whose masks turn out the same are
counted once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ..candidates import (
    FIRST,
    POSITIONS,
    SUMS,
    UNIFORM,
    VALUES,
    WIDTH,
    CandidateTable,
    CandidateTables,
    PlanMemory,
    check_positional_rows,
)
from .compiling import call
from .constants import chunks_of
from .loading import planning
from .threads import run_ranges

Array = np.ndarray


def count_bits(rows: torch.Tensor, chunk_bytes: int) -> torch.Tensor:
    """Count, for every bit of every chunk position, the rows that have it set.

    Parameters
    ----------
    rows : torch.Tensor
        uint8 ``[N, row_bytes]``, contiguous.
    chunk_bytes : int
        Bytes of a chunk; divides row_bytes.

    Returns
    -------
    torch.Tensor
        int64 ``[C, 8 * chunk_bytes]``, bit 0 the least significant.
    """
    kernel, raw = planning().count_bits, rows.numpy()

    def work(begin: int, end: int) -> Array:
        counts = np.zeros((rows.shape[1], 8), np.int64)
        call(kernel, raw, counts, begin, end)
        return counts

    # The bits of a chunk are those of its bytes, one after the other.
    return torch.from_numpy(sum(run_ranges(work, *rows.shape))).view(-1, 8 * chunk_bytes)


def plan_memory(rows: Sequence[torch.Tensor], candidates: CandidateTables) -> PlanMemory:
    """Return memory for what is counted of candidates, whose sums are 0.

    Parameters
    ----------
    rows : sequence of torch.Tensor
        Of each table, those that values will be learnt from.
    candidates : CandidateTables
        The rules.
    """
    memory = PlanMemory(
        candidates, torch.empty(PlanMemory.words_for(candidates), dtype=torch.int64)
    )
    memory.totals.zero_()
    return memory


def agreed_masks(
    counts: Sequence[torch.Tensor], candidates: CandidateTables, memory: PlanMemory
) -> None:
    """Write the masks of candidates: the bits on which enough rows agree, and those of the field.

    Parameters
    ----------
    counts : sequence of torch.Tensor
        Of each table, int64 with an entry for each bit of a row, as `count_bits` returns it for any
        chunk_bytes: the rows that have it set.
    candidates : CandidateTables
        The rules.
    memory : PlanMemory
        Where masks are written.
    """
    for i, (each, table) in enumerate(zip(counts, candidates.tables, strict=True)):
        masks, bits = memory.found(i)[0].numpy().view(np.uint64), each.view(-1, 8).numpy()
        call(planning().agreed_masks, bits, table.n_rows, table.numbers, masks)


def frequent_values(
    rows: Sequence[torch.Tensor], candidates: CandidateTables, memory: PlanMemory
) -> None:
    """Write the most frequent masked chunks of each position, of all positions when uniform.

    Most frequent first; equal counts go to the smaller value, and where there are fewer values the
    first one is repeated.

    Parameters
    ----------
    rows : sequence of torch.Tensor
        Of each table, uint8 ``[N, row_bytes]``, contiguous; N at least 1, and at most
        POSITIONAL_ROWS where a candidate is positional.
    candidates : CandidateTables
        The rules.
    memory : PlanMemory
        Of `plan_memory` for such rows, with the masks, where values are written.
    """
    check_positional_rows(rows, candidates)
    for i, (each, table) in enumerate(zip(rows, candidates.tables, strict=True)):
        _write_values(each, table, memory.found(i).numpy().view(np.uint64))


def _write_values(rows: torch.Tensor, table: CandidateTable, masks_and_values: Array) -> None:
    all_masks, values = masks_and_values[0], masks_and_values[1:]
    turned: dict[tuple[int, bool], Array] = {}
    for width, uniform, entries, same in _distinct(table, all_masks):
        if same is not None:
            values[:, entries] = values[:, same]
            continue
        # In 64 bits, whatever the width: compiled once, and hardly slower.
        key = width, bool(uniform)
        if key not in turned:
            some = chunks_of(rows, width).reshape(1, -1) if uniform else _columns(rows, width)
            turned[key] = some.astype(np.uint64)
        columns = turned[key]
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


def sizes_by_option(
    rows: torch.Tensor, candidates: CandidateTables, memory: PlanMemory, unit_bits: int = 32
) -> None:
    """Add up what rows take packed, under all options of each candidate of the last table.

    Parameters
    ----------
    rows : torch.Tensor
        uint8 ``[N, row_bytes]``, contiguous.
    candidates : CandidateTables
        The rules.
    memory : PlanMemory
        With masks and values, and `totals`, to which is added, by code_bits - 1: the units of all
        rows, not grouped and grouped, where a row that would not shrink counts as it is, and the
        rows that have exceptions; and at last the masks that are not that of the first position.
    unit_bits : {32, 1}
        Unit of the sizes: words, as they are stored, or bits, where `rows` are parts of longer
        rows, whose ends are not to count.
    """
    totals, table = memory.totals.numpy(), candidates.measured
    found = memory.found(len(candidates.tables) - 1).numpy().view(np.uint64)
    all_masks, all_values = found[0], found[1:]
    room = np.empty((5, rows.shape[0]), np.int32)
    turned: dict[int, Array] = {}
    known: dict[tuple[int, ...], Array] = {}
    for c, (width, uniform, entries, same) in enumerate(_distinct(table, all_masks)):
        if same is not None:
            totals[c] += known[width, uniform, same.start]
            continue
        if width not in turned:
            turned[width] = _columns(rows, width)
        columns = turned[width]
        counted = known[width, uniform, entries.start] = np.zeros(SUMS, np.int64)
        call(
            planning().sizes_by_option,
            columns,
            all_masks[entries].astype(columns.dtype),
            all_values[:, entries].astype(columns.dtype),
            bool(uniform),
            unit_bits,
            room,
            counted,
        )
        totals[c] += counted


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
