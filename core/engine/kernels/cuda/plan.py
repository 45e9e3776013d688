"""Counting for a planner on a GPU; see plan.cu."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ..candidates import (
    COLUMNS,
    UNIFORM,
    VALUES,
    WIDTH,
    CandidateTable,
    check_positional_rows,
)
from ..format import ceil_div
from .constants import constant_on
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
    """Parameters of `agreed_masks`: int64 `counts` of bits, the numbers of a CandidateTable."""

    kernel = "agreed_masks"

    counts: Address
    n_rows: Int64
    row_bytes: Int32
    numbers: Address
    masks: Address


@dataclass(init=False)
class FrequentByPosition(Parameters):
    """Parameters of `frequent_by_position`; int64 masks and values of `entries` positions."""

    kernel = "frequent_by_position"

    rows: Address
    n_rows: Int32
    row_bytes: Int32
    numbers: Address
    masks: Address
    entries: Int64
    places: UInt32
    values: Address


@dataclass(init=False)
class CountValues(Parameters):
    """Parameters of `count_values`; int64 `tables` ``[n, 2]`` and `keys`, int32 `counts`."""

    kernel = "count_values"

    rows: Address
    n_rows: Int64
    row_bytes: Int32
    numbers: Address
    masks: Address
    tables: Address
    keys: Address
    counts: Address


@dataclass(init=False)
class TopValues(Parameters):
    """Parameters of `top_values`; either the tops or `numbers` and `values` may be None."""

    kernel = "top_values"

    keys: Address
    counts: Address
    tables: Address
    spare: Int32
    top_keys: Address
    top_counts: Address
    numbers: Address
    entries: Int64
    values: Address


@dataclass(init=False)
class SizesByOption(Parameters):
    """Parameters of `sizes_by_option`; int64 `totals` ``[n, 3, 3]``."""

    kernel = "sizes_by_option"

    rows: Address
    n_rows: Int64
    row_bytes: Int32
    numbers: Address
    masks: Address
    values: Address
    entries: Int64
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

    def agreed_masks(
        self,
        counts: torch.Tensor,
        n_rows: int,
        candidates: CandidateTable,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the masks of candidates; see `kernels.cpu.agreed_masks`."""
        masks = out
        if masks is None:
            masks = torch.empty(candidates.entries, dtype=torch.int64, device=counts.device)
        numbers = constant_on(counts.device, candidates.numbers)
        tiles = ceil_div(candidates.most_positions, THREADS)
        self._launch(AgreedMasks, THREADS)(
            (min(tiles, self._most_blocks), len(candidates), 1),
            counts.data_ptr(),
            n_rows,
            candidates.row_bytes,
            numbers.data_ptr(),
            masks.data_ptr(),
        )
        return masks

    def frequent_values(
        self,
        rows: torch.Tensor,
        masks: torch.Tensor,
        candidates: CandidateTable,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the most frequent masked chunks; see `kernels.cpu.frequent_values`."""
        n, entries = rows.shape[0], candidates.entries
        check_positional_rows(n, candidates)
        rows = aligned_to(rows, 8)
        values = out
        if values is None:
            values = torch.empty((VALUES, entries), dtype=torch.int64, device=rows.device)
        if candidates.positional:
            places = 1 << (2 * n - 1).bit_length()
            shared_bytes = 12 * (places + 1) + 4
            positions = candidates.most_positions
            numbers = constant_on(rows.device, candidates.numbers)
            self._launch(FrequentByPosition, COLUMN_THREADS, shared_bytes)(
                (positions, len(candidates), 1),
                rows.data_ptr(),
                n,
                candidates.row_bytes,
                numbers.data_ptr(),
                masks.data_ptr(),
                entries,
                places,
                values.data_ptr(),
            )
        if candidates.uniform:
            self._frequent_in_all(rows, masks, candidates, values)
        return values

    def _frequent_in_all(
        self,
        rows: torch.Tensor,
        masks: torch.Tensor,
        candidates: CandidateTable,
        values: torch.Tensor,
    ) -> None:
        """Write the values of uniform candidates."""
        device, n = rows.device, rows.shape[0]
        numbers = constant_on(device, candidates.numbers)
        tables, most_chunks, total, slices = _value_tables(
            candidates.numbers.tobytes(), n, candidates.row_bytes, SLICE_PLACES
        )
        on_device = constant_on(device, tables)
        # Keys, and behind them counts of half their size, all 0 at first.
        memory = torch.zeros(total + ceil_div(total, 2), dtype=torch.int64, device=device)
        keys, counts = memory, memory[total:]
        blocks = ceil_div(most_chunks, CHUNKS_PER_THREAD * THREADS)
        self._launch(CountValues, THREADS)(
            (min(blocks, self._most_blocks), len(candidates), 1),
            rows.data_ptr(),
            n,
            candidates.row_bytes,
            numbers.data_ptr(),
            masks.data_ptr(),
            on_device.data_ptr(),
            keys.data_ptr(),
            counts.data_ptr(),
        )
        found = len(candidates) * slices * VALUES if slices > 1 else 0
        tops = torch.empty(found + ceil_div(found, 2), dtype=torch.int64, device=device)
        top_keys, top_counts = tops, tops[found:]
        top = self._launch(TopValues, THREADS)
        to_values = (numbers.data_ptr(), values.shape[1], values.data_ptr())
        top(
            (slices, len(candidates), 1),
            keys.data_ptr(),
            counts.data_ptr(),
            on_device[0].data_ptr(),
            1,
            top_keys.data_ptr(),
            top_counts.data_ptr(),
            *((0, 0, 0) if slices > 1 else to_values),
        )
        if slices > 1:
            top(
                (1, len(candidates), 1),
                top_keys.data_ptr(),
                top_counts.data_ptr(),
                on_device[1].data_ptr(),
                0,
                0,
                0,
                *to_values,
            )

    def sizes_by_option(
        self,
        rows: torch.Tensor,
        masks: torch.Tensor,
        values: torch.Tensor,
        candidates: CandidateTable,
        unit_bits: int = 32,
    ) -> torch.Tensor:
        """Return what rows take packed; see `kernels.cpu.sizes_by_option`."""
        rows = aligned_to(rows, 8)
        numbers = constant_on(rows.device, candidates.numbers)
        totals = torch.zeros((len(candidates), 3, 3), dtype=torch.int64, device=rows.device)
        # A few waves of blocks for all candidates; each row is a warp's work.
        blocks = min(
            ceil_div(rows.shape[0], THREADS // 32),
            max(1, 4 * self._most_blocks // len(candidates)),
        )
        self._launch(SizesByOption, THREADS)(
            (blocks, len(candidates), 1),
            rows.data_ptr(),
            rows.shape[0],
            candidates.row_bytes,
            numbers.data_ptr(),
            masks.data_ptr(),
            values.data_ptr(),
            values.shape[1],
            unit_bits.bit_length() - 1,
            totals.data_ptr(),
        )
        return totals

    def _launch(self, parameters: type[Parameters], threads: int, shared_bytes: int = 0) -> Launch:
        key = parameters, shared_bytes
        found = self._launches.get(key)
        if found is None:
            found = self._launches[key] = self._runner.bind(PLAN, parameters, threads, shared_bytes)
        return found


@lru_cache(64)
def _value_tables(
    numbers: bytes, n_rows: int, row_bytes: int, slice_places: int
) -> tuple[np.ndarray, int, int, int]:
    """Return where the values of uniform candidates are counted.

    First places and numbers of places, int64 ``[2, n, 2]``: of the tables, and then of what each
    slice of them has found. There is one more place behind those of a table. Also the most chunks
    of a candidate, the places of all tables, and the slices of the largest one.
    """
    table = np.frombuffer(numbers, np.int64).reshape(-1, COLUMNS)
    widths = table[:, WIDTH]
    chunks = n_rows * (row_bytes // widths)
    different = np.minimum(chunks, 1 << np.minimum(8 * widths, 62))
    places = np.array([1 << int(2 * d - 1).bit_length() for d in different], np.int64)
    places[table[:, UNIFORM] == 0] = 0
    slices = ceil_div(int(places.max()), slice_places)
    tables = np.zeros((2, len(table), 2), np.int64)
    tables[0, :, 0] = np.cumsum(places + 1) - (places + 1)
    tables[0, :, 1] = places
    tables[1, :, 0] = np.arange(len(table)) * slices * VALUES
    tables[1, :, 1] = np.where(places > 0, slices * VALUES, 0)
    return tables, int(chunks.max()), int(tables[0, -1].sum()) + 1, slices
