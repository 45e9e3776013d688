"""Tables made ready to be gathered from again and again, at little cost for each call."""

from __future__ import annotations

import functools
from array import array
from typing import Any

import numpy as np
import torch

from ..format import PAD_WORDS, RowLayout, TableStorage, check_sizes
from .compiling import compiling_with_cache_of, prepare
from .constants import SIGNED, UNSIGNED, Field, constants_of
from .loading import gathering
from .threads import BYTES_PER_THREAD, POOL_BYTES, Team, run_ranges, team_of_torch, threads_for

# A batch of rows has so many bytes, or two rows: what two batches read fits into the first cache.
_BATCH_BYTES = 32768
_NOT_PLAIN = -(1 << 62)  # lookups.NOT_PLAIN, which loads Numba

Array = np.ndarray[Any, Any]


class SlotMap:
    """The slot of each row of a table in a cache, as compiled code reads it.

    Parameters
    ----------
    slot_of : numpy.ndarray
        int32 ``[N]``, contiguous: the slot of each row, negative for none. It may change, but not
        its sign once `make_bits` was called.

    Attributes
    ----------
    slots_at : int
        Its address, which numpy takes long to tell.
    bits_at : int
        Address of the bits, 0 while there are none.
    """

    def __init__(self, slot_of: np.ndarray[Any, Any]) -> None:
        self.slot_of = slot_of
        self.slots_at: int = slot_of.ctypes.data
        self._bits: np.ndarray[Any, Any] | None = None
        self.bits_at = 0

    def make_bits(self) -> None:
        """Build a bit set of the rows that have a slot.

        Lookups read these bits first; they fit a nearer cache of the processor than the map.
        """
        self._bits = np.packbits(self.slot_of >= 0, bitorder="little")
        self.bits_at = self._bits.ctypes.data


class PreparedTable:
    """A compact table whose rows lookups.py finds and decodes in one go.

    It holds the addresses of the table's tensors, and these tensors: whoever puts others in their
    place makes another one. What they hold may change.

    Parameters
    ----------
    table : TableStorage
        On the CPU.
    layout : RowLayout
        On the CPU; one that `serves` accepts.
    """

    def __init__(self, table: TableStorage, layout: RowLayout) -> None:
        gathering()
        from . import lookups

        f = layout.format
        field = constants_of(layout).field
        assert field is not None and table.bases is not None and table.lengths is not None
        values = field.values if field.bytes is None else field.bytes
        batch = lookups.MAX_BATCH
        while batch > 2 and batch * f.row_bytes > _BATCH_BYTES:
            batch //= 2
        numbers = {**numbers_of(table, layout, values), lookups.BATCH: batch}
        self._numbers = np.array([numbers[i] for i in range(lookups.SIZES)], np.int64)
        self._address: int = self._numbers.ctypes.data
        self._part = 0  # address of `lookups.part_of_gather`'s function
        chunks: dict[int, Any] = UNSIGNED if field.bytes is None else SIGNED
        self._like = chunks[f.chunk_bytes](0)
        self._kernel = lookups.gather_compact
        self._row_bytes = f.row_bytes
        self._n_rows = table.n_rows
        self._compiled: set[Any] = set()
        self._holds: tuple[TableStorage, Field] = (table, field)

    @staticmethod
    def serves(table: TableStorage, layout: RowLayout) -> bool:
        """Return whether a table is compact and has a field."""
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
        bad, words, _ = self._gather(ids, out, 0)
        if bad < 0:
            return -1, words
        row = int(ids[bad])
        return row + self._n_rows if row < 0 else row, 0

    def look_up(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        slots: SlotMap,
        resident: torch.Tensor,
        out: torch.Tensor,
    ) -> tuple[int, int, int] | None:
        """Sum bags of one id each: take their rows from a cache or decode them, and add 0.

        Parameters
        ----------
        ids, offsets : torch.Tensor
            int64 ``[n]``, contiguous: rows, and where bags begin.
        slots : SlotMap
            The slot of each row in `resident`.
        resident : torch.Tensor
            ``[slots, D]``, contiguous, of the table's dtype.
        out : torch.Tensor
            float32 or float64 ``[n, D]``, contiguous.

        Returns
        -------
        tuple or None
            As for `gather`, and how many of the rows were not resident. None where an id is out of
            range or negative, or bag n does not begin at id n; what `out` holds is undefined then.
        """
        # An array.array is made, and tells its address, several times as fast as numpy's.
        bags = array(
            "q",
            (
                offsets.data_ptr(),
                slots.slots_at,
                resident.data_ptr(),
                out.element_size(),
                slots.bits_at,
            ),
        )
        bad, words, missing = self._gather(ids, out, bags.buffer_info()[0])
        if bad == _NOT_PLAIN:
            return None
        return (-1, words, missing) if bad < 0 else (int(ids[bad]), 0, missing)

    def _gather(self, ids: torch.Tensor, out: torch.Tensor, bags: int) -> tuple[int, int, int]:
        """Return -1, the position of a damaged row or _NOT_PLAIN, the words, and rows not resident.

        `bags` is as in `lookups.gather_compact`.
        """
        threads = 1 if out.nbytes < 2 * BYTES_PER_THREAD else threads_for(out.nbytes)
        team = team_of_torch() if threads > 1 else None
        if team is None:
            # By numpy: torch's threads, which its large operations start, hang in a forked child.
            numbers = ids.numpy().astype(np.int64, copy=False)
            results = self._gather_on_pool(numbers, out.data_ptr(), bags)
        else:
            # Where they have that dtype, `to` still takes several microseconds.
            wide = ids if ids.dtype is torch.int64 else ids.to(torch.int64)
            results = self._gather_on_team(team, threads, wide, out.data_ptr(), bags)
        words = missing = 0
        for found, away in results:
            if found < 0:
                return (_NOT_PLAIN if found == _NOT_PLAIN else -1 - found), 0, 0
            words += found
            missing += away
        return -1, words, missing

    def _gather_on_pool(
        self, ids: np.ndarray[Any, Any], target: int, bags: int
    ) -> list[tuple[int, int]]:
        """Gather by this thread or several; return what each of them did, as the kernel does."""
        kind = ids.flags.num
        if kind not in self._compiled:
            prepare(self._kernel, self._numbers, self._like, ids, target, bags, 0, 0)
            self._compiled.add(kind)

        def work(begin: int, end: int) -> tuple[int, int]:
            found: tuple[int, int] = self._kernel(
                self._numbers, self._like, ids, target, bags, begin, end
            )
            return found

        if len(ids) * self._row_bytes < POOL_BYTES:
            return [work(0, len(ids))]
        return run_ranges(work, len(ids), self._row_bytes)

    def _gather_on_team(
        self, team: Team, threads: int, ids: torch.Tensor, target: int, bags: int
    ) -> list[tuple[int, int]]:
        """Do what `_gather_on_pool` does by threads of a team."""
        call = array(
            "q",
            (
                team.thread_number,
                team.thread_count,
                self._address,
                ids.data_ptr(),
                ids.shape[0],
                target,
                bags,
                *(0,) * (2 * threads),
            ),
        )
        if self._part == 0:
            self._part = _part_of_gather(self._like.dtype.name).address
        team.run(self._part, call.buffer_info()[0], threads)
        n = len(call)
        return [(call[at], call[at + 1]) for at in range(n - 2 * threads, n, 2)]


class PreparedRaw:
    """Raw rows, copied by id.

    Parameters
    ----------
    rows : torch.Tensor
        uint8 ``[N, row_bytes]`` on the CPU, contiguous; what it holds may change.
    row_words : int
        Words that a gather counts for each row.
    """

    def __init__(self, rows: torch.Tensor, row_words: int) -> None:
        self._rows = rows.numpy()
        self._row_words = row_words
        self._kernel = gathering().copy_rows
        self._compiled: set[Any] = set()

    def gather(self, ids: torch.Tensor, out: torch.Tensor) -> tuple[int, int]:
        """Copy rows by id; see `PreparedTable.gather`. None is ever damaged."""
        rows, numbers, target = self._rows, ids.numpy(), out.numpy()
        n_rows, row_bytes = rows.shape
        kind = (numbers.dtype, numbers.flags.num, target.flags.num)
        if kind not in self._compiled:
            prepare(self._kernel, rows, row_bytes, row_bytes, numbers, n_rows, target, 0, 0)
            self._compiled.add(kind)

        def work(begin: int, end: int) -> None:
            self._kernel(rows, row_bytes, row_bytes, numbers, n_rows, target, begin, end)

        if len(numbers) * row_bytes < POOL_BYTES:
            work(0, len(numbers))
        else:
            run_ranges(work, len(numbers), row_bytes)
        return -1, len(numbers) * self._row_words


def numbers_of(table: TableStorage, layout: RowLayout, values: Array | None) -> dict[int, int]:
    """Return what lookups.py reads of a table and its field, by place, but for the batch.

    Parameters
    ----------
    table : TableStorage
        On the CPU, of any kind. Checked to have what its number of rows needs.
    layout : RowLayout
        On the CPU.
    values : numpy.ndarray or None
        ``[K, ...]``, what the codes stand for; None where the layout has no field.
    """
    from . import lookups

    f = layout.format
    check_sizes(table, f.clusters)
    field, words, overflow = constants_of(layout).field, table.words, table.overflow
    return {
        lookups.N_ROWS: table.n_rows,
        lookups.ROW_BYTES: f.row_bytes,
        lookups.ROW_WORDS: f.row_words,
        lookups.WORDS: words.data_ptr(),
        lookups.WORDS_LIMIT: max(0, words.numel() - PAD_WORDS),
        lookups.BASES: _address(table.bases),
        lookups.LENGTHS: _address(table.lengths),
        lookups.LENGTH_BYTES: 0 if table.lengths is None else table.lengths.element_size(),
        lookups.ROW_CLUSTERS: _address(table.row_clusters if f.clusters > 1 else None),
        lookups.CLUSTERS: f.clusters,
        lookups.MOVED: _address(table.moved),
        lookups.OVERFLOW: _address(overflow),
        lookups.OVERFLOW_LIMIT: 0 if overflow is None else overflow.numel() - PAD_WORDS,
        lookups.FIELDS: 0 if field is None else field.numbers.ctypes.data,
        lookups.VALUES: 0 if values is None else values.ctypes.data,
        lookups.CLUSTER_VALUES_BYTES: 0 if values is None else values.strides[0],
        lookups.GROUP_VALUES_BYTES: 0 if field is None else field.group_values_bytes,
        lookups.EACH: field is not None and field.each,
        lookups.CODE_BITS: f.code_bits,
        lookups.GROUPED: f.grouped,
        lookups.CHUNKS: f.chunks,
    }


@functools.cache
def _part_of_gather(chunk: str) -> Any:
    """Return `lookups.part_of_gather` for chunks of a dtype."""
    from . import lookups

    with compiling_with_cache_of(lookups.gather_compact):
        return lookups.part_of_gather(np.dtype(chunk).type(0))


def _address(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
