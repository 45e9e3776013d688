"""Tables of compressed rows in host memory, and caches of these rows on GPUs."""

from . import hotness
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
from .feature import CompressedFeature, RowsFuture
from .parts import Layout, items_per_row
from .ranks import share_cache, share_table
from .report import FeaturesReport, feature_name
from .slabs import SlabCache
from .table import CompressedTable

__all__ = [
    "CompressedFeature",
    "CompressedTable",
    "FeaturesReport",
    "Layout",
    "MIN_SAMPLE_ROWS",
    "Rows",
    "RowsFuture",
    "SAMPLE_BYTES",
    "SlabCache",
    "as_tensor",
    "check_layout",
    "check_not_from_end",
    "choose_codec",
    "draw_items",
    "feature_name",
    "fitted_to_items",
    "hotness",
    "items_as_rows",
    "items_per_row",
    "row_ids",
    "rows_per_batch",
    "share_cache",
    "share_table",
    "slices_of",
    "take_rows",
]
