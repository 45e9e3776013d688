"""Packing rows that leave a cache into the table that they belong to."""

from __future__ import annotations

import numpy as np
import torch

from ..format import RowLayout, TableStorage
from ..rewriting import LeavingRows, OverflowPlaces
from .compiling import call
from .constants import chunks_of, constants_of, unsigned
from .loading import rewriting

_NOTHING = torch.empty(0, dtype=torch.int32)


def rewrite_rows(
    table: TableStorage, layout: RowLayout, places: OverflowPlaces, batch: LeavingRows
) -> None:
    """Pack rows that leave a cache into the table that they belong to.

    A row that fits into its place there is packed into it: one of a compact table if it is not
    longer than the row that the table was packed with, one of a table in place always. Another one
    goes raw into the overflow area, where it keeps its place until it fits again. Nothing else of
    the table is touched; what a row was before does not matter.

    Parameters
    ----------
    table : TableStorage
        Compact, with `moved` and `overflow`, or in place, of one item a row. Its words and metadata
        are overwritten.
    layout : RowLayout
        Its codec's.
    places : OverflowPlaces
        The overflow area has room for all of the rows; see there. Overwritten.
    batch : LeavingRows
        The rows.
    """
    f, constants = layout.format, constants_of(layout)
    rows = batch.rows.view(len(batch.rows), -1).view(torch.uint8)
    nothing = _NOTHING.view(torch.uint8)
    bases = np.empty(0, np.int64) if table.bases is None else table.bases.numpy()
    call(
        rewriting().rewrite_rows,
        chunks_of(rows, f.chunk_bytes),
        rows.numpy(),
        batch.slots.numpy(),
        batch.leaving.numpy(),
        batch.coming.numpy(),
        constants.tables,
        constants.starts,
        f.code_bits,
        f.grouped,
        f.uniform,
        f.row_words,
        f.keep_section,
        f.levels,
        unsigned(table.words),
        bases,
        unsigned(nothing if table.lengths is None else table.lengths),
        (nothing if table.row_clusters is None else table.row_clusters).numpy(),
        *(
            unsigned(_NOTHING if part is None else part)
            for part in (table.flags, table.moved, table.overflow)
        ),
        unsigned(places.free),
        places.state.numpy(),
        places.report.numpy(),
    )
