"""Candidates of a plan as kernels read them: rules that give the masks of chunks of rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ...errors import ArgumentError

#: Columns of `CandidateTable.numbers`; plan.cu gets them as defines.
WIDTH, UNIFORM, AGREED, FIELD, FIRST, POSITIONS = range(6)
COLUMNS = 6
#: Most values that a position has codes for.
VALUES = 7
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
    numbers : numpy.ndarray
        int64 ``[n, COLUMNS]``: bytes of a chunk; whether masks are uniform; the least number of
        chunks that must agree on a bit (not read where masks are given); the bits that are
        invariant anyway; the first entry; the number of entries, 1 when uniform.
    """

    row_bytes: int
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
            rows.append((rule.chunk_bytes, int(rule.uniform), agreed, signed, first, positions))
            first += positions
        return cls(row_bytes, np.array(rows, np.int64).reshape(-1, COLUMNS))

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self.numbers)

    # A planner on a GPU asks for these as often as it launches.

    @cached_property
    def entries(self) -> int:
        """Number of masks of all candidates."""
        return int(self.numbers[:, POSITIONS].sum())

    @cached_property
    def most_positions(self) -> int:
        """The most masks that one candidate has."""
        return int(self.numbers[:, POSITIONS].max())

    @cached_property
    def uniform(self) -> bool:
        """Whether any candidate is uniform."""
        return bool(self.numbers[:, UNIFORM].any())

    @cached_property
    def positional(self) -> bool:
        """Whether any candidate is positional."""
        return not self.numbers[:, UNIFORM].all()


@lru_cache(64)
def _table(rules: tuple[MaskRule, ...], row_bytes: int, n_rows: int) -> CandidateTable:
    return CandidateTable.build(rules, row_bytes, n_rows)


def check_positional_rows(n_rows: int, candidates: CandidateTable) -> None:
    """Refuse more rows than values of positional masks are learnt from."""
    if n_rows > POSITIONAL_ROWS and candidates.positional:
        raise ArgumentError(
            f"rows: {n_rows}, accepted are {POSITIONAL_ROWS} where masks are positional"
        )
