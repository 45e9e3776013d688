"""Packing rows that leave a cache into the table that they belong to; see rewrite.cu."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from ..format import RowLayout, TableStorage, ceil_div
from ..rewriting import MAX_REWRITTEN_ROW_BYTES, LeavingRows, OverflowPlaces
from .parameters import Address, Int32, Int64, Parameters
from .runner import Launch, Runner
from .source import Variant
from .tiles import WARPS, has_byte_field

BLOCKS = 8  # of a multiprocessor
#: Shared memory of a block: for each warp a row, and the word behind it.
STAGES_BYTES = MAX_REWRITTEN_ROW_BYTES + 4 * WARPS


@dataclass(init=False)
class RewriteRows(Parameters):
    """Parameters of `rewrite_rows`.

    Those of `encode_rows`; int64 slots, rows that leave them and their number; the tensors of a
    `TableStorage`, any of which may be None where they may be there, and of `OverflowPlaces`.
    """

    kernel = "rewrite_rows"

    rows: Address
    slots: Address
    leaving: Address
    coming: Address
    n_rows: Int64
    chunks: Int32
    row_words: Int32
    row_bytes: Int32
    clusters: Int32
    tables: Address
    starts: Address
    words: Address
    bases: Address
    lengths: Address
    length_bytes: Int32
    row_clusters: Address
    flags: Address
    moved: Address
    overflow: Address
    free_places: Address
    state: Address
    report: Address
    stage_words: Int32


class RewriteKernels:
    """The kernel of rewrite.cu on one GPU.

    Parameters
    ----------
    runner : Runner
        Of the device.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._most_blocks = BLOCKS * runner.multiprocessors
        # The last one of each table, what else it was bound to, and the warps of a block.
        self._launches: WeakKeyDictionary[
            TableStorage, tuple[RowLayout, OverflowPlaces, Launch, int]
        ] = WeakKeyDictionary()

    def rewrite_rows(
        self, table: TableStorage, layout: RowLayout, places: OverflowPlaces, batch: LeavingRows
    ) -> None:
        """Pack rows into their table; see `kernels.cpu.rewrite_rows`.

        The rows start at a multiple of a chunk and have at most MAX_REWRITTEN_ROW_BYTES; the
        table's words and overflow may lie in page-locked host memory.
        """
        known = self._launches.get(table)
        if known is None or known[0] is not layout or known[1] is not places:
            warps = warps_for(layout)
            known = layout, places, self._bound(table, layout, places, warps), warps
            self._launches[table] = known
        known[2](
            max(1, min(ceil_div(batch.most, known[3]), self._most_blocks)),
            batch.rows.data_ptr(),
            batch.slots.data_ptr(),
            batch.leaving.data_ptr(),
            batch.coming.data_ptr(),
        )

    def _bound(
        self, table: TableStorage, layout: RowLayout, places: OverflowPlaces, warps: int
    ) -> Launch:
        f, lengths = layout.format, table.lengths
        byte_field = f.clusters == 1 and has_byte_field(layout)
        stage_words = _stage_words(layout)
        return self._runner.bind(
            Variant(
                "rewrite", f.chunk_bytes, f.code_bits, f.grouped, f.uniform, byte_field=byte_field
            ),
            RewriteRows,
            32 * warps,
            4 * stage_words * warps,
            n_rows=table.n_rows,
            chunks=f.chunks,
            row_words=f.row_words,
            row_bytes=f.row_bytes,
            clusters=f.clusters,
            tables=layout.tables,
            starts=layout.starts,
            words=table.words,
            bases=table.bases,
            lengths=lengths,
            length_bytes=0 if lengths is None else lengths.element_size(),
            row_clusters=table.row_clusters,
            flags=table.flags,
            moved=table.moved,
            overflow=table.overflow,
            free_places=places.free,
            state=places.state,
            report=places.report,
            stage_words=stage_words,
        )


def warps_for(layout: RowLayout) -> int:
    """Return the warps of a block: of long rows, as many as have room for one each."""
    return max(1, min(WARPS, STAGES_BYTES // (4 * _stage_words(layout))))


def _stage_words(layout: RowLayout) -> int:
    # The last read-modify-write may touch the word behind the row.
    return layout.format.row_words + 1
