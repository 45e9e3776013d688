"""Tables of compressed rows in host memory, and caches of these rows on GPUs."""

from .arguments import check_not_from_end, row_ids
from .build import (
    MIN_SAMPLE_ROWS,
    SAMPLE_BYTES,
    Rows,
    as_tensor,
    check_layout,
    choose_codec,
    draw_items,
    fitted_to_items,
    items_as_rows,
    rows_per_batch,
    slices_of,
    take_rows,
)
from .feature import RowsFuture
from .parts import Layout, items_per_row
from .report import FeaturesReport, feature_name

__all__ = [
    "FeaturesReport",
    "Layout",
    "MIN_SAMPLE_ROWS",
    "Rows",
    "RowsFuture",
    "SAMPLE_BYTES",
    "as_tensor",
    "check_layout",
    "check_not_from_end",
    "choose_codec",
    "draw_items",
    "feature_name",
    "fitted_to_items",
    "items_as_rows",
    "items_per_row",
    "row_ids",
    "rows_per_batch",
    "slices_of",
    "take_rows",
]
