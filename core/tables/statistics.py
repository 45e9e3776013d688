"""What is known of a table: sizes, counts of its gathers, and advice about them."""

from __future__ import annotations

from typing import Any

import torch

from ..devices import checked_device
from ..engine.advisor.advice import Advice, advisor_for
from .build import SAMPLE_BYTES
from .host_table import HostTable

BATCH_ROWS = 100_000  # of the gathers that advice is about, when nobody says


def advice(table: HostTable, device: torch.device | str, batch_rows: int) -> Advice:
    """Do what `CompressedTable.advice` says."""
    table._check_open()
    parts = table._parts
    n_sample = min(parts.n_rows, 4096, max(1, SAMPLE_BYTES // max(1, parts.row_bytes)))
    sample = None if parts.raw else lambda: table.packed_rows_of(torch.arange(n_sample))
    return advisor_for(checked_device(device)).advise(
        codec=None if parts.raw else table.codec,
        sample=sample,
        n_rows=len(table),
        row_bytes=max(1, table.row_bytes),
        rows_per_packed_row=table.rows_per_packed_row,
        packed_bytes=4 * parts.facts["packed_words"],
        packed_span_bytes=parts.tensors["words"].nbytes,
        batch_rows=batch_rows,
    )


def stats(table: HostTable) -> dict[str, Any]:
    """Do what `CompressedTable.stats` says."""
    table._check_open()
    parts = table._parts
    raw_bytes = parts.raw_bytes
    words = table.read_words()
    on_gpu = table._gpus
    return {
        "rows": len(table),
        "row_bytes": table.row_bytes,
        "rows_per_packed_row": table.rows_per_packed_row,
        "layout": parts.layout,
        "codec": table.codec.describe(),
        "raw_bytes": raw_bytes,
        "packed_bytes": parts.tensors["words"].nbytes,
        "metadata_bytes": parts.metadata_bytes + table.codec.profile_bytes,
        "host_bytes": table.nbytes,
        "ratio": table.ratio,
        "packed_rows": table._rows.packed_items,
        "moved_rows": table._rows.moved_items,
        "overflow_bytes": table._rows.overflow_bytes,
        "pinned": table.pinned,
        "gathers": table._totals["gathers"],
        "gathered_rows": table._totals["rows"],
        "gathered_bytes": table._totals["rows"] * table.row_bytes,
        "moved_bytes": 4 * words,
        "advice": {str(device): advice(table, device, BATCH_ROWS).as_dict() for device in on_gpu},
    }
