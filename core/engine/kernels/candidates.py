"""Candidates of a plan as kernels read them: rules that give the masks of chunks of rows.

A table has the candidates that are counted on the same rows; kernels take several tables at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from ...errors import ArgumentError

#: Columns of `CandidateTable.numbers`; plan.cu gets them as defines.
WIDTH, UNIFORM, AGREED, FIELD, FIRST, POSITIONS, CHUNKS, COUNTED, STRIDE, TABLE = range(10)
COLUMNS = 10
#: Most values that a position has codes for.
VALUES = 7
#: Sums that a candidate is measured by: over rows of code_bits 1 to 3, three each: not grouped,
#: grouped, and rows with exceptions; and the masks that are not that of the first position.
SUMS = 10
#: Of these, the place of the last.
DIFFERING = SUMS - 1
#: Tables that one launch counts.
MOST_TABLES = 2
#: Rows at the most from which the values of positional masks are learnt: as many different chunks
#: have a place in the shared memory of a multiprocessor.
POSITIONAL_ROWS = 2048


@dataclass(frozen=True)
class MaskRule:
    """A way to get masks from rows.

    Parameters
    ----------
    chunk_bytes : int
        Bytes of a chunk.
    uniform : bool
        Whether one mask serves all chunk positions.
    threshold : float or None
        A bit is invariant when at least this share of the rows agree on it; all of them when None.
    field : int
        Bits that are invariant whatever the rows say.
    """

    chunk_bytes: int
    uniform: bool
    threshold: float | None
    field: int


@dataclass(frozen=True, eq=False)
class CandidateTable:
    """Rules for rows of one size, with the places of their masks.

    Masks of all candidates lie back to back, one for each position: int64 ``[entries]``, whose
    bits are those of an unsigned number. Values are int64 ``[VALUES, entries]``.

    Parameters
    ----------
    row_bytes : int
        Bytes of a row.
    n_rows : int
        Rows whose bits the masks are learnt from.
    numbers : numpy.ndarray
        int64 ``[n, COLUMNS]``: bytes of a chunk; whether masks are uniform; the least number of
        chunks that must agree on a bit (not read where masks are given); the bits that are
        invariant anyway; the first entry; the number of entries, 1 when uniform; the chunks of a
        row; `n_rows`; the entries of the table; and the number of the table, here 0.
    """

    row_bytes: int
    n_rows: int
    numbers: np.ndarray

    @classmethod
    def of(cls, rules: Iterable[MaskRule], row_bytes: int, n_rows: int) -> CandidateTable:
        """Return the table of rules whose masks are learnt from `n_rows` rows."""
        return _table(tuple(rules), row_bytes, n_rows)

    @classmethod
    def build(cls, rules: Iterable[MaskRule], row_bytes: int, n_rows: int) -> CandidateTable:
        """Return a table that is made anew, and kept nowhere."""
        rows = []
        first = 0
        for rule in rules:
            chunks = row_bytes // rule.chunk_bytes
            positions = 1 if rule.uniform else chunks
            counted = n_rows * chunks if rule.uniform else n_rows
            share = 1.0 if rule.threshold is None else rule.threshold
            # A share that equals the threshold counts, whatever its last digit.
            agreed = counted if share == 1 else int(np.ceil((share - 1e-12) * counted))
            signed = rule.field - (1 << 64) if rule.field >> 63 else rule.field
            uniform = int(rule.uniform)
            rows.append(
                (rule.chunk_bytes, uniform, agreed, signed, first, positions, chunks, n_rows, 0, 0)
            )
            first += positions
        numbers = np.array(rows, np.int64).reshape(-1, COLUMNS)
        numbers[:, STRIDE] = first
        return cls(row_bytes, n_rows, numbers)

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self.numbers)

    # A planner on a GPU asks for these as often as it launches.

    @cached_property
    def entries(self) -> int:
        """Number of masks of all candidates."""
        return int(self.numbers[:, POSITIONS].sum())

    @cached_property
    def uniform(self) -> bool:
        """Whether any candidate is uniform."""
        return bool(self.numbers[:, UNIFORM].any())

    @cached_property
    def positional(self) -> bool:
        """Whether any candidate is positional."""
        return not self.numbers[:, UNIFORM].all()


@dataclass(frozen=True, eq=False)
class CandidateTables:
    """Tables that are counted in the same launches, each on rows of its own.

    Parameters
    ----------
    tables : tuple of CandidateTable
        One or two. The candidates of the last one are measured.
    numbers : numpy.ndarray
        As of `CandidateTable`, one table after the other, with the number of the table. The first
        entry is a place in `PlanMemory.found`.
    """

    tables: tuple[CandidateTable, ...]
    numbers: np.ndarray

    @classmethod
    def of(cls, *tables: CandidateTable) -> CandidateTables:
        """Return tables together; the same ones are returned for the same tables."""
        return _together(tables)

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self.numbers)

    @cached_property
    def most_positions(self) -> int:
        """The most masks that one candidate has."""
        return int(self.numbers[:, POSITIONS].max())

    @cached_property
    def uniform(self) -> bool:
        """Whether any candidate is uniform."""
        return any(table.uniform for table in self.tables)

    @cached_property
    def positional(self) -> bool:
        """Whether any candidate is positional."""
        return any(table.positional for table in self.tables)

    @cached_property
    def found_places(self) -> tuple[int, ...]:
        """The places in `PlanMemory.found` where tables begin, and where the last one ends."""
        ends = np.cumsum([(1 + VALUES) * table.entries for table in self.tables])
        return (0, *ends.tolist())

    @property
    def measured(self) -> CandidateTable:
        """The table whose candidates are measured."""
        return self.tables[-1]


class PlanMemory:
    """Memory for what is counted: sums, then masks and values, then whatever kernels need.

    Parameters
    ----------
    candidates : CandidateTables
        The candidates.
    words : torch.Tensor
        int64, contiguous, at least `PlanMemory.words_for(candidates)`, of which the sums are 0.
    """

    def __init__(self, candidates: CandidateTables, words: torch.Tensor) -> None:
        self._candidates, self._words = candidates, words
        sums, ends = _sums(candidates), candidates.found_places
        self._places = [sums + place for place in ends]
        #: int64 ``[n, SUMS]`` of the table that is measured.
        self.totals = words[:sums].view(-1, SUMS)

    @staticmethod
    def words_for(candidates: CandidateTables) -> int:
        """Return the int64 numbers of sums, masks and values."""
        return _sums(candidates) + candidates.found_places[-1]

    def found(self, table: int) -> torch.Tensor:
        """Return int64 ``[1 + VALUES, entries]`` of a table: masks, and values."""
        begin, end = self._places[table : table + 2]
        return self._words[begin:end].view(1 + VALUES, -1)

    @property
    def found_address(self) -> int:
        """Where masks and values begin."""
        return self._words.data_ptr() + 8 * self._places[0]

    @property
    def spare_address(self) -> int:
        """Where what kernels need begins."""
        return self._words.data_ptr() + 8 * self._places[-1]

    def on_host(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the sums, and what `found` does of all tables but the last, in one copy.

        Waits for a GPU.
        """
        copied = self._words[: self._places[-2]].cpu().numpy()
        found = [
            copied[begin:end].reshape(1 + VALUES, -1)
            for begin, end in zip(self._places[:-2], self._places[1:-1], strict=True)
        ]
        return copied[: self._places[0]].reshape(-1, SUMS), found


def _sums(candidates: CandidateTables) -> int:
    return len(candidates.measured) * SUMS


@lru_cache(64)
def _table(rules: tuple[MaskRule, ...], row_bytes: int, n_rows: int) -> CandidateTable:
    return CandidateTable.build(rules, row_bytes, n_rows)


@lru_cache(64)
def _together(tables: tuple[CandidateTable, ...]) -> CandidateTables:
    if not 1 <= len(tables) <= MOST_TABLES:
        raise ArgumentError(f"tables: {len(tables)}, accepted are 1 to {MOST_TABLES}")
    numbers = np.concatenate([table.numbers for table in tables])
    begin = place = 0
    for i, table in enumerate(tables):
        mine = numbers[begin : begin + len(table)]
        mine[:, FIRST] += place
        mine[:, TABLE] = i
        begin, place = begin + len(table), place + (1 + VALUES) * table.entries
    return CandidateTables(tables, numbers)


def check_positional_rows(rows: Sequence[torch.Tensor], candidates: CandidateTables) -> None:
    """Refuse more rows than values of positional masks are learnt from."""
    for each, table in zip(rows, candidates.tables, strict=True):
        if len(each) > POSITIONAL_ROWS and table.positional:
            raise ArgumentError(
                f"rows: {len(each)}, accepted are {POSITIONAL_ROWS} where masks are positional"
            )
