"""Tables made ready to be gathered from again and again, at little cost for each call."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from ..format import PAD_WORDS, RowLayout, TableStorage, check_sizes
from .compiling import compiling_beside, prepare
from .constants import UNSIGNED, Field, constants_of
from .loading import gathering
from .team import Team, team_of_torch, threads_for
from .threads import run_ranges

# Two batches of rows have room in the first cache: so many bytes, or two rows each.
_BATCH_BYTES = 16384


class PreparedTable:
    """A compact table whose rows lookups.py finds and decodes in one go.

    It holds the addresses of the table's tensors, and these tensors: whoever puts others in their
    place makes another one. What they hold may change.

    Parameters
    ----------
    table : TableStorage
        On the CPU.
    layout : RowLayout
        On the CPU; `serves` tells whether it is one for this class.
    """

    def __init__(self, table: TableStorage, layout: RowLayout) -> None:
        gathering()
        from . import lookups

        f = layout.format
        check_sizes(table, f.clusters)
        field = constants_of(layout).field
        assert field is not None and table.bases is not None and table.lengths is not None
        words, overflow = table.words, table.overflow
        batch = lookups.MAX_BATCH
        while batch > 2 and batch * f.row_bytes > _BATCH_BYTES:
            batch //= 2
        numbers = {
            lookups.N_ROWS: table.n_rows,
            lookups.ROW_BYTES: f.row_bytes,
            lookups.ROW_WORDS: f.row_words,
            lookups.WORDS: words.data_ptr(),
            lookups.WORDS_LIMIT: max(0, words.numel() - PAD_WORDS),
            lookups.BASES: table.bases.data_ptr(),
            lookups.LENGTHS: table.lengths.data_ptr(),
            lookups.LENGTH_BYTES: table.lengths.element_size(),
            lookups.ROW_CLUSTERS: _address(table.row_clusters if f.clusters > 1 else None),
            lookups.CLUSTERS: f.clusters,
            lookups.MOVED: _address(table.moved),
            lookups.OVERFLOW: _address(overflow),
            lookups.OVERFLOW_LIMIT: 0 if overflow is None else overflow.numel() - PAD_WORDS,
            lookups.FIELDS: field.numbers.ctypes.data,
            lookups.VALUES: field.values.ctypes.data,
            lookups.CLUSTER_VALUES_BYTES: field.values.strides[0],
            lookups.GROUP_VALUES_BYTES: field.group_values_bytes,
            lookups.EACH: field.each,
            lookups.CODE_BITS: f.code_bits,
            lookups.GROUPED: f.grouped,
            lookups.CHUNKS: f.chunks,
            lookups.BATCH: batch,
        }
        self._numbers = np.array([numbers[i] for i in range(lookups.SIZES)], np.int64)
        self._like = UNSIGNED[f.chunk_bytes](0)
        self._kernel = lookups.gather_compact
        self._row_bytes = f.row_bytes
        self._chunk_bytes = f.chunk_bytes
        self._n_rows = table.n_rows
        self._compiled: set[Any] = set()
        self._holds: tuple[TableStorage, Field] = (table, field)

    @staticmethod
    def serves(table: TableStorage, layout: RowLayout) -> bool:
        """Tell whether a table is compact and has a field."""
        gathering()
        return table.lengths is not None and constants_of(layout).field is not None

    def gather(self, ids: torch.Tensor, out: torch.Tensor) -> tuple[int, int]:
        """Decode rows by id.

        Parameters
        ----------
        ids : torch.Tensor
            int32 or int64 ``[n]``, contiguous, negative ones counted from the end.
        out : torch.Tensor
            uint8 ``[n, row_bytes]``, contiguous.

        Returns
        -------
        bad : int
            -1, or the number of a damaged row; then what `out` holds is undefined.
        words : int
            Words of the rows, those of the packed ones as many as they need.
        """
        threads = threads_for(out.nbytes)
        team = team_of_torch() if threads > 1 else None
        if team is not None:
            ids = ids.to(torch.int64)
        numbers = ids.numpy()
        target = out.data_ptr()
        kind = (numbers.dtype, numbers.flags.num)
        if kind not in self._compiled:
            prepare(self._kernel, self._numbers, self._like, numbers, target, 0, 0)
            self._compiled.add(kind)

        def work(begin: int, end: int) -> int:
            return int(self._kernel(self._numbers, self._like, numbers, target, begin, end))

        if team is None:
            words = run_ranges(work, len(numbers), self._row_bytes)
        else:
            words = self._gather_on_team(team, threads, numbers, target)
        bad = next((-1 - found for found in words if found < 0), -1)
        if bad < 0:
            return -1, sum(words)
        row = int(numbers[bad])
        return row + self._n_rows if row < 0 else row, 0

    def _gather_on_team(
        self, team: Team, threads: int, ids: np.ndarray[Any, Any], target: int
    ) -> list[int]:
        """Gather by threads of a team; return what each of them did, as the kernel does."""
        call = np.array(
            [
                team.thread_number,
                team.thread_count,
                self._numbers.ctypes.data,
                ids.ctypes.data,
                len(ids),
                target,
                *[0] * threads,
            ],
            np.int64,
        )
        part = _part_of_gather(self._chunk_bytes)
        team.run(part.address, call.ctypes.data, threads)
        found: list[int] = call[-threads:].tolist()
        return found


@functools.cache
def _part_of_gather(chunk_bytes: int) -> Any:
    """Return `lookups.part_of_gather` for chunks of a size."""
    from . import lookups

    with compiling_beside(lookups.gather_compact):
        return lookups.part_of_gather(UNSIGNED[chunk_bytes](0))


def _address(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
