"""Counting for a planner on a GPU; see plan.cu."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ..candidates import (
    CHUNKS,
    COLUMNS,
    TABLE,
    UNIFORM,
    VALUES,
    WIDTH,
    CandidateTables,
    PlanMemory,
    check_positional_rows,
)
from ..format import ceil_div
from .constants import Constant
from .parameters import Address, Int32, Int64, Parameters, UInt32
from .runner import Launch, Runner
from .source import PLAN
from .tiles import aligned_to

THREADS = 256  # of a block
COLUMN_THREADS = 128  # of a block that counts a position
BLOCKS = 8  # of a multiprocessor
MOST_BLOCKS = 65_535  # of the second dimension of a grid: candidates
SLICE_PLACES = 4096  # of a table that one block looks at
CHUNKS_PER_THREAD = 8  # at least, of those that count


@dataclass(init=False)
class AgreedMasks(Parameters):
    """Parameters of `agreed_masks`: int64 counts of bits, the numbers of a CandidateTable."""

    kernel = "agreed_masks"

    counts: Address
    other_counts: Address
    numbers: Address
    found: Address


@dataclass(init=False)
class FrequentByPosition(Parameters):
    """Parameters of `frequent_by_position`; masks and values in `found`."""

    kernel = "frequent_by_position"

    rows: Address
    other_rows: Address
    n_rows: Int32
    other_n_rows: Int32
    numbers: Address
    places: UInt32
    found: Address


@dataclass(init=False)
class CountValues(Parameters):
    """Parameters of `count_values`; int64 `tables` ``[n, 2]`` and `keys`, int32 `counts`."""

    kernel = "count_values"

    rows: Address
    other_rows: Address
    n_rows: Int64
    other_n_rows: Int64
    numbers: Address
    tables: Address
    found: Address
    keys: Address
    counts: Address


@dataclass(init=False)
class TopValues(Parameters):
    """Parameters of `top_values`; uint32 `done` ``[n]``, 0 at first."""

    kernel = "top_values"

    keys: Address
    counts: Address
    tables: Address
    top_keys: Address
    top_counts: Address
    done: Address
    numbers: Address
    found: Address


@dataclass(init=False)
class SizesByOption(Parameters):
    """Parameters of `sizes_by_option`; int64 `totals` ``[n, SUMS]``."""

    kernel = "sizes_by_option"

    rows: Address
    n_rows: Int64
    numbers: Address
    found: Address
    unit_shift: Int32
    totals: Address


class PlanKernels:
    """The kernels of plan.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._most_blocks = BLOCKS * runner.multiprocessors
        self._launches: dict[tuple[type[Parameters], int], Launch] = {}

    def plan_memory(self, rows: Sequence[torch.Tensor], candidates: CandidateTables) -> PlanMemory:
        """Return memory for what is counted; see `kernels.cpu.plan_memory`."""
        # All of it is 0: sums, and the tables in which values are counted.
        words = PlanMemory.words_for(candidates) + _value_tables_of(rows, candidates).words
        return PlanMemory(candidates, torch.zeros(words, dtype=torch.int64, device=rows[0].device))

    def agreed_masks(
        self, counts: Sequence[torch.Tensor], candidates: CandidateTables, memory: PlanMemory
    ) -> None:
        """Write the masks of candidates; see `kernels.cpu.agreed_masks`."""
        tiles = ceil_div(candidates.most_positions, THREADS)
        self._launch(AgreedMasks, THREADS)(
            (min(tiles, self._most_blocks), len(candidates), 1),
            counts[0].data_ptr(),
            counts[-1].data_ptr(),
            _numbers(candidates).on(counts[0].device).data_ptr(),
            memory.found_address,
        )

    def frequent_values(
        self, rows: Sequence[torch.Tensor], candidates: CandidateTables, memory: PlanMemory
    ) -> None:
        """Write the most frequent masked chunks; see `kernels.cpu.frequent_values`."""
        check_positional_rows(rows, candidates)
        rows = [aligned_to(each, 8) for each in rows]
        if candidates.positional:
            most = max(map(len, rows))
            places = 1 << (2 * most - 1).bit_length()
            shared_bytes = 12 * (places + 1) + 4
            self._launch(FrequentByPosition, COLUMN_THREADS, shared_bytes)(
                (candidates.most_positions, len(candidates), 1),
                rows[0].data_ptr(),
                rows[-1].data_ptr(),
                len(rows[0]),
                len(rows[-1]),
                _numbers(candidates).on(rows[0].device).data_ptr(),
                places,
                memory.found_address,
            )
        if candidates.uniform:
            self._frequent_in_all(rows, candidates, memory)

    def _frequent_in_all(
        self, rows: Sequence[torch.Tensor], candidates: CandidateTables, memory: PlanMemory
    ) -> None:
        """Write the values of uniform candidates."""
        n, device = len(candidates), rows[0].device
        tables = _value_tables_of(rows, candidates)
        places = tables.places.on(device).data_ptr()
        numbers = _numbers(candidates).on(device).data_ptr()
        keys = memory.spare_address
        counts, *tops = (keys + 8 * word for word in tables.begins)
        blocks = ceil_div(tables.most_chunks, CHUNKS_PER_THREAD * THREADS)
        self._launch(CountValues, THREADS)(
            (min(blocks, self._most_blocks), n, 1),
            rows[0].data_ptr(),
            rows[-1].data_ptr(),
            len(rows[0]),
            len(rows[-1]),
            numbers,
            places,
            memory.found_address,
            keys,
            counts,
        )
        self._launch(TopValues, THREADS)(
            (tables.slices, n, 1), keys, counts, places, *tops, numbers, memory.found_address
        )

    def sizes_by_option(
        self,
        rows: torch.Tensor,
        candidates: CandidateTables,
        memory: PlanMemory,
        unit_bits: int = 32,
    ) -> None:
        """Add up what rows take packed; see `kernels.cpu.sizes_by_option`."""
        rows = aligned_to(rows, 8)
        n = len(candidates.measured)
        numbers = _numbers(candidates).on(rows.device).data_ptr()
        # A few waves of blocks for all candidates; each row is a warp's work.
        blocks = min(ceil_div(rows.shape[0], THREADS // 32), max(1, 4 * self._most_blocks // n))
        self._launch(SizesByOption, THREADS)(
            (blocks, n, 1),
            rows.data_ptr(),
            rows.shape[0],
            numbers + 8 * COLUMNS * (len(candidates) - n),
            memory.found_address,
            unit_bits.bit_length() - 1,
            memory.totals.data_ptr(),
        )

    def _launch(self, parameters: type[Parameters], threads: int, shared_bytes: int = 0) -> Launch:
        key = parameters, shared_bytes
        found = self._launches.get(key)
        if found is None:
            found = self._launches[key] = self._runner.bind(PLAN, parameters, threads, shared_bytes)
        return found


@lru_cache(64)
def _numbers(candidates: CandidateTables) -> Constant:
    return Constant(candidates.numbers)


@dataclass(frozen=True, eq=False)
class _ValueTables:
    """Where the values of uniform candidates are counted, in words of 8 bytes.

    Parameters
    ----------
    places : Constant
        First places and numbers of places, int64 ``[n, 2]``. There is one more place behind those
        of a table.
    begins : tuple of int
        Behind the tables' keys, where begin their counts, the keys and the counts that slices of
        tables have found, and for each candidate the slices that are done.
    words : int
        All of it.
    slices : int
        Of the largest table.
    most_chunks : int
        Of a candidate.
    """

    places: Constant
    begins: tuple[int, ...]
    words: int
    slices: int
    most_chunks: int


def _value_tables_of(rows: Sequence[torch.Tensor], candidates: CandidateTables) -> _ValueTables:
    return _value_tables(candidates, tuple(map(len, rows)), SLICE_PLACES)


@lru_cache(64)
def _value_tables(
    candidates: CandidateTables, n_rows: tuple[int, ...], slice_places: int
) -> _ValueTables:
    numbers = candidates.numbers
    n, widths = len(numbers), numbers[:, WIDTH]
    chunks = np.array(n_rows)[numbers[:, TABLE]] * numbers[:, CHUNKS]
    different = np.minimum(chunks, 1 << np.minimum(8 * widths, 62))
    places = np.array([1 << int(2 * d - 1).bit_length() for d in different], np.int64)
    places[numbers[:, UNIFORM] == 0] = 0
    slices = ceil_div(int(places.max()), slice_places)
    tables = np.stack([np.cumsum(places + 1) - (places + 1), places], 1)
    # Keys, and behind them counts of half their size.
    total = int(tables[-1].sum()) + 1 if candidates.uniform else 0
    tops = n * slices * VALUES
    sizes = (total, ceil_div(total, 2), tops, ceil_div(tops, 2), ceil_div(n, 2))
    *begins, words = itertools.accumulate(sizes)
    return _ValueTables(Constant(tables), tuple(begins), words, slices, int(chunks.max()))
